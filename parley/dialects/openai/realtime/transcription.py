"""The text of committed audio: a request of the route for transcripts, answered by events about the audio's item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parley.dialects.openai.realtime.audio import CommittedAudio, wave_file, write_clip_form
from parley.dialects.openai.realtime.events import fault_members, write_event
from parley.dialects.openai.realtime.session_settings import SessionSettings, TranscriptionSettings
from parley.dialects.openai.realtime.transcript_stream import TranscriptPart, TranscriptStream
from parley.dialects.socket_session import SocketAnswer, SocketRequest

TRANSCRIPTION_LANE = "transcription"
EVENT_PREFIX = "conversation.item.input_audio_transcription"


@dataclass(frozen=True, slots=True)
class TranscriptionRequest(SocketRequest):
    """Committed audio that becomes text. ``settings``: those of the session at that time."""

    item_id: str
    audio: CommittedAudio
    settings: SessionSettings
    transcription: TranscriptionSettings
    acknowledgement: tuple[bytes, ...]


class TranscriptionAnswer(SocketAnswer):
    """The answer to a request. ``note_transcript``: takes the item's id and its text. Raises Overloaded if some of the
    audio was dropped."""

    sibling = "audio/transcriptions"

    def __init__(self, request: TranscriptionRequest, note_transcript: Callable[[str, str], None]):
        self._request, self._note_transcript = request, note_transcript
        settings, transcription = request.settings, request.transcription
        members = {
            "model": transcription.model or settings.model,
            "language": transcription.language,
            "prompt": transcription.prompt,
            "stream": "true",
            "include[]": "logprobs" if settings.wants_logprobs else "",
        }
        clip = wave_file(request.audio.read_samples(), request.audio.rate)
        self.body, content_type = write_clip_form(clip, members)
        self.headers = ((b"content-type", content_type),)
        self._stream = TranscriptStream()

    def read_part(self, status: int, data: bytes, *, last: bool) -> list[bytes]:
        """Return the events that the next part of the answer makes."""
        return [self._write_part(part) for part in self._stream.read_parts(status, data, last=last)]

    def _write_part(self, part: TranscriptPart) -> bytes:
        position: dict[str, Any] = {"item_id": self._request.item_id, "content_index": 0}
        if part.error is not None:
            return write_failure(self._request.item_id, part.error)
        if not part.done:
            logprobs = {} if part.logprobs is None else {"logprobs": part.logprobs}
            return write_event(f"{EVENT_PREFIX}.delta", **position, delta=part.delta, **logprobs)
        text = self._stream.text
        self._note_transcript(self._request.item_id, text)
        logprobs = {"logprobs": self._stream.logprobs} if self._request.settings.wants_logprobs else {}
        return write_event(f"{EVENT_PREFIX}.completed", **position, transcript=text, usage=part.usage, **logprobs)


def write_failure(item_id: str, error: Mapping[str, Any]) -> bytes:
    """Return the event of audio that has no transcript."""
    return write_event(f"{EVENT_PREFIX}.failed", item_id=item_id, content_index=0, error=fault_members(error))
