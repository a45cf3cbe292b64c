"""Headers of OpenAI's answers: the time that a request took, and the limits of a key."""

from __future__ import annotations

import math

from parley.types import KeyLimitStates


def openai_headers(seconds: float) -> list[tuple[bytes, bytes]]:
    """Return the headers of every answer, given the seconds that the request has taken so far."""
    return [(b"openai-processing-ms", b"%d" % (seconds * 1000)), (b"openai-version", b"2020-10-01")]


REQUEST_LIMIT_HEADERS, TOKEN_LIMIT_HEADERS = (
    tuple(f"x-ratelimit-{figure}-{kind}".encode() for figure in ("limit", "remaining", "reset"))
    for kind in ("requests", "tokens")
)


def openai_limit_headers(states: KeyLimitStates, now: float) -> list[tuple[bytes, bytes]]:
    """Return OpenAI's headers about the limits of a key. Times are written as ``6m0s`` or ``250ms``."""
    headers: list[tuple[bytes, bytes]] = []
    for names, state in ((REQUEST_LIMIT_HEADERS, states.requests), (TOKEN_LIMIT_HEADERS, states.tokens)):
        if state is not None:
            limit, remaining, reset = names
            headers += (
                (limit, b"%d" % state.limit),
                (remaining, b"%d" % state.remaining),
                (reset, _duration_text(state.reset_seconds).encode()),
            )
    return headers


def _duration_text(seconds: float) -> str:
    """Return a duration as Go writes it, rounded up: 0s, 250ms, 1.5s, 6m0s, 23h59m59s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds <= 0:
        return "0s"
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest_milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours}h' if hours else ''}{f'{minutes}m' if hours or minutes else ''}{rest_milliseconds / 1000:g}s"
