"""How an API is asked for a stream of tokens, and what its events say: what the load generator knows of an API.

Each dialect declares its own in its ``bench``. A prompt is token ids where an API takes them, else a text that becomes
as many tokens. Every API is asked for greedy tokens up to the length and, where it can be asked, not to end before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    """How one API is asked and read. ``path`` is the dialect's own, and may name ``{model}``.

    ``events`` finds events in the bytes of an answer. ``see`` reads the data of one; ValueError, TypeError or
    AttributeError: it is none. ``talks``: a prompt is a conversation's only turn.
    """

    path: str
    body: Callable[[Shape, Any], dict[str, Any]]
    see: Callable[[bytes], Seen]
    ids: bool = True
    talks: bool = False
    events: Callable[[Sequence[Stamped]], Iterator[Stamped]] = events


def reason(body: Any) -> str:
    """The sentence in an error body of the OpenAI shape (or in that of a probe), empty when there is none."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
