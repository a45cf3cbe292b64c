"""Measures free memory, divides it between KV cache, states and staging, and raises the errors if it is too small.

Nothing here depends on the type of model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from parley import control_groups
from parley.core.sequence import PAGE_SIZE
from parley.model.checkpoint.files import LoadError
from parley.native import mapped_weights
from parley.types import ParleySettings

# KV cache's share of the memory that is free after the weights are loaded. On a GPU, the memory of the largest step is
# subtracted first; the rest is for the graphs of steps, images and fragments.
KV_MEMORY_SHARE = {"cpu": 0.4, "cuda": 0.9}
SNAPSHOTS_PER_SEQUENCE = 4  # states that are kept at most, for each sequence that may run at once
FEWER_BITS = "serve a smaller model or one with fewer bits (--quantization)"  # advice where weights are too large
STAGING_DIVISOR = 8  # the staging buffer of an accelerator's cache takes at most 1/8 of the host's free memory


@contextmanager
def guard_allocation(purpose: str, advice: str) -> Iterator[None]:
    """Turn a failed allocation, which torch reports as RuntimeError, into a LoadError. ``advice``: what the operator
    can do besides ending other programs."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "alloc" in str(error) or "out of memory" in str(error):
            raise LoadError(f"There is not enough memory for {purpose}. End other programs, or {advice}.") from None
        raise


def refuse_large_tensors(subject: str, size: int, device: torch.device, advice: str) -> None:
    """Raise LoadError if tensors of ``size`` bytes do not fit into free memory. ``subject``: their name in the message.
    ``advice``: what the operator can do besides ending other programs."""
    free_bytes = free_device_memory(device)
    if size > free_bytes:
        raise LoadError(
            f"{subject} take {size >> 20} MiB, but only {free_bytes >> 20} MiB of memory are free. "
            f"End other programs, or {advice}."
        )


def refuse_large_weights(size: int, device: torch.device) -> None:
    """Raise LoadError if a decoder's weights of ``size`` bytes do not fit into free memory."""
    refuse_large_tensors("The weights", size, device, FEWER_BITS)


class CacheSizes(NamedTuple):
    """``pages`` of the KV cache, and ``slots`` for the states of sequences: as many as run at once. ``snapshots``:
    further slots, for states that are kept for later sequences or while drafts are tried."""

    pages: int
    slots: int
    snapshots: int = 0


def plan_cache(
    page_bytes: int,
    device: torch.device,
    length: int,
    settings: ParleySettings,
    state_bytes: int = 0,
    position_bytes: int = 0,
) -> CacheSizes:
    """Return how many pages of ``page_bytes`` bytes fit in memory, at most those of a full batch of full contexts.

    ``state_bytes``: the states of one sequence, for models with layers that keep them. All states together take at most
    half of the memory, unless all useful pages fit as well; ``settings.state_cache`` is subtracted first.
    ``position_bytes``: the further bytes for each position of the longest context, counted if no setting fixes the
    memory of the cache. Raises LoadError.
    """
    useful = settings.max_batch * -(-length // PAGE_SIZE)
    free_bytes = max(0, free_device_memory(device) - settings.set_aside)
    budget = settings.kv_memory
    if budget is None:
        budget = int(free_bytes * KV_MEMORY_SHARE[device.type] * settings.kv_share)
    slots, snapshots = settings.max_batch, 0
    if state_bytes:
        slots, snapshots = _divide_states(budget, useful * page_bytes, state_bytes, settings)
    if not page_bytes:
        return CacheSizes(useful, slots, snapshots)
    budget -= (slots + snapshots) * state_bytes
    if settings.kv_memory is not None:
        position_bytes = 0
    # Fewer pages than a full context needs make it shorter
    enough = (budget - length * position_bytes) // page_bytes
    fewer = min(length // PAGE_SIZE, budget // (page_bytes + PAGE_SIZE * position_bytes))
    page_count = min(useful, max(enough, fewer))
    if page_count < 1 and settings.kv_memory is not None:
        raise LoadError(f"kv_memory is {settings.kv_memory} bytes, but one page of the KV cache takes {page_bytes}.")
    if page_count < 1:
        raise LoadError(
            f"Only {free_bytes >> 20} MiB of memory are free, too little for a KV cache. End other programs, or serve "
            "a smaller model."
        )
    return CacheSizes(page_count, slots, snapshots)


def _divide_states(budget: int, useful_bytes: int, state_bytes: int, settings: ParleySettings) -> tuple[int, int]:
    """Return the slots for states of running sequences, and those for snapshots. ``useful_bytes``: of all pages that
    are of use. Raises LoadError."""
    needs_snapshots = settings.prefix_cache or settings.speculate != "none" or settings.shared
    reserved = settings.state_cache // state_bytes if settings.state_cache is not None and needs_snapshots else 0
    cache_budget = budget - reserved * state_bytes
    count = max(cache_budget // 2, cache_budget - useful_bytes) // state_bytes
    if count < 1:
        amount = f"kv_memory is {budget}" if settings.kv_memory is not None else f"The KV cache gets {budget}"
        share = f"of which snapshots take {reserved * state_bytes} and states half of the rest" if reserved else ""
        raise LoadError(
            f"{amount} bytes, {share or 'of which states get half'}, but one sequence's take {state_bytes}."
        )
    if settings.state_cache is None and needs_snapshots:
        slots = min(settings.max_batch, (count + 1) // 2)
        reserved = min(count - slots, SNAPSHOTS_PER_SEQUENCE * settings.max_batch)
    else:
        slots = min(settings.max_batch, count)
    if not reserved and (settings.speculate != "none" or settings.shared):
        option = "speculate" if settings.speculate != "none" else "role"
        raise LoadError(
            f"--{option} keeps states of {state_bytes} bytes besides those of running sequences, and there is no "
            "memory for one: it needs a larger --state-cache or --kv-memory."
        )
    return slots, reserved


def staging_page_count(page_bytes: int, settings: ParleySettings) -> int:
    """Return how many pages of ``page_bytes`` bytes the staging buffer holds. Raises LoadError."""
    if settings.staging is None:
        return max(1, free_device_memory(torch.device("cpu")) // STAGING_DIVISOR // page_bytes)
    if settings.staging < page_bytes:
        raise LoadError(f"kv_staging is {settings.staging} bytes, but one page of the KV cache takes {page_bytes}.")
    return settings.staging // page_bytes


def free_device_memory(device: torch.device) -> int:
    """Return the bytes of memory of ``device`` that this process may still allocate."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, control_groups.free_host_memory() - mapped_weights.uncopied_bytes())
