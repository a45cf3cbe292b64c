"""Reading texts, token ids and pairs of texts, and the base of all replies that are made of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects.fields import Fields
from parley.dialects.reply import HeaderList, RequestTimings, UnstreamedReply
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_TOKEN_ID
from parley.dialects.tei.api_rules import TeiRules
from parley.dialects.tei.error_answers import BatchTooLarge, EmptyInput
from parley.dialects.tgi.answer_parts import whole_milliseconds
from parley.errors import WrongType
from parley.types import (
    Event,
    KeptSide,
    PoolingOptions,
    Prompt,
    PromptVector,
    Request,
    TextPair,
    TextPrompt,
    TokensPrompt,
    Usage,
)

TEI_FIELD_NAMES = {"prompt": "inputs"}  # neutral names of fields in the server's errors, and the names here


MAX_PROMPT_NAME = 256  # characters
KEPT_SIDES: dict[str, KeptSide] = {"Left": "tail", "left": "tail", "Right": "head", "right": "head"}
EMPTY_SENTENCE = "Input validation error: `inputs` cannot be empty"
PAIR_FORMS = (
    "a string, a pair of strings [string, string] or a batch of mixed strings and pairs "
    "[[string], [string, string], ...]"
)


def check_batch_size(rules: TeiRules, size: int, name: str) -> None:
    """Raise EmptyInput or BatchTooLarge unless a request may have this number of texts in the member ``name``."""
    if not size:
        raise EmptyInput(f"`{name}` cannot be empty", field=name)
    if size > rules.max_batch:
        message = f"batch size {size} > maximum allowed batch size {rules.max_batch}"
        raise BatchTooLarge(message, field=name)


def read_tei_inputs(rules: TeiRules, body: Fields, name: str = "inputs") -> list[Prompt]:
    """Return one text or its token ids, or a batch of both. Raises BadRequest."""
    value = body.raw_value(name)
    if value is None:
        raise body.missing_member(name)
    if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
        check_batch_size(rules, len(value), name)
        return [_read_input(item, f"{name}[{index}]") for index, item in enumerate(value)]
    return [_read_input(value, name)]


def _read_input(value: Any, path: str) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise EmptyInput(EMPTY_SENTENCE, field=path)
        return TextPrompt(value)
    is_ids = isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value)
    if not is_ids:
        raise WrongType(f"{path}: data did not match any variant of untagged enum Input", field=path)
    if not value:
        raise EmptyInput(EMPTY_SENTENCE, field=path)
    return TokensPrompt(value)


def read_texts(rules: TeiRules, body: Fields, name: str) -> list[str]:
    """Return a batch of texts. Raises BadRequest."""
    value = body.raw_value(name)
    if value is None:
        raise body.missing_member(name)
    if not isinstance(value, list):
        raise body.mistyped_member(name, "an array")
    check_batch_size(rules, len(value), body.member_path(name))
    return [_read_text(body, item, f"{name}[{index}]") for index, item in enumerate(value)]


def _read_text(body: Fields, value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise body.with_defaults({path: value}).mistyped_member(path, "a string")
    return value


def read_sequences(rules: TeiRules, body: Fields) -> tuple[list[TextPrompt | TextPair], bool]:
    """Return the texts and pairs to classify, and whether they are a batch. Raises BadRequest."""
    value = body.raw_value("inputs")
    if value is None:
        raise body.missing_member("inputs")
    if isinstance(value, list) and value and isinstance(value[0], list):
        check_batch_size(rules, len(value), "inputs")
        return [_read_sequence(item, f"inputs[{index}]") for index, item in enumerate(value)], True
    return [_read_sequence([value] if isinstance(value, str) else value, "inputs")], False


def _read_sequence(value: Any, path: str) -> TextPrompt | TextPair:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise WrongType(f"{path}: invalid type, expected {PAIR_FORMS}", field=path)
    if len(value) not in (1, 2):
        raise WrongType(f"{path}: invalid length {len(value)}, expected {PAIR_FORMS}", field=path)
    if not any(value):
        raise EmptyInput(EMPTY_SENTENCE, field=path)
    return TextPrompt(value[0]) if len(value) == 1 else TextPair(TextPrompt(value[0]), TextPrompt(value[1]))


def read_prompt_name(body: Fields, prompts: Sequence[Prompt]) -> str | None:
    """Return the name of the model's own prompt for these texts. Raises BadRequest for token ids."""
    name = body.string("prompt_name", None, cap=MAX_PROMPT_NAME)
    if name is not None and any(isinstance(prompt, TokensPrompt) for prompt in prompts):
        raise body.member_error("prompt_name", "can only be used with texts")
    return name


def _count_characters(prompt: Prompt) -> int:
    """Return how many characters of text a prompt has; token ids count as one each."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, TextPair):
        return len(prompt.first.text) + len(prompt.second.text)
    return len(prompt.ids) if isinstance(prompt, TokensPrompt) else 0


def tei_answer_headers(
    context: RequestContext, timings: RequestTimings | None, characters: int, tokens: int
) -> HeaderList:
    """Return an answer's headers: how large the request was, and where its time went."""
    assert timings is not None, "no answer is a stream"
    return [
        (b"x-compute-type", f"{context.device}+optimized".encode()),
        (b"x-compute-time", whole_milliseconds(timings.total)),
        (b"x-compute-characters", b"%d" % characters),
        (b"x-compute-tokens", b"%d" % tokens),
        (b"x-total-time", whole_milliseconds(timings.total)),
        (b"x-tokenization-time", whole_milliseconds(timings.validation)),
        (b"x-queue-time", whole_milliseconds(timings.queue)),
        (b"x-inference-time", whole_milliseconds(timings.inference)),
    ]


class TeiReply(UnstreamedReply):
    """A request for numbers about each of its ``prompts``. ``parameters``: where the options of truncation are."""

    field_names: ClassVar[Mapping[str, str]] = TEI_FIELD_NAMES

    def __init__(
        self,
        rules: TeiRules,
        body: Fields,
        context: RequestContext,
        prompts: Sequence[Prompt],
        pooling: PoolingOptions,
        parameters: Fields | None = None,
    ):
        self.check_model(context)
        parameters = body if parameters is None else parameters
        direction = parameters.string("truncation_direction", "Right", allowed=tuple(KEPT_SIDES))
        truncate = parameters.boolean("truncate", rules.auto_truncate)
        self.request = Request(
            id=context.unique_id,
            model="" if rules.strict else body.string("model", "", cap=256),
            prompts=list(prompts),
            pooling=pooling,
            max_prompt_tokens=context.context_length or None if truncate else None,
            kept_side=KEPT_SIDES[direction],
        )
        self._context = context
        self._characters = sum(map(_count_characters, prompts))
        self._tokens = 0
        self._vectors: dict[int, PromptVector] = {}

    def check_model(self, context: RequestContext) -> None:
        """Check that the model answers such requests. Raises UnfitModel."""

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the numbers of these events by prompt."""
        for event in events:
            if isinstance(event, PromptVector):
                self._vectors[event.prompt] = event

    def render_body(self, usage: Usage) -> bytes:
        """Return the answer as JSON."""
        self._tokens = usage.prompt_tokens
        return self.render_vectors([self._vectors[index] for index in range(len(self._vectors))])

    def render_vectors(self, answers: list[PromptVector]) -> bytes:
        """Return the answer, given the numbers of all prompts in their order."""
        raise NotImplementedError

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the headers that tell how large the request was, and where its time went."""
        return tei_answer_headers(self._context, timings, self._characters, self._tokens)
