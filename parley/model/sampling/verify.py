"""Verifies draft tokens: accepts those that would have been drawn without drafts.

The draw at a position is a function of its logits, the seed, the position and the tokens before it. So every position
is drawn exactly as it would be alone, and a row's draws count up to and including the first that differs from its
draft. The tokens are those of a run without drafts, for any drafts: only the number of steps differs.

For a slot without state, all positions are drawn at once. If logits processors depend on the tokens so far, a row is
drawn one position at a time, and its sequence temporarily holds the drawn tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from parley.core.sequence import RowResult, StepRow
from parley.model.sampling.sampler import Sampler

BROKEN_LOGITS = "The model produced logits that are not numbers."


@dataclass(eq=False, slots=True)
class DraftTrial:
    """A row that samples, with or without drafts; its positions start at row ``first`` of the logits."""

    row: StepRow
    result: RowResult
    first: int
    position: int = field(init=False)  # output position of the first token to draw
    accepted: bool = True  # all drafts so far were accepted

    def __post_init__(self) -> None:
        self.position = self.row.sequence.output_length


def verify_drafts(
    sampler: Sampler, logits: torch.Tensor, argmax_ids: torch.Tensor, finite: list[bool], trials: list[DraftTrial]
) -> None:
    """Draw for each trial, into its result, until a draft is rejected.

    logits float32 [P, vocab]; ``argmax_ids`` int64 [P]: the ids of the largest logits; ``finite``: for each row,
    whether its largest logit is a finite number. A trial draws nothing from a row where it is not; if that is its
    first row, it gets ``error``. The sampler must be ready for the first positions.
    """
    remaining = trials
    try:
        while remaining:
            remaining = _verify_round(sampler, logits, argmax_ids, finite, remaining)
    finally:
        for trial in trials:  # the loop appends the tokens itself
            sequence = trial.row.sequence
            del sequence.tokens[sequence.prompt_len + trial.position :]


def _verify_round(
    sampler: Sampler, logits: torch.Tensor, argmax_ids: torch.Tensor, finite: list[bool], trials: list[DraftTrial]
) -> list[DraftTrial]:
    """Draw the next position of each trial, or all of its positions. Return the trials that continue."""
    requests: list[tuple[DraftTrial, int]] = []
    for trial in trials:
        first = trial.first + len(trial.result.tokens)
        end = first + 1 if sampler.is_stateful(trial.row.sequence.slot) else trial.first + 1 + len(trial.row.drafts)
        end_of_finite = next((at for at in range(first, end) if not finite[at]), end)
        if end_of_finite == trial.first:
            trial.result.error = BROKEN_LOGITS
        requests += [(trial, at) for at in range(first, end_of_finite)]
    if not requests:
        return []
    rows = torch.tensor([at for _, at in requests], device=logits.device)
    slots = [trial.row.sequence.slot for trial, _ in requests]
    positions = [trial.position + at - trial.first for trial, at in requests]
    draws = sampler.draw_tokens(logits[rows], slots, positions, argmax_ids[rows], overwrite=True)
    continuing: list[DraftTrial] = []
    for (trial, at), (token, score) in zip(requests, draws, strict=True):
        if not trial.accepted:
            continue
        slot = trial.row.sequence.slot
        if token is None:
            trial.accepted = False
            if at == trial.first:
                trial.result.error = sampler.wait_grammars([slot])[0]
            continue
        trial.result.tokens.append(token)
        if score is not None:
            trial.result.scores.append(score)
        number, drafts = at - trial.first, trial.row.drafts
        trial.accepted = number < len(drafts) and drafts[number] == token
        if sampler.is_stateful(slot):
            trial.result.end = sampler.grammar_end(slot)
            if trial.accepted and trial.result.end is None:
                trial.row.sequence.tokens.append(token)
                continuing.append(trial)
    problems = sampler.wait_grammars([trial.row.sequence.slot for trial in continuing])
    # A trial with a problem fails at its next step, where the problem shows up again.
    return [trial for trial, problem in zip(continuing, problems, strict=True) if problem is None]
