"""Ends slow work early: in a thread if its result is no longer wanted, in the event loop if it takes too long there.

A thread cannot be cancelled from outside. The caller runs the work with ``run_until_abandoned``, and the work calls
``stop_if_abandoned`` between its parts, at any depth, without being passed anything.

The event loop tries work with ``run_briefly``, and the work calls ``stop_if_not_brief``. Only its processor time
counts: work is not slow because other programs run meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

BRIEF_SECONDS = 0.05  # of processor time that work may take in the event loop before it is done in a thread

_ABANDONED: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)
# When work has to end: by the clock at the earliest (monotonic seconds), and by the processor time of its thread.
_BRIEF_ENDS: ContextVar[tuple[float, float] | None] = ContextVar("brief_ends", default=None)


class Abandoned(Exception):
    """No caller waits for the result of this work."""


class NotBrief(BaseException):
    """Work in the event loop takes too long. It changed nothing, and may be done in a thread from its beginning.

    No Exception, because a handler of faults would take it for one.
    """


def run_until_abandoned(work: Callable[[], T], abandoned: threading.Event) -> T:
    """Call ``work``. Once ``abandoned`` is set, it raises Abandoned at its next check."""
    token = _ABANDONED.set(abandoned)
    try:
        stop_if_abandoned()
        return work()
    finally:
        _ABANDONED.reset(token)


def stop_if_abandoned() -> None:
    """Raise Abandoned if the result of the work that runs in this thread is no longer wanted."""
    abandoned = _ABANDONED.get()
    if abandoned is not None and abandoned.is_set():
        raise Abandoned


def run_briefly(work: Callable[[], T]) -> T:
    """Call ``work``. After BRIEF_SECONDS it raises NotBrief at its next check."""
    token = _BRIEF_ENDS.set((time.monotonic() + BRIEF_SECONDS, time.thread_time() + BRIEF_SECONDS))
    try:
        return work()
    finally:
        _BRIEF_ENDS.reset(token)


def brief_end() -> float | None:
    """Return the time (monotonic seconds) before which ``stop_if_not_brief`` need not be called; None outside of
    ``run_briefly``."""
    ends = _BRIEF_ENDS.get()
    return None if ends is None else ends[0]


def stop_if_not_brief() -> None:
    """Raise NotBrief if the work that runs here takes too long for the event loop."""
    ends = _BRIEF_ENDS.get()
    if ends is not None and time.thread_time() > ends[1]:
        raise NotBrief
