"""The formats of a transcript: JSON with usage, JSON with times, plain text, and the subtitles SubRip and WebVTT.

A model that gives no times has one segment, and one subtitle, from the start of the clip to its end.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from parley.dialects.json_answer import encode_json
from parley.dialects.openai.token_objects import finite_logprob
from parley.types import TokenInfo, Usage

SpeechTask = Literal["transcribe", "translate"]
PLAIN_TEXT = b"text/plain; charset=utf-8"


@dataclass(frozen=True)
class Transcript:
    """The text of a clip. ``language``: the name or code to show; "" if it is unknown. ``tokens``: those of the text.

    ``seconds``: the length of the clip. ``hears_nobody``: the model reports that no speech is heard.
    """

    task: SpeechTask
    text: str
    language: str
    seconds: float
    tokens: list[TokenInfo]
    temperature: float
    hears_nobody: bool = False


def token_usage(usage: Usage) -> dict[str, Any]:
    """Return the usage in tokens."""
    audio_tokens = usage.media_tokens.get("audio", 0)
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "input_token_details": {"text_tokens": usage.prompt_tokens - audio_tokens, "audio_tokens": audio_tokens},
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def duration_usage(seconds: float) -> dict[str, Any]:
    """Return the usage as the length of the clip in whole seconds, rounded up."""
    return {"type": "duration", "seconds": math.ceil(seconds)}


def transcript_logprobs(tokens: list[TokenInfo]) -> list[dict[str, Any]]:
    """Return the log-probabilities of a transcript's tokens."""
    return [
        {"token": token.text, "logprob": finite_logprob(token.logprob), "bytes": list(token.raw_bytes)}
        for token in tokens
    ]


def write_verbose_json(transcript: Transcript) -> bytes:
    """Return the transcript with its language and times."""
    segments = [_whole_segment(transcript)] if transcript.text else []
    return encode_json(
        {
            "task": transcript.task,
            "language": transcript.language,
            "duration": round(transcript.seconds, 3),
            "text": transcript.text,
            "segments": segments,
            "usage": duration_usage(transcript.seconds),
        }
    )


def _whole_segment(transcript: Transcript) -> dict[str, Any]:
    logprobs = [finite_logprob(token.logprob) for token in transcript.tokens]
    data = transcript.text.encode()
    return {
        "id": 0,
        "seek": 0,
        "start": 0.0,
        "end": round(transcript.seconds, 3),
        "text": transcript.text,
        "tokens": [token.id for token in transcript.tokens],
        "temperature": transcript.temperature,
        "avg_logprob": sum(logprobs) / max(1, len(logprobs)),
        "compression_ratio": len(data) / len(zlib.compress(data)),  # as Whisper defines it
        "no_speech_prob": float(transcript.hears_nobody),
    }


def write_text(transcript: Transcript) -> bytes:
    """Return the text and a line break."""
    return transcript.text.encode() + b"\n"


def write_srt(transcript: Transcript) -> bytes:
    """Return the transcript as subtitles in SubRip's format; nothing if it is empty."""
    if not transcript.text:
        return b""
    end = _clock_time(transcript.seconds, ",")
    return f"1\n00:00:00,000 --> {end}\n{_cue_text(transcript.text)}\n\n".encode()


def write_vtt(transcript: Transcript) -> bytes:
    """Return the transcript as subtitles in WebVTT's format."""
    if not transcript.text:
        return b"WEBVTT\n\n"
    text = escape(_cue_text(transcript.text), quote=False)
    return f"WEBVTT\n\n00:00:00.000 --> {_clock_time(transcript.seconds, '.')}\n{text}\n\n".encode()


def _cue_text(text: str) -> str:
    """Return a text without empty lines, which end a subtitle, and without the arrow between its times."""
    lines = (line.strip() for line in text.replace("-->", "->").splitlines())
    return "\n".join(filter(None, lines))


def _clock_time(seconds: float, point: str) -> str:
    """Return a time as hours, minutes, seconds and milliseconds."""
    whole_seconds, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, whole_seconds = divmod(whole_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{whole_seconds:02}{point}{milliseconds:03}"
