"""Files in this process's memory (memfd) that media processes and the engine open at ``/proc/{pid}/fd/{fd}``."""

from __future__ import annotations

import fcntl
import os
import resource
import sys
import threading
import weakref

from parley.errors import Overloaded
from parley.types import FeatureFile

JOB_FILES = 2  # files of a job: its input and its output
FINAL = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryBudget:
    """Counts all memory files and their bytes. New jobs are refused above ``limit`` bytes or
    ``file_limit`` files."""

    def __init__(self, limit: int, file_limit: int | None = None):
        self.limit, self.used = limit, 0
        self.file_limit, self.file_count = file_limit or find_file_limit(), 0
        self._lock = threading.Lock()  # files are closed by the last thread that uses them

    def check_room(self, size: int) -> None:
        """Raise Overloaded unless there is room for ``size`` bytes more, and for the files of a job."""
        if self.used + size > self.limit or self.file_count + JOB_FILES > self.file_limit:
            raise Overloaded("The media of other requests take all memory that is set aside for media.", retry_after=1)

    def add_bytes(self, size: int) -> None:
        """Count ``size`` more bytes, less if it is negative."""
        with self._lock:
            self.used += size

    def open_file(self) -> int:
        """Make a memory file and return its descriptor. Raises OSError."""
        file = os.memfd_create("parley-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with self._lock:
            self.file_count += 1
        return file

    def close_file(self, file: int, sizes: list[int]) -> None:
        """Close a file, whose size is in ``sizes``."""
        os.close(file)
        with self._lock:
            self.used -= sizes[0]
            self.file_count -= 1


def find_file_limit() -> int:
    """Return how many memory files a model may have: half of the descriptors that connections of clients leave."""
    available, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if available == resource.RLIM_INFINITY else available // 16


def read_memory_file(feature_file: FeatureFile) -> bytes:
    """Return the content of a memory file of this process. Raises OSError if it has been closed."""
    return os.pread(feature_file.fd, feature_file.size, 0)


class MemoryFile:
    """A file that lasts as long as this object. Raises OSError."""

    def __init__(self, budget: MemoryBudget):
        self._budget = budget
        self._file = budget.open_file()
        self._sizes = [0]  # a list, which the finalizer can read after this object has gone
        weakref.finalize(self, budget.close_file, self._file, self._sizes)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._sizes[0]

    @property
    def feature_file(self) -> FeatureFile:
        """Where other processes open the file."""
        return FeatureFile(os.getpid(), self._file, self.size)

    def write_bytes(self, data: bytes) -> None:
        """Fill the file."""
        with open(self._file, "wb", closefd=False) as file:
            file.write(data)
        self._count(len(data))

    def seal(self) -> None:
        """Make the file immutable, so that readers may rely on its size. Raises OSError if it is being written."""
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, FINAL)
        self._count(os.fstat(self._file).st_size)

    def _count(self, size: int) -> None:
        self._budget.add_bytes(size - self._sizes[0])
        self._sizes[0] = size
