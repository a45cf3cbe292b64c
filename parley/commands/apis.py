"""How each API is asked for a stream of tokens, and what its events say: what the load generator knows of APIs.

A prompt is token ids where an API takes them, else a text that becomes as many tokens. Every API is asked for greedy
tokens up to the length and, where it can be asked, not to end before.
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
    """What every request of a load has: lengths in tokens; ``timeout`` in seconds from sending to the last byte."""

    model: str
    output: int
    timeout: float


@dataclass
class Seen:
    """What one event said: whether it carried output, tokens as far as it told, the end, the reason of a failure."""

    output: bool = False
    prompt: int = 0
    tokens: int = 0
    cached: int = 0
    last: bool = False
    error: str = ""


Stamped = tuple[float, bytes]  # with the time at which it came


def events(pieces: Sequence[Stamped]) -> Iterator[Stamped]:
    """The data of each event of a stream, with the time at which its line was complete."""
    rest = b""
    for when, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip()


@dataclass(frozen=True)
class Api:
    """How one API is asked and read. ``path`` may name ``{model}``.

    ``events`` finds events in the bytes of an answer. ``see`` reads the data of one; ValueError, TypeError or
    AttributeError: it is none. ``talks``: a prompt is a conversation's only turn.
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
    read = details.get("input_length") or details.get("prompt_tokens") or 0  # as MindIE calls it
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
    """Output tokens are told anew with each event."""
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
