"""Chunk planner: how many tokens of a prompt the next step computes (chunked prefill).

A prompt is cut into chunks that end at page ends, so that a step takes about the time that the step budget allows. The
prefill share decides whether a step may compute prompts at all whose sequences have no output yet.

In some models the tokens of a media item attend to later tokens of the same item. A chunk must not end within such an
item: it ends at the item's start, or includes the whole item, even beyond the budget. A chunk may start within such an
item, after cached pages, because these pages were computed together with the whole item.

This module knows nothing of the order of sequences, of slots or of the allocation of pages.
"""

from __future__ import annotations

from parley.core.media.placeholders import end_outside_items
from parley.core.prefill_share import PrefillShare
from parley.core.sequence import PAGE_SIZE, Sequence
from parley.core.step_budget import StepBudget


class ChunkPlanner:
    """Cuts prompts into chunks, by ``step_budget`` and ``prefill_share``.

    For each step: ``begin_step``, then ``charge_decodes``, then ``chunk_size`` and ``charge_chunk`` for each chunk.
    """

    def __init__(self, step_budget: StepBudget, prefill_share: PrefillShare):
        self._step_budget = step_budget
        self._prefill_share = prefill_share
        self._has_chunk = False  # the current step has a chunk

    def begin_step(self, decode_count: int) -> None:
        """Begin a step with ``decode_count`` sequences that decode."""
        self._has_chunk = False
        self._prefill_share.begin_step(decode_count)

    def charge_decodes(self, token_count: int) -> None:
        """Charge the budget with the tokens of the step's decodes, drafts included."""
        self._step_budget.begin_step(token_count)

    def may_compute(self, sequence: Sequence) -> bool:
        """Whether the prefill share lets the sequence have a row in this step."""
        return self._prefill_share.allows_prefill or sequence.output_length > 0

    def chunk_size(self, sequence: Sequence, cached_count: int) -> int:
        """Return how many tokens of the sequence this step should compute after ``cached_count`` more cached pages: all
        of the rest, a number that ends at a page end, or 0.

        If the budget has less than a page left, the chunk is not worth a row, unless it is the step's only one.
        """
        if not self.may_compute(sequence):
            return 0
        start, total = sequence.computed + cached_count * PAGE_SIZE, len(sequence.tokens)
        budget = self._step_budget.tokens_left(start)
        if self._has_chunk and budget < min(PAGE_SIZE, total - start):
            return 0
        end = min(total, start + budget)
        boundary = end // PAGE_SIZE * PAGE_SIZE
        end = boundary if start < boundary and end < total else end
        end = end_outside_items(sequence.request.media, sequence.prompt_len, start, end)
        return 0 if self._has_chunk and end - start > budget else end - start

    def charge_chunk(self, sequence: Sequence, count: int) -> None:
        """Charge the budget with the next ``count`` tokens of the sequence, and the prefill share if it has no output
        yet."""
        self._has_chunk = True
        self._step_budget.spend_tokens(sequence.computed, count)
        if not sequence.output_length:
            self._prefill_share.charge_prefill(count)
