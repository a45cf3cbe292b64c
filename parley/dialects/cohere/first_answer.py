"""The answer of the first version's chat: its text and calls, and the events that a stream sends of them.

Events are lines of JSON, or server-sent events for a client that asks for these. Reasoning has no place in this
version and is left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.json_answer import encode_json
from parley.dialects.json_body import decode_json
from parley.dialects.sse import named_event
from parley.types import ChoiceDelta, ToolCallDelta

TEXT_LINE = b'{"is_finished":false,"event_type":"text-generation","text":%b}\n'


class FirstMessage:
    """Collects the text and the calls of an answer, and writes the events of each piece. ``server_sent``: as
    server-sent events."""

    def __init__(self, *, server_sent: bool = False):
        self._server_sent = server_sent
        self._pieces: list[str] = []
        self._calls: list[ToolCallDelta] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def add_delta(self, delta: ChoiceDelta) -> None:
        """Add a piece of the text or of a call."""
        if (call := delta.tool_call) is not None:
            if call.name is not None:
                self._calls.append(ToolCallDelta(len(self._calls), None, call.name))
            self._calls[-1].arguments += call.arguments
        elif delta.output_part == "content":
            self._pieces.append(delta.text)

    def write_delta(self, delta: ChoiceDelta) -> bytes:
        """Add a piece, and return its events."""
        self.add_delta(delta)
        if (call := delta.tool_call) is not None:
            return self._write_call(call)
        if delta.output_part != "content" or not delta.text:
            return b""
        if self._server_sent:
            return self.event("text-generation", {"text": delta.text})
        return TEXT_LINE % encode_json(delta.text)

    def _write_call(self, call: ToolCallDelta) -> bytes:
        """Return the events of a piece of a call: its name, and its parameters as JSON text in pieces."""
        pieces = [{"name": call.name}] if call.name is not None else []
        if call.arguments:
            pieces.append({"parameters": call.arguments})
        index = {"index": len(self._calls) - 1}
        return b"".join(self.event("tool-calls-chunk", {"tool_call_delta": index | piece}) for piece in pieces)

    def finish_calls(self) -> bytes:
        """Return the event with all calls; nothing if there are none."""
        calls = self.calls_member()
        return self.event("tool-calls-generation", {"text": self.text} | calls) if calls else b""

    def event(self, event_type: str, members: dict[str, Any], *, is_last: bool = False) -> bytes:
        """Return one event."""
        event = {"is_finished": is_last, "event_type": event_type} | members
        return named_event(event_type, event) if self._server_sent else encode_json(event) + b"\n"

    def calls_member(self) -> dict[str, Any]:
        """Return the calls; nothing if there are none. One that was cut off is no call."""
        calls = [
            {"name": call.name, "parameters": parameters}
            for call in self._calls
            if (parameters := _read_parameters(call)) is not None
        ]
        return {"tool_calls": calls} if calls else {}


def _read_parameters(call: ToolCallDelta) -> dict[str, Any] | None:
    try:
        parameters = decode_json((call.arguments or "{}").encode())
    except (msgspec.DecodeError, RecursionError):
        return None
    return parameters if isinstance(parameters, dict) else None
