"""A response in text: a request of the Responses API, whose events become those of the Realtime API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from parley.dialects.json_answer import encode_json
from parley.dialects.openai.realtime.conversation import ItemWithAudio
from parley.dialects.openai.realtime.events import EARLY_END, read_fault, write_event, write_fault
from parley.dialects.socket_session import SocketAnswer, SocketRequest
from parley.dialects.sse import STREAM_END, read_event_data, split_events

RESPONSE_LANE = "response"
LAST_EVENTS = {
    "response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed",
}  # fmt: skip
SHOWN_ITEMS = ("message", "function_call")  # reasoning is not shown
# Events of a part or of a call, with the members that they have besides their position.
PART_EVENTS = {
    "response.output_text.delta": ("content_index", "delta"),
    "response.output_text.done": ("content_index", "text"),
    "response.function_call_arguments.delta": ("delta",),
    "response.function_call_arguments.done": ("arguments",),
}


@dataclass(frozen=True, slots=True)
class ResponseRequest(SocketRequest):
    """A ``response.create``. ``members``: of the body, without its input; ``items``: its own input; None: the whole
    conversation. ``keeps_output``: the output becomes part of the conversation."""

    response_id: str
    event_id: str | None
    members: dict[str, Any]
    items: list[ItemWithAudio] | None
    keeps_output: bool
    metadata: dict[str, Any] | None


class RealtimeAnswer(SocketAnswer):
    """The answer to one request. ``add_item`` adds an item to the conversation, and returns the id of the one before
    it; ``on_end`` is called once."""

    sibling = "responses"

    def __init__(
        self,
        request: ResponseRequest,
        input_items: list[dict[str, Any]],
        add_item: Callable[[dict[str, Any]], str | None],
        on_end: Callable[[], None],
    ):
        self.request, self._add_item, self._on_end = request, add_item, on_end
        self.body = encode_json(request.members | {"input": input_items, "stream": True, "store": False})
        self._data = b""
        self._has_ended = False
        self._shown_indices: dict[int, int] = {}  # of items that are shown, by their indices in the whole output
        self._calls: dict[str, dict[str, Any]] = {}  # of each call: its name and id
        self._output: list[dict[str, Any]] = []

    def read_part(self, status: int, data: bytes, *, last: bool) -> list[bytes]:
        """Return the events that the next part of the answer makes."""
        self._data += data
        if status != 200:
            return [self._write_refusal(self._data)] if last else []
        events, self._data = split_events(self._data)
        messages: list[bytes] = []
        for event_data in map(read_event_data, events):
            if event_data not in (b"", STREAM_END) and not self._has_ended:
                messages += self._read_event(msgspec.json.decode(event_data))
        if last and not self._has_ended:
            messages.append(self._write_done("failed", {"type": "failed", "error": EARLY_END}, None))
        return messages

    def cancelled_event(self) -> bytes:
        """Return the event that ends a response which its client has cancelled."""
        return self._write_done("cancelled", {"type": "cancelled", "reason": "client_cancelled"}, None)

    def _write_refusal(self, body: bytes) -> bytes:
        """Return the error event for a refusal. Nothing has been generated."""
        self._has_ended = True
        self._on_end()
        return write_fault(read_fault(body), self.request.event_id)

    def _read_event(self, event: dict[str, Any]) -> list[bytes]:
        kind = event["type"]
        if kind == "response.created":
            return [write_event(kind, response=self._show_response("in_progress", None, None))]
        if kind in LAST_EVENTS:
            return [self._write_end(LAST_EVENTS[kind], event["response"])]
        if kind == "response.output_item.added" and event["item"]["type"] in SHOWN_ITEMS:
            self._shown_indices[event["output_index"]] = len(self._shown_indices)
        output_index = self._shown_indices.get(event.get("output_index", -1))
        if output_index is None:
            return []
        position = {"response_id": self.request.response_id, "output_index": output_index}
        if kind.startswith("response.output_item."):
            return self._write_item(kind, event["item"], position)
        position["item_id"] = event["item_id"]
        if kind.startswith("response.content_part."):
            part = {"type": "text", "text": event["part"].get("text", "")}
            return [write_event(kind, **position, content_index=event["content_index"], part=part)]
        if kind not in PART_EVENTS:
            return []
        members = {name: event[name] for name in PART_EVENTS[kind]}
        return [write_event(kind, **position, **members, **self._calls.get(event["item_id"], {}))]

    def _write_item(self, kind: str, item: dict[str, Any], position: dict[str, Any]) -> list[bytes]:
        """Return the events about an item, which the conversation gets once it is done."""
        item_object = show_item(item)
        if kind == "response.output_item.added":
            if item["type"] == "function_call":
                self._calls[item["id"]] = {"call_id": item["call_id"], "name": item["name"]}
            return [write_event(kind, **position, item=item_object)]
        messages = [write_event(kind, **position, item=item_object)]
        self._output.append(item_object)
        if self.request.keeps_output:
            previous_id = self._add_item(item_object)
            for name in ("conversation.item.added", "conversation.item.done"):
                messages.append(write_event(name, previous_item_id=previous_id, item=item_object))
        return messages

    def _write_end(self, status: str, response: dict[str, Any]) -> bytes:
        details: dict[str, Any] | None = None
        if status == "incomplete":
            reason = (response.get("incomplete_details") or {}).get("reason")
            details = {"type": "incomplete", "reason": reason}
        elif status == "failed":
            details = {"type": "failed", "error": response.get("error") or EARLY_END}
        return self._write_done(status, details, response.get("usage"))

    def _write_done(self, status: str, details: dict[str, Any] | None, usage: dict[str, Any] | None) -> bytes:
        self._has_ended = True
        self._on_end()
        return write_event("response.done", response=self._show_response(status, details, usage))

    def _show_response(
        self, status: str, details: dict[str, Any] | None, usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "object": "realtime.response",
            "id": self.request.response_id,
            "status": status,
            "status_details": details,
            "output": self._output,
            "conversation_id": None,
            "output_modalities": ["text"],
            "max_output_tokens": self.request.members.get("max_output_tokens", "inf"),
            "usage": None if usage is None else _show_usage(usage),
            "metadata": self.request.metadata,
        }


def show_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an output item of the Responses API as an item of a conversation."""
    shown = {"id": item["id"], "object": "realtime.item", "type": item["type"], "status": item["status"]}
    if item["type"] == "function_call":
        return shown | {name: item[name] for name in ("call_id", "name", "arguments")}
    parts = [{"type": "output_text", "text": part.get("text", part.get("refusal", ""))} for part in item["content"]]
    return shown | {"role": "assistant", "content": parts}


def _show_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a response. All of its input counts as text: the Responses API tells no kinds apart."""
    cached = usage["input_tokens_details"]["cached_tokens"]
    return {
        "total_tokens": usage["total_tokens"],
        "input_tokens": usage["input_tokens"],
        "output_tokens": usage["output_tokens"],
        "input_token_details": {"text_tokens": usage["input_tokens"], "audio_tokens": 0, "cached_tokens": cached},
        "output_token_details": {"text_tokens": usage["output_tokens"], "audio_tokens": 0},
    }
