"""Output items: the answer's reasoning, message and calls, one item after the other, and the events of each.

The same code builds an answer in one piece and a stream, so the last event of a stream holds the same items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parley.dialects.openai.responses.call_items import CallItem, CustomCallItem
from parley.dialects.openai.responses.client_calls import CLIENT_CALLS
from parley.dialects.openai.responses.events import EventStream
from parley.dialects.openai.responses.open_item import Item, ItemStatus, OpenItem
from parley.dialects.openai.responses.tools import ResponsesTool
from parley.dialects.openai.token_objects import finite_logprob
from parley.types import ChoiceDelta, TokenInfo, ToolCallDelta

CALL_ITEMS: dict[str, type[CallItem]] = {"function": CallItem, "custom": CustomCallItem, **CLIENT_CALLS}


class MessageItem(OpenItem):
    """A message with one part. ``wants_logprobs``: the events have the log-probabilities of their tokens."""

    prefix = "msg"

    def __init__(self, unique_id: str, output_index: int, events: EventStream, wants_logprobs: bool):
        super().__init__(unique_id, output_index, events)
        self._wants_logprobs = wants_logprobs
        self._texts: list[str] = []
        self._tokens: list[TokenInfo] = []
        self._unsent_tokens: list[TokenInfo] = []
        self._place = {"content_index": 0} | self._place
        self._template = events.delta_template("response.output_text.delta", **self._place, logprobs=[])

    def open(self) -> None:
        """Write the events that announce the item and its part."""
        super().open()
        self._events.write("response.content_part.added", **self._place, part=self._part())

    def add_text(self, text: str, tokens: list[TokenInfo]) -> None:
        """Add text with its tokens, which may also come without text or with a later one."""
        if not self._wants_logprobs:
            if text:
                self._texts.append(text)
                self._events.write_delta(self._template, text)
            return
        self._tokens += tokens
        self._unsent_tokens += tokens
        if text:
            self._texts.append(text)
            self._write_scored(text)

    def _write_scored(self, text: str) -> None:
        logprobs, self._unsent_tokens = [_scored_token(token) for token in self._unsent_tokens], []
        self._events.write("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def snapshot(self, status: ItemStatus) -> Item:
        """Return the item as it is now."""
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "status": status, "content": content, "role": "assistant"}

    def _part(self) -> Item:
        logprobs = [_scored_token(token) for token in self._tokens]
        return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": "".join(self._texts)}

    def _close_parts(self) -> None:
        part, logprobs = self._part(), [_scored_token(token) for token in self._tokens]
        self._events.write("response.output_text.done", **self._place, logprobs=logprobs, text=part["text"])
        self._events.write("response.content_part.done", **self._place, part=part)


class ReasoningItem(OpenItem):
    """Reasoning: its text, or the same text as a summary for clients that ask for one.

    ``seal``: returns the encrypted content of a text; None: the client does not want it. ``has_status``: the item has a
    status, as others have.
    """

    prefix = "rs"

    def __init__(
        self,
        unique_id: str,
        output_index: int,
        events: EventStream,
        as_summary: bool,
        seal: Callable[[str], str] | None,
        has_status: bool,
    ):
        super().__init__(unique_id, output_index, events)
        self._texts: list[str] = []
        self._as_summary, self._seal, self._has_status = as_summary, seal, has_status
        self._place |= {"summary_index": 0} if as_summary else {"content_index": 0}
        self._kind = "summary_text" if as_summary else "reasoning_text"
        self._event_name = "response.reasoning_summary_text" if as_summary else "response.reasoning_text"
        self._part_event = "response.reasoning_summary_part" if as_summary else "response.content_part"
        self._template = events.delta_template(f"{self._event_name}.delta", **self._place)

    def open(self) -> None:
        """Write the events that announce the item and its part."""
        super().open()
        self._events.write(f"{self._part_event}.added", **self._place, part={"type": self._kind, "text": ""})

    def add_text(self, text: str) -> None:
        """Add text."""
        self._texts.append(text)
        self._events.write_delta(self._template, text)

    def snapshot(self, status: ItemStatus) -> Item:
        """Return the item as it is now."""
        text = "".join(self._texts)
        parts = [] if status == "in_progress" else [{"type": self._kind, "text": text}]
        item: Item = {"id": self.id, "type": "reasoning"}
        if not self._as_summary:
            item["content"] = parts
        if self._seal is not None and status != "in_progress":
            item["encrypted_content"] = self._seal(text)
        item["summary"] = parts if self._as_summary else []
        return item | {"status": status} if self._has_status else item

    def _close_parts(self) -> None:
        text = "".join(self._texts)
        self._events.write(f"{self._event_name}.done", **self._place, text=text)
        self._events.write(f"{self._part_event}.done", **self._place, part={"type": self._kind, "text": text})


class CompactionItem(OpenItem):
    """A summary of the conversation, which the client gets sealed by ``seal``."""

    prefix = "cmp"

    def __init__(self, unique_id: str, output_index: int, events: EventStream, seal: Callable[[str], str]):
        super().__init__(unique_id, output_index, events)
        self._texts: list[str] = []
        self._seal = seal

    def add_text(self, text: str) -> None:
        """Add text. The first one is announced."""
        if not self._texts:
            self._events.write("response.compaction.compacting", **self._place)
        self._texts.append(text)

    def snapshot(self, status: ItemStatus) -> Item:
        """Return the item as it is now."""
        sealed = "" if status == "in_progress" else self._seal("".join(self._texts))
        return {"id": self.id, "type": "compaction", "encrypted_content": sealed}

    @property
    def is_empty(self) -> bool:
        """Whether it tells nothing."""
        return not "".join(self._texts).strip()

    def _close_parts(self) -> None:
        pass


class OutputItems:
    """The items of one response. ``items``: those that are complete.

    ``declared``: the client's tools by the names that the model knows. ``as_summary``, ``seal`` and
    ``reasoning_status`` as in ``ReasoningItem``. ``seal_summary``: seals a summary. ``summarizes``: the answer is one.
    """

    def __init__(
        self,
        unique_id: str,
        events: EventStream,
        declared: Mapping[str, ResponsesTool],
        *,
        wants_logprobs: bool,
        as_summary: bool,
        seal: Callable[[str], str] | None,
        reasoning_status: bool = False,
        seal_summary: Callable[[str], str] = str,
        summarizes: bool = False,
    ):
        self.items: list[Item] = []
        self._seal_summary, self._summarizes = seal_summary, summarizes
        self._unique_id, self._events, self._declared = unique_id, events, declared
        self._wants_logprobs, self._as_summary, self._seal = wants_logprobs, as_summary, seal
        self._reasoning_status = reasoning_status
        self._open_item: OpenItem | None = None
        self._call_index = -1  # of the last call
        self._early_tokens: list[TokenInfo] = []  # of a message whose text has not come

    def add_delta(self, delta: ChoiceDelta) -> None:
        """Add new output of the model."""
        if self._summarizes:
            if delta.output_part == "content" and delta.text:
                self._summary_item().add_text(delta.text)
        elif delta.output_part == "content":
            self._add_content(delta)
        elif delta.output_part == "reasoning":
            if delta.text:
                self._add_reasoning(delta.text)
        elif delta.tool_call is not None:
            self._add_call(delta.tool_call)

    def add_summary(self, text: str) -> None:
        """Add a summary that stands before the answer, unless it is empty. Clients put it in place of all turns before
        it, so nothing of it is announced before it is complete."""
        if text:
            self._summary_item().add_text(text)
            self._close_open("completed")

    def close_items(self, status: ItemStatus, *, empty_message: bool, is_whole: bool) -> list[Item]:
        """End the item that is open, and return all items.

        ``empty_message``: a complete answer without any has an empty message. ``is_whole``: the model ended the answer
        itself. A summary that is not whole, or empty, is left out: clients and conversations put it in place of all
        turns before it, which would be lost.
        """
        if isinstance(self._open_item, CompactionItem) and (not is_whole or self._open_item.is_empty):
            self._open_item = None
        is_missing = self._open_item is None and not self.items and not self._summarizes
        if empty_message and is_missing and status == "completed":
            self._begin_message()
        self._close_open(status)
        return self.items

    def _summary_item(self) -> CompactionItem:
        """Return the item of the summary, which is open from its first use on."""
        if not isinstance(self._open_item, CompactionItem):
            self._begin_item(CompactionItem(self._unique_id, len(self.items), self._events, self._seal_summary))
        assert isinstance(self._open_item, CompactionItem)
        return self._open_item

    def _add_content(self, delta: ChoiceDelta) -> None:
        item = self._open_item
        if isinstance(item, MessageItem):
            item.add_text(delta.text, delta.tokens)
        elif delta.text:
            tokens, self._early_tokens = self._early_tokens + delta.tokens, []
            self._begin_message().add_text(delta.text, tokens)
        elif self._wants_logprobs:
            self._early_tokens += delta.tokens

    def _begin_message(self) -> MessageItem:
        self._close_open("completed")
        message = MessageItem(self._unique_id, len(self.items), self._events, self._wants_logprobs)
        self._begin_item(message)
        return message

    def _add_reasoning(self, text: str) -> None:
        item = self._open_item
        if not isinstance(item, ReasoningItem):
            self._close_open("completed")
            item = ReasoningItem(
                self._unique_id, len(self.items), self._events, self._as_summary, self._seal, self._reasoning_status
            )
            self._begin_item(item)
        item.add_text(text)

    def _add_call(self, call: ToolCallDelta) -> None:
        if call.index != self._call_index:
            self._call_index = call.index
            name = call.name or ""
            tool = self._declared.get(name, ResponsesTool(name))
            self._close_open("completed")
            item_class = CALL_ITEMS[tool.kind]
            self._begin_item(item_class(self._unique_id, len(self.items), self._events, call.id or "", tool))
        assert isinstance(self._open_item, CallItem)
        self._open_item.add_arguments(call.arguments)

    def _begin_item(self, item: OpenItem) -> None:
        self._open_item = item
        if self._events.enabled:
            item.open()

    def _close_open(self, status: ItemStatus) -> None:
        if self._open_item is not None:
            self.items.append(self._open_item.close(status))
            self._open_item = None


def _scored_token(token: TokenInfo) -> Item:
    """Return a token's log-probability, in the form of the final part and of events."""
    return _alternative(token) | {"top_logprobs": list(map(_alternative, token.top_tokens))}


def _alternative(token: TokenInfo) -> Item:
    # Open Responses requires `bytes` in events too; OpenAI's events have none, and its clients accept them.
    return {"token": token.text, "bytes": list(token.raw_bytes), "logprob": finite_logprob(token.logprob)}
