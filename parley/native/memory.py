"""Memory for weights and KV pages: separate mappings instead of the heap.

Loading copies and packs weights piece by piece, so memory that is kept alternates with memory that is freed. In the
heap that would leave unused gaps of a quarter of the model's size. Mappings also request huge pages, because every step
reads all weights, and each page costs an address translation.

KV pages that other processes read and write are in an anonymous file, which exists as long as a process has it open.
The file is sealed: its size cannot change, so no part of a mapping can disappear.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

import torch

HUGE_PAGE = 2 << 20  # bytes of a huge page
HEAP_LIMIT = 1 << 16  # bytes; smaller tensors stay in the heap
CPU = torch.device("cpu")


def map_tensor(numbers: int, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """Return an uninitialized tensor of ``numbers`` elements on the CPU, or on the meta device without memory."""
    size = numbers * dtype.itemsize
    if size < HEAP_LIMIT or device.type == "meta":
        return torch.empty(numbers, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    all_bytes = torch.frombuffer(memory, dtype=torch.uint8)
    start = -all_bytes.data_ptr() % HUGE_PAGE
    with suppress(AttributeError, OSError, ValueError):  # no huge pages on this system, or a size below one of them
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE * HUGE_PAGE)
    return all_bytes[start : start + size].view(dtype)


def create_shared_memory(size: int) -> tuple[torch.Tensor, int]:
    """Return ``size`` zero bytes on the CPU, and the descriptor of their file. Memory is used only once written.

    Raises OSError, also on systems without memfd (other than Linux).
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no anonymous shared memory (memfd)")
    file = os.memfd_create("parley-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8), file
    except (OSError, ValueError):
        os.close(file)
        raise
