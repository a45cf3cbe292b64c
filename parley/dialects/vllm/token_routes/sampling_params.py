"""The sampling parameters of vLLM's engine as JSON, which its routes between tokens and prompts have as one object.

Names and defaults are those of ``SamplingParams`` in ``vllm/sampling_params.py``. A client sets them for
``/inference/v1/generate``; a rendered prompt has those that its request means, without the ones that have defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from parley.dialects import output_constraints, sampling_members
from parley.dialects.fields import Fields
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import (
    MAX_TOKENS,
    read_alternatives,
    read_stop_conditions,
    read_stream_interval,
    unsupported_member_error,
)
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import requests
from parley.dialects.vllm.refusal_wording import parameter_error
from parley.errors import BadRequest, InvalidValue
from parley.types import OutputOptions, Request, SamplingOptions, StopConditions

DEFAULTS: dict[str, Any] = {  # defaults of members, which are left out if they have these values
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "no_repeat_ngram_size": 0,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "stream_interval": 1,  # not the original's default, but the same to it
    "output_text_buffer_length": 0,
}
MIN_TEMPERATURE = 0.01  # a lower one is raised to it, unless it means greedy
DELTA_OUTPUT, FINAL_OUTPUT = 1, 2  # values of ``output_kind``
# Members without an effect here: they change how vLLM represents, caches or copies something.
IGNORED_FLAGS = ("flat_logprobs", "skip_clone", "skip_reading_prefix_cache", "spaces_between_special_tokens")
IGNORED_INTEGERS = ("output_kind", "output_text_buffer_length", "prompt_logprob_start", "routed_experts_prompt_start")
UNSUPPORTED_MEMBERS = {
    "prompt_logprob_token_ids": "Log-probabilities of chosen tokens of the prompt are",
    "trace_decode_token_ids": "Prescribed output tokens are",
}
NO_LISTED_IDS = "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids). Got "
NO_STOP_STRINGS = "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."


def check_sampling_params(params: Fields) -> None:
    """Check the rules for these members that other generating routes do not have. Raises BadRequest."""
    for name in IGNORED_FLAGS:
        params.boolean(name, False)
    for name in IGNORED_INTEGERS:
        params.integer(name, 0)
    for name, subject in UNSUPPORTED_MEMBERS.items():
        if params.array(name, cap=MAX_TOKENS):
            raise unsupported_member_error(params, name, subject)
    params.free_object("extra_args")  # for connectors and processors of the original's engine
    fault = next(_engine_faults(params), None)
    if fault is not None:
        raise fault


def _engine_faults(params: Fields) -> Iterator[BadRequest]:
    yield from requests.drawing_faults(params)
    max_tokens = params.integer("max_tokens", None, 1, MAX_TOKENS)
    yield from requests.token_faults(params, max_tokens)
    if params.has_value("stop") and params.raw_value("stop") and not params.boolean("detokenize", True):
        yield InvalidValue(NO_STOP_STRINGS)


def read_thinking_budget(params: Fields) -> int | None:
    """Read how many tokens of reasoning there may be, None for no limit. Raises BadRequest."""
    budget = params.integer("thinking_token_budget", -1, -1, MAX_TOKENS)
    return None if budget < 0 else budget


def read_engine_sampling(params: Fields) -> SamplingOptions:
    """Read how tokens are drawn. A seed of -1 means none. Raises BadRequest."""
    sampling = sampling_members.read_sampling(params, max_temperature=2)
    return msgspec.structs.replace(sampling, seed=None) if sampling.seed == -1 else sampling


def read_token_stop_conditions(params: Fields, context: RequestContext) -> StopConditions:
    """Read when to stop. Without ``max_tokens``: at the end of the context. Raises BadRequest."""
    max_tokens = params.integer("max_tokens", None, 1, MAX_TOKENS)
    stop_conditions = read_stop_conditions(params, max_tokens, requests.VLLM_RULES)
    return stop_conditions if max_tokens is not None else requests.cap_max_tokens(stop_conditions, context)


def read_output_options(params: Fields, context: RequestContext, stream: bool) -> OutputOptions:
    """Read the options of reports about tokens; tokens are sent at once and not parsed. Raises BadRequest."""
    logprobs = read_alternatives(params, "logprobs", requests.VLLM_RULES, context)
    prompt_logprobs = read_alternatives(params, "prompt_logprobs", requests.VLLM_RULES, context)
    if stream and prompt_logprobs is not None:
        sentence = "`prompt_logprobs` are not available when `stream=True`."
        raise parameter_error(sentence, "prompt_logprobs")
    return OutputOptions(
        logprobs=logprobs,
        logprob_ids=_read_listed_ids(params, logprobs),
        prompt_logprobs=prompt_logprobs,
        skip_special=params.boolean("skip_special_tokens", True),
        ids=True,
        tokens_at_once=True,
        unparsed=True,
        stream_interval=read_stream_interval(params),
    )


def _read_listed_ids(params: Fields, logprobs: int | None) -> list[int]:
    """Read the tokens whose log-probabilities are reported; as in the original, none without ``logprobs``."""
    if logprobs is None or not params.has_value("logprob_token_ids"):
        return []
    ids = vllm_members.read_logprob_ids(params, logprobs, None)
    count = len(params.array("logprob_token_ids", cap=vllm_members.MAX_LOGPROB_IDS))
    if logprobs != count:
        sentence = f"{NO_LISTED_IDS}logprobs={logprobs}, len(logprob_token_ids)={count}."
        raise parameter_error(sentence, "logprob_token_ids", count)
    return ids


def write_sampling_params(request: Request, max_tokens: int) -> dict[str, Any]:
    """Return the members that express the request, in the original's order, without those that have their defaults.

    ``max_tokens``: the largest number of tokens that fit after the prompt.
    """
    options, stop = request.output_options, request.stop_conditions
    members: dict[str, Any] = {
        "n": request.n,
        **_drawing_members(request.sampling),
        "stop": stop.strings,
        "stop_token_ids": stop.ids,
        "ignore_eos": stop.ignore_eos,
        "max_tokens": max_tokens,
        "min_tokens": stop.min_tokens,
        "logprobs": None if options.logprob_ids else options.logprobs,
        "prompt_logprobs": options.prompt_logprobs,
        "logprob_token_ids": options.logprob_ids or None,
        "skip_special_tokens": options.skip_special,
        "include_stop_str_in_output": stop.include_in_output,
        "output_kind": DELTA_OUTPUT if request.stream else FINAL_OUTPUT,
        "stream_interval": options.stream_interval,
        "skip_clone": True,
        "output_text_buffer_length": _held_characters(stop),
        "structured_outputs": _structured_outputs(request),
        "logit_bias": {str(token_id): bias for token_id, bias in request.sampling.logit_bias.items()} or None,
        "allowed_token_ids": request.sampling.allowed or None,
        "bad_words": request.banned_words,
        "skip_reading_prefix_cache": options.prompt_logprobs is not None,
        "thinking_token_budget": request.thinking_budget,
        "repetition_detection": _repetition_members(stop),
    }
    return {name: value for name, value in members.items() if value is not None and value != DEFAULTS.get(name)}


def _drawing_members(sampling: SamplingOptions) -> dict[str, Any]:
    """Return the options that draw a token. With greedy sampling, limits of the choice of tokens have no effect.

    ``typical_p`` and ``no_repeat_ngram_size`` are not the original's; the route that continues the prompt has them.
    """
    greedy = sampling.temperature < requests.GREEDY_TEMPERATURE
    return {
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "temperature": _engine_temperature(sampling.temperature),
        "watermarking": sampling.watermark or None,
        "top_p": None if greedy else sampling.top_p,
        "top_k": None if greedy else sampling.top_k,
        "min_p": None if greedy else sampling.min_p,
        "typical_p": None if greedy else sampling.typical_p,
        "no_repeat_ngram_size": sampling.no_repeat_ngram,
        "seed": sampling.seed,
    }


def _engine_temperature(temperature: float) -> float:
    return temperature if temperature == 0 else max(temperature, MIN_TEMPERATURE)


def _held_characters(stop: StopConditions) -> int:
    """Return how many characters the engine holds back because they may begin a stop string."""
    return max(map(len, stop.strings)) - 1 if stop.strings and not stop.include_in_output else 0


def _repetition_members(stop: StopConditions) -> dict[str, int] | None:
    return None if stop.repetition is None else msgspec.structs.asdict(stop.repetition)


def _structured_outputs(request: Request) -> dict[str, Any] | None:
    """Return the constraint on the answer's form; None without one. Structural tags are refused before."""
    grammar = request.grammar
    if grammar is None:
        return None
    kind, value = {"lark": "grammar", "ebnf": "grammar"}.get(grammar.kind, grammar.kind), grammar.value
    if kind == "json" and value == output_constraints.ANY_OBJECT_SCHEMA:
        kind, value = "json_object", True
    elif isinstance(value, bool):
        value = json.dumps(value)
    return {
        **dict.fromkeys(("json", "regex", "choice", "grammar", "json_object")),
        "disable_any_whitespace": grammar.whitespace == "",
        "disable_additional_properties": False,
        "whitespace_pattern": grammar.whitespace or None,
        "structural_tag": None,
        kind: value,
    }
