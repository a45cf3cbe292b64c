"""Translates a request for the engine into vLLM's parameters for one of its choices.

The values are plain data. Requests that vLLM cannot follow have been refused in the API process (``capabilities.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parley.types import EngineRequest
from parley.worker.vllm.page_moves import KEEP_PAGES
from parley.worker.vllm.requests.continuation import Continuation, prior_tokens
from parley.worker.vllm.requests.extra_options import extra_sampling_fields
from parley.worker.vllm.requests.lark_text import decompile_lark

SEED_RANGE = 1 << 64
UNSEEDED = -1  # vLLM reads this seed as "none"
STAND_IN_SEED = -(1 << 63)


@dataclass(frozen=True)
class ChoiceFields:
    """A choice for vLLM. ``sampling``: members of ``SamplingParams``; ``lark``: its grammar, "" for none.

    ``banned``: token sequences, which no public member takes. ``page_move``: for vLLM's connector, None for nothing.
    """

    token_ids: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    lark: str = ""
    banned: list[list[int]] = field(default_factory=list)
    page_move: dict[str, Any] | None = None


def translate_choice(request: EngineRequest, index: int, continuation: Continuation) -> ChoiceFields:
    """Return choice ``index`` of a request that generates."""
    sampling, prompted = request.sampling, prior_tokens(request, index)[: continuation.prompted_count]
    # A choice without tokens computes one, which is dropped: vLLM draws at least one.
    max_tokens = max(1, request.max_tokens - len(prompted))
    fields = {
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, max(0, request.min_tokens - len(prompted))),
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
    fields |= extra_sampling_fields(
        request, continuation.redrawn_tokens(request, index) if continuation.is_forced else []
    )
    return ChoiceFields(
        request.token_ids + prompted,
        fields | _logprob_fields(request, index),
        decompile_lark(request.grammar) if request.grammar else "",
        sampling.banned,
        _page_move(request, index, continuation),
    )


def translate_pooling(request: EngineRequest) -> dict[str, Any]:
    """Return the members of ``PoolingParams`` of a request for a vector.

    The host cuts vectors itself: vLLM does so only for models that say that they were trained for it.
    """
    assert request.pooling is not None
    return {"task": "embed", "use_activation": request.pooling.normalize}


def wrap_seed(seed: int) -> int:
    """Return a seed as a signed 64-bit number. Different seeds below 2**64 stay different, except one pair."""
    wrapped = (seed + SEED_RANGE // 2) % SEED_RANGE - SEED_RANGE // 2
    return STAND_IN_SEED if wrapped == UNSEEDED else wrapped


def scores_prompt(request: EngineRequest, index: int) -> bool:
    """Whether this choice reports the log-probabilities of the prompt: the first one does, unless it continues."""
    return request.prompt_logprobs >= 0 and index == 0 and not prior_tokens(request, index)


def _logprob_fields(request: EngineRequest, index: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.logprob_ids:
        fields = {"logprob_token_ids": list(request.logprob_ids), "logprobs": len(request.logprob_ids)}
    elif request.logprobs >= 0:
        fields["logprobs"] = request.logprobs
    if scores_prompt(request, index):
        fields["prompt_logprobs"] = request.prompt_logprobs
    return fields


def _page_move(request: EngineRequest, index: int, continuation: Continuation) -> dict[str, Any] | None:
    """Return the move of a choice's pages by vLLM's connector. Those of tokens that are drawn again stay here."""
    if continuation.page_move is not None:
        return continuation.page_move
    is_kept = request.lease and index == 0 and not continuation.redrawn_tokens(request, index)
    return dict(KEEP_PAGES) if is_kept else None
