"""Counters and histograms, and Prometheus' text format for them.

No client library is used, since counts and distributions are all that is needed: recording costs an addition, and text
is only produced for a scrape. They have no names here, because the same numbers are exported under the names of several
servers.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum
from typing import NamedTuple

SampleGroup = tuple[str, Iterable[tuple[str, float]]]  # common labels, and each value with its further labels
SORT_BATCH = 512  # numbers that are sorted into buckets together


def escape_label(value: str) -> str:
    """Escape a label's value for the text format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def format_labels(pairs: Mapping[str, str]) -> str:
    """Return labels in the text format, without braces."""
    return ",".join(f'{name}="{escape_label(value)}"' for name, value in pairs.items())


class LabelledCounter:
    """A counter, one for each value of a label."""

    def __init__(self, *values: str):
        self.by_label: dict[str, float] = dict.fromkeys(values, 0.0)

    def add_count(self, amount: float = 1, value: str = "") -> None:
        """Increase the counter of one label value."""
        self.by_label[value] = self.by_label.get(value, 0.0) + amount

    def take_delta(self) -> dict[str, float]:
        """Return the counts since the last call, for another process to add, and reset them."""
        delta, self.by_label = self.by_label, dict.fromkeys(self.by_label, 0.0)
        return delta

    def add_delta(self, delta: Mapping[str, float]) -> None:
        """Add the counts of another process."""
        for value, amount in delta.items():
            self.add_count(amount, value)

    @property
    def total_count(self) -> float:
        """The sum over all label values."""
        return sum(self.by_label.values())


# Bucket bounds in seconds that vLLM's dashboards know, for parley's own histograms as well.
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
               640, 2560)  # fmt: skip
TPOT_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


class HistogramDelta(NamedTuple):
    """The numbers that a histogram has recorded: their sum, and counts by the name of a scale."""

    total: float
    observed: int
    bucket_counts: dict[str, list[int]]


class BucketHistogram:
    """A histogram. ``scales``: lists of bucket bounds, by name.

    Numbers are sorted into buckets many at a time, which costs a fifth of doing it one by one.
    """

    def __init__(self, **scales: Sequence[float]):
        self._bounds = {name: tuple(bounds) for name, bounds in scales.items()}
        self._clear_series()

    def set_scale(self, name: str, bounds: Sequence[float]) -> None:
        """Add a scale or change its bounds, which drops all recorded numbers. The same bounds change nothing."""
        if self._bounds.get(name) != tuple(bounds):
            self._bounds[name] = tuple(bounds)
            self._clear_series()

    def _clear_series(self) -> None:
        self._unsorted: list[float] = []
        self._sum, self._count = 0.0, 0
        self._bucket_counts = {name: [0] * (len(bounds) + 1) for name, bounds in self._bounds.items()}

    def observe(self, number: float, times: int = 1) -> None:
        """Record a number, ``times`` times."""
        if times == 1:
            self._unsorted.append(number)
        else:
            self._unsorted += [number] * times
        if len(self._unsorted) >= SORT_BATCH:
            self._sort_observed()

    def take_delta(self) -> HistogramDelta:
        """Return the recorded numbers since the last call, for another process to add, and reset them."""
        self._sort_observed()
        delta = HistogramDelta(self._sum, self._count, self._bucket_counts)
        self._clear_series()
        return delta

    def add_delta(self, delta: HistogramDelta) -> None:
        """Add the numbers of another process, whose histogram has the same scales."""
        self._sum += delta.total
        self._count += delta.observed
        for name, counts in delta.bucket_counts.items():
            own_counts = self._bucket_counts[name]
            self._bucket_counts[name] = [
                own_count + further_count for own_count, further_count in zip(own_counts, counts, strict=True)
            ]

    def _sort_observed(self) -> None:
        numbers, self._unsorted = sorted(self._unsorted), []
        self._sum += sum(numbers)
        self._count += len(numbers)
        for name, bounds in self._bounds.items():
            counts = self._bucket_counts[name]
            below = 0
            for place, bound in enumerate(bounds):
                up_to = bisect_right(numbers, bound, below)
                counts[place] += up_to - below
                below = up_to
            counts[-1] += len(numbers) - below

    @property
    def observed_sum(self) -> float:
        """The sum of the recorded numbers."""
        self._sort_observed()
        return self._sum

    @property
    def observed_count(self) -> int:
        """Number of recorded numbers."""
        self._sort_observed()
        return self._count

    def histogram_lines(self, name: str, common: str, scale: str, factor: int = 1) -> Iterator[str]:
        """Yield the lines of a histogram with the bounds of one scale, in a unit ``factor`` times smaller.

        ``common``: labels of all lines.
        """
        self._sort_observed()
        bounds, counts = self._bounds[scale], self._bucket_counts[scale]
        comma = "," if common else ""
        total = 0
        for bound, count in zip((*(bound * factor for bound in bounds), "+Inf"), counts, strict=True):
            total += count
            yield f'{name}_bucket{{{common}{comma}le="{bound}"}} {total}\n'
        label_text = f"{{{common}}}" if common else ""
        yield f"{name}_sum{label_text} {self._sum * factor:.17g}\n{name}_count{label_text} {total}\n"


class RecentValues(deque[float]):
    """The last numbers, as many as ``maxlen`` of ``deque``."""

    def take_delta(self) -> list[float]:
        """Return the numbers since the last call, for another process to add, and reset them."""
        delta = list(self)
        self.clear()
        return delta

    @property
    def recent_mean(self) -> float:
        """The mean; 0.0 without numbers."""
        return fsum(self) / len(self) if self else 0.0


class RateMeter:
    """An amount per second, as a mean over the last full seconds."""

    def __init__(self, seconds: int):
        self._seconds = seconds
        self._counts: dict[int, float] = {}

    def add_amount(self, amount: float) -> None:
        """Add an amount to the current second."""
        now = int(time.monotonic())
        self._counts[now] = self._counts.get(now, 0.0) + amount
        if len(self._counts) > self._seconds + 1:
            del self._counts[next(iter(self._counts))]

    @property
    def mean_rate(self) -> float:
        """The mean amount per second, over the last full seconds."""
        now = int(time.monotonic())
        return sum(self._counts.get(now - k, 0.0) for k in range(1, self._seconds + 1)) / self._seconds


def metric_header(kind: str, name: str, help_text: str) -> str:
    """Return the HELP and TYPE lines of a metric."""
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def scalar_lines(kind: str, name: str, help_text: str, groups: Iterable[SampleGroup]) -> str:
    """Return a counter or gauge in the text format."""
    lines = []
    for common, values in groups:
        for extra_labels, value in values:
            label_text = common + ("," if common and extra_labels else "") + extra_labels.removeprefix(",")
            lines.append(f"{name}{{{label_text}}} {value:.17g}\n" if label_text else f"{name} {value:.17g}\n")
    return metric_header(kind, name, help_text) + "".join(lines)
