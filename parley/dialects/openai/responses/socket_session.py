"""The messages of a WebSocket of the Responses API: ``response.create`` events, answered by the events of streams.

The newest response of each stream of a connection that the server does not store is kept for the connection, as the
items of its conversation. A request that continues it is given these items as its input, and one that refers to one of
them is given the item.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.error_answers import openai_error_object
from parley.dialects.openai.labels import MAX_LABEL
from parley.dialects.openai.responses.items import TRIGGER, referred_name
from parley.dialects.openai.responses.stored import HISTORY_HEADER
from parley.dialects.socket_session import (
    SocketAnswer,
    SocketOpening,
    SocketRequest,
    SocketSession,
)
from parley.dialects.sse import STREAM_END, read_event_data, split_events
from parley.errors import BadRequest, InvalidValue, ParleyError, Unsupported, excerpt

Members = dict[str, msgspec.Raw]
CREATE, STEER = "response.create", "response.steer"
ENVELOPE = frozenset(("type", "stream_id"))  # members of a message that are not the body's
MAX_STREAM_ID = 64  # characters
NO_ITEMS = b"[]"
LAST_EVENTS = frozenset(("response.completed", "response.incomplete", "response.failed"))
ID_MEMBER = re.compile(rb'^\s*\[.*?"id"', re.DOTALL)  # in an array
INPUT_PLACE = re.compile(r"\binput\[(\d+)\]")
STATUS_TYPES = {401: "invalid_request_error", 429: "requests", 503: "service_unavailable"}
_members_decoder = msgspec.json.Decoder(Members)
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class _EventType(msgspec.Struct):
    type: str = ""


class _ItemName(msgspec.Struct):
    """The members by which an item can be referred to."""

    type: Any = None
    id: Any = None
    role: Any = None


class _Outcome(msgspec.Struct):
    """The members of an ended response that the session needs."""

    id: str
    store: bool = True
    output: msgspec.Raw = msgspec.Raw(NO_ITEMS)


class _ErrorAnswer(msgspec.Struct):
    error: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CreateRequest(SocketRequest):
    """A ``response.create``: the members of its body."""

    members: Members

    @property
    def previous(self) -> str | None:
        """The id of the response that it continues, if it names one."""
        return _decoded_text(self.members.get("previous_response_id"))

    @property
    def may_refer(self) -> bool:
        """Whether its input may refer to items by their ids."""
        return ID_MEMBER.search(self.members.get("input", b"")) is not None


class ResponsesSession(SocketSession):
    """The messages of one connection, which keeps its newest responses."""

    max_lanes, max_waiting, max_seconds = 32, 16, 3600.0

    def __init__(self, opening: SocketOpening):
        self._records = opening.records
        self._newest: dict[str, str] = {}  # of each stream: the id of its newest response that is kept; oldest first

    def read_message(self, data: bytes) -> SocketRequest | list[bytes]:
        """Return the request in a message, or the message that refuses it."""
        stream_id = ""
        try:
            message = decode_fields(data)
            stream_id = _read_stream_id(message)
            kind = message.string("type", None, cap=MAX_LABEL)
            if kind is None:
                raise message.missing_member("type")
            if kind == STEER:
                return [_refused_steering(message)]
            if kind != CREATE:
                raise InvalidValue(f"Invalid value for 'type': {excerpt(kind)}. The supported value is '{CREATE}'.",
                              field="type")  # fmt: skip
            _check_transport_members(message)
        except ParleyError as error:
            return [_error_event(400, openai_error_object(error)["error"], stream_id)]
        members = _members_decoder.decode(data)
        body = {name: value for name, value in members.items() if name not in ENVELOPE}
        return CreateRequest(stream_id, body | {"stream": msgspec.Raw(b"true")})

    def count_earlier_bytes(self, request: SocketRequest) -> int:
        """Return the bytes of the responses that the connection keeps and ``start_request`` may read."""
        assert isinstance(request, CreateRequest)
        if request.may_refer:
            return sum(map(len, self._kept_records()))
        return len(self._records.find_record(request.previous or "") or b"")

    def start_request(self, request: SocketRequest) -> SocketAnswer:
        """Return the answer to a request, which has no parts yet."""
        assert isinstance(request, CreateRequest)
        return SocketResponsesAnswer(self, request, self._records.find_record(request.previous or ""))

    def find_items(self) -> dict[str, msgspec.Raw]:
        """Return the items with ids of all responses that are kept."""
        items = [item for record in self._kept_records() for item in _items_decoder.decode(record)]
        names = (_decoded_name(item).id for item in items)
        return {name: item for name, item in zip(names, items, strict=True) if isinstance(name, str)}

    def _kept_records(self) -> list[bytes]:
        records = map(self._records.find_record, self._newest.values())
        return [record for record in records if record is not None]

    def refuse_request(self, request: SocketRequest, error: ParleyError) -> bytes:
        """Return the message that refuses a request."""
        return _error_event(error.status, openai_error_object(error)["error"], request.lane)

    def refuse_lane(self, request: SocketRequest) -> bytes:
        """Return the message that refuses a request because too many streams have requests."""
        message = f"At most {self.max_lanes} streams of a connection may have requests at a time."
        return self.refuse_request(
            request, BadRequest(message, field="stream_id", code="websocket_stream_limit_reached")
        )

    def render_expiry(self, lane: str) -> bytes:
        """Return the message that ends a connection after ``max_seconds``, or refuses a request of a lane then."""
        minutes = round(self.max_seconds / 60)
        message = f"The WebSocket has been open for {minutes} minutes, its limit. Open a new one to continue."
        error = BadRequest(message, code="websocket_connection_limit_reached")
        return _error_event(400, openai_error_object(error)["error"], lane)

    def keep_response(self, request: CreateRequest, response_id: str, items: bytes) -> None:
        """Keep a response in place of the one before it in its stream. ``items``: of its conversation, as JSON."""
        self._forget_lane(request.lane)
        while len(self._newest) > self.max_lanes:
            self._forget_lane(next(iter(self._newest)))
        self._newest[request.lane] = response_id
        self._records.save_record(response_id, items)

    def drop_response(self, response_id: str | None) -> None:
        """Forget a response, because a request that continues it has failed."""
        for lane, newest in tuple(self._newest.items()):
            if newest == response_id:
                self._forget_lane(lane)

    def drop_older(self, lane: str) -> None:
        """Forget the newest response of a stream that is kept: the server stores a newer one."""
        self._forget_lane(lane)

    def _forget_lane(self, lane: str) -> None:
        if (response_id := self._newest.pop(lane, None)) is not None:
            self._records.delete_record(response_id)


class SocketResponsesAnswer(SocketAnswer):
    """The answer to one request. ``earlier``: the items of the response that it continues, as JSON; None if the
    connection keeps no such response."""

    def __init__(self, session: ResponsesSession, request: CreateRequest, earlier: bytes | None):
        self._session, self._request, self._earlier = session, request, earlier
        self._earlier_count = 0
        self._data = b""  # of an event that has not arrived whole, or of an answer that is no stream
        self._has_ended = False
        members = request.members
        self._new_items = _input_items(members.get("input"))
        if request.may_refer and self._new_items is not None:
            self._new_items = _with_referred_items(self._new_items, session.find_items())
            members = members | {"input": msgspec.Raw(self._new_items)}
        if earlier is not None and self._new_items is not None:
            members = members | {"input": msgspec.Raw(_joined_items(earlier, self._new_items))}
            self._earlier_count = len(_items_decoder.decode(earlier))
        if earlier is not None:
            self.headers = [(HISTORY_HEADER, b"in-input")]
        self.body = encode_json(members)

    def read_part(self, status: int, data: bytes, *, last: bool) -> list[bytes]:
        """Return the messages that the next part of the answer makes."""
        self._data += data
        if status != 200:
            return [self._failure_message(status, self._data)] if last else []
        events, self._data = split_events(self._data)
        messages = [self._read_event(data) for data in map(read_event_data, events) if data not in (b"", STREAM_END)]
        if last and not self._has_ended:
            messages.append(self._failure_message(500, b""))
        return messages

    def _read_event(self, data: bytes) -> bytes:
        """Return an event as its message. The last event of a response ends the response here, too."""
        if b'"response"' in data:
            kind = msgspec.json.decode(data, type=_EventType).type
            if kind in LAST_EVENTS:
                self._has_ended = True
                self._end_response(kind, _members_decoder.decode(data)["response"])
        return _with_stream_id(data, self._request.lane)

    def _end_response(self, kind: str, response: msgspec.Raw) -> None:
        """Keep a response that the server does not store; one that has failed drops the one before it."""
        if kind == "response.failed":
            self._session.drop_response(self._request.previous)
            return
        outcome = msgspec.json.decode(response, type=_Outcome)
        is_whole = self._request.previous is None or self._earlier is not None
        if outcome.store or not is_whole:  # continued one that the server stores: its items are not known here
            self._session.drop_older(self._request.lane)
            return
        new_items = _without_triggers(self._new_items or NO_ITEMS)
        items = _joined_items(self._earlier or NO_ITEMS, new_items)
        self._session.keep_response(self._request, outcome.id, _joined_items(items, bytes(outcome.output)))

    def _failure_message(self, status: int, body: bytes) -> bytes:
        """Return the error that ends the request. ``body``: of the server's refusal."""
        self._has_ended = True
        self._session.drop_response(self._request.previous)
        try:
            error = msgspec.json.decode(body, type=_ErrorAnswer).error
        except msgspec.MsgspecError:  # a refusal by another server, or no body
            message = body.decode("utf-8", "replace") or "The answer ended early."
            error = {"message": message, "type": STATUS_TYPES.get(status, "server_error"), "param": None, "code": None}
        if self._earlier_count:
            error = {name: self._own_places(value) for name, value in error.items()}
        return _error_event(status, error, self._request.lane)

    def _own_places(self, value: Any) -> Any:
        """Return a text with the numbers that the items have in the client's own input."""
        if not isinstance(value, str):
            return value
        return INPUT_PLACE.sub(lambda match: f"input[{int(match[1]) - self._earlier_count}]", value)


def _check_transport_members(message: Fields) -> None:
    """Refuse members that ask for another way to answer than events on the connection. Raises BadRequest."""
    if message.boolean("background", False):
        raise Unsupported("Unsupported parameter: 'background'. Responses of a WebSocket do not run in the background.",
                          field="background")  # fmt: skip
    if not message.boolean("stream", True):
        raise Unsupported("Unsupported value: 'stream'. Responses of a WebSocket are always streams.", field="stream")


def _read_stream_id(message: Fields) -> str:
    """Return the stream that a message names, "" if it names none. Raises InvalidValue."""
    stream_id = message.raw_value("stream_id")
    if stream_id is None:
        return ""
    if not isinstance(stream_id, str) or not 1 <= len(stream_id) <= MAX_STREAM_ID:
        raise InvalidValue(
            f"Invalid 'stream_id': must be a string of 1 to {MAX_STREAM_ID} characters.",
            field="stream_id",
            code="invalid_stream_id",
        )
    return stream_id


def _refused_steering(message: Fields) -> bytes:
    """Return the refusal of input for a response that runs. Raises BadRequest for a malformed message."""
    previous = message.string("previous_response_id", None, cap=MAX_LABEL)
    for name, value in (("previous_response_id", previous), ("input", message.raw_value("input"))):
        if value is None:
            raise message.missing_member(name)
    error = {
        "code": "steering_not_supported",
        "message": "Responses of this server cannot be steered. Send the input once the response has ended.",
        "type": "invalid_request_error",
    }
    steer = {"input": message.raw_value("input"), "previous_response_id": previous}
    return encode_json({"type": "response.steer.failed", "error": error, "sequence_number": 0, "steer": steer})


def _error_event(status: int, error: Mapping[str, Any], stream_id: str) -> bytes:
    members = {name: error[name] for name in ("type", "code", "message", "param") if name in error}
    return _with_stream_id(encode_json({"type": "error", "status": status, "error": members}), stream_id)


def _with_stream_id(event: bytes, stream_id: str) -> bytes:
    return b'%b,"stream_id":%b}' % (event[:-1], encode_json(stream_id)) if stream_id else event


def _decoded_text(value: msgspec.Raw | None) -> str | None:
    """Return the text that a JSON value is, None if it is something else."""
    try:
        return None if value is None else msgspec.json.decode(value, type=str)
    except msgspec.MsgspecError:
        return None


def _input_items(value: msgspec.Raw | None) -> bytes | None:
    """Return the items of ``input`` as a JSON array; None if it has another type, which the server will refuse."""
    data = NO_ITEMS if value is None else bytes(value)
    match data[:1]:
        case b"[":
            return data
        case b'"':
            return b"[%b]" % encode_json({"type": "message", "role": "user", "content": msgspec.Raw(data)})
        case _:
            return NO_ITEMS if data == b"null" else None


def _with_referred_items(data: bytes, known_items: Mapping[str, msgspec.Raw]) -> bytes:
    """Return the items of a JSON array, with those that are known in place of the references to them."""
    try:
        items = _items_decoder.decode(data)
    except msgspec.MsgspecError:  # the server refuses them
        return data
    return encode_json([_referred_item(item, known_items) for item in items])


def _referred_item(item: msgspec.Raw, known_items: Mapping[str, msgspec.Raw]) -> msgspec.Raw:
    name = _decoded_name(item)
    return known_items.get(referred_name(name.type, name.id, name.role) or "", item)


def _without_triggers(data: bytes) -> bytes:
    """Return the items of a JSON array without triggers, which asked for the output of their own response only."""
    items = _items_decoder.decode(data)
    kept = [item for item in items if _decoded_name(item).type != TRIGGER]
    return data if len(kept) == len(items) else encode_json(kept)


def _decoded_name(item: msgspec.Raw) -> _ItemName:
    """Return the members by which an item can be referred to; no values if it is no object."""
    try:
        return msgspec.json.decode(item, type=_ItemName)
    except msgspec.MsgspecError:
        return _ItemName()


def _joined_items(first: bytes, second: bytes) -> bytes:
    """Return the items of two JSON arrays as one array."""
    inner = [items[1:-1] for items in (first, second)]
    return b"[%b]" % b",".join(items for items in inner if items.strip())
