"""Processes the results of a step: appends sampled tokens to their sequences, and makes outputs of them."""

from __future__ import annotations

from parley.core.beam_search.beam_searches import BeamSearches
from parley.core.encoder_scheduler import EncoderScheduler
from parley.core.finish_reason import finish_reason
from parley.core.open_choices import OpenChoices
from parley.core.scheduler import Scheduler
from parley.core.sequence import RowResult, SequenceStatus, StepRow
from parley.core.shared_pages.pinned import PinnedPages
from parley.core.step_counters import StepCounters
from parley.types import EngineOutput

STEP_FAILED = "The engine failed while computing this request."


class ResultProcessor:
    """Processes one computed row at a time. Outputs are collected in ``open_choices``, and emitted by the loop."""

    def __init__(
        self,
        scheduler: Scheduler | EncoderScheduler,
        open_choices: OpenChoices,
        pinned_pages: PinnedPages,
        beam_searches: BeamSearches,
        counters: StepCounters,
    ):
        self._scheduler, self._open_choices, self._pinned_pages = scheduler, open_choices, pinned_pages
        self._beam_searches, self._counters = beam_searches, counters

    def process_result(self, row: StepRow, result: RowResult) -> None:
        """Append the result of a row to its sequence, and end the choice if its last token was computed."""
        sequence, request = row.sequence, row.sequence.request
        if sequence.status is SequenceStatus.FINISHED:
            return  # its beam search has ended with the row of another beam
        is_beam = request.beam is not None and sequence.request_id in self._beam_searches
        row_output = result.candidates if is_beam else result.tokens
        is_incomplete = (row.sample and not row_output) or (row.make_vector and result.vector is None)
        if result.error is not None or is_incomplete:
            if isinstance(self._scheduler, Scheduler):
                self._scheduler.evict_sequence_pages(sequence)
            self._open_choices.fail_sequence(sequence, result.error or STEP_FAILED)
            return
        if result.prompt_scores:
            sequence.prompt_scores += result.prompt_scores
        if request.token_costs:
            sequence.compute_seconds += self._counters.step_seconds
        if request.lease:
            self._pinned_pages.extend_lease(sequence, row.start + row.count)
        if row.start + row.count < len(sequence.tokens):
            if not sequence.output_length:
                sequence.prefill_chunks.append(self._counters.prefill_chunk(row))
            return
        if request.lease:
            self._pinned_pages.mark_first_result(sequence)
        if is_beam:
            self._beam_searches.report_beam(sequence, result.candidates)
            return
        output = self._make_output(row, result)
        if output.finish_reason is None:
            self._open_choices.add_output(output)
        else:
            self._open_choices.finish_sequence(sequence, output)

    def _make_output(self, row: StepRow, result: RowResult) -> EngineOutput:
        """Append the sampled tokens of a row that computes its sequence's last token. Return an output with its
        result."""
        sequence = row.sequence
        output = EngineOutput(
            sequence.request_id,
            sequence.index,
            finish_reason="length",  # the row only scores the prompt
            cached_tokens=sequence.cached_tokens,
            preemptions=sequence.preemptions,
        )
        if len(sequence.tokens) == sequence.prompt_len:  # its first output
            output.queue_seconds = sequence.queue_seconds
            output.prompt_scores = sequence.prompt_scores or None
            if sequence.prefill_chunks:
                output.prefill_chunks = [*sequence.prefill_chunks, self._counters.prefill_chunk(row)]
        if row.make_vector:
            output.vector, output.finish_reason = result.vector, "stop"
        if row.sample:
            self._append_tokens(row, result, output)
        return output

    def _append_tokens(self, row: StepRow, result: RowResult, output: EngineOutput) -> None:
        """Append the sampled tokens to the sequence and its output, and set ``finish_reason`` if they end the
        choice."""
        sequence, request = row.sequence, row.sequence.request
        sequence.tokens += result.tokens
        self._counters.generated_tokens += len(result.tokens)
        reason = finish_reason(sequence)
        output.token_ids = result.tokens
        if request.logprobs >= 0:
            output.scores = result.scores
        if request.token_costs:
            output.token_costs = self._counters.token_costs(sequence, len(result.tokens))
        if reason == "stop" or result.end == "mark":
            output.stop_id = result.tokens[-1]
        output.finish_reason = reason if result.end is None else "stop"
        if row.drafts:
            self._commit_drafts(row, len(result.tokens) - 1)

    def _commit_drafts(self, row: StepRow, accepted: int) -> None:
        """Commit the first ``accepted`` drafts of the row, and record the number."""
        assert isinstance(self._scheduler, Scheduler) and self._scheduler.speculation is not None
        self._scheduler.commit_drafts(row)
        self._scheduler.speculation.record_acceptance(row, accepted)
