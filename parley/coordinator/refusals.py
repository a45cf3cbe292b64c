"""The errors of the coordinator itself, in the form of the client's API.

Their texts are those that the API of the instance plane documents (``dialects/mounts.py``). Clients of that API, and
all clients of a strict coordinator, get the text as it is documented; others get a sentence that says the same, in the
shape of their API's errors.
"""

from __future__ import annotations

from parley.dialects.dialect import Dialect
from parley.dialects.mounts import COORDINATOR_TEXTS
from parley.dialects.reply import Answer
from parley.errors import BadRequest, BodyTimedOut, EngineError, NotReady, Overloaded, ParleyError

TEXTS = COORDINATOR_TEXTS
PLAIN_TEXT_TYPE = b"text/plain; charset=utf-8"
NO_MEMORY = b'{"error":"Memory limit exceeded","code":429}'  # for APIs that define no body for it
# The sentences for clients of other APIs, alarms and the log, in place of a documented text.
SENTENCES = {
    TEXTS.cluster_not_ready: "The cluster is not ready: too few of its instances can take requests.",
    TEXTS.too_many_requests: "The cluster has too many requests.",
    TEXTS.memory_exceeded: "The coordinator's memory for request bodies is full.",
    TEXTS.duplicate_id: "Another open request has the same id.",
    TEXTS.prefill_connect_failed: "The prefill instance cannot be reached.",
    TEXTS.send_failed: "The request could not be sent to any instance.",
    TEXTS.prefill_send_failed: "The request could not be sent to the prefill instance.",
    TEXTS.prefill_receive_failed: "The prefill instance did not complete its answer.",
    TEXTS.prefill_failed: "The prefill instance failed.",
    TEXTS.decode_failed: "The decode instance failed.",
    TEXTS.retry_failed: "The request was retried and failed again.",
    TEXTS.schedule_timeout: "No instance had room for the request in time.",
    TEXTS.schedule_failed: "No instance can run this request.",
    TEXTS.first_token_timeout: "The first token did not come in time.",
    TEXTS.inference_timeout: "The request was not completed in time.",
    TEXTS.tokenizer_timeout: "The text was not tokenized in time.",
}

NO_ANSWER = "The connection to the instance broke before its answer was complete."  # in place of TEXTS.send_failed

# The documented statuses of texts; those of all others are the errors' own. Other APIs get 503 if no instance can be
# reached, because the request may be sent again.
DOCUMENTED_STATUSES = {TEXTS.send_failed: 500}

ERROR_CLASSES: dict[int, type[ParleyError]] = {
    400: BadRequest,
    408: BodyTimedOut,
    429: Overloaded,
    503: NotReady,
}


def coordinator_error(status: int, text: str, retry_after: float | None = None, *, sentence: str = "") -> ParleyError:
    """Create an error from a documented text. ``retry_after``: seconds until the client may retry; ``sentence``: in
    place of the text's own."""
    error = ERROR_CLASSES.get(status, EngineError)(sentence or plain_sentence(text))
    if retry_after is not None:
        error.retry_after = retry_after
    error.documented = text
    return error


def plain_sentence(text: str) -> str:
    """Return the sentence for a documented text; any other text is returned as it is."""
    return SENTENCES.get(text, text)


def documented_answer(error: ParleyError, dialect: Dialect, strict: bool) -> Answer | None:
    """Return a documented error of the coordinator in the documented form; None if the API words it itself."""
    if not error.documented or not (strict or dialect.documented_errors):
        return None
    if error.documented == TEXTS.memory_exceeded:
        return Answer(429, dialect.no_memory_body or NO_MEMORY)
    status = DOCUMENTED_STATUSES.get(error.documented, error.status)
    return Answer(status, plain_body(error.documented), PLAIN_TEXT_TYPE)


def plain_body(text: str) -> bytes:
    """Encode a documented text as a plain-text body."""
    return text.encode() + b"\r\n"
