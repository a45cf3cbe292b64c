"""Numbers that are counted, and how Prometheus' text format writes them.

Counts and distributions are all that is needed here, so they are written out rather than taken from a client library:
one costs an addition when it is fed, and text is only made when somebody asks. They have no names: the same numbers are
told under those of several servers.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum

Group = tuple[str, Iterable[tuple[str, float]]]  # common labels; each value with the labels it has beside them
GATHER = 512  # numbers that are sorted together


def escape(value: str) -> str:
    """A label's value as the format wants it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def labels(pairs: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{escape(value)}"' for name, value in pairs.items())


class Count:
    """A number that only grows, one for each value of a label."""

    def __init__(self, *values: str):
        self.counts: dict[str, float] = dict.fromkeys(values, 0.0)

    def add(self, amount: float = 1, value: str = "") -> None:
        self.counts[value] = self.counts.get(value, 0.0) + amount

    @property
    def total(self) -> float:
        return sum(self.counts.values())


class Distribution:
    """How often a number fell below each of some bounds. ``scales`` are several lists of bounds, by name.

    Numbers are put where they belong many at a time, once they are sorted: a fifth of what one by one would cost.
    """

    def __init__(self, **scales: Sequence[float]):
        self.scale(**scales)

    def scale(self, **scales: Sequence[float]) -> None:
        """Begin anew with these bounds."""
        self._fresh: list[float] = []
        self._sum = 0.0
        self._scales = [(bounds, [0] * (len(bounds) + 1)) for bounds in scales.values()]
        self._names = list(scales)

    def observe(self, number: float, times: int = 1) -> None:
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
        self._sort()
        return self._sum

    @property
    def total(self) -> int:
        """How many numbers were observed."""
        self._sort()
        return sum(self._scales[0][1])

    def lines(self, name: str, common: str, scale: str) -> Iterator[str]:
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
    """The last so many numbers, as ``maxlen`` says."""

    @property
    def mean(self) -> float:
        return fsum(self) / len(self) if self else 0.0


class Rate:
    """What is added in a second, as a mean over the last few whole ones."""

    def __init__(self, seconds: int):
        self._seconds = seconds
        self._counts: dict[int, float] = {}

    def add(self, amount: float) -> None:
        now = int(time.monotonic())
        self._counts[now] = self._counts.get(now, 0.0) + amount
        if len(self._counts) > self._seconds + 1:
            del self._counts[next(iter(self._counts))]

    @property
    def mean(self) -> float:
        now = int(time.monotonic())
        return sum(self._counts.get(now - k, 0.0) for k in range(1, self._seconds + 1)) / self._seconds


def header(kind: str, name: str, help: str) -> str:
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n"


def scalar(kind: str, name: str, help: str, groups: Iterable[Group]) -> str:
    """A counter or gauge."""
    lines = []
    for common, values in groups:
        for own, value in values:
            both = common + ("," if common and own else "") + own.removeprefix(",")
            lines.append(f"{name}{{{both}}} {value:.17g}\n" if both else f"{name} {value:.17g}\n")
    return header(kind, name, help) + "".join(lines)
