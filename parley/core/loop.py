"""The engine loop: requests in, outputs out, one model step at a time.

    add, cancel      between steps, so that new requests and cancels take effect before anything is scheduled
    schedule         the scheduler selects sequences, and how many tokens of each are computed
    run              the model runner computes them
    finish           append tokens, end choices, free pages
    emit             one list of outputs for the whole step, with the engine's statistics

Every choice that is added gets exactly one output with ``finish``, unless it is cancelled; then no further output
follows. No exception of a model runner leaves the loop: a failed step fails the choices that had a row in it, a failed
row only its own choice.

The loop knows nothing of text, sockets or tensors, and belongs to one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from parley.core.adapter_cache import Fetch, Shelf
from parley.core.admission import Intake, Prepare, at_once, refusal
from parley.core.counters import Meter
from parley.core.encoder_scheduler import Whole
from parley.core.finish import allowance, verdict
from parley.core.guess.ngram import Lookup, Predicted
from parley.core.guess.speculation import Speculation, Tried
from parley.core.pages.block_pool import BlockPool, extend, root
from parley.core.prefill_share import Quota
from parley.core.scheduler import Scheduler
from parley.core.search.beam import Search, capacity
from parley.core.search.searches import Searches
from parley.core.sequence import BLOCK_SIZE, Adapter, Row, Runner, Sampled, Sequence, Status, Step
from parley.core.shared_pages.pinned import Holds
from parley.core.step_budget import Fixed, Pace, Timed
from parley.types import Finish, Output, Settings, Stats, Work

log = logging.getLogger("parley.engine")

FAILED = "The engine failed while computing this request."


class Loop:
    """Drives ``runner`` by the ``settings``; ``emit(outputs, stats)`` is called at the end of each step, in its thread.

    ``step_budget`` overrides the one that the settings imply (milliseconds on CPU, else tokens). ``prefill_share`` is
    the prefill share of the compute time; it can be changed between steps. ``fetch_adapter`` reads adapters outside the
    steps; without it a step waits for an adapter to be read. ``prepare_request`` prepares a request and then calls its
    callback in the loop's thread. ``on_pages_leased(request_id, pages)`` is called with the pages added to the lease of
    a request, before the outputs of their step are emitted.
    """

    def __init__(
        self,
        runner: Runner,
        settings: Settings,
        emit: Callable[[list[Output], Stats], None],
        pace: Pace | None = None,
        fetch: Fetch | None = None,
        prepare: Prepare | None = None,
        filled: Callable[[str, list[int]], None] | None = None,
        quota: Quota | None = None,
    ):
        if pace is None:
            on_cpu = settings.device.startswith("cpu")
            pace = Timed(settings.step_ms / 1000) if on_cpu else Fixed(settings.step_tokens)
        self.runner = runner
        self.settings = settings
        self.quota = quota or Quota()
        self.pool = BlockPool(runner.blocks)
        self.context = runner.max_model_len
        self._caching = settings.prefix_cache and runner.blocks > 0
        self.shelf = Shelf(settings.max_adapters, fetch or at_once(runner), settings.adapters)
        names = settings.model if self._caching else None
        self.holds = Holds(self.pool, self.shelf, names, runner.vocab_size, filled or (lambda id, pages: None))
        self._meter = Meter()
        self._searches = Searches(runner, self._meter, self._give, self._leave)
        self.scheduler: Scheduler | Whole
        self.speculation: Speculation | None = None
        if runner.blocks:
            # A lone sequence can always run to its end: no context is longer than the pool.
            self.context = min(self.context, runner.blocks * BLOCK_SIZE)
            proposer = Lookup() if settings.speculate == "ngram" else runner.proposer
            guesses = proposer if isinstance(proposer, Lookup) else Predicted(proposer)
            self.speculation = Speculation(
                guesses, settings.speculate_tokens, runner.vocab_size, always=proposer is not None
            )
            self.scheduler = Scheduler(
                self.pool,
                pace,
                settings.max_batch,
                self._admit,
                self._release,
                settings.prefix_cache,
                self.speculation,
                self.holds.fits,
                self.holds.revoke,
                self.quota,
            )
            self.holds.scheduler = self._searches.scheduler = self.scheduler
        else:
            self.scheduler = Whole(pace, settings.max_batch, self._admit)
        self.intake = Intake(self.shelf, prepare, self._begin, self._refuse)
        self._emit = emit
        self._pace = pace
        self._open: dict[str, dict[int, Sequence]] = {}  # unfinished choices, by request and index
        self._outputs: list[Output] = []
        self._changed = False  # something changed since the last emit
        self._stuck = False  # the next sequence waits for pages that are pinned for other instances
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        """Whether ``step`` has nothing to do until something else is called."""
        busy = (self._open or self._searches) and not self._stuck
        return not (busy or self._changed or self.holds.changed)

    def add(self, work: Work) -> None:
        """Queue all choices of a request. If it is invalid, outputs of the next step report the error."""
        if work.id in self._open or work.id in self._searches or work.id in self.intake:
            log.error("a request was submitted twice under one id; the second is ignored")
            return
        self._changed = True
        why = refusal(work, self.runner, self.context, self.pool.size, self.settings.max_batch)
        if why:
            self._refuse(work, set(range(work.n)), why)
        else:
            self.intake.add(work)

    def cancel(self, id: str, index: int = -1) -> None:
        """Cancel one choice of a request, or (-1) all. Its pages are freed at once and no output follows. Unknown ids
        are ignored."""
        self.intake.cancel(id, index)
        if id in self._searches and self._searches.cancel(id, index):
            self._changed = True
        for sequence in list(self._open.get(id, {}).values()):
            if index < 0 or sequence.index == index:
                self._close(sequence)
                self._changed = True
        # Only rejections wait for the next step in this list.
        self._outputs = [o for o in self._outputs if o.id != id or (index >= 0 and o.index != index)]

    def conclude(self, id: str, reason: Finish) -> None:
        """End a beam search with the outputs so far; unfinished beams end for ``reason``. Unknown ids are ignored."""
        if id in self._searches:
            self._searches.conclude(id, reason)
        elif wanted := self.intake.cancel(id):
            self._outputs += [Output(id, index, finish=reason) for index in sorted(wanted)]
        self._changed = True

    def reset(self, *, running: bool = False) -> bool:
        """Clear the prefix cache, as ``Reset`` says. False, and nothing is done, while pages are pinned."""
        if self.holds.pinned or self.holds.reserved:
            return False
        return self.scheduler.reset(running=running)

    def check(self) -> None:
        """Check conservation of pages and slots, for tests. Raises AssertionError."""
        self.scheduler.check([*self.holds.tables()])

    def step(self) -> bool:
        """Schedule, run, finish, emit. Returns whether there is more work."""
        if self.idle:
            return False
        step = self._schedule()
        self._meter.clear()
        if step.rows:
            self._meter.steps += 1
            results = self._run(step)
            if results is None:
                self.scheduler.abandon(step)
                for row in step.rows:
                    if row.sequence.status is not Status.FINISHED:
                        self._fail(row.sequence, FAILED)
            else:
                for row, result in zip(step.rows, results, strict=True):
                    self._finish(row, result)
                if self._searches:
                    self._searches.advance((row.sequence for row in step.rows), FAILED)
        self._searches.sweep(FAILED)
        outputs, self._outputs = self._outputs, []
        self._changed = self.holds.changed = False
        self._emit(outputs, self.stats())
        return not self.idle

    def stats(self) -> Stats:
        """Return the current statistics: gauges now, counters since the start."""
        meter = self._meter
        tried = self.speculation.tried if self.speculation is not None else Tried()
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self.intake),
            blocks_used=self.pool.used,
            blocks_total=self.pool.size,
            preemptions=self.scheduler.preemptions,
            prefix_queries=self.pool.queries,
            prefix_hits=self.pool.hits,
            steps=meter.steps,
            prompt_tokens=meter.prompt_tokens,
            generated_tokens=meter.generated_tokens,
            step_tokens=meter.tokens,
            step_prompt=meter.prompt,
            step_rows=meter.rows,
            step_seconds=meter.seconds,
            drafts=tried.rows,
            draft_tokens=tried.tokens,
            draft_accepted=list(tried.accepted),
            pinned=self.holds.pinned,
            reserved=self.holds.reserved,
        )

    def _refuse(self, work: Work, wanted: set[int], why: str) -> None:
        """End the wanted choices of a request with an error before it starts."""
        self._outputs += [Output(work.id, index, finish="error", error=why) for index in sorted(wanted)]
        self._changed = True

    def _begin(self, work: Work, wanted: set[int], added: float, adapter: Adapter | None) -> None:
        """Queue the wanted choices of a request whose grammar and adapter are ready."""
        sequences = self._sequences(work, added, adapter)
        searched = work.beam is not None and any(sequence.limit for sequence in sequences)
        for sequence in sequences:
            if searched and sequence.index:
                sequence.status = Status.FINISHED  # until a beam forks into it
            else:
                self.scheduler.add(sequence)
        if searched:
            self._searches.add(Search(work, sequences))
        elif sequences:
            self._open[work.id] = dict(enumerate(sequences))
            if work.prediction and self.speculation is not None:
                self.speculation.expect(work.id)
            if work.lease and self._caching:
                self._lease(sequences, wanted)
        self._meter.prompt_tokens += 0 if work.begun else len(work.token_ids)
        self._changed = True
        for index in set(range(work.n)) - wanted:
            self.cancel(work.id, index)

    def _sequences(self, work: Work, added: float, adapter: Adapter | None) -> list[Sequence]:
        """Create a sequence for each choice of a request, or for each beam of its search."""
        start = root(self.settings.model, work.salt, *([adapter.digest.hex()] if adapter else []))
        hashes: list[bytes] = []
        if self._caching:
            extend(hashes, start, work.token_ids, len(work.token_ids) // BLOCK_SIZE)
        stops = frozenset(work.stop_ids)
        limit = allowance(work, self.context)
        width = 0
        if work.beam is not None and limit:
            width = work.beam.width
            limit = min(limit, capacity(self.pool.size, width) - len(work.token_ids))
        made: list[Sequence] = []
        for index in range(width or work.n):
            given = work.given[index] if work.given and not width else []
            sequence = Sequence(
                id=work.id,
                index=index,
                work=work,
                tokens=work.token_ids + given,
                prompt_len=len(work.token_ids),
                seed=(work.seed + index) % 2**64,
                order=self._arrivals,
                hashes=list(hashes),
                # All choices have the same prompt: only the first scores it.
                prompt_scores=[None] if work.prompt_logprobs >= 0 and index == 0 and not given else [],
                limit=limit,
                stops=stops,
                root=start,
                added=added,
                since=added,
                adapter=adapter,
                turns=max(1, width),
            )
            if given and self._caching:
                extend(sequence.hashes, start, sequence.tokens, len(sequence) // BLOCK_SIZE)
            self._arrivals += 1
            made.append(sequence)
        return made

    def _lease(self, choices: list[Sequence], wanted: set[int]) -> None:
        """Open a lease for the whole pages of the request's prompt (with the prior outputs of its first choice)."""
        first = choices[0]
        starting = [choices[index] for index in sorted(wanted)]
        hashes, group = first.hashes[: len(first) // BLOCK_SIZE], first.work.group
        if starting and (hashes or group):
            self.holds.lease(first.id, starting, hashes, group or first.id)

    def _schedule(self) -> Step:
        """Return the next step. If no sequence can run, revoke reservations of other instances until one can."""
        self.holds.urge()
        while True:
            preemptions = self.scheduler.preemptions
            step = self.scheduler.schedule()
            if step.rows or self._searches.doomed or not (self.scheduler.running or self.scheduler.waiting):
                self._stuck = False
                return step
            if self.scheduler.preemptions == preemptions and not self.holds.revoke():
                self._stuck = True
                return step

    def _run(self, step: Step) -> list[Sampled] | None:
        """Run the step. Returns the model runner's results, or None if it failed."""
        began = perf_counter()
        try:
            results = self.runner.run(step)
            if len(results) != len(step.rows):
                raise RuntimeError(f"{len(step.rows)} rows gave {len(results)} results")
        except Exception:
            log.exception("a step of %d rows failed", len(step.rows))
            return None
        self._meter.observe(step, began)
        seconds = self._meter.seconds
        self._pace.observe(seconds)
        self.quota.observe(seconds, step.tokens)
        if self.speculation is not None and self.speculation.wanted and not self._meter.prompt:
            self.speculation.observe(step, seconds)
        return results

    def _finish(self, row: Row, result: Sampled) -> None:
        """Append the results of a row, and end the choice if this was its last token."""
        sequence, work = row.sequence, row.sequence.work
        if sequence.status is Status.FINISHED:
            return  # ended together with another beam of its search
        beam = work.beam is not None and sequence.id in self._searches
        drawn = result.candidates if beam else result.tokens
        missing = (row.sample and not drawn) or (row.pool and result.vector is None)
        if result.error is not None or missing:
            for block in sequence.blocks:
                self.pool.forget(block)  # these pages may hold wrong values
            self._fail(sequence, result.error or FAILED)
            return
        if result.prompt_scores:
            sequence.prompt_scores += result.prompt_scores
        if work.costs:
            sequence.computing += self._meter.seconds
        if work.lease:
            self.holds.grow(sequence, row.start + row.count)
        if row.start + row.count < len(sequence.tokens):
            return
        if work.lease:
            self.holds.start(sequence)
        if beam:
            self._searches.report(sequence, result.candidates)
            return
        output = Output(sequence.id, sequence.index, cached_tokens=sequence.cached, preemptions=sequence.preemptions)
        if len(sequence.tokens) == sequence.prompt_len:  # its first output
            output.waited = sequence.waited
            output.prompt_scores = sequence.prompt_scores or None
        finish: Finish | None = "length"
        if row.pool:
            output.vector, finish = result.vector, "stop"
        if row.sample:
            sequence.tokens += result.tokens
            self._meter.generated_tokens += len(result.tokens)
            finish = verdict(sequence)
            output.token_ids = result.tokens
            if work.logprobs >= 0:
                output.scores = result.scores
            if work.costs:
                output.costs = self._meter.costs(sequence, len(result.tokens))
            if finish == "stop" or result.end == "mark":
                output.stop_id = result.tokens[-1]
            if result.end is not None:
                finish = "stop"
            if row.drafts:
                self._settle(row, len(result.tokens) - 1)
        output.finish = finish
        if finish is None:
            self._outputs.append(output)
        else:
            self._end(sequence, output)

    def _settle(self, row: Row, accepted: int) -> None:
        """Commit the first ``accepted`` drafts of the row, and record how many were right."""
        assert isinstance(self.scheduler, Scheduler) and self.speculation is not None
        self.scheduler.settle(row)
        self.speculation.learn(row, accepted)

    def _give(self, outputs: list[Output]) -> None:
        """Emit the outputs of a search that has ended."""
        self._meter.generated_tokens += sum(len(output.token_ids) for output in outputs)
        self._outputs += outputs

    def _leave(self, search: Search) -> None:
        """Remove the sequences of a search that has ended from the scheduler, pinned pages and admission."""
        self.holds.start(search.root)
        for member in search.members:
            self.scheduler.remove(member)
        self.intake.end(search.work.id)

    def _fail(self, sequence: Sequence, reason: str) -> None:
        if sequence.id in self._searches:
            self._searches.fail(sequence.id, reason)
        else:
            self._end(sequence, Output(sequence.id, sequence.index, finish="error", error=reason))

    def _end(self, sequence: Sequence, output: Output) -> None:
        self._outputs.append(output)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """Remove a choice from the scheduler, pinned pages and open requests."""
        self.holds.start(sequence)
        self.scheduler.remove(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        choices = self._open[sequence.id]
        del choices[sequence.index]
        if not choices:
            del self._open[sequence.id]
            self.intake.end(sequence.id)
            if self.speculation is not None:
                self.speculation.drop(sequence.id)

    def _admit(self, sequence: Sequence) -> bool:
        if not sequence.preemptions:
            sequence.waited = perf_counter() - sequence.added
        try:
            self.runner.admit(sequence)
        except Exception:
            log.exception("a sequence could not be admitted")
            if sequence.id in self._searches:
                self._searches.doom(sequence.id)
            else:
                self._fail(sequence, FAILED)
            return False
        self.holds.begin(sequence)
        return True

    def _release(self, sequence: Sequence) -> None:
        try:
            self.runner.release(sequence)
        except Exception:
            log.exception("a sequence could not be released")
