"""The APIs that the load generator speaks: how to request a stream of tokens, and how to read its events.

A prompt is token ids if the API takes them, else a text of as many tokens. Every request asks for greedy sampling up to
the output length and, where the API allows it, for ignoring the end-of-sequence token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from parley.commands.client import reason

SILENT = "an error event without a message"


@dataclass(frozen=True)
class Shape:
    """Parameters shared by all requests of a load: output length in tokens; ``timeout`` in seconds to the last byte."""

    model: str
    output: int
    timeout: float


@dataclass
class Seen:
    """The content of one event. Token counts are 0 if the event has none; ``error`` is the reason of a failure."""

    output: bool = False
    prompt: int = 0
    tokens: int = 0
    cached: int = 0
    last: bool = False
    error: str = ""


Stamped = tuple[float, bytes]  # arrival time in seconds, data


def events(pieces: Sequence[Stamped]) -> Iterator[Stamped]:
    """Yield the data of each server-sent event, with the arrival time of its complete line."""
    rest = b""
    for when, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip()


@dataclass(frozen=True)
class Api:
    """How to call one API and read its stream. ``path`` may contain ``{model}``.

    ``split_events`` finds the events in the bytes of a response. ``read_event`` parses the data of one; it raises
    ValueError, TypeError or AttributeError for anything else. ``takes_ids``: prompts are token ids. ``is_chat``: a
    prompt is the only turn of a conversation.
    """

    path: str
    body: Callable[[Shape, Any], dict[str, Any]]
    see: Callable[[bytes], Seen]
    ids: bool = True
    talks: bool = False
    events: Callable[[Sequence[Stamped]], Iterator[Stamped]] = events


def _openai(shape: Shape) -> dict[str, Any]:
    return {
        "model": shape.model,
        "max_tokens": shape.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _see_openai(data: bytes) -> Seen:
    if data == b"[DONE]":
        return Seen(last=True)
    event = json.loads(data)
    if "error" in event:
        return Seen(error=reason(event) or SILENT)
    choices = event.get("choices") or []
    said = any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices)
    usage = event.get("usage") or {}
    return Seen(
        said,
        usage.get("prompt_tokens") or 0,
        usage.get("completion_tokens") or 0,
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def _tgi(shape: Shape, text: str) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": shape.output, "details": True}}


def _see_tgi(data: bytes) -> Seen:
    event = json.loads(data)
    if "error" in event:
        return Seen(error=reason(event) or SILENT)
    details = event.get("details") or {}
    last = event["generated_text"] is not None if "generated_text" in event else False
    read = details.get("input_length") or details.get("prompt_tokens") or 0  # the latter is MindIE's name
    return Seen(True, read, details.get("generated_tokens") or 0, last=last)


def _triton(shape: Shape, text: str) -> dict[str, Any]:
    return {
        "text_input": text,
        "stream": True,
        "max_tokens": shape.output,
        "temperature": 0,
        "ignore_eos": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_finish_reason": True,
    }


def _see_triton(data: bytes) -> Seen:
    """Read an event of Triton's stream. Each repeats its count of output tokens."""
    event = json.loads(data)
    if "error" in event:
        return Seen(error=reason(event) or SILENT)
    tokens = int(event.get("num_output_tokens") or 0)
    ended = event.get("finish_reason") not in (None, "", "None", "null")
    return Seen(tokens > 0, int(event.get("num_input_tokens") or 0), tokens, last=ended)


APIS = {
    "openai": Api("/v1/completions", lambda shape, ids: _openai(shape) | {"prompt": ids}, _see_openai),
    "chat": Api(
        "/v1/chat/completions",
        lambda shape, text: _openai(shape) | {"messages": [{"role": "user", "content": text}]},
        _see_openai,
        ids=False,
        talks=True,
    ),
    "vllm": Api("/vllm/v1/completions", lambda shape, ids: _openai(shape) | {"prompt": ids}, _see_openai),
    "tgi": Api("/generate_stream", _tgi, _see_tgi, ids=False),
    "mindie": Api("/mindie/generate_stream", _tgi, _see_tgi, ids=False),
    "triton": Api("/v2/models/{model}/generate_stream", _triton, _see_triton, ids=False),
}
