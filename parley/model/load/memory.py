"""How much memory is free, how much of it the KV cache gets, and the errors if that is not enough.

Knows no models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from parley.core.sequence import BLOCK_SIZE
from parley.model.checkpoint.files import LoadError
from parley.types import Settings

KV_MEMORY_SHARE = 0.4  # KV cache's share of the memory that is free after the weights are loaded
STAGING_DIVISOR = 8  # the staging buffer of an accelerator's cache takes at most 1/8 of the host's free memory


@contextmanager
def guard_allocation(purpose: str) -> Iterator[None]:
    """Turn a failed allocation, which torch reports as RuntimeError, into a LoadError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "alloc" in str(error) or "out of memory" in str(error):
            raise LoadError(f"There is not enough memory for {purpose}.") from None
        raise


class CacheSizes(NamedTuple):
    """``pages`` of the KV cache, and ``slots`` for the states of sequences: as many as run at once."""

    pages: int
    slots: int


def plan_cache(
    page_bytes: int, device: torch.device, length: int, settings: Settings, state_bytes: int = 0
) -> CacheSizes:
    """Return how many pages of ``page_bytes`` bytes fit in memory, at most those of a full batch of full contexts.

    ``state_bytes``: the states of one sequence, for models with layers that keep them. All states together take at most
    half of the memory, unless all useful pages fit beside them. Raises LoadError.
    """
    useful = settings.max_batch * -(-length // BLOCK_SIZE)
    free_bytes = max(0, free_memory(device) - settings.set_aside)
    budget = settings.kv_memory
    if budget is None:
        budget = int(free_bytes * KV_MEMORY_SHARE * settings.kv_share)
    slots = settings.max_batch
    if state_bytes:
        slots = min(slots, max(budget // 2, budget - useful * page_bytes) // state_bytes)
        if slots < 1:
            amount = f"kv_memory is {budget}" if settings.kv_memory is not None else f"The KV cache gets {budget}"
            raise LoadError(f"{amount} bytes, of which states get half, but one sequence's take {state_bytes}.")
    if not page_bytes:
        return CacheSizes(useful, slots)
    blocks = min(useful, (budget - slots * state_bytes) // page_bytes)
    if blocks < 1 and settings.kv_memory is not None:
        raise LoadError(f"kv_memory is {settings.kv_memory} bytes, but one page of the KV cache takes {page_bytes}.")
    if blocks < 1:
        raise LoadError(f"Only {free_bytes >> 20} MiB of memory are free, too little for a KV cache.")
    return CacheSizes(blocks, slots)


def staging_page_count(page_bytes: int, settings: Settings) -> int:
    """Return how many pages of ``page_bytes`` bytes the staging buffer holds. Raises LoadError."""
    if settings.staging is None:
        return max(1, free_memory(torch.device("cpu")) // STAGING_DIVISOR // page_bytes)
    if settings.staging < page_bytes:
        raise LoadError(f"kv_staging is {settings.staging} bytes, but one page of the KV cache takes {page_bytes}.")
    return settings.staging // page_bytes


def free_memory(device: torch.device) -> int:
    """Return the bytes of memory that this process may still allocate."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free_bytes = int(line.split()[1]) << 10
        # A container may be limited to less than the machine has.
        group = Path("/sys/fs/cgroup")
        free_bytes = min(
            free_bytes, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        )
    except (OSError, ValueError):
        pass  # not Linux, no limit ("max"), or another version of cgroups
    return free_bytes
