"""Shared by TGI's two routes in OpenAI's format: parameters under OpenAI's names, endings, stream errors, headers.

The bytes differ from OpenAI's almost everywhere: ids are empty, each token is a chunk, each chunk has the role, finish
reasons are TGI's, and errors of a stream are reported inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from parley.dialects.fields import MAX_F32, MAX_U32, MAX_U64, Fields
from parley.dialects.reply import Answer, HeaderList, Reply, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import STREAM_DONE
from parley.dialects.tgi.answer_parts import tgi_answer_headers, tgi_event, tgi_finish_reason
from parley.dialects.tgi.api_rules import TGI_VERSION, TgiRules
from parley.dialects.tgi.error_answers import special_error_type, tgi_error_object
from parley.dialects.tgi.parameters import TgiParameters
from parley.errors import MalformedBody, MissingField, ParleyError, WrongType
from parley.types import ChoiceDelta, ChoiceDone, TokenInfo, Usage
from parley.version import __version__

SYSTEM_FINGERPRINT = f"{TGI_VERSION}-parley-{__version__}"
ANY_MODEL = "tgi"  # model name that matches any served model


def read_shared_members(body: Fields, rules: TgiRules) -> dict[str, Any]:
    """Read the ``TgiParameters`` members that both routes share. Temperature 0 is greedy; the default samples."""
    temperature = body.number("temperature", None, -MAX_F32, MAX_F32)
    if rules.strict and isinstance(body.raw_value("stop"), str):
        raise body.mistyped_member("stop", "an array")
    return {
        "temperature": None if temperature == 0 else temperature,
        "do_sample": temperature != 0,
        "top_p": body.number("top_p", None, -MAX_F32, MAX_F32),
        "frequency_penalty": body.number("frequency_penalty", None, -MAX_F32, MAX_F32),
        "seed": body.integer("seed", None, 0, MAX_U64),
        "stop": body.strings("stop", cap=MAX_U32, total=MAX_U32),
        "details": True,
    }


def read_stream_member(body: Fields, rules: TgiRules) -> bool:
    """Return the member ``stream``, False by default. Raises BadRequest."""
    if rules.strict and body.is_null("stream"):
        raise body.mistyped_member("stream", "a boolean")
    return body.boolean("stream", False)


class TgiOpenAIReply(Reply):
    """A reply in OpenAI's format."""

    media_type: ClassVar[str] = "text/event-stream"
    field_names: ClassVar[Mapping[str, str]] = {"prompt": "inputs"}
    ping_bytes: ClassVar[bytes] = b":\n\n"
    ping_interval: ClassVar[float | None] = 15.0

    def __init__(self, body: Fields, rules: TgiRules, context: RequestContext, params: TgiParameters, characters: int):
        model = body.string("model", None, cap=256)
        self._model = None if model in (None, ANY_MODEL) else model
        self._rules, self._context, self._params = rules, context, params
        self._characters = characters
        self._usage = Usage()

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the mark that ends a stream."""
        return STREAM_DONE

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error frame that ends a stream."""
        return openai_failure_frames(error, self._rules)

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return an error before the first chunk; strict streams report it with status 200."""
        return error_inside_stream(error, self._rules) if self._rules.strict and self.request.stream else None

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the timing and token headers."""
        return tgi_answer_headers(
            self._rules,
            self._context.device,
            self._characters,
            timings,
            self._usage.prompt_tokens,
            self._usage.completion_tokens,
        )

    def _requested_model(self) -> str:
        """Return the model or adapter to use: the main model for an unknown name, as in the original."""
        is_known_model = self._model in self._context.model_names or self._model in self._context.adapters
        return self._model if self._model is not None and is_known_model else ""

    def _model_name(self) -> str:
        """Return the model name: the client's, or else the served one."""
        return self._model or self.request.model

    def _end_reason(self, done: ChoiceDone) -> str:
        """Return the finish reason of a native answer."""
        return tgi_finish_reason(done, self._params.max_new_tokens)


def split_delta(delta: ChoiceDelta) -> Iterator[tuple[TokenInfo, str]]:
    """Yield each token with its part of the delta's text; the parts add up to that text."""
    rest_text = delta.text
    last = len(delta.tokens) - 1
    for number, token in enumerate(delta.tokens):
        part = (
            rest_text
            if number == last
            else rest_text[: 0 if token.is_special else len(token.raw_bytes.decode("utf-8", "ignore"))]
        )
        rest_text = rest_text[len(part) :]
        yield token, part


def tgi_usage_object(total: Usage) -> dict[str, int]:
    """Return the ``usage`` object."""
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
    }


def openai_failure_frames(error: ParleyError, rules: TgiRules) -> bytes:
    """Return the frames that end a stream after an error; the status number is the same for every error."""
    text = tgi_error_object(error, rules)["error"]
    return tgi_event({"error": {"message": text, "http_status_code": 422}}) + STREAM_DONE


def error_inside_stream(error: ParleyError, rules: TgiRules) -> Answer | None:
    """Return an error as a whole stream; None for template and tool errors, which come before the stream starts."""
    if special_error_type(error) in ("tool_error", "template_error"):
        return None
    return Answer(200, openai_failure_frames(error, rules), b"text/event-stream")


def reply_or_error_stream(rules: TgiRules, body: Fields, build_reply: Any) -> Any:
    """Return ``build_reply()``. Strict rules report its validation errors inside the stream, with status 200."""
    try:
        return build_reply()
    except (MalformedBody, MissingField, WrongType):
        raise
    except ParleyError as error:
        error_answer = error_inside_stream(error, rules) if rules.strict and body.raw_value("stream") is True else None
        if error_answer is None:
            raise
        return error_answer
