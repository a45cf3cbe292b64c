"""Memory of the host in which pages of a KV cache lie on their way from and to other instances.

Other processes open it in place of a cache that they cannot reach: an accelerator's. It is laid out as the cache is, so
nobody who reads or writes it can tell it from one. Who has which of its pages is known in ``core.transit``.

Copies are part of the device's stream of work: they see what steps before them wrote, and later steps see what they
wrote. For CUDA the memory is registered, so that the device copies by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from parley.model.checkpoint import LoadError
from parley.model.kv import PagedKV, carve, regions
from parley.native import memory

BATCH = 32 << 20  # bytes that are copied at once, gathered on the device


class Staging:
    """``blocks`` places for pages of ``cache``, in ``regions`` of ``file``. The loader says how many: see ``Arena``.

    A ``core.transit.Copier``. Raises OSError where there is no memory that processes can share, and LoadError.
    """

    def __init__(self, cache: PagedKV, blocks: int):
        self.blocks = blocks
        self.regions = regions(cache.owners, blocks)
        whole, self.file = memory.shared(max(each.offset + blocks * each.stride for each in self.regions))
        self._places = carve(whole, cache.owners, self.regions, blocks)
        self._pages = cache.arenas
        self._device = cache.device
        self._most = max(1, BATCH // sum(each.size for each in self.regions))
        if self._device.type == "cuda":
            _register(whole)

    @torch.inference_mode()
    def store(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages of the cache (first) to places (second)."""
        for pages, runs in self._batches(pairs):
            for cache, places in zip(self._pages, self._places, strict=True):
                gathered = cache.index_select(1, pages)
                for first, count, place in runs:
                    for source, target in zip(gathered, places, strict=True):  # by layer: there a run is one piece
                        target[place : place + count].copy_(source[first : first + count], non_blocking=True)
            self._wait()

    @torch.inference_mode()
    def load(self, pairs: list[tuple[int, int]]) -> None:
        """Copy places (second) to pages of the cache (first)."""
        for pages, runs in self._batches(pairs):
            for cache, places in zip(self._pages, self._places, strict=True):
                gathered = cache.new_empty((len(cache), len(pages), *cache.shape[2:]))
                for first, count, place in runs:
                    for source, target in zip(places, gathered, strict=True):
                        target[first : first + count].copy_(source[place : place + count], non_blocking=True)
                cache.index_copy_(1, pages, gathered)
            self._wait()

    def _batches(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, list[tuple[int, int, int]]]]:
        """Pages int64 [N] on the device, and runs of them whose places are side by side: number in the batch, length,
        first place."""
        for first in range(0, len(pairs), self._most):
            batch = pairs[first : first + self._most]
            places = [place for _, place in batch]
            breaks = [i for i, (one, two) in enumerate(pairwise(places), 1) if two != one + 1]
            runs = [(start, end - start, places[start]) for start, end in pairwise([0, *breaks, len(batch)])]
            yield torch.tensor([page for page, _ in batch], device=self._device), runs

    def _wait(self) -> None:
        """Until copies are done: whoever is told of them does not follow the device's stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _register(whole: torch.Tensor) -> None:
    """Lock memory, so that devices copy from and to it by themselves. Raises LoadError: what CUDA failed at once it may
    report again in the next step, so there is no going on without."""
    portable = 1  # in any context of CUDA
    error = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, portable))
    if error:
        raise LoadError(
            f"CUDA cannot lock {whole.nbytes >> 20} MiB of memory for staging pages (error {error}): "
            "with a smaller kv_staging it may."
        )
