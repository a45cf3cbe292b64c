"""Shared by the replies of MindIE's interfaces: collecting an answer, splitting it into frames, ending on an error.

An event of a stream is the output of one step of the engine, usually one token.
"""

from __future__ import annotations

import codecs
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.error_answers import body_refusal_answer, mindie_error_answer, mindie_failure_text
from parley.dialects.mindie.interfaces.request_names import header_request_id, request_name
from parley.dialects.mindie.members.inputs import MAX_INPUT_IDS, PromptInput
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import encoded_event
from parley.dialects.tgi.answer_parts import tgi_finish_reason
from parley.errors import NoTokens, ParleyError
from parley.types import ChoiceDelta, ChoiceDone, Event, PromptAccepted, PromptScored, TokenCost, TokenInfo, Usage


def shared_request_members(rules: MindieRules, context: RequestContext, label: str = "") -> dict[str, Any]:
    """Return the ``Request`` members that all interfaces share. The header's name or the label cancels it."""
    return {
        "id": context.unique_id,
        "on_overflow": rules.truncation or "refuse",
        "counted_tokens": MAX_INPUT_IDS if rules.strict else 0,
        "cancel_ids": (request_name(context), label) if label else (request_name(context),),
        "exclusive_id": header_request_id(context),
    }


class MindieReply(Reply):
    """A reply of any interface. ``prompt_input``: its input, which words the refusal of a prompt without tokens."""

    media_type: ClassVar[str] = "text/event-stream"
    field_names: ClassVar[Mapping[str, str]] = {"stop_ids": "stop_token_ids"}
    ping_bytes: ClassVar[bytes] = b""

    def __init__(self, rules: MindieRules, prompt_input: PromptInput):
        self._rules = rules
        self._prompt_input = prompt_input

    def finish_stream(self, usage: Usage) -> bytes:
        """Return nothing: the last frame ends the stream."""
        return b""

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the end of a stream after an error; like the original, strict rules send the bare text."""
        if self._rules.strict:
            return mindie_failure_text(error)
        return encoded_event(mindie_error_answer(error, self._rules).body)

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return the refusal of a prompt without tokens; None for other errors."""
        return body_refusal_answer(self._prompt_input.no_tokens) if isinstance(error, NoTokens) else None


class StreamPiece(NamedTuple):
    """A frame of a stream: the tokens of a step (none if an end came alone), their text, and whether it is the last."""

    tokens: Sequence[TokenInfo]
    text: str
    is_last: bool

    @property
    def last_token(self) -> TokenInfo | None:
        """The last token, or None."""
        return self.tokens[-1] if self.tokens else None

    @property
    def token_ids(self) -> list[int]:
        """The token ids."""
        return [token.id for token in self.tokens]

    @property
    def elapsed_ms(self) -> int:
        """The time these tokens took together, in milliseconds."""
        costs = [token.cost for token in self.tokens if token.cost is not None]
        return round(1000 * sum(cost.wait_seconds + cost.compute_seconds for cost in costs))


class SingleChoiceReply(MindieReply):
    """A reply with one choice."""

    field_names: ClassVar[Mapping[str, str]] = {"max_tokens": "max_new_tokens"}

    def __init__(self, rules: MindieRules, prompt_input: PromptInput, limit: int):
        super().__init__(rules, prompt_input)
        self.prompt_ids: Sequence[int] = ()
        self.seed = 0
        self.output_tokens: list[TokenInfo] = []
        self.scored_prompt: PromptScored | None = None
        self.done_event: ChoiceDone | None = None
        self._limit = limit
        self._text_parts: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @abstractmethod
    def render_piece(self, piece: StreamPiece) -> bytes:
        """Return a piece as bytes of the stream."""

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a frame for each step of the engine."""
        return b"".join([self.render_piece(piece) for piece in self._split_pieces(events)])

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the tokens and text of these events."""
        tokens, text = self._take_events(events)
        self.output_tokens += tokens
        self._text_parts.append(text)

    @property
    def whole_text(self) -> str:
        """The whole text so far; its parts are joined when it is read."""
        self._text_parts = ["".join(self._text_parts)]
        return self._text_parts[0]

    @property
    def finish_reason(self) -> str:
        """The finish reason; a request cancelled by another call counts as stopped by a string."""
        assert self.done_event is not None
        return (
            "stop_sequence" if self.done_event.reason == "cancel" else tgi_finish_reason(self.done_event, self._limit)
        )

    def _take_events(self, events: Sequence[Event]) -> tuple[list[TokenInfo], str]:
        """Return the tokens and text of these events; store the other events."""
        tokens: list[TokenInfo] = []
        texts: list[str] = []
        for event in events:
            match event:
                case ChoiceDelta():
                    texts.append(event.text)
                    tokens += event.tokens
                case PromptAccepted():
                    self.prompt_ids, self.seed = event.token_ids, event.seed
                case PromptScored():
                    self.scored_prompt = event
                case ChoiceDone():
                    self.done_event = event
        return tokens, "".join(texts)

    def _split_pieces(self, events: Sequence[Event]) -> Iterator[StreamPiece]:
        """Split the text among the steps whose tokens spell it; the rest of the text goes to the last step."""
        tokens, remaining_text = self._take_events(events)
        groups = list(_group_by_step(tokens))
        for group in groups[:-1]:
            group_text = "".join(map(self._decode_token, group))
            group_text = group_text if remaining_text.startswith(group_text) else ""
            remaining_text = remaining_text[len(group_text) :]
            self._text_parts.append(group_text)
            yield StreamPiece(group, group_text, False)
        if groups or remaining_text or self.done_event is not None:
            for token in groups[-1] if groups else ():
                self._decode_token(token)
            self._text_parts.append(remaining_text)
            yield StreamPiece(groups[-1] if groups else (), remaining_text, self.done_event is not None)

    def _decode_token(self, token: TokenInfo) -> str:
        return "" if token.is_special else self._decoder.decode(token.raw_bytes)


def _group_by_step(tokens: Iterable[TokenInfo]) -> Iterator[list[TokenInfo]]:
    """Group the tokens of one step: they have equal costs, and different steps have different ones."""
    group: list[TokenInfo] = []
    for token in tokens:
        if group and (token.cost is None or token.cost.tokens == 1 or token.cost != group[-1].cost):
            yield group
            group = []
        group.append(token)
    if group:
        yield group


def elapsed_milliseconds(cost: TokenCost | None) -> int:
    """Return the whole milliseconds from the choice's previous token, or from queueing, to this one."""
    return round(1000 * (cost.wait_seconds + cost.compute_seconds)) if cost is not None else 0


def waited_microseconds(cost: TokenCost | None) -> int:
    """Return the microseconds that the choice waited for the step."""
    return round(1e6 * cost.wait_seconds) if cost is not None else 0
