"""``/v1/realtime`` as vLLM has it: a WebSocket that takes audio and sends its text.

The events are those of ``vllm/entrypoints/speech_to_text/realtime``. There the text comes while audio still arrives;
here it comes once the client has sent the last audio, because models here read a whole clip.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.realtime.audio import (
    MAX_AUDIO_TEXT,
    AudioBuffer,
    CommittedAudio,
    wave_file,
    write_clip_form,
)
from parley.dialects.openai.realtime.transcript_stream import TranscriptPart, TranscriptStream
from parley.dialects.socket_session import SocketAnswer, SocketOpening, SocketRequest, SocketSession
from parley.errors import ParleyError, TooLarge

SAMPLE_RATE = 16_000  # Hz
MAX_MODEL_NAME = 256
NOT_VALIDATED = "Model not validated. Make sure to validate the model by sending a session.update event."
ERROR_CODES = {"NotFoundError": "model_not_found"}  # others are processing_error


@dataclass(frozen=True, slots=True)
class UtteranceRequest(SocketRequest):
    """Audio that is complete, and the model that reads it."""

    audio: CommittedAudio
    model: str


class VllmRealtimeSession(SocketSession):
    """The messages of one connection."""

    max_lanes, max_waiting, max_seconds = 1, 16, 3600.0
    max_idle = 600.0
    max_per_client = 64

    def __init__(self, opening: SocketOpening):
        self._buffer = AudioBuffer(opening.records)
        self._model: str | None = None

    def opening_messages(self) -> list[bytes]:
        """Return the event that begins the session."""
        session_id = f"sess-{secrets.token_hex(16)}"
        return [encode_json({"type": "session.created", "id": session_id, "created": int(time.time())})]

    def read_message(self, data: bytes) -> SocketRequest | list[bytes]:
        """Return the request in an event, or the event that refuses it; most events have no answer."""
        try:
            event = decode_fields(data)
        except ParleyError:
            return [write_vllm_socket_error("Invalid JSON", "invalid_json")]
        try:
            return self._read_event(event)
        except ParleyError as error:
            return [write_vllm_socket_error(error.message, "processing_error")]

    def _read_event(self, event: Fields) -> SocketRequest | list[bytes]:
        kind = event.raw_value("type")
        match kind:
            case "session.update":
                if not event.has_value("model"):
                    return [write_vllm_socket_error("Missing required field: model", "invalid_event")]
                self._model = event.string("model", "", cap=MAX_MODEL_NAME)
            case "input_audio_buffer.append":
                return self._append_audio(event)
            case "input_audio_buffer.commit":
                if self._model is None:
                    return [write_vllm_socket_error(NOT_VALIDATED, "model_not_validated")]
                if event.boolean("final", False):
                    return UtteranceRequest("", self._buffer.commit_audio(SAMPLE_RATE), self._model)
            case _:
                return [write_vllm_socket_error(f"Unknown event type: {str(kind)[:60]}", "unknown_event")]
        return []

    def _append_audio(self, event: Fields) -> list[bytes]:
        try:
            self._buffer.append_audio(event.string("audio", "", cap=MAX_AUDIO_TEXT))
        except ParleyError as error:
            message = error.message if isinstance(error, TooLarge) else "Invalid audio data"
            return [write_vllm_socket_error(message, "invalid_audio")]
        return []

    def count_earlier_bytes(self, request: SocketRequest) -> int:
        """Return the bytes of audio that ``start_request`` has to read."""
        assert isinstance(request, UtteranceRequest)
        return request.audio.size

    def start_request(self, request: SocketRequest) -> SocketAnswer:
        """Return the answer to a request, which has no parts yet. Raises Overloaded if its audio was dropped."""
        assert isinstance(request, UtteranceRequest)
        try:
            return UtteranceAnswer(request)
        finally:
            request.audio.drop_audio()

    def refuse_request(self, request: SocketRequest, error: ParleyError) -> bytes:
        """Return the event that refuses a request, whose audio is dropped."""
        assert isinstance(request, UtteranceRequest)
        request.audio.drop_audio()
        return write_vllm_socket_error(error.message, "processing_error")

    def refuse_lane(self, request: SocketRequest) -> bytes:
        """Return the event that refuses a request because the only lane is in use."""
        raise AssertionError("there is only one lane")

    def render_expiry(self, lane: str) -> bytes:
        """Return the event that ends a connection after ``max_seconds``, or refuses a request then."""
        return write_vllm_socket_error(f"The session has lasted for {round(self.max_seconds / 60)} minutes, its limit.",
                           "session_expired")  # fmt: skip


class UtteranceAnswer(SocketAnswer):
    """The answer to one request: pieces of the text, then the whole text with the usage."""

    sibling = "audio/transcriptions"

    def __init__(self, request: UtteranceRequest):
        members = {"model": request.model, "stream": "true", "stream_include_usage": "true"}
        self.body, content_type = write_clip_form(wave_file(request.audio.read_samples(), request.audio.rate), members)
        self.headers = ((b"content-type", content_type),)
        self._stream = TranscriptStream()

    def read_part(self, status: int, data: bytes, *, last: bool) -> list[bytes]:
        """Return the events that the next part of the answer makes."""
        return [self._write_part(part) for part in self._stream.read_parts(status, data, last=last)]

    def _write_part(self, part: TranscriptPart) -> bytes:
        if part.error is not None:
            return write_vllm_socket_error(
                part.error["message"], ERROR_CODES.get(part.error.get("type", ""), "processing_error")
            )
        if not part.done:
            return encode_json({"type": "transcription.delta", "delta": part.delta})
        done: dict[str, Any] = {"type": "transcription.done", "text": self._stream.text, "usage": part.usage}
        return encode_json(done)


def write_vllm_socket_error(message: str, code: str) -> bytes:
    """Return the event of an error."""
    return encode_json({"type": "error", "error": message, "code": code})
