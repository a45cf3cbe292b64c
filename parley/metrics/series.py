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

Group = tuple[str, Iterable[tuple[str, float]]]  # common labels, and each value with its further labels
GATHER = 512  # numbers that are sorted into buckets together


def escape(value: str) -> str:
    """Escape a label's value for the text format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def labels(pairs: Mapping[str, str]) -> str:
    """Return labels in the text format, without braces."""
    return ",".join(f'{name}="{escape(value)}"' for name, value in pairs.items())


class Count:
    """A counter, one for each value of a label."""

    def __init__(self, *values: str):
        self.counts: dict[str, float] = dict.fromkeys(values, 0.0)

    def add(self, amount: float = 1, value: str = "") -> None:
        """Increase the counter of one label value."""
        self.counts[value] = self.counts.get(value, 0.0) + amount

    @property
    def total(self) -> float:
        """The sum over all label values."""
        return sum(self.counts.values())


class Distribution:
    """A histogram. ``scales``: one or more lists of bucket bounds, by name.

    Numbers are sorted into buckets many at a time, which costs a fifth of doing it one by one.
    """

    def __init__(self, **scales: Sequence[float]):
        self.scale(**scales)

    def scale(self, **scales: Sequence[float]) -> None:
        """Set new bounds and drop all recorded numbers."""
        self._fresh: list[float] = []
        self._sum = 0.0
        self._scales = [(bounds, [0] * (len(bounds) + 1)) for bounds in scales.values()]
        self._names = list(scales)

    def observe(self, number: float, times: int = 1) -> None:
        """Record a number, ``times`` times."""
        if times == 1:
            self._fresh.append(number)
        else:
            self._fresh += [number] * times
        if len(self._fresh) >= GATHER:
            self._sort()

    def _sort(self) -> None:
        numbers, self._fresh = sorted(self._fresh), []
        self._sum += sum(numbers)
        for bounds, counts in self._scales:
            below = 0
            for place, bound in enumerate(bounds):
                upto = bisect_right(numbers, bound, below)
                counts[place] += upto - below
                below = upto
            counts[-1] += len(numbers) - below

    @property
    def sum(self) -> float:
        """The sum of the recorded numbers."""
        self._sort()
        return self._sum

    @property
    def total(self) -> int:
        """Number of recorded numbers."""
        self._sort()
        return sum(self._scales[0][1])

    def lines(self, name: str, common: str, scale: str) -> Iterator[str]:
        """Yield the lines of a histogram with the bounds of one scale. ``common``: labels of all lines."""
        self._sort()
        bounds, counts = self._scales[self._names.index(scale)]
        comma = "," if common else ""
        total = 0
        for bound, count in zip((*bounds, "+Inf"), counts, strict=True):
            total += count
            yield f'{name}_bucket{{{common}{comma}le="{bound}"}} {total}\n'
        own = f"{{{common}}}" if common else ""
        yield f"{name}_sum{own} {self._sum:.17g}\n{name}_count{own} {total}\n"


class Recent(deque[float]):
    """The last ``maxlen`` numbers."""

    @property
    def mean(self) -> float:
        """The mean; 0.0 without numbers."""
        return fsum(self) / len(self) if self else 0.0


class Rate:
    """An amount per second, as a mean over the last full seconds."""

    def __init__(self, seconds: int):
        self._seconds = seconds
        self._counts: dict[int, float] = {}

    def add(self, amount: float) -> None:
        """Add an amount to the current second."""
        now = int(time.monotonic())
        self._counts[now] = self._counts.get(now, 0.0) + amount
        if len(self._counts) > self._seconds + 1:
            del self._counts[next(iter(self._counts))]

    @property
    def mean(self) -> float:
        """The mean amount per second, over the last full seconds."""
        now = int(time.monotonic())
        return sum(self._counts.get(now - k, 0.0) for k in range(1, self._seconds + 1)) / self._seconds


def header(kind: str, name: str, help: str) -> str:
    """Return the HELP and TYPE lines of a metric."""
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n"


def scalar(kind: str, name: str, help: str, groups: Iterable[Group]) -> str:
    """Return a counter or gauge in the text format."""
    lines = []
    for common, values in groups:
        for own, value in values:
            both = common + ("," if common and own else "") + own.removeprefix(",")
            lines.append(f"{name}{{{both}}} {value:.17g}\n" if both else f"{name} {value:.17g}\n")
    return header(kind, name, help) + "".join(lines)
