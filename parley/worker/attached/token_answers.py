"""Translates requests for ``/inference/v1/generate`` and ``/pooling``, and their answers, to and from the terms of
vLLM's engine.

Their forms are those of ``vllm/entrypoints/scale_out/token_in_token_out`` and ``vllm/entrypoints/pooling/pooling``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from parley.types import BATCH_PRIORITY, EngineRequest
from parley.worker.vllm.outputs.choice_output import (
    ChoiceOutput,
    ListedToken,
    TensorStandIn,
    collect_prompt_scores,
    collect_scores,
    finish_number,
)
from parley.worker.vllm.requests.continuation import Continuation
from parley.worker.vllm.requests.sampling_fields import scores_prompt, translate_choice, translate_pooling


class ScoredToken(ListedToken, gc=False):
    """A sampled token. ``top_logprobs`` lists it again, and then the alternatives."""

    top_logprobs: list[ListedToken] = msgspec.field(default_factory=list)


class PromptToken(msgspec.Struct, gc=False):
    """The log-probability of a token of the prompt, or of an alternative to it."""

    logprob: float | None = None
    rank: int | None = None


class TokenLogprobs(msgspec.Struct):
    """The scores of a choice's new tokens."""

    content: list[ScoredToken] | None = None


class ChoiceChunk(msgspec.Struct):
    """New tokens of a choice, with the stop token that ended it."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


class ServerError(msgspec.Struct):
    """An error answer of the server."""

    message: str = ""


class PromptDetails(msgspec.Struct):
    """Details of a prompt's tokens."""

    cached_tokens: int | None = None


class ServerUsage(msgspec.Struct):
    """The token counts of a request. Details are present if the server runs with --enable-prompt-tokens-details."""

    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """The cached tokens of the prompt; 0 if the server does not report them."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0


class TokenAnswer(msgspec.Struct):
    """A whole answer, or a chunk of a stream. ``prompt_logprobs``: for each token of the prompt, itself and then
    alternatives by their ids; None for the first token. ``usage`` comes alone, at the end of a stream."""

    choices: list[ChoiceChunk] = []
    prompt_logprobs: list[dict[int, PromptToken] | None] | None = None
    usage: ServerUsage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: ServerError | None = None


class PoolingAnswerVector(msgspec.Struct):
    """A vector in an answer of ``/pooling``."""

    data: list[float]


class PoolingAnswer(msgspec.Struct):
    """The answer of ``/pooling`` for one text."""

    data: list[PoolingAnswerVector]
    usage: ServerUsage | None = None


def write_choice(
    request: EngineRequest, index: int, continuation: Continuation, *, model: str, max_logprobs: int
) -> dict[str, Any]:
    """Return the body of the server's request for one choice. ``max_logprobs``: the most that the server lists."""
    fields = translate_choice(request, index, continuation)
    params: dict[str, Any] = fields.sampling | {"detokenize": False}
    if request.logprob_ids:
        # The sampled token is one entry of the list. An id that is named twice makes room for it.
        params["logprob_token_ids"] = [*request.logprob_ids, request.logprob_ids[0]]
        params["logprobs"] = len(request.logprob_ids) + 1
    elif request.logprobs > 0:
        params["logprobs"] = min(request.logprobs + 1, max_logprobs)
    body: dict[str, Any] = {"model": request.adapter or model, "token_ids": fields.token_ids, "sampling_params": params}
    # Streams report neither scores of the prompt nor the place of its pages.
    body["stream"] = not scores_prompt(request, index) and not request.lease
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if fields.page_move is not None:
        body["kv_transfer_params"] = fields.page_move
    if fields.lark:
        params["structured_outputs"] = {"grammar": fields.lark}
        body["reasoning_ended"] = True  # the grammar covers the reasoning
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if 0 != request.priority < BATCH_PRIORITY:  # a server without priorities refuses all but 0
        body["priority"] = request.priority
    return body


def read_choice_output(choice_id: str, request: EngineRequest, answer: TokenAnswer) -> ChoiceOutput | None:
    """Return the output in an answer to a request for one choice; None if it has nothing new."""
    if not answer.choices:
        return None
    choice = answer.choices[0]
    output = ChoiceOutput(choice_id, choice.token_ids or [], finish_number(choice.finish_reason))
    output.kv_transfer_params = answer.kv_transfer_params
    if choice.logprobs is not None and choice.logprobs.content:
        scored = [(token, token.top_logprobs) for token in choice.logprobs.content]
        output.new_logprobs = collect_scores(scored, request.logprob_ids)
    if answer.prompt_logprobs is not None:
        positions = map(_list_position, answer.prompt_logprobs)
        output.new_prompt_logprobs_tensors = collect_prompt_scores(positions, request.token_ids)
    return output


def write_pooling(request: EngineRequest, *, model: str) -> dict[str, Any]:
    """Return the body of the server's request for a vector."""
    body: dict[str, Any] = {"model": request.adapter or model, "input": request.token_ids, **translate_pooling(request)}
    if 0 != request.priority < BATCH_PRIORITY:  # a server without priorities refuses all but 0
        body["priority"] = request.priority
    return body


def read_vector_answer(choice_id: str, answer: PoolingAnswer) -> ChoiceOutput | None:
    """Return the output of a request for a vector, None if the answer has none."""
    if not answer.data:
        return None
    return ChoiceOutput(choice_id, pooling_output=TensorStandIn(answer.data[0].data))


def _list_position(position: dict[int, PromptToken] | None) -> list[ListedToken] | None:
    if position is None:
        return None
    return [ListedToken(token_id, logprob.logprob, logprob.rank) for token_id, logprob in position.items()]
