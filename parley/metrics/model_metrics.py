"""The metrics of a model, recorded in one place. They have no names here: each dialect's ``metrics`` module writes them
under the names of the server it is compatible with, so that existing dashboards work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from parley.metrics.key_names import KeyNames
from parley.metrics.request_totals import RequestTotals
from parley.metrics.series import BucketHistogram, HistogramDelta, LabelledCounter, RateMeter, RecentValues
from parley.types import EngineStats, ModelInfo

RECENT_COUNT, RATE_SECONDS = 1000, 10


class ModelMetricsDelta(NamedTuple):
    """The metrics of a model's requests in one process since the last delta: series by the names of their members of
    ``ModelMetrics``, and tokens by API key and kind."""

    totals: RequestTotals
    counters: dict[str, dict[str, float]]
    histograms: dict[str, HistogramDelta]
    recent: dict[str, list[float]]
    key_tokens: list[tuple[str, str, int]]


class ModelMetrics:
    """All metrics of one model since its start. The engine's own counters are in its ``EngineStats``.

    Histograms have no buckets here: each API adds its own (``Dialect.add_buckets``).
    """

    def __init__(self) -> None:
        self.totals = RequestTotals()
        # Finished choices, by reason.
        self.finished_choices = LabelledCounter("stop", "length", "abort", "error", "repetition")
        self.rejected_requests = LabelledCounter("queue_full")  # valid requests refused for lack of capacity, by reason
        self.invalid_requests = LabelledCounter("")  # invalid requests
        self.cached_tokens = LabelledCounter("")  # prompt tokens found in the prefix cache
        # Prompt tokens counted by other instances whose pages were received or cached here.
        self.external_tokens = LabelledCounter("")
        # Prompt tokens counted by other instances that were recomputed here.
        self.recomputed_tokens = LabelledCounter("")
        self._key_names = KeyNames()
        self.key_tokens: Counter[tuple[str, str]] = Counter()  # tokens of ended requests, by API key and kind
        # per request, in seconds
        self.time_to_first_token = BucketHistogram()  # TTFT: from its arrival
        self.inter_token_seconds = BucketHistogram()  # of a choice
        self.time_per_output_token = BucketHistogram()  # TPOT: mean after the first token
        self.request_seconds = BucketHistogram()  # from its arrival to its last token
        self.prepare_seconds = BucketHistogram()  # reading, rendering, tokenizing
        self.engine_queue_seconds = BucketHistogram()  # in the engine's queue
        self.queue_seconds = BucketHistogram()  # from its arrival to its first step
        self.request_prefill_seconds = BucketHistogram()  # from its first step to its first token
        self.request_decode_seconds = BucketHistogram()  # from its first token to its last
        self.inference_seconds = BucketHistogram()  # from its first step to its last token
        self.load_ratio = BucketHistogram()  # from its arrival to its end, divided by the part after its first step
        self.recent_ttft = RecentValues(maxlen=RECENT_COUNT)  # like time_to_first_token
        self.recent_gaps = RecentValues(maxlen=RECENT_COUNT)  # like inter_token_seconds
        # per request, counts
        self.choice_counts = BucketHistogram()
        self.prompt_length = BucketHistogram()
        self.computed_length = BucketHistogram()  # prompt tokens that were not found in the prefix cache
        self.output_length = BucketHistogram()  # sum over all choices
        self.longest_output = BucketHistogram()  # of the longest choice
        self.max_tokens = BucketHistogram()
        self.bundled_tokens = BucketHistogram()  # output tokens that arrived together with the previous one
        self.preemption_counts = BucketHistogram()  # preemptions of its choices
        # per step of the engine
        self.step_tokens = BucketHistogram()  # of prompts that it began to read, and tokens that it generated
        self.step_rows = BucketHistogram()
        self.prefill_step_seconds = BucketHistogram()  # of steps with prompt tokens
        self.decode_step_seconds = BucketHistogram()  # of all other steps
        # tokens of all steps
        self.prompt_rate, self.output_rate = RateMeter(RATE_SECONDS), RateMeter(RATE_SECONDS)
        self._prompt_tokens = self._generated_tokens = 0  # of all steps so far

    def record_key_tokens(self, key: str, counts: Mapping[str, int]) -> None:
        """Count the tokens of a request by kind, for its API key."""
        name = self._key_names.series_name(key)
        for kind, count in counts.items():
            self.key_tokens[name, kind] += count

    def take_delta(self) -> ModelMetricsDelta:
        """Return the metrics of requests since the last call, for another process to add, and reset them."""
        series = vars(self).items()
        delta = ModelMetricsDelta(
            self.totals.take_delta(),
            {name: metric.take_delta() for name, metric in series if isinstance(metric, LabelledCounter)},
            {name: metric.take_delta() for name, metric in series if isinstance(metric, BucketHistogram)},
            {name: metric.take_delta() for name, metric in series if isinstance(metric, RecentValues)},
            [(*key_and_kind, count) for key_and_kind, count in self.key_tokens.items()],
        )
        self.key_tokens.clear()
        return delta

    def add_delta(self, delta: ModelMetricsDelta) -> None:
        """Add the metrics of requests of another process."""
        self.totals.add_delta(delta.totals)
        for name, series_delta in (*delta.counters.items(), *delta.histograms.items()):
            getattr(self, name).add_delta(series_delta)
        for name, values in delta.recent.items():
            getattr(self, name).extend(values)
        for key, kind, count in delta.key_tokens:
            self.record_key_tokens(key, {kind: count})

    def record_step(self, stats: EngineStats) -> None:
        """Record the engine's counters after a step. Does nothing if the step had no tokens."""
        if not stats.step_tokens:
            return
        generated = max(0, stats.generated_tokens - self._generated_tokens)
        prompt = max(0, stats.prompt_tokens - self._prompt_tokens)
        self._prompt_tokens, self._generated_tokens = stats.prompt_tokens, stats.generated_tokens
        self.step_tokens.observe(prompt + generated)
        self.step_rows.observe(stats.step_rows)
        self.prompt_rate.add_amount(stats.step_prompt_tokens)
        self.output_rate.add_amount(generated)
        (self.prefill_step_seconds if stats.step_prompt_tokens else self.decode_step_seconds).observe(
            stats.step_seconds
        )


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """The state of a model at the time of a scrape.

    ``info`` is None before the model is loaded. ``active_adapters``: adapters of open requests, each with whether a
    request still waits for its first token; ``adapter_places``: adapters that fit in memory, 0 without adapters.
    ``engine_restarts``: how often its engine was started again.
    """

    model: str
    metrics: ModelMetrics
    stats: EngineStats
    info: ModelInfo | None
    prefix_cache: bool
    ready: bool
    progress: float
    open_requests: int
    active_adapters: frozenset[tuple[str, bool]] = frozenset()
    adapter_places: int = 0
    engine_restarts: int = 0
