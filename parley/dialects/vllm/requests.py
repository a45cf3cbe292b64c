"""The request rules of vLLM's server that OpenAI's API does not have, for chat and completions.

The members themselves are read in ``dialects/openai``. Here are only the differences, in the original's wording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from parley.dialects.dialect import Answer, Head, Reply
from parley.dialects.fields import Fields, decode
from parley.dialects.forms import KINDS
from parley.dialects.openai import constraints
from parley.dialects.openai.shared import MAX_TOKENS, Rules
from parley.dialects.parameters import MAX_N
from parley.dialects.vllm import shared
from parley.dialects.vllm.words import SCORES, WORDS, named, unstopped, unsupported_media
from parley.errors import BadRequest, Invalid, excerpt
from parley.types import Request, Sampling, Stop

MAX_STOPS = 4
MAX_ID = 128  # characters of a request id in a header
CAP = "max_new_tokens"  # a generation default that limits a member rather than filling it in
GREEDY = 1e-5  # a lower temperature is treated as 0
RULES = Rules(roles=(), reserve=1, best_of=False, fewest=0, shown=True, schemas=False, bare=True)
FORMS = {"json_object": "json_object", "json_schema": "json", "structural_tag": "structural_tag"}  # by type
UNTRUSTED_TEMPLATE = (
    "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with "
    "untrusted chat template."
)
UNTRUSTED_MEDIA = (
    "Per-request {name} are disabled by default because they can change multimodal preprocessing resource usage. Start "
    "the server with --trust-request-mm-kwargs only when clients are trusted."
)

R = TypeVar("R", bound=Reply)


def read(make: Callable[[Fields, Head], R], body: bytes, head: Head) -> R | Answer:
    """Return the reply to a body. A refusal by the original's engine is sent inside a stream. Raises BadRequest."""
    check_type(head)
    advice = {name: value for name, value in head.advice.items() if name != CAP}
    fields = decode(body, WORDS).over(advice)
    try:
        return make(fields, head)
    except Invalid as error:
        if error.field in SCORES and fields.raw("stream") is True and "max allowed" in error.message:
            return Answer(200, shared.failure(error), b"text/event-stream; charset=utf-8")
        raise


def check_type(head: Head) -> None:
    """Raise Malformed if the content type is not JSON."""
    kind = head.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if not (kind.endswith((b"/json", b"+json")) and b"/" in kind):
        raise unsupported_media()


def check(body: Fields, head: Head, *, counted: str = "max_tokens", least: int = 0) -> None:
    """Check the rules for all generating requests. ``counted``: the member that limits the output, at ``least``.

    Raises BadRequest.
    """
    fault = next(_faults(body, head, counted, least), None)
    if fault is not None:
        raise fault


def _faults(body: Fields, head: Head, counted: str, least: int) -> Iterator[BadRequest]:
    stops = body.raw("stop")
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        yield unstopped(stops, MAX_STOPS)
    if body.number("top_p", 1.0, 0, 1) == 0:
        yield named("top_p must be in (0, 1], got 0.0.", "top_p", 0.0)
    n = body.integer("n", 1, 1, MAX_N)
    if n > 1 and body.number("temperature", 1.0, 0, 2) < GREEDY and not body.boolean("use_beam_search", False):
        yield Invalid(f"n must be 1 when using greedy sampling, got {n}.")
    wanted = body.integer(counted, None, least, MAX_TOKENS)
    if wanted is not None and head.context and wanted > head.context:
        sentence = f"{counted}={wanted} cannot be greater than max_model_len={head.context}."
        yield named(f"{sentence} Please request fewer output tokens.", counted, wanted)
    minimum = body.integer("min_tokens", 0, 0, MAX_TOKENS)
    if wanted is not None and 0 < wanted < minimum:
        yield Invalid(f"min_tokens must be less than or equal to max_tokens={wanted}, got {minimum}.")
    if body.has("allowed_token_ids") and not body.raw("allowed_token_ids"):
        yield body.empty("allowed_token_ids", "array")
    bias = body.raw("logit_bias")
    keys = [key for key in bias if not (key.isascii() and key.isdigit())][:8] if isinstance(bias, dict) else []
    if keys:
        told = excerpt(keys, 200)
        sentence = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {told}"
        yield named(sentence, "logit_bias", keys)
    left = head.context - (wanted or 0)
    if head.context and (kept := body.integer("truncate_prompt_tokens", -1, -1, MAX_TOKENS)) > left:
        sentence = f"truncate_prompt_tokens={kept} cannot be greater than max_model_len - {counted} = {left}."
        yield named(f"{sentence} Please request a smaller truncation size.", "truncate_prompt_tokens", kept)
    body.integer("seed", None)  # a signed integer of 64 bits
    if body.raw("logprob_token_ids") == []:
        yield named("`logprob_token_ids` must not be an empty list.", "logprob_token_ids")
    if body.boolean("stream", False) and body.has("prompt_logprobs"):
        yield named("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if body.boolean("stream", False) and body.boolean("use_beam_search", False):
        yield Invalid("Streaming is not currently supported with beam search")
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if body.has(name):
            yield named(UNTRUSTED_MEDIA.format(name=name), name)
    yield from _constraints(body)


def _constraints(body: Fields) -> Iterator[BadRequest]:
    wish = body.object("structured_outputs")
    given = {kind for kind in KINDS if wish is not None and wish.raw(kind)}
    if len(given | (_formed(body) if given else set())) > 1:
        sentence = "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice')."
        yield named(sentence, "structured_outputs")
    if wish is not None and not given and not wish.has("json"):
        told = dict.fromkeys(KINDS)
        yield Invalid(f"You must use one kind of structured outputs constraint but none are specified: {told}")
    form = body.object("response_format")
    if form is not None and form.raw("type") == "json_schema" and not form.has("json_schema"):
        sentence = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
        yield named(sentence, "response_format")


def _formed(body: Fields) -> set[str]:
    """Return the kind of constraint in ``response_format``, if it has one."""
    form = body.object("response_format")
    kind = FORMS.get(str(form.raw("type"))) if form is not None else None
    return {kind} if kind is not None else set()


def formed(body: Fields) -> Fields:
    """Let ``response_format`` replace the constraint of its kind in ``structured_outputs``. Raises BadRequest."""
    wish, form = body.raw("structured_outputs"), body.raw("response_format")
    kinds = _formed(body)
    if not wish or not kinds:
        return body
    constraints.response_format(body)
    (kind,) = kinds
    values = {
        "json_object": lambda: True,
        "json": lambda: form["json_schema"]["schema"],
        "structural_tag": lambda: json.dumps(form),
    }
    one = {"structured_outputs": wish | {kind: values[kind]()}}
    return body.without({"structured_outputs", "response_format"}).over(one)


def check_chat(body: Fields) -> None:
    """Check the rules for conversations. Raises Invalid."""
    if body.has("chat_template"):
        raise Invalid(UNTRUSTED_TEMPLATE)
    if body.has("tools") and body.raw("tools") == []:
        raise Invalid(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        )
    choice = body.raw("tool_choice")
    if choice in ("auto", "required") and not body.has("tools"):
        raise WORDS.invalid("tool_choice", "needs tools.")
    if isinstance(choice, dict) and body.has("structured_outputs"):
        raise Invalid("You can only either use constraints for structured outputs or tools, not both.")


def check_prompt(body: Fields) -> None:
    """Check the rules for plain prompts. Raises BadRequest."""
    if not (body.has("prompt") or body.raw("prompt_embeds")):
        raise body.empty("prompt", "string")
    if body.string("suffix", ""):
        raise Invalid("suffix is only supported for models with FIM completion rendering")


def cap(stop: Stop, head: Head) -> Stop:
    """Limit the output tokens to ``max_new_tokens`` of the model's generation defaults, if it has it."""
    most = head.advice.get(CAP)
    if most is None or most < 1 or (stop.max_tokens is not None and stop.max_tokens <= most):
        return stop
    return msgspec.structs.replace(stop, max_tokens=max(int(most), stop.min_tokens))


def sampling(request: Request) -> Sampling:
    """Return the sampling options; for beam search without those that only apply to drawing, including defaults."""
    if request.beam is None:
        return request.sampling
    return msgspec.structs.replace(request.sampling, top_p=1.0, top_k=0, min_p=0.0)


def name(head: Head, own: str) -> str:
    """Return the request's id: the header's, or else the body's (``own``), or 16 digits of the unique id."""
    given = head.headers.get(b"x-request-id", b"").decode("latin-1")
    if given and len(given) <= MAX_ID and given.isascii() and given.isprintable():
        return given
    return own if own != head.id else head.id[:16]
