"""The messages of a WebSocket of the Realtime API.

Audio is appended to a buffer and committed. A transcript of it is made by the same server's route for transcripts, and
a response by its Responses API, so that models, keys, limits and logs are those of such requests. Answers are text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.openai.common_members import unsupported_member_error
from parley.dialects.openai.error_answers import openai_error_object
from parley.dialects.openai.labels import MAX_LABEL
from parley.dialects.openai.metadata import read_metadata
from parley.dialects.openai.realtime.audio import MAX_AUDIO_TEXT, AudioBuffer, CommittedAudio
from parley.dialects.openai.realtime.conversation import (
    ItemWithAudio,
    RealtimeConversation,
    input_item,
    read_realtime_item,
)
from parley.dialects.openai.realtime.events import new_id, write_event, write_realtime_error
from parley.dialects.openai.realtime.response import RESPONSE_LANE, RealtimeAnswer, ResponseRequest
from parley.dialects.openai.realtime.session_settings import (
    NO_LIMIT,
    SessionKind,
    SessionSettings,
    check_modalities,
    read_response_members,
)
from parley.dialects.openai.realtime.transcription import (
    TRANSCRIPTION_LANE,
    TranscriptionAnswer,
    TranscriptionRequest,
    write_failure,
)
from parley.dialects.socket_session import (
    LaneEnd,
    SocketAnswer,
    SocketOpening,
    SocketRequest,
    SocketSession,
)
from parley.errors import BadRequest, InvalidValue, ParleyError, excerpt

MIN_AUDIO_SECONDS = 0.1  # of audio that is committed
MAX_INPUT_ITEMS = 1024
EventAnswer = SocketRequest | LaneEnd | list[bytes]


class RealtimeSession(SocketSession):
    """The messages of one connection. Its query names the model, or says that it only transcribes."""

    max_lanes, max_waiting, max_seconds = 2, 16, 3600.0
    max_idle = 600.0
    max_per_client = 64
    subprotocol = b"realtime"

    def __init__(self, opening: SocketOpening):
        kind: SessionKind = "transcription" if opening.query.get("intent") == "transcription" else "realtime"
        self._settings = SessionSettings(kind, opening.query.get("model", "")[:MAX_LABEL])
        self._id, self._expires_at = new_id("sess"), int(time.time() + self.max_seconds)
        self._buffer = AudioBuffer(opening.records)
        self._conversation = RealtimeConversation(opening.records)
        self._last_audio_id: str | None = None
        self._active: ResponseRequest | None = None
        self._answer: RealtimeAnswer | None = None  # of the active response, once it has begun
        self._readers: Mapping[str, Callable[[Fields], EventAnswer]] = {
            "session.update": self._update_session,
            "input_audio_buffer.append": self._append_audio,
            "input_audio_buffer.commit": self._commit_audio,
            "input_audio_buffer.clear": self._clear_audio,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.delete": self._delete_item,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
        }

    # -- as the connection calls it

    def opening_messages(self) -> list[bytes]:
        """Return the event that begins the session."""
        return [write_event("session.created", session=self._settings.show_session(self._id, self._expires_at))]

    def read_message(self, data: bytes) -> EventAnswer:
        """Return the request in an event, or the events that answer it or refuse it."""
        event_id = None
        try:
            event = decode_fields(data)
            event_id = event.string("event_id", None, cap=MAX_LABEL)
            kind = event.string("type", None, cap=MAX_LABEL)
            if kind is None:
                raise event.missing_member("type")
            if kind not in self._readers:
                names = ", ".join(f"'{name}'" for name in self._readers)
                raise InvalidValue(f"Invalid value: {excerpt(kind)}. Supported values are: {names}.", field="type")
            return self._readers[kind](event)
        except ParleyError as error:
            return [write_realtime_error(error, event_id)]

    def acknowledge(self, request: SocketRequest) -> list[bytes]:
        """Return the events about committed audio, which is an item even if it gets no transcript."""
        return list(request.acknowledgement) if isinstance(request, TranscriptionRequest) else []

    def count_earlier_bytes(self, request: SocketRequest) -> int:
        """Return the bytes of audio, or of the conversation, that ``start_request`` has to read."""
        return request.audio.size if isinstance(request, TranscriptionRequest) else self._conversation.size

    def start_request(self, request: SocketRequest) -> SocketAnswer:
        """Return the answer to a request, which has no parts yet. Raises Overloaded if its input was dropped."""
        if isinstance(request, TranscriptionRequest):
            try:
                return TranscriptionAnswer(request, self._conversation.note_transcript)
            finally:
                self._discard_audio(request)
        assert isinstance(request, ResponseRequest)
        rate = self._settings.rate
        items = self._conversation.list_items() if request.items is None else request.items
        input_items = [input_item(item, rate, audio) for item, audio in items]
        answer = RealtimeAnswer(request, input_items, self._conversation.add_output, self._end_response)
        if request.items is not None:
            request.items.clear()  # they may be large, and the answer has them now
        if self._active is request:  # else it was cancelled
            self._answer = answer
        return answer

    def refuse_request(self, request: SocketRequest, error: ParleyError) -> bytes:
        """Return the event that refuses a request."""
        if isinstance(request, TranscriptionRequest):
            self._discard_audio(request)
            return write_failure(request.item_id, openai_error_object(error)["error"])
        assert isinstance(request, ResponseRequest)
        self._end_response()
        return write_realtime_error(error, request.event_id)

    def refuse_lane(self, request: SocketRequest) -> bytes:
        """Return the event that refuses a request because all lanes are in use. Each kind of request has one lane
        here."""
        raise AssertionError("there is a lane for each kind of request")

    def render_expiry(self, lane: str) -> bytes:
        """Return the event that ends a connection after ``max_seconds``, or refuses a request of a lane then."""
        minutes = round(self.max_seconds / 60)
        error = BadRequest(f"Your session hit the maximum duration of {minutes} minutes.", code="session_expired")
        return write_realtime_error(error, None)

    # -- settings and audio

    def _update_session(self, event: Fields) -> EventAnswer:
        session = event.object("session")
        if session is None:
            raise event.missing_member("session")
        self._settings = self._settings.apply_update(session)
        return [write_event("session.updated", session=self._settings.show_session(self._id, self._expires_at))]

    def _append_audio(self, event: Fields) -> EventAnswer:
        audio = event.string("audio", None, cap=MAX_AUDIO_TEXT)
        if audio is None:
            raise event.missing_member("audio")
        self._buffer.append_audio(audio)
        return []

    def _clear_audio(self, event: Fields) -> EventAnswer:
        self._buffer.commit_audio(self._settings.rate).drop_audio()
        return [write_event("input_audio_buffer.cleared")]

    def _commit_audio(self, event: Fields) -> EventAnswer:
        settings = self._settings
        seconds = self._buffer.size / 2 / settings.rate
        if seconds < MIN_AUDIO_SECONDS:
            raise InvalidValue(
                "Error committing input audio buffer: buffer too small. Expected at least "
                f"{MIN_AUDIO_SECONDS * 1000:.0f}ms of audio, but buffer only has {seconds * 1000:.2f}ms of audio.",
                code="input_audio_buffer_commit_empty",
            )
        if settings.kind == "transcription" and settings.transcription is None:
            raise InvalidValue("Set 'session.audio.input.transcription' before audio is committed.",
                          field="session.audio.input.transcription")  # fmt: skip
        self._conversation.check_room()
        audio = self._buffer.commit_audio(settings.rate)
        item_id, events = self._add_audio_item(audio)
        if settings.transcription is None:
            return list(events)
        return TranscriptionRequest(TRANSCRIPTION_LANE, item_id, audio, settings, settings.transcription, tuple(events))

    def _add_audio_item(self, audio: CommittedAudio) -> tuple[str, list[bytes]]:
        """Add committed audio to the conversation. Return its item's id, and the events about it."""
        item_id = new_id("item")
        item = {
            "id": item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        previous_id = self._conversation.add_item(item, audio=audio) or self._last_audio_id
        self._last_audio_id = item_id
        committed = write_event("input_audio_buffer.committed", previous_item_id=previous_id, item_id=item_id)
        return item_id, [committed, *_item_events(item, previous_id)]

    def _discard_audio(self, request: TranscriptionRequest) -> None:
        """Forget audio that was read or refused, if nothing but its transcript was wanted."""
        if request.settings.kind == "transcription":
            self._conversation.discard_item(request.item_id)

    # -- the conversation

    def _create_item(self, event: Fields) -> EventAnswer:
        members = event.object("item")
        if members is None:
            raise event.missing_member("item")
        item = read_realtime_item(members)
        previous_id = self._conversation.add_item(item, event.string("previous_item_id", None, cap=MAX_LABEL))
        return _item_events(item, previous_id)

    def _retrieve_item(self, event: Fields) -> EventAnswer:
        return [write_event("conversation.item.retrieved", item=self._conversation.find_item(_read_item_id(event)))]

    def _delete_item(self, event: Fields) -> EventAnswer:
        item_id = _read_item_id(event)
        self._conversation.delete_item(item_id)
        return [write_event("conversation.item.deleted", item_id=item_id)]

    # -- responses

    def _create_response(self, event: Fields) -> EventAnswer:
        if self._active is not None:
            message = f"Conversation already has an active response in progress: {self._active.response_id}."
            raise InvalidValue(message, code="conversation_already_has_active_response")
        if self._settings.kind == "transcription":
            raise InvalidValue("A transcription session has no responses.", field="type")
        response_options = event.object("response") or Fields({}, "response")
        check_modalities(response_options)
        if response_options.has_value("prompt"):
            raise unsupported_member_error(response_options, "prompt", "Prompts that the service keeps are")
        members = self._settings.response_members | read_response_members(response_options)
        if members.get("max_output_tokens") == NO_LIMIT:
            del members["max_output_tokens"]
        items = None
        if response_options.has_value("input"):
            items = self._read_input(response_options)
        keeps_output = response_options.string("conversation", "auto", allowed=("auto", "none")) == "auto"
        if keeps_output:
            self._conversation.check_room()
        self._active = ResponseRequest(
            RESPONSE_LANE,
            new_id("resp"),
            event.string("event_id", None, cap=MAX_LABEL),
            {"model": self._settings.model} | members,
            items,
            keeps_output,
            read_metadata(response_options) or None,
        )
        return self._active

    def _read_input(self, response_options: Fields) -> list[ItemWithAudio]:
        """Return the items of a response's own input, and those of the conversation to which it refers. Each of these
        may be named once: a short message could otherwise repeat a large one a thousand times. Raises BadRequest."""
        items, known_ids = list[ItemWithAudio](), set[str]()
        for item in response_options.objects("input", cap=MAX_INPUT_ITEMS):
            if item.raw_value("type") != "item_reference":
                items.append((read_realtime_item(item), None))
                continue
            item_id = item.string("id", "", cap=MAX_LABEL)
            if item_id in known_ids:
                raise item.member_error("id", "refers to an item that an earlier one refers to.")
            known_ids.add(item_id)
            items.append(self._conversation.find_with_audio(item_id))
        return items

    def _cancel_response(self, event: Fields) -> EventAnswer:
        active, response_id = self._active, event.string("response_id", None, cap=MAX_LABEL)
        if active is None or response_id not in (None, active.response_id):
            raise InvalidValue("Cancellation failed: no active response found", code="response_cancel_not_active")
        answer = self._answer
        if answer is None or answer.request is not active:  # its request waits for the end of one that was cancelled
            answer = RealtimeAnswer(active, [], self._conversation.add_output, self._end_response)
        return LaneEnd(RESPONSE_LANE, [answer.cancelled_event()])

    def _end_response(self) -> None:
        self._active = self._answer = None


def _read_item_id(event: Fields) -> str:
    item_id = event.string("item_id", None, cap=MAX_LABEL)
    if item_id is None:
        raise event.missing_member("item_id")
    return item_id


def _item_events(item: dict[str, Any], previous_id: str | None) -> list[bytes]:
    """Return the events about a new item."""
    members = {"previous_item_id": previous_id, "item": item}
    return [write_event(f"conversation.item.{name}", **members) for name in ("added", "done")]
