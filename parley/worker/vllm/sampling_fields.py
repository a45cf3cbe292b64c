"""Translates a request for the engine into what vLLM wants to know of one of its choices.

The values are plain data. What vLLM cannot do has been refused in the API process (``capabilities.py``); the exception
is a choice that another instance began.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parley.types import EngineRequest
from parley.worker.vllm.extra_options import extra_sampling_fields
from parley.worker.vllm.lark_text import write_lark

SEED_RANGE = 1 << 64
UNSEEDED = -1  # vLLM reads this seed as "none"
STAND_IN_SEED = -(1 << 63)


@dataclass(frozen=True)
class ChoiceFields:
    """A choice for vLLM. ``sampling``: members of ``SamplingParams``; ``lark``: its grammar, "" for none.

    ``banned``: token sequences, which no public member takes.
    """

    token_ids: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    lark: str = ""
    banned: list[list[int]] = field(default_factory=list)


def explain_refusal(request: EngineRequest, index: int) -> str:
    """Return why vLLM cannot continue a choice that another instance began, "" if it can.

    vLLM sees tokens that were drawn elsewhere as part of the prompt. So it cannot count them as output, and its random
    numbers start anew.
    """
    sampling = request.sampling
    if not _prior_tokens(request, index):
        return ""
    uses = {
        "a temperature": sampling.temperature > 0,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "banned token sequences": bool(sampling.banned),
        "a grammar": bool(request.grammar),
        "a thinking budget": request.reasoning_limit is not None,
    }
    reasons = [name for name, is_used in uses.items() if is_used]
    return f"vLLM cannot continue an answer with {reasons[0]} that another instance began." if reasons else ""


def translate_choice(request: EngineRequest, index: int) -> ChoiceFields:
    """Return choice ``index`` of a request that generates."""
    sampling, prior_tokens = request.sampling, _prior_tokens(request, index)
    # A choice without tokens computes one, which is dropped: vLLM draws at least one.
    max_tokens = max(1, request.max_tokens - len(prior_tokens))
    fields = {
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, max(0, request.min_tokens - len(prior_tokens))),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": wrap_seed(request.seed + index),
        "stop_token_ids": list(request.stop_ids),
        # The end of a grammar is an end mark for vLLM: it must not ignore that one.
        "ignore_eos": not request.grammar,
    }
    if sampling.logit_bias:
        fields["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed:
        fields["allowed_token_ids"] = list(sampling.allowed)
    fields |= extra_sampling_fields(request)
    return ChoiceFields(
        request.token_ids + prior_tokens,
        fields | _logprob_fields(request, index),
        write_lark(request.grammar) if request.grammar else "",
        sampling.banned,
    )


def translate_pooling(request: EngineRequest) -> dict[str, Any]:
    """Return the members of ``PoolingParams`` of a request for a vector.

    The host cuts vectors itself: vLLM does so only for models that say that they were trained for it.
    """
    assert request.pooling is not None
    return {"task": "embed", "use_activation": request.pooling.normalize}


def wrap_seed(seed: int) -> int:
    """Return a seed as a signed 64-bit number. Different seeds below 2**64 stay different, but for one."""
    wrapped = (seed + SEED_RANGE // 2) % SEED_RANGE - SEED_RANGE // 2
    return STAND_IN_SEED if wrapped == UNSEEDED else wrapped


def scores_prompt(request: EngineRequest, index: int) -> bool:
    """Whether this choice reports the log-probabilities of the prompt: the first one does, unless it continues."""
    return request.prompt_logprobs >= 0 and index == 0 and not _prior_tokens(request, index)


def _logprob_fields(request: EngineRequest, index: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.logprob_ids:
        fields = {"logprob_token_ids": list(request.logprob_ids), "logprobs": len(request.logprob_ids)}
    elif request.logprobs >= 0:
        fields["logprobs"] = request.logprobs
    if scores_prompt(request, index):
        fields["prompt_logprobs"] = request.prompt_logprobs
    return fields


def _prior_tokens(request: EngineRequest, index: int) -> list[int]:
    return request.prior_tokens[index] if request.prior_tokens else []
