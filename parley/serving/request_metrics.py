"""Metrics and access log data of one request. All times are from ``time.perf_counter``, in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from parley.dialects.reply import RequestTimings
from parley.metrics.model_metrics import ModelMetrics
from parley.tracing.generation_spans import (
    EndedGeneration,
    GenerationTimes,
    encode_generation_spans,
    operation_name,
)
from parley.tracing.request_trace import RequestTrace
from parley.types import FinishReason, PrefillChunk, Request, Usage
from parley.web.logs import AccessLogEntry

METRIC_FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "tool": "stop",
    "length": "length",
    "repetition": "repetition",
    "cancel": "abort",
    "error": "error",
}


class RequestMetrics:
    """Records one request: ``record_submit`` first, then the other events as they happen, then ``record_end``.

    ``trace``: where its spans are added at the end, if it is traced.
    """

    def __init__(
        self, metrics: ModelMetrics, log_entry: AccessLogEntry, arrived: float, trace: RequestTrace | None = None
    ):
        self.log_entry = log_entry
        self._trace = trace
        self._request: Request | None = None
        self._prefill_chunks: list[PrefillChunk] = []
        self._finish_reasons: list[FinishReason] = []
        self._model_metrics = metrics
        self._arrival_time = arrived
        self._submit_time = 0.0
        self._first_step_time = 0.0  # start of the engine's first step with the request
        self._first_token_time = 0.0
        self._last_token_times: dict[int, float] = {}  # choice -> time of its last token
        self._preemptions: dict[int, int] = {}  # choice -> number of preemptions
        self._usage = Usage()
        self._grouped_tokens = 0  # tokens that arrived in the same output as the one before
        self._replaying = False  # another instance has counted the current outputs
        self._resumed = False  # another instance has counted the prompts

    @property
    def awaits_first_token(self) -> bool:
        """Whether no token has arrived yet."""
        return not self._first_token_time

    @property
    def seconds_since_arrival(self) -> float:
        """The age of the request."""
        return time.perf_counter() - self._arrival_time

    @contextmanager
    def replaying_outputs(self) -> Iterator[None]:
        """Within this context, outputs are replayed that another instance has counted."""
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = False

    def record_submit(self, request: Request, usage: Usage, *, resumed: bool = False) -> None:
        """Record that the engine has the request. ``usage`` grows later. ``resumed``: another instance counted it."""
        self._submit_time = time.perf_counter()
        self._request, self._usage, self._resumed = request, usage, resumed
        if resumed:
            return
        metrics = self._model_metrics
        metrics.prepare_seconds.observe(self._submit_time - self._arrival_time)
        metrics.prompt_length.observe(usage.prompt_tokens)
        metrics.choice_counts.observe(request.n)
        if request.stop_conditions.max_tokens is not None:
            metrics.max_tokens.observe(request.stop_conditions.max_tokens)

    def record_prefill(self, cached_tokens: int, prompt_tokens: int, chunks: list[PrefillChunk] | None = None) -> None:
        """Record that ``cached_tokens`` of a prompt's ``prompt_tokens`` tokens were in the prefix cache.
        ``chunks``: the steps that computed the others, if there were several."""
        if chunks and not self._prefill_chunks:
            self._prefill_chunks = chunks
        if self._resumed:
            self._model_metrics.external_tokens.add_count(cached_tokens)
            self._model_metrics.recomputed_tokens.add_count(prompt_tokens - cached_tokens)
        else:
            self._model_metrics.cached_tokens.add_count(cached_tokens)

    def record_tokens(self, choice: int, count: int, now: float, queue_seconds: float) -> None:
        """Record new tokens of a choice. ``queue_seconds``: its wait in the engine's queue, read with the first."""
        if self._replaying:
            self._first_token_time, self._first_step_time = self._first_token_time or now, self._submit_time
            return
        if not self._first_token_time:
            self._first_token_time = now
            self._first_step_time = self._submit_time + queue_seconds
            self._model_metrics.engine_queue_seconds.observe(queue_seconds)
            self._model_metrics.queue_seconds.observe(self._first_step_time - self._arrival_time)
            self._model_metrics.request_prefill_seconds.observe(now - self._first_step_time)
            self.log_entry.ttft_seconds = now - self._arrival_time
            self._model_metrics.time_to_first_token.observe(now - self._arrival_time)
            self._model_metrics.recent_ttft.append(now - self._arrival_time)
        if count > 1:
            self._grouped_tokens += count - 1
        previous = self._last_token_times.get(choice)
        if previous is not None:
            gap = (now - previous) / count
            self._model_metrics.inter_token_seconds.observe(gap, count)
            self._model_metrics.recent_gaps.append(gap)
        self._last_token_times[choice] = now

    def record_preemptions(self, choice: int, times: int) -> None:
        """Record that a choice has been preempted ``times`` times so far."""
        self._preemptions[choice] = times

    def record_finish(self, reason: FinishReason) -> None:
        """Record that a choice has finished."""
        self.log_entry.finish_reason = reason
        self._finish_reasons.append(reason)
        if not self._replaying:
            self._model_metrics.finished_choices.add_count(value=METRIC_FINISH_REASONS[reason])

    def current_timings(self) -> RequestTimings:
        """Return how long each phase took until now; call it after the last token."""
        now = time.perf_counter()
        first_step_time = self._first_step_time or now
        first_token_time, last_token_time = self._first_token_time, max(self._last_token_times.values(), default=0.0)
        return RequestTimings(
            now - self._arrival_time,
            self._submit_time - self._arrival_time,
            first_step_time - self._submit_time,
            now - first_step_time,
            first_token_time - first_step_time if first_token_time and not self._resumed else None,
            last_token_time - first_token_time if last_token_time else None,
        )

    def record_end(self, lengths: list[int], unfinished: int, *, failed: bool, handed_over: bool = False) -> None:
        """Record the end of the request.

        ``lengths``: delivered tokens of each choice. ``unfinished``: choices that never finished. ``handed_over``: the
        request continues on another instance, which counts it at its end.
        """
        if not self._submit_time:
            return
        now, metrics, usage, delivered = time.perf_counter(), self._model_metrics, self._usage, sum(lengths)
        self.log_entry.prompt_tokens, self.log_entry.completion_tokens = usage.prompt_tokens, delivered
        if self._trace is not None and self._trace.context.sampled:
            self._add_spans(self._trace, now, delivered, unfinished, failed, handed_over)
        if handed_over:
            self.log_entry.finish_reason = "onward"
            return
        if unfinished:
            self.log_entry.finish_reason = "error" if failed else "abort"
            metrics.finished_choices.add_count(unfinished, self.log_entry.finish_reason)
        self._add_to_totals(now, unfinished > 0, failed)
        counts = {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens, "output": delivered}
        metrics.record_key_tokens(self.log_entry.key, counts)
        metrics.request_seconds.observe(now - self._arrival_time)
        metrics.output_length.observe(delivered)
        metrics.bundled_tokens.observe(self._grouped_tokens)
        metrics.preemption_counts.observe(sum(self._preemptions.values()))
        metrics.longest_output.observe(max(lengths, default=0))
        metrics.computed_length.observe(usage.prompt_tokens - usage.cached_tokens)
        if self._first_token_time:
            metrics.inference_seconds.observe(now - self._first_step_time)
            metrics.load_ratio.observe((now - self._arrival_time) / max(1e-6, now - self._first_step_time))
            metrics.request_decode_seconds.observe(now - self._first_token_time)
            if delivered > 1:
                metrics.time_per_output_token.observe((now - self._first_token_time) / (delivered - 1))

    def _add_spans(
        self, trace: RequestTrace, now: float, delivered: int, unfinished: int, failed: bool, handed_over: bool
    ) -> None:
        """Add the spans of the generation and its phases."""
        assert self._request is not None
        times = GenerationTimes(
            arrived=self._arrival_time,
            submitted=self._submit_time,
            ended=now,
            first_step=self._first_step_time,
            first_token=self._first_token_time,
            last_token=max(self._last_token_times.values(), default=0.0),
            chunks=self._prefill_chunks,
        )
        incomplete = "" if handed_over or not unfinished else "error" if failed else "abort"
        request = self._request
        ended = EndedGeneration(
            operation_name(request),
            request.id,
            request.model,
            stream=request.stream,
            n=request.n,
            max_tokens=request.stop_conditions.max_tokens,
            sampling=None if request.pooling is not None else request.sampling,
            usage=self._usage,
            times=times,
            output_tokens=delivered,
            finish_reasons=(*self._finish_reasons, *([incomplete] * unfinished if incomplete else ())),
            preemptions=sum(self._preemptions.values()),
            resumed=self._resumed,
            error=incomplete,
        )
        trace.add_later(partial(encode_generation_spans, trace, ended))

    def _add_to_totals(self, now: float, incomplete: bool, failed: bool) -> None:
        """Add the request to the totals. ``incomplete``: some of its choices never finished."""
        totals = self._model_metrics.totals
        totals.last_end = time.time()
        if incomplete:
            totals.failed_seconds += now - self._arrival_time
            totals.failed += failed
            totals.cancelled += not failed
            return
        first_step_time = self._first_step_time or self._submit_time
        totals.succeeded += 1
        totals.total_seconds += now - self._arrival_time
        totals.prepare_seconds += self._submit_time - self._arrival_time
        totals.queue_seconds += first_step_time - self._submit_time
        totals.compute_seconds += now - first_step_time
