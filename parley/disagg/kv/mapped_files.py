"""Files of other processes, mapped for reading, each once for all links that use it. Knows nothing of their content.

A mapping costs time for each 4 KiB touched through it, on first access and again on unmapping: about 40 ms for a
gigabyte, during which Python keeps the interpreter lock. So links share mappings, and a thread unmaps them in small
steps.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

STEP = 16 << 20  # bytes unmapped at a time

Place = tuple[int, int, int]  # device, inode and size of a file


class Maps:
    """All mappings of this process. ``acquire_mapping`` and ``release_mapping`` may be called from any thread."""

    def __init__(self) -> None:
        self._maps: dict[Place, mmap.mmap] = {}
        self._users: Counter[Place] = Counter()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "parley-kv-maps")

    def take(self, file: int) -> tuple[Place, mmap.mmap]:
        """Map an open file, until its identity is released. Raises OSError."""
        found = os.fstat(file)
        place = found.st_dev, found.st_ino, found.st_size
        with self._lock:
            if place not in self._maps:
                self._maps[place] = mmap.mmap(file, found.st_size, prot=mmap.PROT_READ)
            self._users[place] += 1
            return place, self._maps[place]

    def give(self, place: Place) -> None:
        """Remove one user. Users that still have the mapping may continue to read."""
        with self._lock:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self._thread.submit(_unmap, self._maps.pop(place))

    def close(self) -> None:
        """Return when all unused files are unmapped. Blocks."""
        self._thread.shutdown(True)


def _unmap(memory: mmap.mmap) -> None:
    """Unmap a file in small steps."""
    for start in range(0, len(memory), STEP):
        memory.madvise(mmap.MADV_DONTNEED, start, min(STEP, len(memory) - start))
