"""Returns freed memory to the system. The C library keeps it otherwise: what a burst of large bodies or of encrypted
connections has taken stays with the process, and grows with each burst, because it lies in pieces."""

from __future__ import annotations

import asyncio
import ctypes


class MemoryTrim:
    """Trims the memory of the process ``delay`` seconds after it is asked to: once for all that ask in that time."""

    def __init__(self, delay: float):
        self._delay = delay
        self._is_scheduled = False

    def schedule_trim(self) -> None:
        """Trim the memory soon, in a thread. An event loop must run."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(self._delay, self._start_trim)

    def _start_trim(self) -> None:
        self._is_scheduled = False
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


def trim_memory() -> None:
    """Return memory that was freed but that the C library keeps, possibly gigabytes, to the system.

    Does nothing where the C library has no ``malloc_trim``.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
