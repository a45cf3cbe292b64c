"""How ``parley bench`` requests a token stream from Ollama's API and reads its lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from parley.dialects.bench import NO_MESSAGE, BenchApi, EventSummary, LoadShape, TimedBytes, error_message


def ollama_bench_body(shape: LoadShape, content: Any) -> dict[str, Any]:
    """Return the body for a conversation of one user turn. The API has no option to ignore the end of a text."""
    options = {"num_predict": shape.output_tokens, "temperature": 0}
    return {"model": shape.model, "messages": [{"role": "user", "content": content}], "options": options}


def split_lines(pieces: Sequence[TimedBytes]) -> Iterator[TimedBytes]:
    """Yield each line of a stream, with the time when it was complete."""
    incomplete_line = b""
    for when, piece in pieces:
        *lines, incomplete_line = (incomplete_line + piece).split(b"\n")
        yield from ((when, line) for line in lines)


def read_line(data: bytes) -> EventSummary:
    """Read one line. Raises ValueError, TypeError or AttributeError if the data is not one."""
    line = json.loads(data)
    if "error" in line:
        return EventSummary(error=error_message(line) or NO_MESSAGE)
    message = line.get("message") or {}
    return EventSummary(
        bool(message.get("content") or message.get("thinking")),
        line.get("prompt_eval_count") or 0,
        line.get("eval_count") or 0,
        last=line["done"],
    )


BENCH_APIS = {
    "ollama": BenchApi(
        "/api/chat",
        ollama_bench_body,
        read_line,
        takes_token_ids=False,
        messages_member="messages",
        split_events=split_lines,
    )
}
