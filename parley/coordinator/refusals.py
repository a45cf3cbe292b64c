"""What the coordinator itself says when something is wrong: MindIE's documented texts, and in which form they go out.

Clients of MindIE's paths, and all clients of a strict coordinator, get the text as it is documented; others get it in
the shape of their API's errors.
"""

from __future__ import annotations

from parley.dialects.dialect import Answer, Dialect
from parley.errors import BadRequest, EngineError, NotReady, Overloaded, ParleyError, TimedOut

NOT_READY = "MindIE-MS Coordinator is not ready"
TOO_MANY = "Too many requests"
MEMORY = "Memory limit exceeded"
TWICE = "Duplicate request id"
UNKNOWN = "Invalid request"
NO_CONNECTION = "Connect to p instance failed"
UNSENT = "Send message to instance failed"
UNASKED = "Send messges to p instance failed"  # misspelled in the documentation
UNREAD = "Receive messages from p instance failed"
P_FAILED = "P instance error"
D_FAILED = "D instance error"
NO_RETRY = "Request retry failed"
LATE = "Request schedule timeout"
NOBODY = "Scheduler proc req failed"
LATE_FIRST = "Request first token timeout"
LATE_END = "Request inference timeout"
LATE_TOKENS = "Request tokenizer timeout"
OVERUSED = "Connection request out of limit, max is {}"

TEXT = b"text/plain; charset=utf-8"
NO_MEMORY = b'{"error":"Memory limit exceeded","code":429}'  # of APIs that have no body of their own for it

KINDS: dict[int, type[ParleyError]] = {
    400: BadRequest,
    408: TimedOut,
    429: Overloaded,
    503: NotReady,
}


def refusal(status: int, text: str, after: float | None = None) -> ParleyError:
    """Create an error of the coordinator. ``retry_after``: seconds until the client may retry."""
    error = KINDS.get(status, EngineError)(text)
    if after is not None:
        error.retry_after = after
    error.documented = True
    return error


def documented(error: ParleyError, dialect: Dialect, strict: bool) -> Answer | None:
    """The error as it is documented, if it is one of the coordinator and to be told like that."""
    if not error.documented or not (strict or dialect.documented_errors):
        return None
    if error.message == MEMORY:
        return Answer(429, dialect.no_memory or NO_MEMORY)
    return Answer(error.status, plain(error.message), TEXT)


def plain(text: str) -> bytes:
    """Encode a documented text as a plain-text body."""
    return text.encode() + b"\r\n"
