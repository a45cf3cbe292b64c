"""The content of an answer as blocks: one after another in a stream, or all together.

Indexes count up from 0, one block is open at a time, and no block is empty: clients send the blocks back, and a text
without characters would be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from parley.dialects.anthropic.toolsets import ToolsetMember
from parley.dialects.json_answer import encode_json
from parley.dialects.sse import named_event
from parley.types import ChoiceDelta, FinishReason, ToolCallDelta

PING_EVENT = named_event("ping", {"type": "ping"})
TEXT_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta",'
    b'"text":%b}}\n\n'
)
NO_TOOLSETS: Mapping[str, ToolsetMember] = {}
BlockType = Literal["text", "thinking", "tool_use"]


@dataclass
class AnswerBlock:
    """One block so far. ``pieces``: its text, its thinking, or the JSON text of its call's arguments."""

    block_type: BlockType
    pieces: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """All pieces so far."""
        return "".join(self.pieces)


class ThinkingDisplay(msgspec.Struct, frozen=True):
    """The form of thinking in an answer. ``hidden``: no block; ``omitted``: a block with only the signature that
    ``seal`` returns.
    """

    hidden: bool
    omitted: bool
    seal: Callable[[str], str]


def anthropic_call_id(call_id: str) -> str:
    """Return a call's id in the original's form; ids that a model itself writes stay as they are."""
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


def call_block(
    block: AnswerBlock, arguments: dict[str, Any], toolset_members: Mapping[str, ToolsetMember]
) -> dict[str, Any]:
    """Return the block of a call; one of a toolset's member has the member's own name."""
    call = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
    member = toolset_members.get(block.name)
    return call if member is None else call | {"name": member.name, "toolset_name": member.toolset}


class BlockStream:
    """Writes an answer's deltas as the events of blocks. ``called``: there was a call.

    ``toolset_members``: the tools of toolsets by the model's names.

    A server with another form of events derives its own class. ``first_ping``: follows the start of the first block.
    ``empty_arguments``: every call begins with an event without arguments.
    """

    first_ping: ClassVar[bytes] = PING_EVENT
    empty_arguments: ClassVar[bool] = True

    def __init__(self, display: ThinkingDisplay, toolset_members: Mapping[str, ToolsetMember] = NO_TOOLSETS):
        self.called = False
        self._display, self._toolset_members = display, toolset_members
        self._open: AnswerBlock | None = None
        self._count = 0  # blocks so far

    def write_delta(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta."""
        if delta.tool_call is not None:
            return self._write_call(delta.tool_call)
        if delta.output_part == "tool" or not delta.text or (delta.output_part == "reasoning" and self._display.hidden):
            return b""
        if delta.output_part == "content":
            opening = self._open_block(AnswerBlock("text")) if not self._is_open("text") else b""
            return opening + self.text_delta(delta.text)
        opening = self._open_block(AnswerBlock("thinking")) if not self._is_open("thinking") else b""
        assert self._open is not None
        self._open.pieces.append(delta.text)
        if self._display.omitted:
            return opening
        return opening + self._delta_event({"type": "thinking_delta", "thinking": delta.text})

    def close_block(self) -> bytes:
        """Return the end of the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return b""
        signature = b""
        if block.block_type == "thinking":
            sealed = self._display.seal(block.text)
            signature = self._delta_event({"type": "signature_delta", "signature": sealed})
        return signature + self._block_event("content_block_stop")

    def summary_events(self, block: dict[str, Any]) -> bytes:
        """Return the events of a summary, a block that is whole; clients expect its content in one piece."""
        self._count += 1
        start = self._block_event("content_block_start", content_block=block | {"content": None})
        delta = self._delta_event({"type": "compaction_delta", "content": block["content"]})
        return start + delta + self._block_event("content_block_stop")

    def _write_call(self, call: ToolCallDelta) -> bytes:
        """Return the events of a piece of a call; its arguments are passed on as they arrive."""
        opening = b""
        if call.name is not None:
            self.called = True
            opening = self._open_block(AnswerBlock("tool_use", call_id=self.call_id(call.id or ""), name=call.name))
            if self.empty_arguments:
                opening += self._delta_event({"type": "input_json_delta", "partial_json": ""})
        if not call.arguments or not self._is_open("tool_use"):
            return opening
        return opening + self._delta_event({"type": "input_json_delta", "partial_json": call.arguments})

    def _is_open(self, block_type: BlockType) -> bool:
        return self._open is not None and self._open.block_type == block_type

    def _open_block(self, block: AnswerBlock) -> bytes:
        start = self.close_block()
        self._open, self._count = block, self._count + 1
        ping = self.first_ping if self._count == 1 else b""
        return start + self._block_event("content_block_start", content_block=self.start_of_block(block)) + ping

    def text_delta(self, text: str) -> bytes:
        """Return the event with a piece of text, as nearly all events are."""
        return TEXT_DELTA % (self._count - 1, encode_json(text))

    def _delta_event(self, delta: dict[str, Any]) -> bytes:
        return self._block_event("content_block_delta", delta=delta)

    def _block_event(self, name: str, **members: Any) -> bytes:
        return named_event(name, self.event_object(name, self._count - 1, members))

    def event_object(self, name: str, index: int, members: dict[str, Any]) -> dict[str, Any]:
        """Return the event of a block with its members in order."""
        return {"type": name, "index": index} | members

    def start_of_block(self, block: AnswerBlock) -> dict[str, Any]:
        """Return a block before it has any content."""
        match block.block_type:
            case "text":
                return {"type": "text", "text": ""}
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
        return call_block(block, {}, self._toolset_members)

    def call_id(self, call_id: str) -> str:
        """Return a call's id as clients get it."""
        return anthropic_call_id(call_id)


class BlockList:
    """Collects the blocks of an answer in one piece. ``client_id``: returns a call's id as clients get it.

    ``toolset_members`` as in ``BlockStream``.
    """

    def __init__(
        self,
        display: ThinkingDisplay,
        toolset_members: Mapping[str, ToolsetMember] = NO_TOOLSETS,
        client_id: Callable[[str], str] = anthropic_call_id,
    ):
        self._display, self._toolset_members, self._client_id = display, toolset_members, client_id
        self._blocks: list[AnswerBlock] = []

    def add_delta(self, delta: ChoiceDelta) -> None:
        """Add a delta to the last block, or begin another."""
        call = delta.tool_call
        if call is not None:
            if call.name is not None:
                self._blocks.append(AnswerBlock("tool_use", [], self._client_id(call.id or ""), call.name))
            self._blocks[-1].pieces.append(call.arguments)
        elif (
            delta.text
            and delta.output_part != "tool"
            and not (delta.output_part == "reasoning" and self._display.hidden)
        ):
            block_type: BlockType = "text" if delta.output_part == "content" else "thinking"
            if not self._blocks or self._blocks[-1].block_type != block_type:
                self._blocks.append(AnswerBlock(block_type))
            self._blocks[-1].pieces.append(delta.text)

    def content(self, reason: FinishReason) -> list[dict[str, Any]]:
        """Return the blocks of an answer that ended for this reason."""
        return list(self._finished_blocks(reason))

    def _finished_blocks(self, reason: FinishReason) -> Iterator[dict[str, Any]]:
        for number, block in enumerate(self._blocks, 1):
            may_be_cut = reason == "length" and number == len(self._blocks)
            if block.block_type == "text":
                yield {"type": "text", "text": block.text}
            elif block.block_type == "thinking":
                shown_text = "" if self._display.omitted else block.text
                yield {"type": "thinking", "thinking": shown_text, "signature": self._display.seal(block.text)}
            elif (arguments := _read_arguments(block.text)) is not None or may_be_cut:
                # Clients see that a call was cut off, but get no incomplete arguments.
                yield call_block(block, arguments or {}, self._toolset_members)
            else:
                yield {"type": "text", "text": f"{block.name}({block.text})"}


def _read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call, or None if a model wrote something else than an object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
