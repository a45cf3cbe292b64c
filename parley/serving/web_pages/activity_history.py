"""The activity of the last hour, as samples that are taken every few seconds and dropped after an hour."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import nan

from parley.metrics.series import RecentValues
from parley.serving.served_model import ServedModel

SAMPLE_SECONDS = 5.0
KEPT_SAMPLES = 720  # an hour
SAMPLE_FIELDS = (
    "running",  # sequences in the engine's batch
    "waiting",
    "kv_used",  # pages
    "kv_total",
    "prompt_tokens",  # these four are counters since the start of the engine
    "generated_tokens",
    "prefix_queries",
    "prefix_hits",
    "finished",  # choices since the start of the server
    "ttft_mean",  # these four are seconds in the time since the sample before, NaN if there was no token
    "ttft_p95",
    "tpot_mean",
    "tpot_p95",
)


class _LatencyReader:
    """Reads the latencies of a model that were recorded since the last call."""

    def __init__(self, model: ServedModel):
        self._metrics = model.metrics
        self._ttft = self._tpot = (0.0, 0)
        self.read_latencies()

    def read_latencies(self) -> tuple[float, float, float, float]:
        """Return mean and 95th percentile of TTFT, then those of the time per output token, in seconds."""
        first, gaps = self._metrics.time_to_first_token, self._metrics.inter_token_seconds
        ttft, tpot = (first.observed_sum, first.observed_count), (gaps.observed_sum, gaps.observed_count)
        before_ttft, before_tpot = self._ttft, self._tpot
        self._ttft, self._tpot = ttft, tpot
        return (
            *_describe_change(before_ttft, ttft, self._metrics.recent_ttft),
            *_describe_change(before_tpot, tpot, self._metrics.recent_gaps),
        )


def _describe_change(before: tuple[float, int], now: tuple[float, int], recent: RecentValues) -> tuple[float, float]:
    """Return the mean of the numbers recorded since ``before``, and the 95th percentile of the most recent of them.

    Both are (sum, count). NaN if there are none, also after a histogram was cleared.
    """
    count = now[1] - before[1]
    if count <= 0:
        return nan, nan
    last_values = sorted(islice(reversed(recent), min(count, len(recent))))
    high = last_values[min(len(last_values) - 1, int(0.95 * len(last_values)))] if last_values else nan
    return (now[0] - before[0]) / count, high


class ActivityHistory:
    """Samples of all models. ``since`` returns those after a time, by the model's main name."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, array[float]]]] = deque(maxlen=KEPT_SAMPLES)
        self._readers: dict[ServedModel, _LatencyReader] = {}

    async def take_samples(self, models: Sequence[ServedModel]) -> None:
        """Take samples for ever. ``models`` may change meanwhile."""
        while True:
            self.take_sample(models)
            await asyncio.sleep(SAMPLE_SECONDS)

    def take_sample(self, models: Sequence[ServedModel]) -> None:
        """Take a sample of each model."""
        self._readers = {model: self._readers.get(model) or _LatencyReader(model) for model in models}
        self._samples.append((round(time.time(), 3), {model.name: self._sample_model(model) for model in models}))

    def _sample_model(self, model: ServedModel) -> array[float]:
        stats = model.engine.stats
        numbers = (
            stats.running,
            stats.waiting,
            stats.used_pages,
            stats.total_pages,
            stats.prompt_tokens,
            stats.generated_tokens,
            stats.prefix_queries,
            stats.prefix_hits,
            model.metrics.finished_choices.total_count,
            *self._readers[model].read_latencies(),
        )
        return array("d", numbers)

    def samples_since(self, start: float) -> dict[str, tuple[list[float], list[list[float]]]]:
        """Return the times of the samples after ``start``, and their numbers in the order of ``SAMPLE_FIELDS``, for
        each model. Times are seconds since the epoch."""
        samples_by_model: dict[str, tuple[list[float], list[list[float]]]] = {}
        for sampled_at, by_model in self._samples:
            if sampled_at > start:
                for name, numbers in by_model.items():
                    times, rows = samples_by_model.setdefault(name, ([], []))
                    times.append(sampled_at)
                    rows.append(numbers.tolist())
        return samples_by_model
