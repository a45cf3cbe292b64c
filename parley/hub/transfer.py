"""Measures the progress of a download over all of its files: bytes, speed and remaining time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 10.0  # averaging window of the speed
REPORT_SECONDS = 0.1  # between two reports
UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def format_bytes(count: float) -> str:
    """Return a number of bytes with three digits and a unit, a power of 1000."""
    size, unit = next(((size, unit) for size, unit in UNITS if count >= size), (1, "B"))
    return f"{count / size:.3g} {unit}" if count / size < 999.5 else f"{count / size:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration as h:mm:ss, or as m:ss below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class TransferMeter:
    """Counts the bytes of a download and reports them. ``total``: bytes of all files together.

    Several counters may count the same bytes, as those that arrive and those that are written: the largest is right.
    The fraction that is reported never falls and never exceeds 1.
    """

    def __init__(self, total: int, report: Callable[[str, float], None], clock: Callable[[], float] = time.monotonic):
        self.total = total
        self._report = report
        self._clock = clock
        self._done = 0.0
        self._history = deque([(clock(), 0.0)])
        self._reported = 0.0  # time of the last report

    def set_done(self, count: float) -> None:
        """Set the number of bytes that one counter has counted."""
        if count <= self._done:
            return
        self._done = min(count, self.total) if self.total else count
        now = self._clock()
        self._history.append((now, self._done))
        while len(self._history) > 2 and now - self._history[1][0] > WINDOW_SECONDS:
            self._history.popleft()
        if now - self._reported >= REPORT_SECONDS or self._done >= self.total > 0:
            self._reported = now
            self._report(self.describe(), self.fraction)

    @property
    def fraction(self) -> float:
        """Return the share of the bytes that have arrived, 0 to 1; 0 while the total is unknown."""
        return min(1.0, self._done / self.total) if self.total else 0.0

    def describe(self) -> str:
        """Return the state as text: how many bytes of how many, bytes per second, and the time that is left."""
        start, bytes_before = self._history[0]
        seconds = self._history[-1][0] - start
        rate = (self._done - bytes_before) / seconds if seconds > 0 else 0.0
        of_total = f" of {format_bytes(self.total)}" if self.total else ""
        parts = [f"downloading {format_bytes(self._done)}{of_total}"]
        if rate and self._done < self.total:
            parts += [f"{format_bytes(rate)}/s", f"{format_seconds((self.total - self._done) / rate)} left"]
        return ", ".join(parts)
