"""What TGI's two routes in OpenAI's form share: parameters under OpenAI's names, ends, errors in a stream, headers.

They differ from OpenAI's own in nearly every byte: ids are empty, each token is a chunk and each chunk has the role,
the end is told in TGI's words, and what is wrong with a stream is told inside it.
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
HOUSE = "tgi"  # the model name that stands for whatever is served


def common(body: Fields, rules: Rules) -> dict[str, Any]:
    """The members of ``Parameters`` that both routes have. Temperature 0 is greedy; without one there is drawing."""
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
    if rules.strict and body.null("stream"):
        raise body.mistyped("stream", "a boolean")
    return body.boolean("stream", False)


class Spoken(Reply):
    """An answer in OpenAI's form."""

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
        return DONE

    def fail(self, error: ParleyError) -> bytes:
        return failure(error, self._rules)

    def refusal(self, error: ParleyError) -> Answer | None:
        return told_inside(error, self._rules) if self._rules.strict and self.request.stream else None

    def headers(self, timings: Timings | None) -> Headers:
        return shared.headers(
            self._rules,
            self._head.device,
            self._characters,
            timings,
            self._usage.prompt_tokens,
            self._usage.completion_tokens,
        )

    def _name(self) -> str:
        """The model as the client called it."""
        return self._model or self.request.model

    def _ended(self, done: Done) -> str:
        """The end as a native answer tells it."""
        return shared.reason(done, self._wish.max_new_tokens)


def pieces(delta: Delta) -> Iterator[tuple[Token, str]]:
    """Each token with its part of the delta's text; together the parts are that text."""
    rest = delta.text
    last = len(delta.tokens) - 1
    for number, token in enumerate(delta.tokens):
        part = rest if number == last else rest[: 0 if token.special else len(token.raw.decode("utf-8", "ignore"))]
        rest = rest[len(part) :]
        yield token, part


def usage(total: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
    }


def failure(error: ParleyError, rules: Rules) -> bytes:
    """The end of a stream that an error cuts short; the number is the same for every error."""
    text = shared.error_object(error, rules)["error"]
    return shared.frame({"error": {"message": text, "http_status_code": 422}}) + DONE


def told_inside(error: ParleyError, rules: Rules) -> Answer | None:
    """An error as a whole stream; None for those of template and tools, which come before there is one."""
    if shared.kind(error) in ("tool_error", "template_error"):
        return None
    return Answer(200, failure(error, rules), b"text/event-stream")


def read_stream(rules: Rules, body: Fields, make: Any) -> Any:
    """The reply that ``make`` gives; what validation refuses of a stream is told inside it, if that is the manner."""
    try:
        return make()
    except (Malformed, Missing, WrongType):
        raise
    except ParleyError as error:
        inside = told_inside(error, rules) if rules.strict and body.raw("stream") is True else None
        if inside is None:
            raise
        return inside
