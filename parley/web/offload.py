"""Work on texts beside the event loop, where it would hold others up. Knows nothing of what is done."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LARGE = 16 << 10  # bytes or characters from which work on a text leaves the event loop


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do the work, in a thread if its input is large."""
    return await asyncio.to_thread(work) if size > LARGE else work()


def give_back() -> None:
    """Give the system back what was freed and the C library keeps, which may be gigabytes; where that can be told."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
