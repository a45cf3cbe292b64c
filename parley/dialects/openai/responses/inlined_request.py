"""Requests for responses at a coordinator, which keeps the responses and conversations of all its instances.

The body for instances contains the items that the client's body refers to, so any instance can answer it. The answer
passes the coordinator, and the response in it is kept there. An instance runs a response in the background like any
stream; the coordinator keeps its events.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.responses import items, members, stored
from parley.dialects.openai.responses.content import inline_uploaded_files
from parley.dialects.openai.responses.events import EventStream
from parley.dialects.openai.responses.stored import StoredResponse
from parley.dialects.records import InlinedRequest
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import EVENT_END, split_events
from parley.errors import NotReady, ParleyError

EVENT_HEAD = b"event: "
ITEM_DONE = b"response.output_item.done"
STATE_EVENTS = frozenset(
    (b"response.created", b"response.in_progress", b"response.completed", b"response.incomplete", b"response.failed")
)


class _ItemEvent(msgspec.Struct):
    item: dict[str, Any]


def inline_records(body: bytes, context: RequestContext) -> InlinedRequest:
    """Return a request that keeps nothing, with the items that its body refers to. Raises BadRequest."""
    return InlinedRequest(_InlinedBody(body, decode_fields(body), context).encode())


def inline_response(
    body: bytes,
    context: RequestContext,
    *,
    decode: Callable[[bytes, RequestContext], Fields] = lambda body, context: decode_fields(body),
    event_stream: type[EventStream] = EventStream,
) -> InlinedRequest:
    """Return a request for a response, with the items that its body refers to. Raises BadRequest.

    ``decode``, ``event_stream``: how the API reads a body and writes events.
    """
    return InlinedResponse(_InlinedBody(body, decode(body, context), context), context, event_stream)


class _InlinedBody:
    """A body with its items. ``new_items``: those that the client sent; ``earlier``: those that it refers to.

    Instances get all of them, with uploaded files in place of their ids.
    """

    def __init__(self, body: bytes, fields: Fields, context: RequestContext):
        self._body, self.fields = body, fields
        self.storage = members.read_storage(self.fields, context)
        self.earlier = stored.earlier_items(context, self.storage)
        with_items, self.new_items = items.input_with_items(
            self.fields, partial(stored.find_item, context), may_be_missing=bool(self.earlier)
        )
        items_before = [*self.earlier, *self.new_items]
        self._items = [
            inline_uploaded_files(item, f"input[{number}]", context) for number, item in enumerate(items_before)
        ]
        self._is_changed = (
            bool(self.earlier)
            or self._items != items_before
            or with_items.raw_value("input") != self.fields.raw_value("input")
        )

    def encode(self) -> bytes:
        """Return the body for instances."""
        if not self._is_changed:
            return self._body
        values = {name: self.fields.raw_value(name) for name in self.fields.member_names}
        return encode_json(values | {"input": self._items})


class InlinedResponse(InlinedRequest):
    """A request for a response, which is kept as it passes."""

    def __init__(self, body: _InlinedBody, context: RequestContext, event_stream: type[EventStream]):
        super().__init__(body.encode())
        self._event_stream = event_stream
        self._storage, self._context = body.storage, context
        self._new_items = stored.with_ids(body.new_items, context.unique_id)
        self._all_items = [*body.earlier, *self._new_items]
        self.is_stream = body.fields.boolean("stream", False)
        if self._storage.in_background:
            self.background_name = f"resp_{context.unique_id}"
        self._tail = b""  # of an event that has not arrived whole
        self._event_count = 0
        self._opening: dict[str, Any] = {}  # the response as its stream announced it
        self._output: list[dict[str, Any]] = []

    def watch_body(self, data: bytes) -> bytes:
        """Keep the response, and return it."""
        if not self._storage.is_stored:
            return data
        response = msgspec.json.decode(data, type=dict[str, Any])
        return data if self._keep_response(response) else encode_json(_without_store(response))

    def watch_stream(self, data: bytes) -> bytes:
        """Count the events, keep the response whenever its state changes, and return what need not be held."""
        events, tail = split_events(self._tail + data)
        is_event = tail.startswith(EVENT_HEAD) or EVENT_HEAD.startswith(tail)  # and no comment, and no body of an error
        self._tail = tail if is_event else b""
        passed = b"".join(self._watch_event(event) + EVENT_END for event in events)
        return passed if is_event else passed + tail

    def _watch_event(self, event: bytes) -> bytes:
        """Return an event as the client gets it."""
        if not event.startswith(EVENT_HEAD):
            return event
        self._event_count += 1
        kind, joint, data = event.removeprefix(EVENT_HEAD).partition(b"\ndata: ")
        if kind == ITEM_DONE:
            self._output.append(msgspec.json.decode(data, type=_ItemEvent).item)
        elif kind in STATE_EVENTS:
            members = msgspec.json.decode(data, type=dict[str, Any])
            response = members["response"]
            self._opening = self._opening or response
            is_running = response["status"] in stored.RUNNING
            is_due = not is_running or bool(self.background_name)
            if is_due and not self._keep_response(response) and not is_running:
                shown = encode_json(members | {"response": _without_store(response)})
                return b"".join((EVENT_HEAD, kind, joint, shown))
        return event

    def render_accepted(self) -> bytes:
        """Return the response as its stream announced it."""
        return encode_json(self._opening)

    def fail_stream(self, error: ParleyError) -> bytes | None:
        """Return the events that end the stream, numbered on from those before. An event that is not complete is
        dropped."""
        self._tail = b""
        events = self._event_stream(enabled=True, count=self._event_count)
        events.write_failure(error, self._opening | {"output": self._output})
        return events.end_bytes()

    def _keep_response(self, response: dict[str, Any]) -> bool:
        """Keep the response, if the client wants that, and add one that has ended to its conversation. Return False if
        it could not be kept."""
        if not self._storage.is_stored:
            return True
        try:
            return stored.keep_response(
                self._context, StoredResponse(response, self._all_items), self._new_items, self._storage.conversation
            )
        except NotReady:  # the store has logged it; the client gets its answer nevertheless
            return False


def _without_store(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response that says that it is not stored, if its API says so at all."""
    return response | {"store": False} if "store" in response else response
