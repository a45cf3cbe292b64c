"""Ends slow work in a thread early if its result is no longer wanted: a thread cannot be cancelled from outside.

The caller runs the work with ``run_until_abandoned``. The work calls ``stop_if_abandoned`` between its parts, at any
depth, without being passed anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_ABANDONED: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)


class Abandoned(Exception):
    """No caller waits for the result of this work."""


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
