"""Files in this process's memory (memfd) that media processes and the engine open at ``/proc/{pid}/fd/{fd}``."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref

from parley.errors import Overloaded
from parley.types import FeatureFile

FINAL = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryBudget:
    """Counts the bytes of all memory files. ``limit``: the most, in bytes, at which a new request is still accepted."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()  # files are closed by the last thread that uses them

    def check_room(self, size: int) -> None:
        """Raise Overloaded unless there is room for ``size`` bytes more."""
        if self.used + size > self.limit:
            raise Overloaded("The media of other requests take all memory that is set aside for media.", retry_after=1)

    def add_bytes(self, size: int) -> None:
        """Count ``size`` more bytes, less if it is negative."""
        with self._lock:
            self.used += size

    def close_file(self, file: int, sizes: list[int]) -> None:
        """Close a file, whose size is in ``sizes``."""
        os.close(file)
        self.add_bytes(-sizes[0])


def read_features(place: FeatureFile) -> bytes:
    """Return the content of a memory file of this process. Raises OSError if it has been closed."""
    return os.pread(place.fd, place.size, 0)


class MemoryFile:
    """A file that lasts as long as this object. Raises OSError."""

    def __init__(self, budget: MemoryBudget):
        self._budget = budget
        self._file = os.memfd_create("parley-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._sizes = [0]  # a list, which the finalizer can read after this object has gone
        weakref.finalize(self, budget.close_file, self._file, self._sizes)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._sizes[0]

    @property
    def place(self) -> FeatureFile:
        """Where other processes open the file."""
        return FeatureFile(os.getpid(), self._file, self.size)

    def write_bytes(self, data: bytes) -> None:
        """Fill the file."""
        with open(self._file, "wb", closefd=False) as file:
            file.write(data)
        self._count(len(data))

    def seal(self) -> None:
        """Keep the file as it is: whoever reads it may rely on its size. Raises OSError if it is being written."""
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, FINAL)
        self._count(os.fstat(self._file).st_size)

    def _count(self, size: int) -> None:
        self._budget.add_bytes(size - self._sizes[0])
        self._sizes[0] = size
