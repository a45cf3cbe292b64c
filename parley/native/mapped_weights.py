"""Files with weights, mapped at once and moved to memory later, behind the same addresses.

Mapping takes no time, so a server can be ready before its weights have been copied. But the pages of a file are small,
and the system may evict them. So a thread copies the file to huge pages afterwards, piece by piece, and the system
moves each copy to the address of its piece. Other threads may read meanwhile: they see the file's page or its copy,
which are equal, and a page fault waits while a piece is replaced.

This is for Linux. Elsewhere, ``MappedWeightFile`` raises OSError.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch

from parley.native.memory import HUGE_PAGE

log = logging.getLogger("parley.engine")

PIECE = 8 * HUGE_PAGE  # bytes that are copied at once
MAP_FIXED = 0x10  # of <sys/mman.h>, as the next ones
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
MADV_POPULATE_READ = 22  # since Linux 5.14
EHWPOISON = 133  # of <errno.h>: memory is damaged
FAILED = ctypes.c_void_p(-1).value
P, N, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
COPY_PRIORITY = 10  # as ``nice``: requests go first

_waiting: list[MappedWeightFile] = []  # files that are not in memory yet
_lock = threading.Lock()


class MappedWeightFile:
    """A file that does not change, as memory that must not be written. ``data``: uint8 [size], aligned to huge pages.

    Raises OSError.
    """

    def __init__(self, path: Path):
        if sys.platform != "linux":
            raise OSError("files are mapped only on Linux")
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(self._file).st_size
            memory = mmap.mmap(-1, self.size + 2 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            reserved = torch.frombuffer(memory, dtype=torch.uint8)
            start = -reserved.data_ptr() % HUGE_PAGE
            self.data = reserved[start : start + self.size]
            if self.size:
                _map(self.data.data_ptr(), self.size, mmap.PROT_READ, mmap.MAP_PRIVATE | MAP_FIXED, self._file)
        except BaseException:
            os.close(self._file)
            raise
        with _lock:
            _waiting.append(self)

    def load_pages(self, data: torch.Tensor) -> None:
        """Read the pages of a part of ``data``, so that a fault of the disk is an error and not a signal.

        Raises OSError. Systems that cannot do this read the pages at their first use.
        """
        begin = data.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        if data.nbytes and _libc().madvise(begin, data.data_ptr() + data.nbytes - begin, MADV_POPULATE_READ):
            number = ctypes.get_errno()
            if number in (errno.EFAULT, EHWPOISON):  # others come from systems that do not know this advice
                raise OSError(number, "some of its pages cannot be read")

    def discard(self) -> None:
        """Never copy the file to memory. Its data remain as they are."""
        with _lock:
            if self in _waiting:
                _waiting.remove(self)
                os.close(self._file)

    def copy_to_memory(self) -> None:
        """Copy all pieces to memory, and close the file. After an error the rest stays mapped."""
        try:
            for offset in range(0, self.size, PIECE):
                self._copy_piece(offset, min(PIECE, self.size - offset))
        except OSError as error:
            log.warning("Weights stay in the pages of their file, where they are slower: %s.", error.strerror)
        finally:
            self.discard()

    def _copy_piece(self, offset: int, size: int) -> None:
        """Replace a piece of the mapping by a copy in huge pages. Raises OSError."""
        libc = _libc()
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        reserved_bytes = whole + HUGE_PAGE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        reserved = _map(None, reserved_bytes, mmap.PROT_READ | mmap.PROT_WRITE, private, -1)
        copy = -(-reserved // HUGE_PAGE) * HUGE_PAGE
        try:
            libc.madvise(copy, whole, mmap.MADV_HUGEPAGE)  # an error means that there are no huge pages
            buffer = memoryview((ctypes.c_char * size).from_address(copy)).cast("B")
            done = 0
            while done < size:
                count = os.preadv(self._file, [buffer[done:]], offset + done)
                if not count:
                    raise OSError(0, "the file became shorter")
                done += count
            target = self.data.data_ptr() + offset
            if libc.mremap(copy, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED, target) == FAILED:
                error = _last_error()
                # The system may have removed the old mapping before it failed. The file has the same bytes.
                _map(target, size, mmap.PROT_READ, mmap.MAP_PRIVATE | MAP_FIXED, self._file, offset)
                raise error
        except BaseException:
            libc.munmap(reserved, reserved_bytes)
            raise
        # What was reserved before and after the copy. The copy's own range is free again, and may be in use already.
        if copy > reserved:
            libc.munmap(reserved, copy - reserved)
        if copy + whole < reserved + reserved_bytes:
            libc.munmap(copy + whole, reserved + reserved_bytes - copy - whole)


def uncopied_bytes() -> int:
    """Return the bytes of memory that ``copy_to_memory`` will take for files that wait for it."""
    with _lock:
        return sum(file.size for file in _waiting)


def start_copying() -> threading.Thread | None:
    """Copy the files that wait to memory in a thread of low priority, which is returned; None if none waits."""
    with _lock:
        files = list(_waiting)
    if not files:
        return None

    def copy_files() -> None:
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPY_PRIORITY)  # of this thread alone
        for file in files:
            file.copy_to_memory()

    thread = threading.Thread(target=copy_files, name="weights", daemon=True)
    thread.start()
    return thread


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = P
    libc.mmap.argtypes = [P, N, INT, INT, INT, ctypes.c_int64]
    libc.mremap.argtypes = [P, N, N, INT, P]
    libc.munmap.argtypes = [P, N]
    libc.madvise.argtypes = [P, N, INT]
    return libc


def _map(address: int | None, size: int, protection: int, flags: int, file: int, offset: int = 0) -> int:
    """Call mmap(2). Raises OSError."""
    result: int | None = _libc().mmap(address, size, protection, flags, file, offset)
    if result is None or result == FAILED:
        raise _last_error()
    return result


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
