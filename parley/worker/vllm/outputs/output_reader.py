"""Translates vLLM's output of one step for one choice, ``EngineCoreOutput``, into parley's.

This module reads attributes of vLLM's objects and does not import vLLM, so that it can be tested with stand-ins.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from math import hypot
from typing import Any

from parley.core.sequence import Sequence
from parley.types import EngineFinishReason, EngineOutput, TokenCost, TokenScore

QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3  # vLLM's EngineCoreEventType
# vLLM's FinishReason, by number: stop, length, abort, error, repetition.
FINISH_REASONS: dict[int, EngineFinishReason] = {0: "stop", 1: "length", 2: "error", 3: "error", 4: "stop"}
ABORTED = "vLLM ended the request."
NO_TOKEN_FITS = "vLLM ended the request: no token fits its grammar together with its other options."
NORMALIZED_TOLERANCE = 1e-2  # error of a normalized vector's length, which may have been computed in bfloat16
LOWEST_LOGPROB = -9999.0  # stands for -infinity, which JSON lacks, where a grammar forbids a token


def read_output(sequence: Sequence, raw: Any, *, end_ids: Collection[int], cost: TokenCost) -> EngineOutput | None:
    """Return a choice's output of one step; None if it has nothing new. ``end_ids``: the model's end tokens.

    ``cost``: the time of all tokens of the step. Updates the sequence's counters. A malformed output raises any error.
    """
    request = sequence.request
    is_first = sequence.last_token_at == 0.0
    record_progress(sequence, raw)
    finish = None if raw.finish_reason is None else FINISH_REASONS[int(raw.finish_reason)]
    token_ids = list(raw.new_token_ids)
    if raw.pooling_output is None and not token_ids and finish is None:
        return None
    output = EngineOutput(
        sequence.request_id,
        sequence.index,
        finish_reason=finish,
        cached_tokens=sequence.cached_tokens,
        preemptions=sequence.preemptions,
        error=(NO_TOKEN_FITS if request.grammar else ABORTED) if finish == "error" else None,
    )
    if is_first:
        output.queue_seconds = sequence.queue_seconds
        output.prompt_scores = sequence.prompt_scores or None
    if raw.pooling_output is not None:
        dimensions = request.pooling.dimensions if request.pooling is not None else None
        output.vector, output.finish_reason = read_vector(raw.pooling_output, dimensions), "stop"
        return output
    _add_tokens(output, sequence, raw, token_ids, end_ids, cost)
    return output


def _add_tokens(
    output: EngineOutput,
    sequence: Sequence,
    raw: Any,
    token_ids: list[int],
    end_ids: Collection[int],
    cost: TokenCost,
) -> None:
    request = sequence.request
    if not request.max_tokens and output.finish_reason != "error":  # vLLM draws at least one token
        output.finish_reason = "length"
        return
    if output.finish_reason == "stop" and token_ids:
        if token_ids[-1] in request.stop_ids:
            output.stop_id = token_ids[-1]
        elif request.grammar and token_ids[-1] in end_ids:
            token_ids.pop()  # vLLM ends every grammar with an end token, which this request does not want
    count = len(token_ids)
    output.token_ids = token_ids
    if request.logprobs >= 0 and raw.new_logprobs is not None:
        alternatives, are_named = request.logprobs or len(request.logprob_ids), bool(request.logprob_ids)
        output.scores = read_token_scores(raw.new_logprobs, alternatives, are_named=are_named)[:count]
    if request.token_costs and count:
        share = TokenCost(cost.batch_rows, cost.wait_seconds / count, cost.compute_seconds / count, count)
        output.token_costs = [share] * count


def read_token_scores(arrays: Any, alternatives: int, *, are_named: bool = False) -> list[TokenScore]:
    """Return the scores in vLLM's arrays: in each row, column 0 is the token itself, and the alternatives follow.

    Alternatives that a grammar forbids are left out, unless the request has named them: vLLM lists some of them.
    """
    token_ids, logprobs, ranks = (values.tolist() for values in arrays[:3])
    scores: list[TokenScore] = []
    for ids, row, rank in zip(token_ids, logprobs, ranks, strict=True):
        listed = list(zip(ids, row, strict=True))[1 : 1 + alternatives]
        kept_tokens = [(token, value) for token, value in listed if are_named or value > LOWEST_LOGPROB]
        values = [max(value, LOWEST_LOGPROB) for _, value in kept_tokens]
        scores.append(TokenScore(max(row[0], LOWEST_LOGPROB), rank, [token for token, _ in kept_tokens], values))
    return scores


def read_vector(tensor: Any, dimensions: int | None) -> bytes:
    """Return the first ``dimensions`` numbers of a vector (None: all) as float32, little endian.

    If the whole vector has length 1, so has the part.
    """
    numbers = tensor.float().flatten().tolist()
    if dimensions is not None and dimensions < len(numbers):
        is_normalized = abs(hypot(*numbers) - 1) < NORMALIZED_TOLERANCE
        numbers = numbers[:dimensions]
        length = hypot(*numbers) if is_normalized else 1.0
        numbers = [number / (length or 1.0) for number in numbers]
    return struct.pack(f"<{len(numbers)}f", *numbers)


def record_progress(sequence: Sequence, raw: Any) -> None:
    """Record in the sequence vLLM's report about the prompt, its start and its preemptions.

    The times are those of time.monotonic, which all processes of a machine share.
    """
    stats = raw.prefill_stats
    if stats is not None and (sequence.last_token_at == 0.0 or getattr(stats, "is_late", False)):
        sequence.cached_tokens = stats.num_cached_tokens
    if raw.new_prompt_logprobs_tensors is not None:
        sequence.prompt_scores += read_token_scores(raw.new_prompt_logprobs_tensors, sequence.request.prompt_logprobs)
    for event in raw.events or ():
        kind = int(event.type)
        if kind == SCHEDULED and not sequence.queue_seconds:
            sequence.queue_seconds = max(0.0, event.timestamp - sequence.queued_at)
        sequence.preemptions += kind == PREEMPTED
