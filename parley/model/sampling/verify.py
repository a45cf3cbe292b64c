"""Verifies draft tokens: accepts those that would have been drawn without drafts.

The draw at a position is a function of its logits, the seed, the position and the tokens before it. So every position
is drawn exactly as it would be alone, and a row's draws count up to and including the first that differs from its
draft. The tokens are those of a run without drafts, whatever the drafts are: only the number of steps differs.

For a slot without state, all positions are drawn at once. If logits processors depend on the tokens so far, a row is
drawn one position at a time, and its sequence temporarily holds the drawn tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from parley.core.sequence import Row, Sampled
from parley.model.sampling.sampler import Sampler

BROKEN = "The model produced logits that are not numbers."


@dataclass(eq=False, slots=True)
class Trial:
    """A row that samples, with or without drafts; its positions start at row ``first`` of the logits."""

    row: Row
    result: Sampled
    first: int
    position: int = field(init=False)  # output position of the first token to draw
    right: bool = True  # all drafts so far were accepted

    def __post_init__(self) -> None:
        self.position = self.row.sequence.generated


def verify(
    sampler: Sampler, logits: torch.Tensor, likely: torch.Tensor, sound: list[bool], trials: list[Trial]
) -> None:
    """Draw for each trial, into its result, until a draft is rejected.

    logits float32 [P, vocab]; ``argmax_ids`` int64 [P]: the ids of the largest logits; ``finite``: for each row,
    whether its largest logit is a finite number. A trial draws nothing from a row where it is not; if that is its
    first row, it gets ``error``. The sampler must be ready for the first positions.
    """
    left = trials
    try:
        while left:
            left = _round(sampler, logits, likely, sound, left)
    finally:
        for trial in trials:  # the loop appends the tokens itself
            sequence = trial.row.sequence
            del sequence.tokens[sequence.prompt_len + trial.position :]


def _round(
    sampler: Sampler, logits: torch.Tensor, likely: torch.Tensor, sound: list[bool], trials: list[Trial]
) -> list[Trial]:
    """Draw the next position of each trial, or all of its positions. Return the trials that continue."""
    asked: list[tuple[Trial, int]] = []
    for trial in trials:
        begin = trial.first + len(trial.result.tokens)
        end = begin + 1 if sampler.stateful(trial.row.sequence.slot) else trial.first + 1 + len(trial.row.drafts)
        good = next((at for at in range(begin, end) if not sound[at]), end)
        if good == trial.first:
            trial.result.error = BROKEN
        asked += [(trial, at) for at in range(begin, good)]
    if not asked:
        return []
    which = torch.tensor([at for _, at in asked], device=logits.device)
    slots = [trial.row.sequence.slot for trial, _ in asked]
    positions = [trial.position + at - trial.first for trial, at in asked]
    draws = sampler.sample(logits[which], slots, positions, likely[which], spent=True)
    going: list[Trial] = []
    for (trial, at), (token, score) in zip(asked, draws, strict=True):
        if not trial.right:
            continue
        slot = trial.row.sequence.slot
        if token is None:
            trial.right = False
            if at == trial.first:
                trial.result.error = sampler.ready([slot])[0]
            continue
        trial.result.tokens.append(token)
        if score is not None:
            trial.result.scores.append(score)
        number, drafts = at - trial.first, trial.row.drafts
        trial.right = number < len(drafts) and drafts[number] == token
        if sampler.stateful(slot):
            trial.result.end = sampler.end(slot)
            if trial.right and trial.result.end is None:
                trial.row.sequence.tokens.append(token)
                going.append(trial)
    problems = sampler.ready([trial.row.sequence.slot for trial in going])
    # A trial with a problem fails at its next step, where the problem shows up again.
    return [trial for trial, problem in zip(going, problems, strict=True) if problem is None]
