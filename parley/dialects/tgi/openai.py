"""Shared by TGI's two routes in OpenAI's format: parameters under OpenAI's names, endings, stream errors, headers.

The bytes differ from OpenAI's almost everywhere: ids are empty, each token is a chunk, each chunk has the role, finish
reasons are TGI's, and errors of a stream are reported inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from parley.dialects.dialect import Answer, Head, Headers, Reply, Timings
from parley.dialects.fields import Fields
from parley.dialects.tgi import shared
from parley.dialects.tgi.parameters import Parameters
from parley.dialects.tgi.shared import F32, SPOKEN, U32, U64, Rules
from parley.errors import Malformed, Missing, ParleyError, WrongType
from parley.types import Delta, Done, Token, Usage
from parley.version import __version__

DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"{SPOKEN}-parley-{__version__}"
HOUSE = "tgi"  # model name that matches any served model


def common(body: Fields, rules: Rules) -> dict[str, Any]:
    """Read the ``TgiParameters`` members that both routes share. Temperature 0 is greedy; the default samples."""
    temperature = body.number("temperature", None, -F32, F32)
    if rules.strict and isinstance(body.raw("stop"), str):
        raise body.mistyped("stop", "an array")
    return {
        "temperature": None if temperature == 0 else temperature,
        "do_sample": temperature != 0,
        "top_p": body.number("top_p", None, -F32, F32),
        "frequency_penalty": body.number("frequency_penalty", None, -F32, F32),
        "seed": body.integer("seed", None, 0, U64),
        "stop": body.strings("stop", cap=U32, total=U32),
        "details": True,
    }


def streams(body: Fields, rules: Rules) -> bool:
    """Return the member ``stream``, False by default. Raises BadRequest."""
    if rules.strict and body.null("stream"):
        raise body.mistyped("stream", "a boolean")
    return body.boolean("stream", False)


class Spoken(Reply):
    """A reply in OpenAI's format."""

    media_type: ClassVar[str] = "text/event-stream"
    names: ClassVar[Mapping[str, str]] = {"prompt": "inputs"}
    ping: ClassVar[bytes] = b":\n\n"
    silence: ClassVar[float | None] = 15.0

    def __init__(self, body: Fields, rules: Rules, head: Head, wish: Parameters, characters: int):
        model = body.string("model", None, cap=256)
        self._model = None if model in (None, HOUSE) else model
        self._rules, self._head, self._wish = rules, head, wish
        self._characters = characters
        self._usage = Usage()

    def end(self, usage: Usage) -> bytes:
        """Return the mark that ends a stream."""
        return DONE

    def fail(self, error: ParleyError) -> bytes:
        """Return the error frame that ends a stream."""
        return failure(error, self._rules)

    def refusal(self, error: ParleyError) -> Answer | None:
        """Return an error before the first chunk; strict streams report it with status 200."""
        return told_inside(error, self._rules) if self._rules.strict and self.request.stream else None

    def headers(self, timings: Timings | None) -> Headers:
        """Return the timing and token headers."""
        return shared.headers(
            self._rules,
            self._head.device,
            self._characters,
            timings,
            self._usage.prompt_tokens,
            self._usage.completion_tokens,
        )

    def _name(self) -> str:
        """Return the model name: the client's, or else the served one."""
        return self._model or self.request.model

    def _ended(self, done: Done) -> str:
        """Return the finish reason of a native answer."""
        return shared.reason(done, self._wish.max_new_tokens)


def pieces(delta: Delta) -> Iterator[tuple[Token, str]]:
    """Yield each token with its part of the delta's text; the parts add up to that text."""
    rest = delta.text
    last = len(delta.tokens) - 1
    for number, token in enumerate(delta.tokens):
        part = rest if number == last else rest[: 0 if token.special else len(token.raw.decode("utf-8", "ignore"))]
        rest = rest[len(part) :]
        yield token, part


def usage(total: Usage) -> dict[str, int]:
    """Return the ``usage`` object."""
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
    }


def failure(error: ParleyError, rules: Rules) -> bytes:
    """Return the frames that end a stream after an error; the status number is the same for every error."""
    text = shared.error_object(error, rules)["error"]
    return shared.frame({"error": {"message": text, "http_status_code": 422}}) + DONE


def told_inside(error: ParleyError, rules: Rules) -> Answer | None:
    """Return an error as a whole stream; None for template and tool errors, which come before the stream starts."""
    if shared.kind(error) in ("tool_error", "template_error"):
        return None
    return Answer(200, failure(error, rules), b"text/event-stream")


def read_stream(rules: Rules, body: Fields, make: Any) -> Any:
    """Return ``build_reply()``. Strict rules report its validation errors inside the stream, with status 200."""
    try:
        return make()
    except (Malformed, Missing, WrongType):
        raise
    except ParleyError as error:
        inside = told_inside(error, rules) if rules.strict and body.raw("stream") is True else None
        if inside is None:
            raise
        return inside
