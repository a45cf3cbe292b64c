"""Checks that the engine can do all that a request asks for; ``ModelInfo`` says what it can do.

To add a feature, name it in ``types.EngineFeature`` and say in ``FEATURE_FIELDS`` which requests use it.
"""

from __future__ import annotations

from collections.abc import Callable

from parley.errors import Incapable, Invalid, Unsupported, excerpt
from parley.text.grammar.answer_grammar import allows_any_text, callable_tools
from parley.types import Chat, EngineFeature, ModelInfo, Request, Sampling

FieldReader = Callable[
    [Request], str | None
]  # returns the field by which a request uses a feature, None if it does not

DEFAULT_SAMPLING = Sampling()


def check_engine_features(request: Request, info: ModelInfo) -> None:
    """Check that the model and its engine can do what the request asks for. Raises Incapable, Invalid, Unsupported."""
    if request.pooling is None:
        if not info.generates:
            message = f"The model {excerpt(request.model)} makes embeddings only and does not generate text."
            raise Incapable(message, field="model")
    elif not info.dimensions:
        raise Incapable(f"The model {excerpt(request.model)} does not make embeddings.", field="model")
    elif request.pooling.dimensions is not None and request.pooling.dimensions > info.dimensions:
        raise Invalid(
            f"Invalid 'dimensions': the embeddings of this model have {info.dimensions}, but "
            f"{request.pooling.dimensions} were requested.",
            field="dimensions",
        )
    for feature, read_field in FEATURE_FIELDS.items():
        if feature not in info.features and (field := read_field(request)) is not None:
            raise Unsupported(f"'{field}' is not available with the engine {info.engine}.", field=field)


def _sampling_field(member: str, field: str) -> FieldReader:
    """Return a reader that reports ``field`` if this member of ``Sampling`` has an effect."""
    return lambda request: field if getattr(request.sampling, member) != getattr(DEFAULT_SAMPLING, member) else None


def _banned_tokens_field(request: Request) -> str | None:
    return "bad_words" if request.banned_words or request.sampling.banned else None


def _beam_search_field(request: Request) -> str | None:
    beam_options = request.beam
    return beam_options.field if beam_options is not None and beam_options.width > 1 else None  # 1: greedy decoding


def _logprobs_field(request: Request) -> str | None:
    if request.output_options.logprobs is not None:
        return "logprobs"
    return "best_of" if request.best_of is not None else None  # the ranking needs log-probabilities


def _grammar_field(request: Request) -> str | None:
    """Return the field that restricts the answer: a format, or tools whose calls must follow a grammar."""
    if request.grammar is not None:
        return request.grammar.field
    for prompt in request.prompts:
        if isinstance(prompt, Chat) and callable_tools(prompt) and not allows_any_text(prompt):
            return "tool_choice" if prompt.tool_choice == "required" else "tools"
    return None


FEATURE_FIELDS: dict[EngineFeature, FieldReader] = {
    "top_k": _sampling_field("top_k", "top_k"),
    "min_p": _sampling_field("min_p", "min_p"),
    "typical_p": _sampling_field("typical_p", "typical_p"),
    "repetition_penalty": _sampling_field("repetition_penalty", "repetition_penalty"),
    "presence_penalty": _sampling_field("presence_penalty", "presence_penalty"),
    "frequency_penalty": _sampling_field("frequency_penalty", "frequency_penalty"),
    "logit_bias": _sampling_field("logit_bias", "logit_bias"),
    "allowed_tokens": _sampling_field("allowed", "allowed_token_ids"),
    "banned_tokens": _banned_tokens_field,
    "no_repeat_ngram": _sampling_field("no_repeat_ngram", "no_repeat_ngram_size"),
    "watermark": _sampling_field("watermark", "watermark"),
    "min_tokens": lambda request: "min_tokens" if request.stop_conditions.min_tokens else None,
    "beam_search": _beam_search_field,
    "logprobs": _logprobs_field,
    "named_logprobs": lambda request: "logprob_token_ids" if request.output_options.logprob_ids else None,
    "prompt_logprobs": lambda request: (
        "prompt_logprobs" if request.output_options.prompt_logprobs is not None else None
    ),
    "grammar": _grammar_field,
    "thinking_budget": lambda request: "thinking_budget" if request.thinking_budget is not None else None,
    "adapters": lambda request: "adapter" if request.adapter is not None else None,
    "cache_salt": lambda request: "cache_salt" if request.cache_salt else None,
}
