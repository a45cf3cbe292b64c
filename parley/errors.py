"""All errors of a request, as one tree; each dialect turns them into its API's own form.

ParleyError                      500
├── BadRequest                   400  the request is wrong; ``field`` names the neutral field at fault, if there is one
│   ├── MalformedBody            400  the body is not in the route's format (not JSON, not an object)
│   ├── MissingField             400  a required field is absent
│   ├── WrongType                400  a field has a JSON type that the API does not accept
│   ├── InvalidValue             400  a value is outside its range or list
│   │   ├── NoTokens             400  the prompt is empty
│   │   ├── UnknownToken         400  the prompt has a token id outside the vocabulary
│   │   ├── UnknownTokenIds      400  an option has token ids outside the vocabulary
│   │   ├── TooManyDimensions    400  the model's vectors are shorter
│   │   ├── UnknownPromptName    400  the model has no prompt of that name to put before a text to embed
│   │   └── BadMedia             400  an image, video or clip cannot be used; ``reason``
│   ├── Unsupported              400  understood, but not available (feature, or combination of two fields)
│   │   ├── UnsuitableModel      400  the model does not generate text, or does not make embeddings
│   │   └── UnknownCoding        400  the body has an unsupported content coding
│   └── ContextLength            400  prompt and requested output exceed the context
├── Unauthorized                 401
├── Forbidden                    403
├── NotFound                     404  no such route or object
│   ├── UnknownModel             404
│   └── UnknownRecord            404  nothing is stored under that id
├── NotAllowed                   405
├── ObjectConflict               409  an object of that name already exists, or is busy
├── BodyTimedOut                 408  the body did not arrive in time
├── InUse                        409  another open request has the same id
├── TooLarge                     413  the body is too large
├── UpgradeRequired              426  the route is for WebSockets
├── HeadersTooLarge              431
├── Overloaded                   429  the queue is full; ``retry_after`` seconds
├── RateLimited                  429  the API key has reached one of its limits; ``retry_after`` seconds
├── NotReady                     503  loading, draining or restarting; ``retry_after`` seconds
│   └── ServerStopping           503  it will not become ready again
├── CommandRefused                a coordinator or controller asked for something that this instance does not do
├── TimeLimitPassed          504/408  the time limit named by ``limit`` has passed (408: the client's)
└── EngineError                  500  the engine failed this request
    └── EngineDied               503  the engine process is gone

Messages are sentences for people. They name field, value and allowed range, and never contain a path, an address, a
repr of an object, or more than a short excerpt of the input.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Literal

Limit = Literal["client", "server", "token"]
DATA_URL = re.compile(r"(data:[^,]{0,100},)[^\s\"'`]{16,}", re.IGNORECASE)


def hide_data(text: str) -> str:
    """Return a text without the contents of data: URLs, which are a client's images and files."""
    return DATA_URL.sub(r"\1…", text)


def failure_reason(error: Exception) -> str:
    """Return why a file could not be read or a connection made, in words: "No such file or directory"."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not encoded in UTF-8"
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(reason := getattr(error, "reason", None), str):  # of TLS
        return reason
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:  # negative: of a name's address
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def excerpt(value: Any, limit: int = 60) -> str:
    """Return the value as JSON-like text, cut to ``limit`` characters, so that an error never echoes a huge input."""
    text = repr(value) if not isinstance(value, bool | None) else {True: "true", False: "false", None: "null"}[value]
    return text if len(text) <= limit else text[: limit - 1] + "…"


SERVER_ERROR = "The server had an error while it processed the request."  # an exception that is no ParleyError


class ParleyError(Exception):
    """Base class. ``status`` is the HTTP status that most APIs use; a dialect may choose another.

    ``retry_after``: seconds after which a retry makes sense. ``documented``: the text that the original
    coordinator documents for this error, if it is one of its errors. ``request_uuid``: the id of the request that it
    ends, for APIs whose errors name it; set when it is answered.
    """

    status = 500
    code: str | None = None
    retry_after: float | None = None
    documented = ""
    request_uuid = ""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None):
        self.message = hide_data(message)
        super().__init__(self.message)
        self.field = field
        if code is not None:
            self.code = code


class BadRequest(ParleyError):
    """The request is wrong. ``place``: the position in the body of the one prompt of several that is wrong."""

    status = 400
    place = ""

    def rename_field(self, name: str) -> None:
        """Replace the neutral field name by the API's own, also where the message quotes it."""
        self.message = self.message.replace(f"'{self.field}'", f"'{name}'")
        self.field = name

    def name_place(self, place: str) -> None:
        """Add the position of the wrong prompt to the message."""
        self.place = place
        self.message = f"{self.message} ({place})"


class MalformedBody(BadRequest):
    """The body is not in the route's format."""


class MissingField(BadRequest):
    """A required field is absent."""

    code = "missing_required_parameter"


class WrongType(BadRequest):
    """A field has a JSON type that the API does not accept."""

    code = "invalid_type"


class InvalidValue(BadRequest):
    """A value is outside its range or list."""

    code = "invalid_value"


class NoTokens(InvalidValue):
    """The prompt is empty."""


class UnknownToken(InvalidValue):
    """The prompt has a token id outside the vocabulary: ``token_id``, None if it is not known."""

    def __init__(self, message: str, *, token_id: int | None = None, field: str | None = None):
        super().__init__(message, field=field)
        self.token_id = token_id


class TooManyDimensions(InvalidValue):
    """The model's vectors are shorter than the request wants them."""


class UnknownTokenIds(InvalidValue):
    """An option lists ids that are not among the ``vocabulary`` tokens: ``token_ids``."""

    def __init__(self, message: str, *, token_ids: Sequence[int], vocabulary: int, field: str | None = None):
        super().__init__(message, field=field)
        self.token_ids = token_ids
        self.vocabulary = vocabulary


class UnknownPromptName(InvalidValue):
    """The request names a prompt for its texts to embed that the model does not have.

    ``name``: the prompt as the client names it; ``known``: those that the model has.
    """

    def __init__(self, message: str, *, name: str, known: Sequence[str], field: str | None = None):
        super().__init__(message, field=field)
        self.name = name
        self.known = known


MediaFault = Literal[
    "bad_address",  # not a URL, or too long a one
    "forbidden_address",  # the operator has not allowed its host, or its folder
    "unreachable",  # could not be fetched: no such host, another status than 200, too slow
    "not_found",  # no such file
    "bad_base64",
    "bad_data_url",  # a data: URL without comma or base64
    "unknown_format",  # the bytes are of no format that is accepted for its kind
    "undecodable",  # damaged
    "too_large",  # in bytes
    "too_many_pixels",
    "too_long",  # in seconds or frames
    "too_slow",  # took too long, or too much memory, to decode
    "too_many",  # items in the request, or in a message
    "unknown_uuid",  # the item is not in the cache, and its data was not sent
    "refused_by_model",  # the model's processor or encoder does not accept it
    "bad_embeddings",
]


class BadMedia(InvalidValue):
    """An image, video or clip of the request cannot be used.

    ``reason``: what is wrong with it; ``kind``: "image", "video" or "audio". ``detail``: numbers and names that APIs
    put into their own sentences, such as ``limit``, ``size``, ``status``, ``host``, and ``total`` if the items of a
    request are too large together; never a decoder's words.
    """

    def __init__(
        self, message: str, *, reason: MediaFault, kind: str, field: str | None = None, **detail: int | float | str
    ):
        super().__init__(message, field=field)
        self.reason = reason
        self.kind = kind
        self.detail = detail


class Unsupported(BadRequest):
    """A feature, or a combination of fields, is understood but not available."""

    code = "unsupported_parameter"


class UnsuitableModel(Unsupported):
    """The model does not generate text, or does not make embeddings."""

    code = "unsupported_model"


class UnknownCoding(Unsupported):
    """The body has an unsupported content coding."""


class ContextLength(BadRequest):
    """Prompt and requested output exceed the context. The attributes are lengths in tokens, as far as known:
    ``limit`` (the context), ``prompt``, and ``requested`` (the output). Of a prompt that is not counted to its end,
    only ``prompt_over`` is known: it is longer than that."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        limit: int | None = None,
        prompt: int | None = None,
        prompt_over: int | None = None,
        requested: int | None = None,
    ):
        super().__init__(message, field=field)
        self.limit = limit
        self.prompt = prompt
        self.prompt_over = prompt_over
        self.requested = requested


class Unauthorized(ParleyError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class Forbidden(ParleyError):
    """The caller may not do this."""

    status = 403


class NotFound(ParleyError):
    """There is no such route or object."""

    status = 404


class UnknownModel(NotFound):
    """There is no model called ``name``, as the client asked; ``served`` lists the names that exist."""

    code = "model_not_found"

    def __init__(self, message: str, *, name: str = "", served: Sequence[str] = (), field: str | None = None):
        super().__init__(message, field=field)
        self.name = name
        self.served = served


class UnknownRecord(NotFound):
    """Nothing is stored under the id that the client named."""


class NotAllowed(ParleyError):
    """The route does not support the method. ``allowed``: the path's methods for the ``Allow`` header, if known."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str = ""):
        super().__init__(message)
        self.allowed = allowed


class ObjectConflict(ParleyError):
    """An object of that name already exists, or is busy."""

    status = 409


class BodyTimedOut(ParleyError):
    """The body did not arrive in time."""

    status = 408


class InUse(ParleyError):
    """Another open request has the same id."""

    status = 409


class TooLarge(ParleyError):
    """The body is too large. ``size`` and ``limit``: in bytes, 0 where they are not known."""

    status = 413

    def __init__(self, message: str, *, size: int = 0, limit: int = 0):
        super().__init__(message)
        self.size = size
        self.limit = limit


class UpgradeRequired(ParleyError):
    """The route is for WebSockets, and the client does not offer to make its connection one."""

    status = 426


class HeadersTooLarge(ParleyError):
    """The headers are too large."""

    status = 431


class Overloaded(ParleyError):
    """The queue is full. ``retry_after``: seconds."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after: float = retry_after


class RateLimited(ParleyError):
    """The API key has reached one of its limits. ``kind``: "requests" or "tokens". ``retry_after``: in seconds; None if
    the request alone exceeds the limit."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: str = "requests", retry_after: float | None = None):
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after


class NotReady(ParleyError):
    """The server is loading, draining or restarting. ``retry_after``: seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after: float = retry_after


class ServerStopping(NotReady):
    """The server will not become ready again."""


class TimeLimitPassed(ParleyError):
    """A time limit has passed. ``limit`` names it: the client's, the server's, or the one between tokens."""

    status = 504

    def __init__(self, message: str, *, limit: Limit):
        super().__init__(message)
        self.limit = limit
        self.status = 408 if limit == "client" else 504


class CommandRefused(ParleyError):
    """An instance refuses a command of a coordinator or controller.

    ``status``: the HTTP status of the answer. ``kind``: the kind of error in the answer, where it is not the usual one
    of the status.
    """

    def __init__(self, status: int, message: str, kind: str = ""):
        super().__init__(message)
        self.status = status
        self.kind = kind


class EngineError(ParleyError):
    """The engine failed this request."""


class EngineDied(EngineError):
    """The engine process has ended."""

    status = 503
