"""What the coordinator itself says when something is wrong: MindIE's documented texts, and in which form they go out.

Clients of MindIE's paths, and all clients of a strict coordinator, get the text as it is documented; others get it in
the shape of their API's errors.
"""

from __future__ import annotations

from parley.dialects.dialect import Answer, Dialect
from parley.errors import BadRequest, EngineError, NotReady, Overloaded, ParleyError, TimedOut

CLUSTER_NOT_READY = "MindIE-MS Coordinator is not ready"
TOO_MANY_REQUESTS = "Too many requests"
MEMORY_EXCEEDED = "Memory limit exceeded"
DUPLICATE_ID = "Duplicate request id"
UNKNOWN_REQUEST = "Invalid request"
PREFILL_CONNECT_FAILED = "Connect to p instance failed"
SEND_FAILED = "Send message to instance failed"
PREFILL_SEND_FAILED = "Send messges to p instance failed"  # misspelled in the documentation
PREFILL_RECEIVE_FAILED = "Receive messages from p instance failed"
PREFILL_FAILED = "P instance error"
DECODE_FAILED = "D instance error"
RETRY_FAILED = "Request retry failed"
SCHEDULE_TIMEOUT = "Request schedule timeout"
SCHEDULE_FAILED = "Scheduler proc req failed"
FIRST_TOKEN_TIMEOUT = "Request first token timeout"
INFERENCE_TIMEOUT = "Request inference timeout"
TOKENIZER_TIMEOUT = "Request tokenizer timeout"
CONNECTION_LIMIT_TEXT = "Connection request out of limit, max is {}"

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
    """The error as it is documented, if it is one of the coordinator and to be told like that."""
    if not error.documented or not (strict or dialect.documented_errors):
        return None
    if error.message == MEMORY_EXCEEDED:
        return Answer(429, dialect.no_memory_body or NO_MEMORY)
    return Answer(error.status, plain_body(error.message), PLAIN_TEXT_TYPE)


def plain_body(text: str) -> bytes:
    """Encode a documented text as a plain-text body."""
    return text.encode() + b"\r\n"
