"""The staging buffer: host memory that holds KV pages in transit from and to other instances.

Other processes map it in place of a cache that they cannot reach: an accelerator's. Its layout is the cache's, so
readers and writers see no difference. ``core/shared_pages/staging.py`` knows who uses which of its pages.

Copies are part of the device's stream: they see writes of earlier steps, and later steps see theirs. For CUDA the
memory is registered, so that the device can copy by DMA.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from parley.model.checkpoint.files import LoadError
from parley.model.networks.paged_kv import PagedKV, carve_arenas, layer_regions
from parley.native import memory

BATCH_BYTES = 32 << 20  # bytes gathered on the device and copied at once


class StagingBuffer:
    """``core``'s ``StagingCopier``: ``place_count`` places for pages of ``cache``, in ``regions`` of ``file``, as
    ``Arena`` describes them.

    Raises OSError if shared memory is not available, and LoadError if CUDA cannot lock it.
    """

    def __init__(self, cache: PagedKV, place_count: int):
        self.place_count = place_count
        self.regions = layer_regions(cache.format_layers, place_count)
        buffer, self.file = memory.create_shared_memory(
            max(region.offset + place_count * region.stride for region in self.regions)
        )
        self._places = carve_arenas(buffer, cache.format_layers, self.regions, place_count)
        self._pages = cache.arenas
        self._device = cache.device
        self._batch_pages = max(1, BATCH_BYTES // sum(region.size for region in self.regions))
        if self._device.type == "cuda":
            _lock_memory(buffer)

    @torch.inference_mode()
    def store_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages of the cache (first of each pair) to places (second)."""
        for pages, runs in self._page_batches(pairs):
            for cache, places in zip(self._pages, self._places, strict=True):
                gathered = cache.index_select(1, pages)
                for first, count, place in runs:
                    for source, target in zip(gathered, places, strict=True):  # within a layer a run is contiguous
                        target[place : place + count].copy_(source[first : first + count], non_blocking=True)
            self._synchronize_copies()

    @torch.inference_mode()
    def load_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy places (second of each pair) to pages of the cache (first)."""
        for pages, runs in self._page_batches(pairs):
            for cache, places in zip(self._pages, self._places, strict=True):
                gathered = cache.new_empty((len(cache), len(pages), *cache.shape[2:]))
                for first, count, place in runs:
                    for source, target in zip(places, gathered, strict=True):
                        target[first : first + count].copy_(source[place : place + count], non_blocking=True)
                cache.index_copy_(1, pages, gathered)
            self._synchronize_copies()

    def _page_batches(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, list[tuple[int, int, int]]]]:
        """Yield pages int64 [N] on the device, and runs of pages with consecutive places: (number in the batch, length,
        first place)."""
        for first in range(0, len(pairs), self._batch_pages):
            batch = pairs[first : first + self._batch_pages]
            places = [place for _, place in batch]
            breaks = [i for i, (one, two) in enumerate(pairwise(places), 1) if two != one + 1]
            runs = [(start, end - start, places[start]) for start, end in pairwise([0, *breaks, len(batch)])]
            yield torch.tensor([page for page, _ in batch], device=self._device), runs

    def _synchronize_copies(self) -> None:
        """Wait until copies are done, because their users do not follow the device's stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _lock_memory(buffer: torch.Tensor) -> None:
    """Lock memory so that devices can copy from and to it. Raises LoadError, because CUDA may report the same error
    again in a later step."""
    portable = 1  # in any context of CUDA
    error = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, portable))
    if error:
        raise LoadError(
            f"CUDA cannot lock {buffer.nbytes >> 20} MiB of memory for staging pages (error {error}): "
            "try a smaller kv_staging."
        )
