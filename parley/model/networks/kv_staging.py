"""The staging buffer: host memory that holds KV pages in transit from and to other instances.

Other processes cannot map the memory of an accelerator, so they map this buffer instead of the KV cache. It has the
same layout. ``core/shared_pages/staging.py`` assigns its pages.

Copies are queued in the device's stream: they read what earlier steps wrote, and later steps read what they wrote. For
CUDA the memory is registered, so that the device can copy by DMA.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from parley.model.checkpoint.files import LoadError
from parley.model.networks.paged_kv import PagedKV, carve_arenas, layer_regions
from parley.native import memory

BATCH_BYTES = 32 << 20  # bytes of pages that are gathered on the device and copied at once


class _StagingRun(NamedTuple):
    """Pages of a batch whose staging pages are consecutive: their indices in the batch, and their staging pages."""

    batch_indices: slice
    staging_pages: slice


class StagingBuffer:
    """``core``'s ``StagingCopier``: ``staging_page_count`` staging pages with the layout of ``cache``. They are in
    ``regions`` of ``file``, as ``Arena`` describes them.

    Raises OSError if shared memory is not available, and LoadError if CUDA cannot lock it.
    """

    def __init__(self, cache: PagedKV, staging_page_count: int):
        self.staging_page_count = staging_page_count
        self.regions = layer_regions(cache.format_layers, staging_page_count)
        buffer, self.file = memory.create_shared_memory(
            max(region.offset + staging_page_count * region.stride for region in self.regions)
        )
        self._staging_arenas = carve_arenas(buffer, cache.format_layers, self.regions, staging_page_count)
        self._cache_arenas = cache.arenas
        self._device = cache.device
        self._batch_pages = max(1, BATCH_BYTES // sum(region.size for region in self.regions))
        if self._device.type == "cuda":
            _lock_memory(buffer)

    @torch.inference_mode()
    def store_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages of the cache (first of each pair) to staging pages (second)."""
        for pages, runs in self._page_batches(pairs):
            for cache, staging in zip(self._cache_arenas, self._staging_arenas, strict=True):
                gathered = cache.index_select(1, pages)
                for run in runs:
                    for source, target in zip(gathered, staging, strict=True):  # within a layer a run is contiguous
                        target[run.staging_pages].copy_(source[run.batch_indices], non_blocking=True)
            self._synchronize_copies()

    @torch.inference_mode()
    def load_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy staging pages (second of each pair) to pages of the cache (first)."""
        for pages, runs in self._page_batches(pairs):
            for cache, staging in zip(self._cache_arenas, self._staging_arenas, strict=True):
                gathered = cache.new_empty((len(cache), len(pages), *cache.shape[2:]))
                for run in runs:
                    for source, target in zip(staging, gathered, strict=True):
                        target[run.batch_indices].copy_(source[run.staging_pages], non_blocking=True)
                cache.index_copy_(1, pages, gathered)
            self._synchronize_copies()

    def _page_batches(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, list[_StagingRun]]]:
        """Yield batches of at most BATCH_BYTES: the cache's pages, int64 [N] on the device, and runs of consecutive
        staging pages that cover the batch."""
        for batch_start in range(0, len(pairs), self._batch_pages):
            batch = pairs[batch_start : batch_start + self._batch_pages]
            numbers = [staging_page for _, staging_page in batch]
            breaks = [i for i, (number, following) in enumerate(pairwise(numbers), 1) if following != number + 1]
            runs = [
                _StagingRun(slice(start, end), slice(numbers[start], numbers[start] + end - start))
                for start, end in pairwise([0, *breaks, len(batch)])
            ]
            yield torch.tensor([page for page, _ in batch], device=self._device), runs

    def _synchronize_copies(self) -> None:
        """Wait until the copies are done, because other processes do not wait for the device's stream."""
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
