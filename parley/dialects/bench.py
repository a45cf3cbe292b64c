"""How the load generator requests a token stream from an API and reads its events.

Each dialect declares its own ``BenchApi`` entries in its ``bench`` module. A prompt is a list of token ids where the
API accepts them, otherwise a text that tokenizes to as many tokens. Every API is asked for greedy tokens up to the
length limit and, where it supports that, to ignore the end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

NO_MESSAGE = "an error event without a message"


@dataclass(frozen=True)
class LoadShape:
    """The settings that all requests of a load share: lengths in tokens, ``timeout`` in seconds for a whole request."""

    model: str
    output_tokens: int
    timeout: float


@dataclass
class EventSummary:
    """The contents of one event: whether it has output, token counts if stated, whether it is the last, the error."""

    output: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    last: bool = False
    error: str = ""


TimedBytes = tuple[float, bytes]  # arrival time, data


def sse_events(pieces: Sequence[TimedBytes]) -> Iterator[TimedBytes]:
    """Yield the data of each event of a stream, with the time when its line was complete."""
    incomplete_line = b""
    for when, piece in pieces:
        *lines, incomplete_line = (incomplete_line + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip()


@dataclass(frozen=True)
class BenchApi:
    """How to call one API and read its stream. ``path`` is the dialect's own and may contain ``{model}``.

    ``split_events`` finds the events in the bytes of an answer. ``read_event`` reads the data of one event; it raises
    ValueError, TypeError or AttributeError if the data is not an event. ``messages_member``: the member
    of the body that has the turns of a conversation, each with ``role`` and ``content``, or "" if there is none.
    """

    path: str
    build_body: Callable[[LoadShape, Any], dict[str, Any]]
    read_event: Callable[[bytes], EventSummary]
    takes_token_ids: bool = True
    messages_member: str = ""
    split_events: Callable[[Sequence[TimedBytes]], Iterator[TimedBytes]] = sse_events

    @property
    def is_chat(self) -> bool:
        """Whether a prompt is sent as the only turn of a conversation."""
        return bool(self.messages_member)


def error_message(body: Any) -> str:
    """Return the message of an error body of the OpenAI form (or of a health probe), or "" if there is none."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
