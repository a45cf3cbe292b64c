"""Runs slow text work in a thread so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from parley.interrupt import NotBrief, run_briefly, run_until_abandoned

T = TypeVar("T")

OFFLOAD_SIZE = 16 << 10  # bytes or characters of input above which work runs in a thread


async def to_thread_if_large(size: int, work: Callable[[], T]) -> T:
    """Call ``work`` and return its result; use a thread if its input is larger than OFFLOAD_SIZE.

    If the caller is cancelled, work in a thread ends at its next ``stop_if_abandoned``.
    """
    return work() if size <= OFFLOAD_SIZE else await run_in_thread(work)


async def to_thread_if_slow(work: Callable[[], T]) -> T:
    """Call ``work`` and return its result. Work that notices (``stop_if_not_brief``) that it takes long is done again
    in a thread, where it ends as in ``to_thread_if_large``."""
    try:
        return run_briefly(work)
    except NotBrief:
        pass
    return await run_in_thread(work)


async def run_in_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread and return its result. If the caller is cancelled, it ends as in
    ``to_thread_if_large``."""
    abandoned = threading.Event()
    try:
        return await asyncio.to_thread(run_until_abandoned, work, abandoned)
    except asyncio.CancelledError:
        abandoned.set()
        raise
