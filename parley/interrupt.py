"""Ends slow work early: in a thread if its result is no longer wanted, in the event loop if it takes too long there.

A thread cannot be cancelled from outside. The caller runs the work with ``run_until_abandoned``, and the work calls
``stop_if_abandoned`` between its parts, at any depth, without being passed anything.

The event loop tries work with ``run_briefly``, and the work calls ``stop_if_not_brief``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

BRIEF_SECONDS = 0.05  # that work may hold the event loop before it is done in a thread

_ABANDONED: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)
_BRIEF_END: ContextVar[float] = ContextVar("brief_end", default=float("inf"))


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
    token = _BRIEF_END.set(time.monotonic() + BRIEF_SECONDS)
    try:
        return work()
    finally:
        _BRIEF_END.reset(token)


def brief_end() -> float:
    """Return the time (monotonic seconds) at which the work that runs here has to end; infinity without a limit."""
    return _BRIEF_END.get()


def stop_if_not_brief() -> None:
    """Raise NotBrief if the work that runs here takes too long for the event loop."""
    if time.monotonic() > brief_end():
        raise NotBrief
