"""Files of other processes, mapped for reading. All links that use a file share one mapping.

A mapping costs time for each 4 KiB accessed through it, on first access and again on unmapping: about 40 ms for a
gigabyte, during which Python holds the interpreter lock. So links share mappings, and a thread unmaps them in small
steps. This module knows nothing of the files' content.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

UNMAP_STEP_BYTES = 16 << 20  # bytes unmapped at a time

FileIdentity = tuple[int, int, int]  # device, inode and size of a file


class MappedFiles:
    """All mappings of this process. ``acquire_mapping`` and ``release_mapping`` may be called from any thread."""

    def __init__(self) -> None:
        self._mappings: dict[FileIdentity, mmap.mmap] = {}
        self._user_counts: Counter[FileIdentity] = Counter()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "parley-kv-maps")

    def acquire_mapping(self, fd: int) -> tuple[FileIdentity, mmap.mmap]:
        """Map an open file, until its identity is released. Raises OSError."""
        file_stat = os.fstat(fd)
        identity = file_stat.st_dev, file_stat.st_ino, file_stat.st_size
        with self._lock:
            if identity not in self._mappings:
                self._mappings[identity] = mmap.mmap(fd, file_stat.st_size, prot=mmap.PROT_READ)
            self._user_counts[identity] += 1
            return identity, self._mappings[identity]

    def release_mapping(self, identity: FileIdentity) -> None:
        """Remove one user. Users that still have the mapping may continue to read."""
        with self._lock:
            self._user_counts[identity] -= 1
            if not self._user_counts[identity]:
                del self._user_counts[identity]
                self._thread.submit(_unmap_in_steps, self._mappings.pop(identity))

    def finish_unmapping(self) -> None:
        """Return when all unused files are unmapped. Blocks."""
        self._thread.shutdown(True)


def _unmap_in_steps(memory: mmap.mmap) -> None:
    """Unmap a file in small steps."""
    for start in range(0, len(memory), UNMAP_STEP_BYTES):
        memory.madvise(mmap.MADV_DONTNEED, start, min(UNMAP_STEP_BYTES, len(memory) - start))
