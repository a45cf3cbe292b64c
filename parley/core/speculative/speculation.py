"""Speculative decoding: decides how many tokens are drafted for each sequence, and counts the accepted ones.

A *draft* is a guess at the next token of a decode, or at later ones. Drafts are computed in the decode's row, and the
tokens after right drafts are sampled in the same step (``StepRow.drafts``). A step of few rows is bound by reading the
weights from memory, so additional rows are nearly free, and every right draft saves a step. In a step of many rows each
draft costs its share.

So a draft is computed only if the steps that it is expected to save are worth more than its row. The costs are learnt
from the times of decode steps; the chance that a sequence's next draft is right is learnt from its last drafts. Of all
drafts, a step computes the most probable ones, as many as maximize tokens per second. A sequence whose drafts are wrong
gets none for a while: twice as long each time, and longer the more sequences run, since all wait for its rows.

Drafts never change a result, so they may depend on time. The guesses come from a ``DraftProposer``; this module knows
neither texts nor models.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from math import log as ln
from time import perf_counter

from parley.core.sequence import DraftProposer, Sequence, Step, StepRow

log = logging.getLogger("parley.engine")

MAX_STEP_DRAFTS = 256  # drafts in a step: bounds the logits held at a time
FIRST_LENGTH = 7  # drafts at a time at first; whenever all of the allowed number were right, the limit is doubled
INITIAL_RATE = 0.6  # initial chance of a first draft being right
SEQUENCE_DECAY = 0.7  # weight of a sequence's history after one more draft
GLOBAL_DECAY = 0.97  # the same for the history of all sequences, which is the start value of new ones
RETRY_CHANCE = 0.5  # assumed chance of the first draft after a pause; without it no pause would end
MAX_PAUSE_EXPONENT = 5  # a pause lasts at most 2 to this power tokens, times the number of sequences
MAX_PRICE = 0.9  # price above which even a good draft is not worth it
DOUBLING_ROWS = 24  # this many rows double a step's time, until it is measured
PRICE_ROWS = 4  # the price of one row is averaged over this many rows
FASTER_WEIGHT, SLOWER_WEIGHT = 0.5, 0.1  # weight of a step that was faster or slower than the average so far
OUTLIER_FACTOR = 2  # times the average duration: slower steps had another cause, and count as this long


@dataclass(slots=True)
class DraftCounts:
    """Counts since the start: ``rows`` with drafts, draft ``tokens``, and how many were right at position 0, 1 …"""

    rows: int = 0
    tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DraftHistory:
    """Draft history of one sequence. ``rate``: chance that a draft is right if those before it are.

    That rate is learnt mostly from short drafts, and matches end somewhere. So the length limit grows only after drafts
    that were right to their end.
    """

    rate: float
    length_limit: int = FIRST_LENGTH  # most drafts at a time
    miss_count: int = 0  # consecutive
    resume_at: int = 0  # output tokens before it drafts again

    def draft_chances(self, count: int) -> list[float]:
        """Return the chance of each of ``count`` drafts being right. The first one after a pause gets RETRY_CHANCE."""
        chances = [self.rate**number for number in range(1, count + 1)]
        if chances and self.miss_count:
            chances[0] = max(RETRY_CHANCE, chances[0])
        return chances


class Speculation:
    """Drafts by ``proposer``, at most ``max_drafts`` tokens for each sequence, in a vocabulary of ``vocab_size`` ids.

    ``always`` False: only while there are requests with a predicted output.
    """

    def __init__(self, proposer: DraftProposer, max_drafts: int, vocab_size: int, always: bool = True):
        self.proposer = proposer
        self.max_drafts = max_drafts
        self.vocab_size = vocab_size
        self.draft_counts = DraftCounts(accepted_per_position=[0] * max_drafts)
        self.costs = DecodeCosts()
        self._always = always
        self._predicted_requests: set[str] = set()  # ids of requests with a predicted output
        self._histories: dict[Sequence, DraftHistory] = {}
        self._average_rate = INITIAL_RATE  # average rate of all sequences
        self._row_price = 0.0
        self._decode_rows = 1  # decodes in the current step
        self._propose_seconds = 0.0  # seconds spent on proposing drafts for the current step
        self._is_off = False

    @property
    def is_active(self) -> bool:
        """Whether drafts should be proposed at all."""
        return self._always or bool(self._predicted_requests)

    @property
    def history_count(self) -> int:
        """Number of sequences whose drafts are counted."""
        return len(self._histories)

    def add_prediction(self, request_id: str) -> None:
        """Register a request with a predicted output."""
        self._predicted_requests.add(request_id)

    def remove_prediction(self, request_id: str) -> None:
        """Forget a request that has ended. Unknown ids are ignored."""
        self._predicted_requests.discard(request_id)

    def draft_decodes(self, decodes: list[Sequence], *, has_prefill: bool) -> dict[Sequence, tuple[int, ...]]:
        """Return drafts for some of the sequences, which have one uncomputed token each. ``has_prefill``: the step also
        computes prompts; additional rows would prolong it, so there are no drafts."""
        self._propose_seconds = 0.0
        if has_prefill or self._is_off or not decodes:
            return {}
        self._decode_rows = len(decodes)
        self._row_price = self.costs.row_price(self._decode_rows)
        draft_limits: list[tuple[Sequence, int]] = []
        budget = MAX_STEP_DRAFTS
        for sequence in decodes:
            # The first output token is sampled with the prompt; a draft of the last one would be of no use.
            length = min(self.draft_length(sequence), sequence.output_limit - sequence.output_length - 1, budget)
            if length > 0 and sequence.output_length and sequence.request.beam is None:
                draft_limits.append((sequence, length))
                budget -= length
        if not draft_limits:
            return {}
        started_at = perf_counter()
        try:
            drafts = self.proposer.propose_drafts(draft_limits)
        except Exception:
            log.exception("proposing drafts failed; speculative decoding is off from now on")
            self._is_off = True
            return {}
        self._propose_seconds = perf_counter() - started_at
        valid_drafts = [
            (sequence, self._valid_prefix(sequence, guess[:length]))
            for (sequence, length), guess in zip(draft_limits, drafts, strict=True)
        ]
        return self._select_drafts(len(decodes), valid_drafts)

    def observe_decodes(self, step: Step, seconds: float) -> None:
        """Record the duration of a step that had decodes only."""
        has_drafts = step.total_tokens > len(step.rows)
        self.costs.observe_rows(step.total_tokens, seconds + (self._propose_seconds if has_drafts else 0.0))

    def record_acceptance(self, row: StepRow, accepted: int) -> None:
        """Record that the first ``accepted`` drafts of a row were right."""
        counts, draft_count = self.draft_counts, len(row.drafts)
        counts.rows += 1
        counts.tokens += draft_count
        for position in range(accepted):
            counts.accepted_per_position[position] += 1
        history = self._history_of(row.sequence)
        informative = accepted + (accepted < draft_count)  # drafts after a wrong one carry no information
        history.rate += (1 - SEQUENCE_DECAY**informative) * (accepted / informative - history.rate)
        self._average_rate += (1 - GLOBAL_DECAY**informative) * (accepted / informative - self._average_rate)
        if accepted < draft_count:
            history.length_limit = FIRST_LENGTH
        elif accepted >= history.length_limit:
            history.length_limit *= 2
        if accepted and history.rate >= self._row_price:
            history.miss_count = 0
        else:
            self._pause_drafts(row.sequence)

    def forget_sequence(self, sequence: Sequence) -> None:
        """Drop the history of a sequence that has ended."""
        self._histories.pop(sequence, None)
        self.proposer.forget_sequence(sequence)

    def draft_length(self, sequence: Sequence) -> int:
        """Return the number of drafts worth proposing: the largest number whose last draft is still right with a
        probability above the price of its row."""
        if self._row_price > MAX_PRICE:
            return 0
        history = self._history_of(sequence)
        if sequence.output_length < history.resume_at:
            return 0
        length = min(self.max_drafts, history.length_limit)
        if self._row_price > 0 and history.rate < 1:
            length = min(length, int(ln(self._row_price) / ln(max(history.rate, 1e-3))))
        return max(1, length)

    def _select_drafts(
        self, rows: int, drafts: list[tuple[Sequence, tuple[int, ...]]]
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return the drafts that are worth their rows in a step of ``rows`` decodes."""
        chances = {sequence: self._history_of(sequence).draft_chances(len(guess)) for sequence, guess in drafts}
        ranked = sorted((chance for row_chances in chances.values() for chance in row_chances), reverse=True)
        count = self.costs.best_draft_count(rows, ranked)
        selection = {}
        for sequence, guess in drafts:
            length = sum(chance >= ranked[count - 1] for chance in chances[sequence]) if count else 0
            if length:
                selection[sequence] = guess[:length]
            elif guess:
                self._pause_drafts(sequence)
        return selection

    def _history_of(self, sequence: Sequence) -> DraftHistory:
        """Return the history of a sequence; a new one starts with the average rate."""
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = DraftHistory(self._average_rate)
        return history

    def _pause_drafts(self, sequence: Sequence) -> None:
        """Give the sequence no drafts for a while: longer the more sequences decode, as all wait for its rows."""
        history = self._history_of(sequence)
        history.miss_count += 1
        history.resume_at = sequence.output_length + self._decode_rows * 2 ** min(
            history.miss_count, MAX_PAUSE_EXPONENT
        )

    def _valid_prefix(self, sequence: Sequence, guess: list[int]) -> tuple[int, ...]:
        """Return the draft up to its first token that is a stop token or outside the vocabulary."""
        for position, token in enumerate(guess):
            if not 0 <= token < self.vocab_size or token in sequence.stop_token_ids:
                return tuple(guess[:position])
        return tuple(guess)


class DecodeCosts:
    """Seconds of decode steps by their number of rows: averages of the measured steps, interpolated between them."""

    def __init__(self) -> None:
        self._measured_rows: list[int] = []  # numbers of rows, ascending
        self._seconds_by_rows: dict[int, float] = {}

    def observe_rows(self, rows: int, seconds: float) -> None:
        """Record the duration of a step. Outliers caused by other load on the machine count little."""
        bucket = _row_bucket(rows)
        if bucket in self._seconds_by_rows:
            average_seconds = self._seconds_by_rows[bucket]
            self._seconds_by_rows[bucket] += (FASTER_WEIGHT if seconds < average_seconds else SLOWER_WEIGHT) * (
                min(seconds, OUTLIER_FACTOR * average_seconds) - average_seconds
            )
            return
        self._seconds_by_rows[bucket] = (
            min(seconds, OUTLIER_FACTOR * self.estimate_seconds(rows)) if self._measured_rows else seconds
        )
        insort(self._measured_rows, bucket)

    def estimate_seconds(self, rows: int) -> float:
        """Estimate the seconds of a step with ``rows`` rows; 0 before the first measurement. Beyond the largest number
        of rows measured, the estimate is optimistic."""
        if not self._measured_rows:
            return 0.0
        index = bisect_left(self._measured_rows, rows)
        if index == len(self._measured_rows):
            largest = self._measured_rows[-1]
            return self._seconds_by_rows[largest] * (1 + (rows - largest) / max(DOUBLING_ROWS, largest))
        next_rows = self._measured_rows[index]
        if index == 0 or next_rows == rows:
            return self._seconds_by_rows[next_rows]
        previous_rows = self._measured_rows[index - 1]
        low, high = self._seconds_by_rows[previous_rows], self._seconds_by_rows[next_rows]
        return low + (high - low) * (rows - previous_rows) / (next_rows - previous_rows)

    def row_price(self, rows: int) -> float:
        """Return the price of one more row in a step of ``rows`` decodes, in tokens: as many as such steps produce in
        the time that the row takes."""
        base_seconds = self.estimate_seconds(rows)
        if not base_seconds:
            return 0.0
        added_seconds = max(0.0, self.estimate_seconds(rows + PRICE_ROWS) - base_seconds)
        return rows * added_seconds / PRICE_ROWS / base_seconds

    def best_draft_count(self, rows: int, chances: list[float]) -> int:
        """Return how many drafts, best first, maximize tokens per second in a step of ``rows`` decodes.

        At most twice the largest number of rows tried: small steps say little about large ones.
        """
        if not self._measured_rows:
            return len(chances)
        chances = chances[: max(0, 2 * self._measured_rows[-1] - rows)]
        tokens = float(rows)
        best_rate, best_count = tokens / self.estimate_seconds(rows), 0
        for number, chance in enumerate(chances, 1):
            tokens += chance
            rate = tokens / self.estimate_seconds(rows + number)
            if rate > best_rate:
                best_rate, best_count = rate, number
        return best_count


def _row_bucket(rows: int) -> int:
    """Round large numbers of rows, so that similar ones share an entry."""
    return rows if rows < 16 else rows >> (rows.bit_length() - 4) << (rows.bit_length() - 4)
