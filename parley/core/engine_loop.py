"""The engine loop: requests in, outputs out, one model step at a time.

    add, cancel      between steps, so that new requests and cancels take effect before anything is scheduled
    schedule         the scheduler selects sequences and how many tokens of each are computed, unless ``core.run_ahead``
                     has started the step already
    run              the model runner computes the step
    finish           append tokens, end choices, free pages
    emit             pass on the outputs of the whole step as one list, with the engine's statistics
    lend             let the encoder of media items compute for the rest of the step's time

Every choice gets exactly one output with ``finish_reason``, its last one. A cancelled choice gets no further output. No
exception of a model runner leaves the loop: a failed step fails the choices that had a row in it, a failed row only its
own choice.

The loop knows nothing of text, sockets or tensors. Only one thread may use it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from time import perf_counter

from parley.core.adapter_cache import AdapterCache, FetchAdapter
from parley.core.admission import Admission, PrepareRequest, blocking_fetch, rejection_reason
from parley.core.beam_search.beam import BeamSearch
from parley.core.beam_search.beam_searches import BeamSearches
from parley.core.encoder_scheduler import EncoderScheduler
from parley.core.media.encode_queue import EncodeQueue
from parley.core.media.encoder_thread import BlockingEncoder, EncoderThread, PostCall
from parley.core.open_choices import OpenChoices
from parley.core.pages.cache_events import CacheEvent, CacheEventLog
from parley.core.pages.page_pool import PagePool, count_transferable_pages
from parley.core.pages.state_slots import StateSlots
from parley.core.prefill_share import PrefillShare
from parley.core.run_ahead import RunAhead
from parley.core.scheduler import Scheduler
from parley.core.sequence import (
    PAGE_SIZE,
    LoadedAdapter,
    ModelRunner,
    RowResult,
    Sequence,
    SequenceStatus,
    Step,
)
from parley.core.sequence_factory import SequenceFactory
from parley.core.shared_pages.pinned import PinnedPages
from parley.core.speculative.ngram import NgramProposer, PredictionProposer
from parley.core.speculative.speculation import DraftCounts, Speculation
from parley.core.step_budget import FixedBudget, StepBudget, TimedBudget
from parley.core.step_counters import StepCounters
from parley.core.step_results import STEP_FAILED, ResultProcessor
from parley.types import EngineFinishReason, EngineOutput, EngineRequest, EngineStats, ParleySettings

log = logging.getLogger("parley.engine")


class EngineLoop:
    """Runs ``runner`` step by step, as the ``settings`` say. All methods must be called in one thread.

    * ``emit(outputs, stats)`` is called at the end of each step.
    * ``step_budget`` replaces ``default_step_budget(settings)``.
    * ``fetch_adapter`` reads adapters outside the steps; without it a step waits until an adapter is read.
    * ``prepare_request(request, on_prepared)`` prepares a request, then calls ``on_prepared`` in the loop's thread;
      without it requests start at once.
    * ``on_pages_leased(request_id, pages)`` is called with the pages added to the lease of a request, before the
      outputs of their step are emitted.
    * ``prefill_share`` limits the time that prefill takes while requests decode; it can be changed between steps.
    * ``post`` lets the loop's thread call a function between steps; without it a step waits until media are encoded.
    * ``publish_events`` gets the events of the prefix cache after each step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        settings: ParleySettings,
        emit: Callable[[list[EngineOutput], EngineStats], None],
        step_budget: StepBudget | None = None,
        fetch_adapter: FetchAdapter | None = None,
        prepare_request: PrepareRequest | None = None,
        on_pages_leased: Callable[[str, list[int]], None] | None = None,
        prefill_share: PrefillShare | None = None,
        post: PostCall | None = None,
        publish_events: Callable[[list[CacheEvent]], None] | None = None,
    ):
        self.runner = runner
        self.settings = settings
        self.max_context = usable_context(runner)
        self.max_batch = min(settings.max_batch, runner.state_slots or settings.max_batch)
        self._emit = emit
        self._publish_events = publish_events
        self._step_budget = step_budget or default_step_budget(settings)
        self._counters = StepCounters()
        self._prefix_caching = settings.prefix_cache and runner.page_count > 0 and restores_states(runner)
        self.prefill_share = prefill_share or PrefillShare()
        self.pool = PagePool(runner.page_count, None if publish_events is None else CacheEventLog())
        self.adapter_cache = AdapterCache(
            settings.max_adapters, fetch_adapter or blocking_fetch(runner), settings.adapters
        )
        self.speculation = make_speculation(runner, settings)
        states = make_state_slots(runner, prefix_caching=self._prefix_caching)
        self.pinned_pages = self._make_pinned_pages(on_pages_leased, states)
        self._beam_searches = BeamSearches(runner, self._counters, self._add_search_outputs, self._close_search)
        self.scheduler = self._make_scheduler(self._step_budget, states)
        self._sequence_factory = SequenceFactory(
            settings.model,
            self.max_context,
            self.pool.page_count,
            runner.long_rope_after,
            hashes_pages=self._prefix_caching,
        )
        self.run_ahead = self._make_run_ahead()
        self.admission = Admission(self.adapter_cache, prepare_request, self._start_request, self._reject_request)
        self._open_choices = OpenChoices(self.scheduler, self.admission, self.pinned_pages, self._beam_searches)
        self._results = ResultProcessor(
            self.scheduler,
            self._open_choices,
            self.pinned_pages,
            self._beam_searches,
            self._counters,
        )
        self.encode_queue = self._make_encode_queue(post)
        # Whether all sequences wait: for pages that are pinned for other instances, or for embeddings of media items.
        self.is_blocked = False

    @property
    def is_idle(self) -> bool:
        """Whether ``step`` would do nothing until another method is called."""
        busy = (self._open_choices or self._beam_searches) and not self.is_blocked
        has_encoded = self.encode_queue is not None and self.encode_queue.has_changes
        return not (busy or self._open_choices.has_changes or self.pinned_pages.has_changes or has_encoded)

    def add_request(self, request: EngineRequest) -> None:
        """Queue all choices of a request. If it is invalid, the outputs of the next step report the error."""
        if request.id in self._open_choices or request.id in self._beam_searches or request.id in self.admission:
            log.error("a request was submitted twice under one id; the second is ignored")
            return
        self._open_choices.has_changes = True
        error = rejection_reason(request, self.runner, self.max_context, self.pool.page_count, self.max_batch)
        if error:
            self._open_choices.reject_request(request, set(range(request.n)), error)
        else:
            self.admission.submit_request(request)

    def cancel_request(self, request_id: str, index: int = -1) -> None:
        """Cancel the choice ``index`` of a request, or (-1) all. Its pages are freed at once and no output follows.

        Unknown ids are ignored.
        """
        self.admission.cancel_waiting(request_id, index)
        if request_id in self._beam_searches and self._beam_searches.cancel_search(request_id, index):
            self._open_choices.has_changes = True
        self._open_choices.cancel_request(request_id, index)

    def finish_beam_search(self, request_id: str, reason: EngineFinishReason) -> None:
        """End a beam search with the outputs so far; unfinished beams end for ``reason``. Unknown ids are ignored."""
        if request_id in self._beam_searches:
            self._beam_searches.finish_search(request_id, reason)
        elif cancelled := self.admission.cancel_waiting(request_id):
            self._open_choices.finish_waiting(request_id, cancelled, reason)
        self._open_choices.has_changes = True

    def reset_prefix_cache(self, *, running: bool = False) -> bool:
        """Clear the prefix cache, as ``ResetPrefixCache`` describes. Return False, and do nothing, while pages are
        pinned."""
        if self.pinned_pages.pinned_count or self.pinned_pages.reserved_count:
            return False
        cleared = self.scheduler.reset_cache(running=running)
        if self._publish_events is not None:
            self._flush_events(self._publish_events)
        return cleared

    def check_invariants(self) -> None:
        """Check conservation of pages and slots, for tests. Raises AssertionError."""
        self.scheduler.check_invariants([*self.pinned_pages.held_tables()], [*self.pinned_pages.held_states()])

    def step(self) -> bool:
        """Schedule, run, finish, emit, lend. Returns whether there is more work."""
        if self.is_idle:
            if self._publish_events is not None:
                self._flush_events(self._publish_events)  # pages may have arrived from other instances
            return False
        started_step = None if self.run_ahead is None else self.run_ahead.take_step()
        step = started_step or self._schedule_step()
        self._counters.reset_step()
        if step.rows:
            self._compute_step(step)
        self._beam_searches.fail_pending(STEP_FAILED)
        self._open_choices.has_changes = self.pinned_pages.has_changes = False
        if self.encode_queue is not None:
            self.encode_queue.has_changes = False
            self.encode_queue.start_next()
        self._emit(self._open_choices.take_outputs(), self.collect_stats())
        if self._publish_events is not None:
            self._flush_events(self._publish_events)
        if self.encode_queue is not None:
            self._lend_processor(self.encode_queue)
        return not self.is_idle

    def _flush_events(self, publish_events: Callable[[list[CacheEvent]], None]) -> None:
        """Publish the events of the prefix cache since the last call."""
        if self.pool.event_log is not None and (events := self.pool.event_log.take_events()):
            publish_events(events)

    def encoder_has_progress(self) -> bool:
        """Whether the encoder of media items has made progress since the last call, or has nothing to do."""
        return self.encode_queue is None or self.encode_queue.encoder.has_progress()

    def close(self) -> None:
        """End the thread of the encoder."""
        if self.encode_queue is not None:
            self.encode_queue.encoder.close()

    def collect_stats(self) -> EngineStats:
        """Return the current statistics: gauges now, counters since the start."""
        counters = self._counters
        encode_queue = self.encode_queue
        draft_counts = self.speculation.draft_counts if self.speculation is not None else DraftCounts()
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.encode_queue or ()) + len(self.admission),
            used_pages=self.pool.used_count,
            total_pages=self.pool.page_count,
            preemptions=self.scheduler.preemptions,
            prefix_queries=self.pool.prefix_queries,
            prefix_hits=self.pool.prefix_hits,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            step_tokens=counters.step_tokens,
            step_prompt_tokens=counters.step_prompt_tokens,
            step_rows=counters.step_rows,
            step_seconds=counters.step_seconds,
            drafts=draft_counts.rows,
            draft_tokens=draft_counts.tokens,
            draft_accepted=list(draft_counts.accepted_per_position),
            pinned_pages=self.pinned_pages.pinned_count,
            reserved_pages=self.pinned_pages.reserved_count,
            media_cache_queries=encode_queue.queries if encode_queue is not None else 0,
            media_cache_hits=encode_queue.hits if encode_queue is not None else 0,
            media_items=dict(counters.media_items),
            encode_seconds=encode_queue.encoder.encode_seconds if encode_queue is not None else 0.0,
        )

    def _make_pinned_pages(
        self, on_pages_leased: Callable[[str, list[int]], None] | None, states: StateSlots | None
    ) -> PinnedPages:
        """Return the holder of pages that other instances read or fill."""
        return PinnedPages(
            self.pool,
            self.adapter_cache,
            self.settings.model if self._prefix_caching else None,
            self.runner.vocab_size,
            self.runner.long_rope_after,
            on_pages_leased or (lambda request_id, pages: None),
            None if states is None else states.pool,
        )

    def _make_scheduler(self, step_budget: StepBudget, states: StateSlots | None) -> Scheduler | EncoderScheduler:
        """Return the scheduler of a decoder, which pinned pages and beam searches use too, or that of an encoder."""
        if not self.runner.page_count:
            return EncoderScheduler(step_budget, self.max_batch, self._admit_sequence)
        scheduler = Scheduler(
            self.pool,
            step_budget,
            self.max_batch,
            self._admit_sequence,
            self._release_slot,
            prefix_cache=self._prefix_caching,
            speculation=self.speculation,
            fits_in_pool=self.pinned_pages.fits_in_pool,
            revoke_reservation=self.pinned_pages.revoke_reservation,
            prefill_share=self.prefill_share,
            long_rope_after=self.runner.long_rope_after,
            states=states,
        )
        self.pinned_pages.attach_scheduler(scheduler)
        self._beam_searches.attach_scheduler(scheduler)
        return scheduler

    def _make_run_ahead(self) -> RunAhead | None:
        """Return the object that starts steps early; None if the runner has no starter, or the model has states."""
        runner = self.runner
        if runner.starter is None or runner.state_slots is not None or not isinstance(self.scheduler, Scheduler):
            return None
        return RunAhead(runner, runner.starter, self.scheduler)

    def _make_encode_queue(self, post: PostCall | None) -> EncodeQueue | None:
        """Return the queue of sequences that wait for embeddings; None for a model that reads text only."""
        if not isinstance(self.scheduler, Scheduler) or (encoder := self.runner.media_encoder) is None:
            return None
        encode_queue = EncodeQueue(
            BlockingEncoder(encoder) if post is None else EncoderThread(encoder, post),
            self.settings.media_cache,
            self.scheduler.resume_sequence,
            self._open_choices.fail_sequence,
        )
        self.scheduler.attach_encode_queue(encode_queue)
        return encode_queue

    def _lend_processor(self, encode_queue: EncodeQueue) -> None:
        """Let the encoder compute for the rest of ``settings.step_ms``, or, if no sequence can run, until the next
        step."""
        if self.is_idle:
            encode_queue.encoder.lend_processor(inf)
        elif encode_queue.is_encoding and (self.prefill_share.allows_prefill or encode_queue.delays_output):
            lent_at = perf_counter()
            encode_queue.encoder.lend_processor(self.settings.step_ms / 1000 - self._counters.step_seconds)
            self.prefill_share.charge_encoding(perf_counter() - lent_at)

    def _start_request(
        self, request: EngineRequest, wanted_choices: set[int], queued_at: float, adapter: LoadedAdapter | None
    ) -> None:
        """Queue the wanted choices of a request whose grammar and adapter are ready."""
        sequences = self._sequence_factory.make_sequences(request, queued_at, adapter)
        uses_beams = request.beam is not None and any(sequence.output_limit for sequence in sequences)
        for sequence in sequences:
            if uses_beams and sequence.index:
                sequence.status = SequenceStatus.FINISHED  # until a beam forks into it
            else:
                self.scheduler.add_sequence(sequence)
        if uses_beams:
            self._beam_searches.add_search(BeamSearch(request, sequences))
        elif sequences:
            self._open_choices.add_request(request, sequences)
            if request.lease and self._prefix_caching:
                self._open_lease(sequences, wanted_choices)
        if not request.resumed:
            self._counters.record_prompt(request)
        self._open_choices.has_changes = True
        for index in set(range(request.n)) - wanted_choices:
            self.cancel_request(request.id, index)

    def _open_lease(self, choices: list[Sequence], wanted_choices: set[int]) -> None:
        """Open a lease for the full pages of the request's prompt (with the prior outputs of its first choice)."""
        first_choice = choices[0]
        request = first_choice.request
        pending_choices = [choices[index] for index in sorted(wanted_choices)]
        page_count = count_transferable_pages(len(first_choice), has_states=self.runner.state_slots is not None)
        hashes, group_name = first_choice.hashes[:page_count], request.release_group
        if pending_choices and (hashes or group_name):
            self.pinned_pages.open_lease(request.id, pending_choices, hashes, group_name or request.id)

    def _schedule_step(self) -> Step:
        """Return the next step. If no sequence can run, revoke reservations of other instances until one can."""
        self.pinned_pages.raise_priorities()
        while True:
            preemptions = self.scheduler.preemptions
            step = self.scheduler.schedule()
            if step.rows or self._beam_searches.has_failing or not (self.scheduler.running or self.scheduler.waiting):
                self.is_blocked = not (step.rows or self._beam_searches.has_failing)
                return step
            if self.scheduler.preemptions == preemptions and not self.pinned_pages.revoke_reservation():
                self.is_blocked = True
                return step

    def _compute_step(self, step: Step) -> None:
        """Run the step and process its results. If it fails, all choices in it fail."""
        self._counters.steps += 1
        results = self._run_model(step)
        if results is None:
            self.scheduler.abandon_step(step)
            if self.run_ahead is not None:
                self.run_ahead.abandon_next()
            for row in step.rows:
                if row.sequence.status is not SequenceStatus.FINISHED:
                    self._open_choices.fail_sequence(row.sequence, STEP_FAILED)
            return
        for row, result in zip(step.rows, results, strict=True):
            self._results.process_result(row, result)
            if self.encode_queue is not None and row.sequence.item_embeddings:
                self.encode_queue.release_computed(row.sequence, row.start + row.count)
        if self._beam_searches:
            self._beam_searches.advance_searches((row.sequence for row in step.rows), STEP_FAILED)
        if self.run_ahead is not None:
            self.run_ahead.confirm_rows()

    def _run_model(self, step: Step) -> list[RowResult] | None:
        """Run the step. Returns the model runner's results, or None if it failed."""
        if self.encode_queue is not None:
            self.encode_queue.encoder.reclaim_processor()
        started_at = perf_counter() if self.run_ahead is None else self.run_ahead.started_at(step)
        try:
            results = (self.run_ahead or self.runner).run_step(step)
            if len(results) != len(step.rows):
                raise RuntimeError(f"{len(step.rows)} rows gave {len(results)} results")
        except Exception:
            log.exception("a step of %d rows failed", len(step.rows))
            return None
        self._counters.record_step(step, started_at)
        seconds = self._counters.step_seconds
        self._step_budget.observe_step(seconds)
        self.prefill_share.observe_step(seconds, step.total_tokens)
        if self.speculation is not None and self.speculation.is_active and not self._counters.step_prompt_tokens:
            self.speculation.observe_decodes(step, seconds)
        return results

    def _reject_request(self, request: EngineRequest, choices: set[int], error: str) -> None:
        """End the wanted choices of a request that could not be prepared."""
        self._open_choices.reject_request(request, choices, error)

    def _add_search_outputs(self, outputs: list[EngineOutput]) -> None:
        """Emit the outputs of a search that has ended."""
        self._counters.generated_tokens += sum(len(output.token_ids) for output in outputs)
        self._open_choices.add_outputs(outputs)

    def _close_search(self, search: BeamSearch) -> None:
        """Remove the sequences of a search that has ended from the scheduler, pinned pages and admission."""
        self.pinned_pages.mark_first_result(search.root_sequence)
        for member in search.beam_sequences:
            self.scheduler.remove_sequence(member)
        self.admission.finish_request(search.request.id)

    def _admit_sequence(self, sequence: Sequence) -> bool:
        """Prepare a sequence that has got a slot. Return False, after failing its choice, if the runner cannot."""
        if not sequence.preemptions:
            sequence.queue_seconds = perf_counter() - sequence.queued_at
        try:
            self.runner.admit_sequence(sequence)
        except Exception:
            log.exception("a sequence could not be admitted")
            if sequence.request_id in self._beam_searches:
                self._beam_searches.fail_after_step(sequence.request_id)
            else:
                self._open_choices.fail_sequence(sequence, STEP_FAILED)
            return False
        self.pinned_pages.mark_admitted(sequence)
        return True

    def _release_slot(self, sequence: Sequence) -> None:
        """Let the runner forget a sequence that loses its slot."""
        try:
            self.runner.release_slot(sequence)
        except Exception:
            log.exception("a sequence could not be released")


def usable_context(runner: ModelRunner) -> int:
    """Return how many tokens a sequence may have: no more than fit into the pool, so that a single one always ends."""
    return min(runner.max_model_len, runner.page_count * PAGE_SIZE) if runner.page_count else runner.max_model_len


def default_step_budget(settings: ParleySettings) -> StepBudget:
    """Return the step budget of the settings: ``step_ms`` on a CPU, ``step_tokens`` on other devices."""
    on_cpu = settings.device.startswith("cpu")
    return TimedBudget(settings.step_ms / 1000) if on_cpu else FixedBudget(settings.step_tokens)


def restores_states(runner: ModelRunner) -> bool:
    """Whether a sequence can continue after a prefix: the model has only keys and values, or has slots for snapshots of
    its states."""
    return runner.state_slots is None or runner.snapshot_slots > 0


def make_speculation(runner: ModelRunner, settings: ParleySettings) -> Speculation | None:
    """Return speculative decoding as the settings say; None for encoders and for models that cannot undo a wrong draft.

    If ``settings.speculate`` is "none", only requests with a prediction get drafts.
    """
    if not runner.page_count or not restores_states(runner):
        return None
    proposer = NgramProposer() if settings.speculate == "ngram" else runner.proposer
    draft_proposer = proposer if isinstance(proposer, NgramProposer) else PredictionProposer(proposer)
    return Speculation(draft_proposer, settings.speculate_tokens, runner.vocab_size, always=proposer is not None)


def make_state_slots(runner: ModelRunner, *, prefix_caching: bool) -> StateSlots | None:
    """Return the slots for snapshots and for states after drafts; None for a model without states."""
    if runner.state_slots is None:
        return None
    return StateSlots(runner.state_slots, runner.snapshot_slots, runner.copy_state, prefix_caching)
