"""Ways to continue a choice that another instance began, and to use the KV pages of that instance.

vLLM's requests have no field for tokens that were sampled elsewhere. Given as part of the prompt, they do not count as
output: penalties ignore them, and a grammar and the random numbers start again after them. So where that matters, vLLM
samples them again. It samples the same tokens, because a choice depends on its seed; rarely, rounding decides between
two tokens, and then the next way is tried.

The pages of another instance, which choice 0 fetches, do not include the last token of choice 0, which that instance
sampled. So this token is sampled again as well; vLLM computes the last token of a prompt in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parley.types import EngineRequest
from parley.worker.vllm.page_moves import read_transfer

DREW_ANOTHER = "vLLM drew another token than the instance that began the answer."


@dataclass(frozen=True)
class Continuation:
    """A way to continue a choice. The first ``prompted_count`` of its prior tokens are given as part of the prompt.

    The others are drawn again; with ``is_forced``, all other tokens are excluded. ``page_move``: vLLM's dictionary of
    the pages that are fetched, None for none.
    """

    prompted_count: int = 0
    is_forced: bool = False
    page_move: dict[str, Any] | None = None

    def redrawn_tokens(self, request: EngineRequest, index: int) -> list[int]:
        """Return the tokens that the choice must draw first."""
        return prior_tokens(request, index)[self.prompted_count :]


def plan_continuations(request: EngineRequest, index: int, *, can_force: bool = False) -> list[Continuation]:
    """Return the ways to compute a choice, the best first; the next one is used if other tokens than the known ones are
    drawn.

    ``can_force``: tokens can be forced.
    """
    prior = prior_tokens(request, index)
    transfers = []
    if request.transfer and index == 0 and (page_move := read_transfer(request.transfer)) is not None:
        transfers = [Continuation(max(0, len(prior) - 1), page_move=page_move)]
    if not prior:
        return transfers or [Continuation()]
    sampling = request.sampling
    penalizes_output = sampling.presence_penalty or sampling.frequency_penalty
    counts_output = bool(
        (penalizes_output and not sampling.penalty_window)  # a window does not tell prompt from output
        or sampling.banned
        or request.grammar
        or request.reasoning_limit
    )
    if not counts_output and not sampling.temperature:
        return [*transfers, Continuation(len(prior))]
    continuations = [continuation for continuation in transfers if not continuation.prompted_count]
    if not can_force:
        continuations = continuations or [Continuation()]
    else:
        continuations.append(Continuation(is_forced=True))
    if not counts_output:  # other random numbers are better than no answer
        continuations.append(Continuation(len(prior)))
    return continuations


def prior_tokens(request: EngineRequest, index: int) -> list[int]:
    """Return the tokens of a choice that another instance drew."""
    return request.prior_tokens[index] if request.prior_tokens else []
