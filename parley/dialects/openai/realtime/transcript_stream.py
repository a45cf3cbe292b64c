"""Reads the streamed answer to a request for a transcript, in OpenAI's or vLLM's form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from parley.dialects.openai.realtime.events import EARLY_END, read_fault
from parley.dialects.sse import DATA_START, STREAM_END, split_events


@dataclass(frozen=True, slots=True)
class TranscriptPart:
    """A part of a transcript. ``done``: the last one, with the ``usage``; ``error``: ended the transcript instead."""

    delta: str = ""
    logprobs: list[Any] | None = None
    done: bool = False
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class TranscriptStream:
    """The answer to one request. ``text``: all of it so far."""

    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    _data: bytes = b""
    _usage: dict[str, Any] | None = None
    _has_ended: bool = False

    def read_parts(self, status: int, data: bytes, *, last: bool) -> Iterator[TranscriptPart]:
        """Return the parts that the next data complete. Exactly one part ends the transcript."""
        self._data += data
        if status != 200:
            if last:
                yield self._end_transcript(TranscriptPart(error=read_fault(self._data)))
            return
        events, self._data = split_events(self._data)
        for event in events:
            if event.startswith(DATA_START) and not self._has_ended:
                yield from self._read_event(event.removeprefix(DATA_START))
        if last and not self._has_ended:
            yield self._end_transcript(TranscriptPart(error=EARLY_END))

    def _read_event(self, data: bytes) -> Iterator[TranscriptPart]:
        if data == STREAM_END:
            yield self._end_transcript(TranscriptPart(done=True, usage=self._usage))
            return
        event = msgspec.json.decode(data)
        if (error := event.get("error")) is not None:
            yield self._end_transcript(TranscriptPart(error=error))
        elif event.get("type") == "transcript.text.done":
            yield self._end_transcript(TranscriptPart(done=True, usage=event["usage"]))
        elif "type" in event:
            yield self._add_text(event["delta"], event.get("logprobs"))
        else:  # vLLM's
            self._usage = event.get("usage") or self._usage
            for choice in event["choices"]:
                if choice["delta"]["content"]:
                    yield self._add_text(choice["delta"]["content"], None)

    def _add_text(self, delta: str, logprobs: list[Any] | None) -> TranscriptPart:
        self.text += delta
        self.logprobs += logprobs or []
        return TranscriptPart(delta, logprobs)

    def _end_transcript(self, part: TranscriptPart) -> TranscriptPart:
        self._has_ended = True
        return part
