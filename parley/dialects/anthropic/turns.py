"""Turns of a request: ``system`` and ``messages``, read into a neutral conversation.

Consecutive messages of one role are one turn. Messages of the role system stay in their place, because moving them to
the front would change the beginning of every later prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from parley.dialects.anthropic.blocks import MAX_BLOCKS, SHARED_BLOCKS, BlockReader, Parts
from parley.dialects.anthropic.refusal_wording import anthropic_value_error, check_anthropic_members, dotted_path
from parley.dialects.anthropic.toolsets import joined_tool_name
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.media import check_media_counts, interleave_parts
from parley.dialects.request_context import RequestContext
from parley.dialects.summary_request import summary_text
from parley.errors import InvalidValue
from parley.types import Media, MediaKind, Message, PlacedMedia, ToolCall

MAX_MESSAGES = 100_000
ROLES = ("user", "assistant", "system")
JOINT = "\n"  # between two texts of one turn
# Claude Code writes its version and a hash of each request here, before 40 KB that are always the same.
BILLING_HEADER = "x-anthropic-billing-header:"
ERROR_PREFIX = "Error: "  # before the result of a failed call, because templates have no mark for that
MESSAGE_MEMBERS = {"role", "content", "clear_at", "output_config"}
THINKING_MEMBERS = {"type", "thinking", "signature"}
USE_MEMBERS = {"type", "id", "name", "input", "cache_control", "caller", "toolset_name"}
COMPACTION_MEMBERS = {"type", "content", "encrypted_content", "signature", "tool_changes", "cache_control"}
RESULT_MEMBERS = {"type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"}
NO_MESSAGES = "messages: at least one message is required"
NO_PREFILL = "This model does not support assistant message prefill. The conversation must end with a user message."
UNANSWERED = (
    "messages.{place}: `tool_use` ids were found without `tool_result` blocks immediately after: {ids}. Each "
    "`tool_use` block must have a corresponding `tool_result` block in the next message."
)
ORPHAN = (
    "messages.{place}: unexpected `tool_use_id` found in `tool_result` blocks: {ids}. Each `tool_result` block must "
    "have a corresponding `tool_use` block in the previous message."
)


@dataclass
class ToolChanges:
    """Tools that join or leave in the middle of a conversation: names, and definitions of new ones."""

    removed: set[str] = field(default_factory=set)
    definitions: list[Fields] = field(default_factory=list)


@dataclass
class AssistantTurn:
    """The parts of an assistant's turn so far."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class TurnReader:
    """Reads the conversation of one request."""

    def __init__(self, blocks: BlockReader, context: RequestContext):
        self.blocks = blocks
        self.tool_changes = ToolChanges()
        self._summary: str | None = None  # of a compaction block in the turn that is being read
        self._rules = blocks.rules
        self._context = context

    def read_system(self, body: Fields) -> str:
        """Return the system prompt without Claude Code's billing line, or "". Raises BadRequest."""
        parts = self.blocks.read_parts(body, "system")
        texts = [_drop_billing_line(part) for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise body.member_error("system", "Input should be text blocks only")
        return JOINT.join(filter(None, texts))

    def read_turns(self, body: Fields) -> list[Message]:
        """Return the messages, consecutive ones of a role as one. Raises BadRequest."""
        items = [(self._read_role(item), item) for item in body.objects("messages", cap=MAX_MESSAGES)]
        if not items:
            raise (
                InvalidValue(NO_MESSAGES, field="messages")
                if body.has_value("messages")
                else body.missing_member("messages")
            )
        if self._rules.strict:
            check_order(items)
        last_user = max((index for index, (role, _) in enumerate(items) if role == "user"), default=-1)
        shown_items = [
            (role, item)
            for index, (role, item) in enumerate(items)
            if not (role == "system" and index < last_user and _is_cleared(item))
        ]
        turns: list[Message] = []
        begins_with_summary = False
        for role, group in groupby(join_meaningless(shown_items), key=lambda pair: pair[0]):
            read_turns = self._read_turn(role, [item for _, item in group])
            if self._summary is not None:
                turns = [Message("user", summary_text(self._summary))]
                self._summary, begins_with_summary = None, True
            turns += read_turns
        if not turns and all(role != "system" for role, _ in items):
            raise InvalidValue(NO_MESSAGES, field="messages")
        return join_summary(list(without_replaced_calls(turns))) if begins_with_summary else turns

    def check_media(self, turns: Iterable[Message], limits: dict[MediaKind, int]) -> None:
        """Raise BadMedia if the turns have too many items of a kind."""
        check_media_counts((placed.media for turn in turns for placed in turn.media), limits)

    def _read_role(self, item: Fields) -> str:
        check_anthropic_members(item, MESSAGE_MEMBERS, self._rules)
        role = item.string("role", None, allowed=ROLES)
        if role is None:
            raise item.missing_member("role")
        if not item.has_value("content") and not (role == "system" and item.has_value("output_config")):
            raise item.missing_member("content")
        if item.raw_value("content") == "":
            self.blocks.check_text("", item.member_path("content"))
        return role

    def _read_turn(self, role: str, items: Sequence[Fields]) -> list[Message]:
        if role == "assistant":
            return self._read_assistant_turn(items)
        if role == "system":
            text = JOINT.join(filter(None, (text for item in items for text in self._read_system_message(item))))
            return [Message("system", text)] if text else []
        return self._read_user_turn(items)

    def _read_user_turn(self, items: Sequence[Fields]) -> list[Message]:
        """Return the results of calls, then the rest. Images of results come with the rest: not every template shows
        them in a result."""
        results: list[Message] = []
        images: list[PlacedMedia] = []
        parts: Parts = []
        had_summary_block = False
        for block in blocks_of(items):
            if isinstance(block, str):
                parts.append(block)
            elif block.raw_value("type") == "compaction":
                had_summary_block = True
                if self._read_summary(block):
                    results, images, parts = [], [], []
            elif self.blocks.read_block_type(block) == "tool_result":
                result, result_images = self._read_tool_result(block)
                results.append(result)
                images += result_images
            else:
                parts += self.blocks.read_block(block)
        content = interleave_parts(filter(None, parts), JOINT)
        media = [*images, *content.media]
        if (results or had_summary_block) and not content.text and not media:
            return results
        return [*results, Message("user", content.text, media=media)]

    def _read_tool_result(self, block: Fields) -> tuple[Message, list[PlacedMedia]]:
        """Return the result of a call, and its images for the start of the message after it."""
        check_anthropic_members(block, RESULT_MEMBERS, self._rules, "tool_result")
        self.blocks.read_cache_control(block)
        use_id = block.string("tool_use_id", None, cap=256)
        if use_id is None:
            raise block.missing_member("tool_use_id")
        parts = self.blocks.read_parts(block, "content", in_result=True)
        text = JOINT.join(part for part in parts if isinstance(part, str))
        prefix = ERROR_PREFIX if block.boolean("is_error", False) else ""
        images = [PlacedMedia(0, part, use_id) for part in parts if isinstance(part, Media)]
        return Message("tool", prefix + text, tool_call_id=use_id), images

    def _read_system_message(self, item: Fields) -> Iterator[str]:
        for block in blocks_of([item]):
            if isinstance(block, str):
                yield block
                continue
            block_type = self.blocks.read_block_type(block)
            if block_type in ("tool_addition", "tool_removal"):
                self._read_tool_change(block, block_type)
            elif block_type == "text":
                self.blocks.read_cache_control(block)
                yield self.blocks.read_text(block)
            else:
                raise block.member_error("type", f"Input should be 'text', but got '{block_type[:60]}'")

    def _read_tool_change(self, block: Fields, block_type: str) -> None:
        tool = block.object("tool")
        if tool is None:
            raise block.missing_member("tool")
        kind = tool.string("type", None, cap=256)
        if kind == "tool_definition" and block_type == "tool_addition":
            definition = tool.object("definition")
            if definition is None:
                raise tool.missing_member("definition")
            self.tool_changes.definitions.append(definition)
            return
        if kind != "tool_reference":
            raise tool.missing_member("type") if kind is None else anthropic_value_error(tool, "type", kind)
        name = tool.string("name", None, cap=256)
        if name is None:
            raise tool.missing_member("name")
        if block_type == "tool_removal":
            self.tool_changes.removed.add(name)
        else:
            self.tool_changes.removed.discard(name)
            self.blocks.revealed_tools.add(name)

    def _read_assistant_turn(self, items: Sequence[Fields]) -> list[Message]:
        turn = AssistantTurn()
        had_summary_block = False
        for block in blocks_of(items):
            if isinstance(block, str):
                turn.texts.append(block)
            elif block.raw_value("type") == "compaction":
                had_summary_block = True
                turn = AssistantTurn() if self._read_summary(block) else turn
            else:
                self._read_assistant_block(block, turn)
        texts, thoughts = list(filter(None, turn.texts)), list(filter(None, turn.thoughts))
        if not texts and not thoughts and not turn.calls:
            return [] if had_summary_block else [Message("assistant", "")]
        content = JOINT.join(texts) if texts or not turn.calls else None
        return [Message("assistant", content, None, JOINT.join(thoughts) or None, turn.calls)]

    def _read_assistant_block(self, block: Fields, turn: AssistantTurn) -> None:
        block_type = self.blocks.read_block_type(block)
        match block_type:
            case "thinking":
                turn.thoughts.append(self._read_thinking(block))
            case "redacted_thinking":
                block.string("data", "")
            case "tool_use":
                turn.calls.append(self._read_tool_use(block))
            case _ if block_type in SHARED_BLOCKS and block_type != "text":
                raise block.member_error("type", f"'{block_type}' blocks are not allowed in assistant messages")
            case _:
                turn.texts += [part for part in self.blocks.read_block(block) if isinstance(part, str)]

    def _read_summary(self, block: Fields) -> bool:
        """Keep a summary, which stands for all before it. Return False for a block without one, which means nothing."""
        check_anthropic_members(block, COMPACTION_MEMBERS, self._rules, "compaction")
        self.blocks.read_cache_control(block)
        summary, signature = block.string("content", None), block.string("signature", None)
        if summary == "":
            raise block.empty_member("content", "string")
        for change in block.objects("tool_changes", cap=MAX_BLOCKS):
            self._read_tool_change(change, self.blocks.read_block_type(change))
        if signature is not None and self._rules.strict and summary != self._opened(signature):
            path = block.member_path("signature")
            block_path = dotted_path(path.rpartition(".")[0])
            raise InvalidValue(f"{block_path}: Invalid `signature` in `compaction` block", field=path)
        if summary is not None:
            self._summary = summary
        return summary is not None

    def _opened(self, signature: str) -> str | None:
        """Return the text that a signature holds; None if this server did not make it for this client."""
        try:
            return self._context.open_reasoning(signature).decode()
        except ValueError:
            return None

    def _read_thinking(self, block: Fields) -> str:
        """Return the thinking that the model wrote, as its signature holds it, else as the client shows it."""
        check_anthropic_members(block, THINKING_MEMBERS, self._rules, "thinking")
        shown_text, signature = block.string("thinking", None), block.string("signature", "")
        if shown_text is None:
            raise block.missing_member("thinking")
        thinking = self._opened(signature)
        if thinking is None and self._rules.strict:
            path = block.member_path("signature")
            block_path = dotted_path(path.rpartition(".")[0])
            raise InvalidValue(f"{block_path}: Invalid `signature` in `thinking` block", field=path)
        return shown_text if thinking is None else thinking

    def _read_tool_use(self, block: Fields) -> ToolCall:
        check_anthropic_members(block, USE_MEMBERS, self._rules, "tool_use")
        self.blocks.read_cache_control(block)
        use_id, name = (block.string(member, None, cap=256) for member in ("id", "name"))
        if use_id is None or name is None:
            raise block.missing_member("id" if use_id is None else "name")
        if not block.has_value("input"):
            raise block.missing_member("input")
        toolset = block.string("toolset_name", None, cap=256)
        if toolset is not None:
            name = joined_tool_name(toolset, name)
        return ToolCall(use_id, name, encode_json(block.free_object("input")).decode())


def join_meaningless(items: Iterable[tuple[str, Fields]]) -> Iterator[tuple[str, Fields]]:
    """Yield roles and messages. A message of the assistant whose summary was cut off means nothing, so it counts as one
    of the user if the user spoke before it: it then does not divide what the user says."""
    last_role = ""
    for role, item in items:
        is_of_user = role == "assistant" and last_role == "user" and _has_no_summary(item)
        yield ("user" if is_of_user else role), item
        last_role = "user" if is_of_user else role


def _has_no_summary(item: Fields) -> bool:
    """Whether a message has only compaction blocks without content."""
    content: Any = item.raw_value("content")
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(block, dict) and block.get("type") == "compaction" and block.get("content") is None
            for block in content
        )
    )


def without_replaced_calls(turns: Iterable[Message]) -> Iterator[Message]:
    """Yield the turns from a summary on, without results of calls before it, and without the media of those."""
    call_ids: set[str | None] = {None}  # of the user's own media
    for turn in turns:
        call_ids.update(call.id for call in turn.tool_calls)
        if turn.role == "tool" and turn.tool_call_id not in call_ids:
            continue
        media = [placed for placed in turn.media if placed.tool_call_id in call_ids]
        if len(media) == len(turn.media):
            yield turn
        elif media or turn.content:
            yield replace(turn, media=media)


def join_summary(turns: list[Message]) -> list[Message]:
    """Return the turns with the first, a summary, and a message of the user after it as one: turns should alternate."""
    if len(turns) < 2 or turns[1].role != "user":
        return turns
    start = f"{turns[0].content}\n\n"
    media = [replace(placed, position=len(start) + placed.position) for placed in turns[1].media]
    return [replace(turns[1], content=start + (turns[1].content or ""), media=media), *turns[2:]]


def blocks_of(items: Iterable[Fields]) -> Iterator[str | Fields]:
    """Yield the contents of messages: a string as such, else its blocks."""
    for item in items:
        if isinstance(item.raw_value("content"), str):
            yield item.string("content", "")
        else:
            yield from item.objects("content", cap=MAX_BLOCKS)


def _is_cleared(item: Fields) -> bool:
    """Whether a system message disappears with the next message of the user."""
    return item.string("clear_at", "never", allowed=("next_user_message", "never")) == "next_user_message"


def _drop_billing_line(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text


# -- the order of turns


def check_order(items: Sequence[tuple[str, Fields]]) -> None:
    """Raise InvalidValue unless a user begins, and each call has its result in the message after it.

    As in recorded answers of the service, an unanswered call is reported at the message that lacks its result, and a
    text after a call in the same message separates the call from its result.
    """
    spoken = [(turn_index, role, item) for turn_index, (role, item) in enumerate(items) if role != "system"]
    if not spoken or (spoken[0][1] != "user" and not _ids_in(spoken[0][2], "compaction", "content")):
        raise InvalidValue('messages: first message must use the "user" role', field="messages")
    open_calls: list[str] = []
    separated = False
    for turn_index, role, item in spoken:
        results = _ids_in(item, "tool_result", "tool_use_id") if role == "user" else {}
        known_ids, answered_ids = set(open_calls), set(results.values())
        for index, use_id in results.items():
            if use_id not in known_ids:
                raise InvalidValue(
                    ORPHAN.format(place=f"{turn_index}.content.{index}", ids=use_id[:256]), field="messages"
                )
        if unanswered := open_calls if separated else [call for call in open_calls if call not in answered_ids]:
            raise _unanswered_error(turn_index, unanswered)
        calls = _ids_in(item, "tool_use", "id") if role == "assistant" else {}
        texts = _ids_in(item, "text", "text") if calls else {}
        last_text = max(texts, default=-1)
        separated = bool(texts) and last_text > min(calls)
        open_calls = [use_id for index, use_id in calls.items() if not separated or index < last_text]
    if open_calls:
        raise _unanswered_error(turn_index + 1, open_calls)


def _unanswered_error(index: int, calls: Sequence[str]) -> InvalidValue:
    return InvalidValue(UNANSWERED.format(place=index, ids=", ".join(calls)[:256]), field="messages")


def _ids_in(item: Fields, block_type: str, member: str) -> dict[int, str]:
    """Return a member of a message's blocks of a type by the blocks' places, as far as it is a text."""
    content: Any = item.raw_value("content")
    blocks = content if isinstance(content, list) else []
    return {
        index: block[member]
        for index, block in enumerate(blocks)
        if isinstance(block, dict) and block.get("type") == block_type and isinstance(block.get(member), str)
    }
