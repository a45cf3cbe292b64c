"""Step counters: totals since the start, size and time of the last step, and the cost of each token."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

from parley.core.sequence import Sequence, Step, StepRow
from parley.types import EngineRequest, MediaKind, PrefillChunk, TokenCost


class StepCounters:
    """Counters of steps and tokens.

    * Since the start: ``steps``, ``prompt_tokens``, ``generated_tokens`` and ``media_items`` (items of prompts by
      kind).
    * Of the last step: ``step_tokens``, ``step_rows``, ``step_seconds``, and ``step_prompt_tokens``: the tokens in rows
      of more than one token.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.media_items: Counter[MediaKind] = Counter()
        self._step_ended_at = 0.0  # end of the last step, time.perf_counter
        self.reset_step()

    def record_prompt(self, request: EngineRequest) -> None:
        """Count the prompt of a request that starts."""
        self.prompt_tokens += len(request.token_ids)
        self.media_items.update(item.kind for item in request.media)

    def reset_step(self) -> None:
        """Reset the numbers of the last step, because a new step begins."""
        self.step_tokens = self.step_prompt_tokens = self.step_rows = 0
        self.step_seconds = 0.0

    def record_step(self, step: Step, started_at: float) -> None:
        """Record a step that has just been computed; ``started_at``: its start, time.perf_counter."""
        self._step_ended_at = perf_counter()
        self.step_seconds = self._step_ended_at - started_at
        self.step_tokens, self.step_rows = step.total_tokens, len(step.rows)
        self.step_prompt_tokens = sum(row.count for row in step.rows if row.count > 1)

    def prefill_chunk(self, row: StepRow) -> PrefillChunk:
        """Return the last step as a chunk of the prefill of a row's sequence."""
        start_seconds = self._step_ended_at - self.step_seconds - row.sequence.queued_at
        return PrefillChunk(row.count, start_seconds, self.step_seconds)

    def token_costs(self, sequence: Sequence, count: int) -> list[TokenCost]:
        """Return the cost of each of the sequence's ``count`` newest tokens, an equal share of their step; restart the
        clock for its next token."""
        wait_seconds = max(0.0, self._step_ended_at - sequence.last_token_at - sequence.compute_seconds)
        cost = TokenCost(self.step_rows, wait_seconds / count, sequence.compute_seconds / count, count)
        sequence.last_token_at, sequence.compute_seconds = self._step_ended_at, 0.0
        return [cost] * count
