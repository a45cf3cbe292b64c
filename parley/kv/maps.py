"""Files of other processes, mapped to be read, each once for all links that need it. Knows nothing of what they hold.

A mapping costs something for each 4 KiB that are touched through it, at the first time and again when it ends: some
40 ms for a gigabyte, in which Python keeps its interpreter's lock. So links share mappings, and to end one is the work
of a thread, in small steps.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

STEP = 16 << 20  # bytes that are let go of at once

Place = tuple[int, int, int]  # device, inode and size of a file


class Maps:
    """Of one process. ``take`` and ``give`` may be called from any thread."""

    def __init__(self) -> None:
        self._maps: dict[Place, mmap.mmap] = {}
        self._users: Counter[Place] = Counter()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "parley-kv-maps")

    def take(self, file: int) -> tuple[Place, mmap.mmap]:
        """What an open file holds, until its place is given back. Raises OSError."""
        found = os.fstat(file)
        place = found.st_dev, found.st_ino, found.st_size
        with self._lock:
            if place not in self._maps:
                self._maps[place] = mmap.mmap(file, found.st_size, prot=mmap.PROT_READ)
            self._users[place] += 1
            return place, self._maps[place]

    def give(self, place: Place) -> None:
        """One user less. Whoever still has the mapping may read on."""
        with self._lock:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self._thread.submit(_unmap, self._maps.pop(place))

    def close(self) -> None:
        """Return when nothing is mapped that nobody uses. Blocks."""
        self._thread.shutdown(True)


def _unmap(memory: mmap.mmap) -> None:
    for start in range(0, len(memory), STEP):
        memory.madvise(mmap.MADV_DONTNEED, start, min(STEP, len(memory) - start))
