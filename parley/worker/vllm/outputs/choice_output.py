"""Outputs of choices with the attributes of vLLM's ``EngineCoreOutput``, made from outputs of its public interfaces.

``HostLoop`` reads steps of the engine core. Where parley gets no steps but whole answers and streams, the same loop
reads these stand-ins: from ``AsyncLLM.generate`` (``generate_client.py``) and from servers (``worker/attached/``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from parley.types import EngineRequest
from parley.worker.vllm.outputs.output_reader import FINISH_REASONS, LOWEST_LOGPROB, SCHEDULED

FINISH_NUMBERS = dict(zip(("stop", "length", "abort", "error", "repetition"), FINISH_REASONS, strict=True))


class ListedToken(msgspec.Struct, gc=False):
    """A token and its log-probability, None for an infinite one. ``rank`` is 1 for the most likely token."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None


class Rows(list[Any]):
    """Rows of numbers that may differ in length; stands in for an array."""

    def tolist(self) -> list[Any]:
        """Return the rows."""
        return self


class TensorStandIn(list[float]):
    """The numbers of a vector; stands in for a tensor."""

    def float(self) -> TensorStandIn:
        """Return the vector: its numbers are floats."""
        return self

    def flatten(self) -> TensorStandIn:
        """Return the vector: it has one dimension."""
        return self

    def tolist(self) -> TensorStandIn:
        """Return the vector, which is a list."""
        return self


class ScoreRows(NamedTuple):
    """Scores of tokens: column 0 is the token itself, and the alternatives follow."""

    token_ids: Rows
    logprobs: Rows
    ranks: Rows


class PrefillStats(NamedTuple):
    """How much of the prompt was computed, and how much was cached, as far as known.

    ``is_late``: they come with the last output, because they were not known before.
    """

    num_computed_tokens: int
    num_cached_tokens: int = 0
    is_late: bool = False


class ChoiceEvent(NamedTuple):
    """Something that happened to a choice at a time of time.monotonic."""

    type: int
    timestamp: float


class ChoiceOutput(msgspec.Struct):
    """New tokens of a choice, with the attributes of ``EngineCoreOutput``."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: int | None = None
    new_logprobs: ScoreRows | None = None
    new_prompt_logprobs_tensors: ScoreRows | None = None
    prefill_stats: PrefillStats | None = None
    events: tuple[ChoiceEvent, ...] = ()
    pooling_output: Any = None
    kv_transfer_params: dict[str, Any] | None = None


class VLLMStep(msgspec.Struct):
    """Outputs that arrived together, with the attributes of ``EngineCoreOutputs``."""

    outputs: list[ChoiceOutput]
    timestamp: float
    engine_index: int = 0
    scheduler_stats: None = None


def finish_number(word: str | None) -> int | None:
    """Return the number of a finish reason; an unknown one is an error."""
    return None if word is None else FINISH_NUMBERS.get(word, FINISH_NUMBERS["error"])


def note_start(output: ChoiceOutput, request: EngineRequest, sent_at: float, cached_tokens: int = 0) -> None:
    """Add to the first output of a choice the facts that vLLM's engine core reports there."""
    output.prefill_stats = PrefillStats(len(request.token_ids) - cached_tokens, cached_tokens)
    output.events = (ChoiceEvent(SCHEDULED, sent_at),)


def collect_scores(tokens: Iterable[tuple[ListedToken, list[ListedToken]]], named_ids: list[int]) -> ScoreRows:
    """Return the scores of drawn tokens, each with those that are listed with it, itself among them.

    ``named_ids``: the alternatives; if empty, the most likely tokens.
    """
    scores = ScoreRows(Rows(), Rows(), Rows())
    for token, listed in tokens:
        alternatives = _by_rank(listed)
        if named_ids:
            logprobs = {entry.token_id: entry.logprob for entry in listed}
            alternatives = [ListedToken(token_id, logprobs.get(token_id)) for token_id in named_ids]
        entries = [token, *alternatives]
        scores.token_ids.append([entry.token_id for entry in entries])
        scores.logprobs.append([LOWEST_LOGPROB if entry.logprob is None else entry.logprob for entry in entries])
        scores.ranks.append(token.rank or 0)
    return scores


def collect_prompt_scores(positions: Iterable[list[ListedToken] | None], token_ids: list[int]) -> ScoreRows:
    """Return the scores of a prompt's tokens; ``positions`` lists alternatives to each, and is None for the first."""
    scored = [
        (
            next((entry for entry in listed if entry.token_id == token_id), ListedToken(token_id)),
            listed,
        )
        for token_id, listed in zip(token_ids, positions, strict=False)
        if listed is not None
    ]
    return collect_scores(scored, [])


def _by_rank(listed: list[ListedToken]) -> list[ListedToken]:
    """Return the most likely tokens, best first. A drawn token that is not among them stands before them in the list;
    so at most one token has a rank beyond their number."""
    ranked = sorted(listed, key=lambda entry: entry.rank or len(listed) + 1)
    return ranked if len(ranked) < 2 or (ranked[-1].rank or 0) <= len(ranked) else ranked[:-1]
