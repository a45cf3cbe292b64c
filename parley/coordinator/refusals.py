"""The errors of the coordinator itself, and the form in which a client gets them.

Their texts are those that the API of the instance plane documents (``dialects/mounts.py``). Clients of that API, and
all clients of a strict coordinator, get the text as it is documented; others get it in the shape of their API's errors.
"""

from __future__ import annotations

from parley.dialects.dialect import Answer, Dialect
from parley.dialects.mounts import COORDINATOR_TEXTS
from parley.errors import BadRequest, EngineError, NotReady, Overloaded, ParleyError, TimedOut

TEXTS = COORDINATOR_TEXTS
PLAIN_TEXT_TYPE = b"text/plain; charset=utf-8"
NO_MEMORY = b'{"error":"Memory limit exceeded","code":429}'  # of APIs that have no body of their own for it

ERROR_CLASSES: dict[int, type[ParleyError]] = {
    400: BadRequest,
    408: TimedOut,
    429: Overloaded,
    503: NotReady,
}


def coordinator_error(status: int, text: str, retry_after: float | None = None) -> ParleyError:
    """Create an error of the coordinator. ``retry_after``: seconds until the client may retry."""
    error = ERROR_CLASSES.get(status, EngineError)(text)
    if retry_after is not None:
        error.retry_after = retry_after
    error.documented = True
    return error


def documented_answer(error: ParleyError, dialect: Dialect, strict: bool) -> Answer | None:
    """Return a documented error of the coordinator in the documented form; None if the API words it itself."""
    if not error.documented or not (strict or dialect.documented_errors):
        return None
    if error.message == TEXTS.memory_exceeded:
        return Answer(429, dialect.no_memory_body or NO_MEMORY)
    return Answer(error.status, plain_body(error.message), PLAIN_TEXT_TYPE)


def plain_body(text: str) -> bytes:
    """Encode a documented text as a plain-text body."""
    return text.encode() + b"\r\n"
