"""Measures where a thread's CPU time goes: wrapped functions charge their own time, without that of wrapped functions
they call, to a name. CPU time, because machines are shared; the cost of measuring is subtracted.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Coroutine
from time import thread_time_ns
from typing import Any


class Meter:
    """Times of one thread. ``own[name]``: nanoseconds; ``calls[name]``: number of entries."""

    def __init__(self) -> None:
        self.own: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._names: list[str] = []
        self._since = 0
        self._inside = self._outside = 0.0  # cost of an entry to the function itself, and to its caller
        self._calibrate()

    def clear(self) -> None:
        """Forget all times."""
        self.own.clear()
        self.calls.clear()

    @property
    def cost(self) -> float:
        """The nanoseconds that measuring took."""
        return sum(self.calls.values()) * (self._inside + self._outside)

    def enter_name(self, name: str) -> None:
        """Start to charge time to ``name``."""
        now = thread_time_ns()
        if self._names:
            self.own[self._names[-1]] += now - self._since - self._outside
        self._names.append(name)
        self.calls[name] += 1
        self._since = thread_time_ns()

    def leave_name(self) -> None:
        """Stop charging the current name, and resume the one before."""
        now = thread_time_ns()
        self.own[self._names.pop()] += now - self._since - self._inside
        self._since = thread_time_ns()

    def wrap_attribute(self, owner: Any, attribute: str, name: str) -> None:
        """Charge a function or coroutine function of a module or class to ``name``."""
        raw = inspect.getattr_static(owner, attribute)
        function = raw.fget if isinstance(raw, property) else raw
        timed = self.timed_function(function, name)
        setattr(owner, attribute, property(timed) if isinstance(raw, property) else timed)

    def timed_function(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function that charges its time to ``name``."""
        if _is_coroutine(function):

            @functools.wraps(function)
            def begun(*args: Any, **kwargs: Any) -> TimedCoroutine:
                return TimedCoroutine(self, function(*args, **kwargs), name)

            return begun

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.enter_name(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave_name()

        return called

    def _calibrate(self, rounds: int = 20_000) -> None:
        empty = self.timed_function(lambda: None, "empty")
        self.enter_name("caller")
        for _ in range(rounds):
            empty()
        self.leave_name()
        self._inside, self._outside = self.own["empty"] / rounds, self.own["caller"] / rounds
        self.clear()


class TimedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine whose running time, without waiting, is charged to a name."""

    def __init__(self, meter: Meter, coroutine: Coroutine[Any, Any, Any], name: str):
        self._meter, self._coroutine, self._name = meter, coroutine, name

    def send(self, value: Any) -> Any:
        self._meter.enter_name(self._name)
        try:
            return self._coroutine.send(value)
        finally:
            self._meter.leave_name()

    def throw(self, *error: Any) -> Any:
        self._meter.enter_name(self._name)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._meter.leave_name()

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> TimedCoroutine:
        return self

    def __iter__(self) -> TimedCoroutine:
        return self

    def __next__(self) -> Any:
        return self.send(None)


def _is_coroutine(function: Callable[..., Any]) -> bool:
    return bool(getattr(getattr(function, "__code__", None), "co_flags", 0) & 0x80)


def cost_table(columns: list[tuple[str, dict[str, float]]], unit: str, whole: list[float] | None = None) -> str:
    """Return a Markdown table: one row per name, ordered by the last column, and the sum.

    ``whole``: each column's total without instrumentation.
    """
    last = columns[-1][1]
    names = sorted({name for _, costs in columns for name in costs}, key=lambda name: -last.get(name, 0.0))
    lines = [f"| {unit} | " + " | ".join(title for title, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(f"{costs.get(name, 0.0):.1f}" for _, costs in columns) + " |")
    lines.append("| **sum** | " + " | ".join(f"{sum(costs.values()):.1f}" for _, costs in columns) + " |")
    if whole is not None:
        lines.append("| **measured as a whole** | " + " | ".join(f"{cost:.1f}" for cost in whole) + " |")
    return "\n".join(lines)
