"""Runs slow text work in a thread so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

OFFLOAD_SIZE = 16 << 10  # bytes or characters of input above which work runs in a thread


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Call ``work`` and return its result; use a thread if its input is larger than LARGE."""
    return await asyncio.to_thread(work) if size > OFFLOAD_SIZE else work()


def trim_memory() -> None:
    """Return memory that was freed but that the C library keeps, possibly gigabytes, to the system.

    Does nothing where the C library has no ``malloc_trim``.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
