"""Checks that the engine supports everything in a request; ``ModelInfo`` lists its features and bounds.

To add a feature, name it in ``types.EngineFeature`` and say in ``FEATURE_FIELDS`` which requests use it. To add a
bound, name it in ``types.EngineBound`` and say in ``BOUNDED_VALUES`` which value of a request it limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from typing import NamedTuple

from parley.errors import InvalidValue, TooManyDimensions, UnsuitableModel, Unsupported, excerpt
from parley.text.grammar.answer_grammar import allows_any_text, callable_tools
from parley.types import (
    ChatPrompt,
    EngineBound,
    EngineFeature,
    ModelInfo,
    PoolingOptions,
    PoolingTask,
    Request,
    SamplingOptions,
)

FieldReader = Callable[[Request], str | None]  # returns the name of the field that needs a feature, or None

DEFAULT_SAMPLING = SamplingOptions()
MISSING_TASKS: dict[PoolingTask, str] = {
    "embed": "does not make embeddings",
    "token_embed": "does not make embeddings of single tokens",
    "embed_sparse": "does not make sparse embeddings",
    "classify": "is no classifier",
    "token_classify": "does not tell classes of single tokens",
}


def check_engine_features(request: Request, info: ModelInfo) -> None:
    """Check that the model and its engine support the request. Raises UnsuitableModel, InvalidValue, Unsupported."""
    if request.pooling is None:
        if not info.generates:
            purpose = "is a classifier" if info.labels else "makes embeddings only"
            raise UnsuitableModel(
                f"The model {excerpt(request.model)} {purpose} and does not generate text.", field="model"
            )
    elif request.pooling.task not in info.pooling_tasks:
        raise UnsuitableModel(
            f"The model {excerpt(request.model)} {MISSING_TASKS[request.pooling.task]}.", field="model"
        )
    else:
        _check_dimensions(request.pooling, info)
    if not info.features.issuperset(FEATURE_FIELDS):  # parley's own engine has them all
        check_used_features(request, info)
    if request.pooling is None:
        check_engine_bounds(request, info)


def _check_dimensions(pooling: PoolingOptions, info: ModelInfo) -> None:
    """Check that vectors are as long as requested. Linear layers after the pooling change only those of texts. Raises
    TooManyDimensions."""
    width = (info.token_dimensions if pooling.task == "token_embed" else 0) or info.dimensions
    if pooling.dimensions is not None and pooling.dimensions > width:
        raise TooManyDimensions(
            f"Invalid 'dimensions': the embeddings of this model have {width}, but {pooling.dimensions} were "
            "requested.",
            field="dimensions",
        )


def check_used_features(request: Request, info: ModelInfo) -> None:
    """Check that the engine has every feature that the request uses. Raises Unsupported."""
    for feature, read_field in FEATURE_FIELDS.items():
        if feature not in info.features and (field := read_field(request)) is not None:
            context = FEATURE_CONTEXTS.get(feature, "")
            raise Unsupported(f"'{field}' is not available with the engine {info.engine}{context}.", field=field)


def check_engine_bounds(request: Request, info: ModelInfo) -> None:
    """Check that the engine accepts the values of a request that generates. Raises InvalidValue."""
    for bound, (low, high) in info.bounds.items():
        amount = BOUNDED_VALUES[bound](request)
        if amount is None or low <= amount.value <= high:
            continue
        lower = [f"at least {low:.12g}"] if low > -math.inf else []
        upper = [f"at most {high:.12g}"] if high < math.inf else []
        allowed = f"{'have' if amount.unit else 'be'} {' and '.join(lower + upper)}{amount.unit}"
        message = f"'{amount.field}' must {allowed} with the engine {info.engine}, but got {amount.value:.12g}."
        raise InvalidValue(message, field=amount.field)


class BoundedValue(NamedTuple):
    """A value of a request that may have a bound. ``unit``: of a count, after a space; empty for other values."""

    field: str
    value: float
    unit: str = ""


def _sampling_field(member: str, field: str) -> FieldReader:
    """Return a reader that reports ``field`` if this member of ``SamplingOptions`` has an effect."""
    return lambda request: field if getattr(request.sampling, member) != getattr(DEFAULT_SAMPLING, member) else None


def _banned_tokens_field(request: Request) -> str | None:
    return "bad_words" if request.banned_words or request.sampling.banned else None


def _beam_search_field(request: Request) -> str | None:
    beam_options = request.beam
    return beam_options.field if beam_options is not None and beam_options.width > 1 else None  # 1: greedy decoding


def _beam_edits_field(request: Request) -> str | None:
    """Return the field that excludes or prefers tokens, if the request searches with beams."""
    if _beam_search_field(request) is None:
        return None
    readers = (_grammar_field, _banned_tokens_field, *(FEATURE_FIELDS[feature] for feature in BEAM_EDITS))
    return next((field for read_field in readers if (field := read_field(request)) is not None), None)


def _logprobs_field(request: Request) -> str | None:
    if request.output_options.logprobs is not None:
        return "logprobs"
    return "best_of" if request.best_of is not None else None  # the ranking needs log-probabilities


def _grammar_field(request: Request) -> str | None:
    """Return the field that restricts the answer: a format, or tools whose calls must follow a grammar."""
    if request.grammar is not None:
        return request.grammar.field
    for prompt in request.prompts:
        if isinstance(prompt, ChatPrompt) and callable_tools(prompt) and not allows_any_text(prompt):
            return "tool_choice" if prompt.tool_choice == "required" else "tools"
    return None


def _limited_grammar_field(request: Request) -> str | None:
    return "allowed_token_ids" if request.sampling.allowed and _grammar_field(request) is not None else None


FEATURE_FIELDS: dict[EngineFeature, FieldReader] = {
    "top_k": _sampling_field("top_k", "top_k"),
    "min_p": _sampling_field("min_p", "min_p"),
    "typical_p": _sampling_field("typical_p", "typical_p"),
    "repetition_penalty": _sampling_field("repetition_penalty", "repetition_penalty"),
    "presence_penalty": _sampling_field("presence_penalty", "presence_penalty"),
    "frequency_penalty": _sampling_field("frequency_penalty", "frequency_penalty"),
    "penalty_window": _sampling_field("penalty_window", "repeat_last_n"),
    "logit_bias": _sampling_field("logit_bias", "logit_bias"),
    "allowed_tokens": _sampling_field("allowed", "allowed_token_ids"),
    "banned_tokens": _banned_tokens_field,
    "no_repeat_ngram": _sampling_field("no_repeat_ngram", "no_repeat_ngram_size"),
    "watermark": _sampling_field("watermark", "watermark"),
    "min_tokens": lambda request: "min_tokens" if request.stop_conditions.min_tokens else None,
    "beam_search": _beam_search_field,
    "beam_edits": _beam_edits_field,
    "logprobs": _logprobs_field,
    "named_logprobs": lambda request: "logprob_token_ids" if request.output_options.logprob_ids else None,
    "prompt_logprobs": lambda request: (
        "prompt_logprobs" if request.output_options.prompt_logprobs is not None else None
    ),
    "grammar": _grammar_field,
    "limited_grammar": _limited_grammar_field,
    "thinking_budget": lambda request: "thinking_budget" if request.thinking_budget is not None else None,
    "adapters": lambda request: "adapter" if request.adapter is not None else None,
    "cache_salt": lambda request: "cache_salt" if request.cache_salt else None,
}


# Features that only one kind of request uses: errors add these words to the name of the engine.
FEATURE_CONTEXTS: dict[EngineFeature, str] = {
    "beam_edits": " together with a beam search",
    "limited_grammar": " together with a grammar",
}
# Features of sampling that also change the candidates of a beam search.
BEAM_EDITS: tuple[EngineFeature, ...] = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_tokens",
    "no_repeat_ngram",
    "watermark",
)


BoundReader = Callable[[Request], BoundedValue | None]  # returns None if the request does not use it


def _sampling_value(member: str) -> BoundReader:
    """Return a reader of a number of ``SamplingOptions``, unless it has no effect."""

    def read_value(request: Request) -> BoundedValue | None:
        value = getattr(request.sampling, member)
        return BoundedValue(member, value) if value != getattr(DEFAULT_SAMPLING, member) else None

    return read_value


def _item_count(field: str, read_items: Callable[[Request], Sized], unit: str) -> BoundReader:
    """Return a reader of the length of a list or an object, unless it is empty."""

    def read_length(request: Request) -> BoundedValue | None:
        length = len(read_items(request))
        return BoundedValue(field, length, f" {unit}") if length else None

    return read_length


def _max_tokens(request: Request) -> BoundedValue | None:
    max_tokens = request.stop_conditions.max_tokens
    return BoundedValue("max_tokens", max_tokens) if max_tokens is not None else None


def _choice_count(request: Request) -> BoundedValue:
    return BoundedValue("n" if request.best_of is None else "best_of", request.choices_per_prompt)


def _beam_width(request: Request) -> BoundedValue | None:
    field = _beam_search_field(request)
    return BoundedValue(field, request.beam.width) if field is not None and request.beam is not None else None


def _top_logprobs(request: Request) -> BoundedValue | None:
    alternatives = request.output_options.logprobs
    return BoundedValue("top_logprobs", alternatives) if alternatives is not None else None


def _prompt_logprobs(request: Request) -> BoundedValue | None:
    alternatives = request.output_options.prompt_logprobs
    return BoundedValue("prompt_logprobs", alternatives) if alternatives is not None else None


BOUNDED_VALUES: dict[EngineBound, BoundReader] = {
    "temperature": lambda request: BoundedValue("temperature", request.sampling.temperature),
    "top_k": _sampling_value("top_k"),
    "repetition_penalty": _sampling_value("repetition_penalty"),
    "presence_penalty": _sampling_value("presence_penalty"),
    "frequency_penalty": _sampling_value("frequency_penalty"),
    "logit_bias": _item_count("logit_bias", lambda request: request.sampling.logit_bias, "tokens"),
    "allowed_tokens": _item_count("allowed_token_ids", lambda request: request.sampling.allowed, "tokens"),
    "banned_tokens": _item_count(
        "bad_words", lambda request: request.sampling.banned or request.banned_words, "sequences"
    ),
    "stop_ids": _item_count("stop_ids", lambda request: request.stop_conditions.ids, "tokens"),
    "max_tokens": _max_tokens,
    "n": _choice_count,
    "beam_width": _beam_width,
    "logprobs": _top_logprobs,
    "named_logprobs": _item_count("logprob_token_ids", lambda request: request.output_options.logprob_ids, "tokens"),
    "prompt_logprobs": _prompt_logprobs,
}
