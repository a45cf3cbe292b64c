"""Memory for weights and for pages of the KV cache: mappings of their own in place of the heap.

What is loaded is copied and laid out piece by piece, large pieces that stay between large ones that go; in the heap
that leaves holes of a quarter of the model. And large pages are asked for, because weights are read from end to end at
every step, and the address of each page costs a look-up.

Pages that other processes read and write lie in a file without a name, which lives as long as somebody has it open. It
is sealed: as its size can never change, whoever maps it can never find a part of the mapping gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

import torch

LARGE = 2 << 20  # bytes of a large page
SMALL = 1 << 16  # bytes that the heap may hold


def mapped(numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of so many numbers on the CPU, not initialised."""
    size = numbers * dtype.itemsize
    if size < SMALL:
        return torch.empty(numbers, dtype=dtype)
    memory = mmap.mmap(-1, size + LARGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE
    with suppress(AttributeError, OSError, ValueError):  # a system without large pages, or less than one of them
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // LARGE * LARGE)
    return whole[start : start + size].view(dtype)


def shared(size: int) -> tuple[torch.Tensor, int]:
    """So many zero bytes on the CPU, and the descriptor of the file that they are. None of them takes real memory until
    it is written. Raises OSError, also where there is no such file (Linux only)."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory that processes can share without a name")
    file = os.memfd_create("parley-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8), file
    except (OSError, ValueError):
        os.close(file)
        raise
