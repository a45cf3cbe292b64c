"""Everything that can go wrong with a request, as one tree; a dialect turns each into its API's own shape.

ParleyError                      500
├── BadRequest                   400  the request is wrong; ``field`` names the neutral field when one is to blame
│   ├── Malformed                400  the body is not what the route reads (not JSON, not an object)
│   ├── Missing                  400  a required field is absent
│   ├── WrongType                400  a field has another JSON type than the API knows
│   ├── Invalid                  400  a value outside its range or list
│   │   ├── NoTokens             400  the prompt is empty
│   │   └── UnknownToken         400  the prompt has a token id that is not in the vocabulary
│   ├── Unsupported              400  understood, but not available (feature, or combination of two fields)
│   │   ├── Incapable            400  the model generates no text, or makes no vectors
│   │   └── UnknownCoding        400  the body has a content coding that is not read here
│   └── ContextLength            400  prompt plus requested output exceed the context
├── Unauthorized                 401
├── Forbidden                    403
├── NotFound                     404  no such route or object
│   └── UnknownModel             404
├── NotAllowed                   405
├── Conflict                     409  something of that name is there already, or is at work
├── TimedOut                     408
├── InUse                        409  another open request has the label
├── TooLarge                     413
├── HeadersTooLarge              431
├── Overloaded                   429  the queue is full; ``retry_after`` seconds
├── NotReady                     503  loading, draining or restarting; ``retry_after`` seconds
│   └── Stopping                 503  it will not be ready any more
├── OrderRefused                  a coordinator or controller wants what this instance does not do
├── Expired                  504/408  it took too long by the wish that ``limit`` names (408: the client's)
└── EngineError                  500  the engine failed this request
    └── EngineDied               503  the engine process is gone

Messages are sentences for a person. They name field, value and allowed range, and never hold a path, an address, a
repr of an object, or more than a short excerpt of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

Limit = Literal["client", "server", "token"]


def excerpt(value: Any, limit: int = 60) -> str:
    """The value as JSON-like text, cut to ``limit`` characters, so that an error never echoes a huge input."""
    text = repr(value) if not isinstance(value, bool | None) else {True: "true", False: "false", None: "null"}[value]
    return text if len(text) <= limit else text[: limit - 1] + "…"


class ParleyError(Exception):
    """Base of all. ``status`` is the HTTP status that most APIs use; a dialect may choose another.

    ``retry_after``: seconds after which to come back, where that helps. ``documented``: the message is a text that the
    original's coordinator documents, to the letter.
    """

    status = 500
    code: str | None = None
    retry_after: float | None = None
    documented = False

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.field = field
        if code is not None:
            self.code = code


class BadRequest(ParleyError):
    status = 400


class Malformed(BadRequest):
    pass


class Missing(BadRequest):
    code = "missing_required_parameter"


class WrongType(BadRequest):
    code = "invalid_type"


class Invalid(BadRequest):
    code = "invalid_value"


class NoTokens(Invalid):
    pass


class UnknownToken(Invalid):
    pass


class Unsupported(BadRequest):
    code = "unsupported_parameter"


class Incapable(Unsupported):
    code = "unsupported_model"


class UnknownCoding(Unsupported):
    pass


class ContextLength(BadRequest):
    """Lengths in tokens, as far as they are known: of the context, of the prompt, asked for behind it."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        limit: int | None = None,
        prompt: int | None = None,
        requested: int | None = None,
    ):
        super().__init__(message, field=field)
        self.limit = limit
        self.prompt = prompt
        self.requested = requested


class Unauthorized(ParleyError):
    status = 401
    code = "invalid_api_key"


class Forbidden(ParleyError):
    status = 403


class NotFound(ParleyError):
    status = 404


class UnknownModel(NotFound):
    """``name`` is what the client asked for, ``served`` what there is."""

    code = "model_not_found"

    def __init__(self, message: str, *, name: str = "", served: Sequence[str] = (), field: str | None = None):
        super().__init__(message, field=field)
        self.name = name
        self.served = served


class NotAllowed(ParleyError):
    """``allowed``: the methods that the path has, as the header says them, if they are known."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str = ""):
        super().__init__(message)
        self.allowed = allowed


class Conflict(ParleyError):
    status = 409


class TimedOut(ParleyError):
    status = 408


class InUse(ParleyError):
    status = 409


class TooLarge(ParleyError):
    status = 413


class HeadersTooLarge(ParleyError):
    status = 431


class Overloaded(ParleyError):
    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after: float = retry_after


class NotReady(ParleyError):
    status = 503

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after: float = retry_after


class Stopping(NotReady):
    pass


class Expired(ParleyError):
    status = 504

    def __init__(self, message: str, *, limit: Limit):
        super().__init__(message)
        self.limit = limit
        self.status = 408 if limit == "client" else 504


class OrderRefused(ParleyError):
    """``status``: the HTTP status of the answer. ``kind``: of error, where it is not the usual one of the status."""

    def __init__(self, status: int, message: str, kind: str = ""):
        super().__init__(message)
        self.status = status
        self.kind = kind


class EngineError(ParleyError):
    pass


class EngineDied(EngineError):
    status = 503
