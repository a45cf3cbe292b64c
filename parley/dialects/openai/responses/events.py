"""The events of a response's stream, numbered in order.

Members are in the service's order: ``type``, then by name. A server with another form of events derives its own class.
"""

from __future__ import annotations

from typing import Any, ClassVar

from parley.dialects.json_answer import encode_json
from parley.dialects.openai.error_answers import openai_error_object
from parley.dialects.sse import STREAM_DONE
from parley.errors import ParleyError

KEEPALIVE = "keepalive"


class EventStream:
    """Writes events. One that is not ``enabled``, for answers in one piece, writes nothing."""

    end_mark: ClassVar[bytes] = STREAM_DONE

    def __init__(self, enabled: bool, count: int = 0):
        self.enabled = enabled
        self.count = count  # events so far
        self._frames: list[bytes] = []

    def write(self, event_type: str, **members: Any) -> None:
        """Write an event with these members."""
        if not self.enabled:
            return
        members["sequence_number"] = self._next_number()
        data = encode_json(self.event_object(event_type, members))
        self._frames.append(b"event: %b\ndata: %b\n\n" % (event_type.encode(), data))

    def delta_template(self, event_type: str, **members: Any) -> bytes:
        """Return an event with two places: the text of ``delta``, and the number of the event."""
        if not self.enabled:
            return b""
        marks = {"delta": "\0", "sequence_number": "\1"}
        data = encode_json(self.event_object(event_type, members | marks)).replace(b"%", b"%%")
        data = data.replace(encode_json("\0"), b"%b").replace(encode_json("\1"), b"%d")
        return b"event: %b\ndata: %b\n\n" % (event_type.encode(), data)

    def write_delta(self, template: bytes, text: str) -> None:
        """Write an event from a template of ``delta_template``, as nearly all events are."""
        if self.enabled:
            self._frames.append(template % (encode_json(text), self._next_number()))

    def take_bytes(self) -> bytes:
        """Return everything written since the last call."""
        data = b"".join(self._frames)
        self._frames = []
        return data

    def end_bytes(self) -> bytes:
        """Return the same, with the mark that ends the stream."""
        return self.take_bytes() + self.end_mark

    def event_object(self, event_type: str, members: dict[str, Any]) -> dict[str, Any]:
        """Return an event with its members in order."""
        return {"type": event_type} | dict(sorted(members.items()))

    def write_failure(self, error: ParleyError, response: dict[str, Any]) -> dict[str, Any]:
        """Write the error and the failed response, which is returned. ``response``: as it was before.

        The error is nested as the service sends it, and flat as its types declare it.
        """
        fault = self.error_members(error)
        code = fault["code"] or "server_error"
        flat = {"code": code, "message": fault["message"], "param": fault["param"]}
        self.write("error", error=flat | {"type": fault["type"]}, **flat)
        failure = {"code": code, "message": fault["message"]}
        failed = response | {"status": "failed", "error": failure, "service_tier": "default"}
        self.write("response.failed", response=failed)
        return failed

    def error_members(self, error: ParleyError) -> dict[str, Any]:
        """Return the type, code, message and member of an error."""
        members: dict[str, Any] = openai_error_object(error)["error"]
        return members

    def _next_number(self) -> int:
        self.count += 1
        return self.count - 1
