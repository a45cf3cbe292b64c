"""A KV arena of this host, mapped: the bytes of its pages as views, without copies.

The mapping is shared with the engine process: each side sees the writes of the other. A page has one piece in each
region of its kind, and consecutive pages are adjacent only within a region. So several pages are processed region by
region, and adjacent pages of a region are one view. This module does not know what pages are used for.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from parley.types import Arena, LayerRegion


class BadArena(Exception):
    """The arena does not match its description, or cannot be opened. The message is one sentence."""


class PageKind(NamedTuple):
    """``page_count`` pages, numbered from ``first``, with one piece in each of the same ``regions``."""

    first: int
    page_count: int
    regions: list[LayerRegion]

    @property
    def page_bytes(self) -> int:
        """The bytes of one of these pages."""
        return sum(region.size for region in self.regions)

    def region_indices(self, pages: Sequence[int]) -> list[int]:
        """Return the indices within the regions of those ``pages`` that are of this kind."""
        end = self.first + self.page_count
        return [page - self.first for page in pages if self.first <= page < end]


class MappedArena:
    """The mapped arena of this server's own engine. Its description comes from the engine's process, never from a peer.

    An arena without regions has pages without bytes, and no file. Raises BadArena.
    """

    def __init__(self, arena: Arena):
        self.arena = arena
        self.kinds = page_kinds(arena)
        self.sizes = [region.size for kind in self.kinds for region in kind.regions]
        self.fd = -1
        self.mapping: mmap.mmap | None = None
        self.view = memoryview(b"")
        if not self.sizes:
            return
        try:
            self.fd = os.open(f"/proc/{arena.pid}/fd/{arena.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise BadArena(f"The KV pages of process {arena.pid} cannot be opened: {error.strerror}.") from error
        try:
            size = os.fstat(self.fd).st_size
            if arena_bytes(arena) > size:
                raise BadArena(f"The KV pages of process {arena.pid} have {size} bytes, not {arena_bytes(arena)}.")
            self.mapping = mmap.mmap(self.fd, size)
        except OSError as error:
            raise BadArena(f"The KV pages of process {arena.pid} cannot be mapped: {error.strerror}.") from error
        finally:
            if self.mapping is None:
                os.close(self.fd)
        self.view = memoryview(self.mapping)

    def close_arena(self) -> None:
        """Unmap the arena; a view that is still in use keeps the mapping until it is gone."""
        self.view.release()
        if self.mapping is not None:
            os.close(self.fd)
            with suppress(BufferError):
                self.mapping.close()
            self.mapping = None

    def contains_pages(self, pages: Sequence[int]) -> bool:
        """Whether all of these are page numbers of the arena."""
        return not pages or (min(pages) >= 0 and max(pages) < self.arena.pages + self.arena.states)

    def count_bytes(self, pages: Sequence[int]) -> int:
        """Return the bytes of these pages."""
        return sum(kind.page_bytes * len(kind.region_indices(pages)) for kind in self.kinds)

    def divide_pages(self, pages: Sequence[int], max_bytes: int) -> Iterator[list[int]]:
        """Yield these pages in lists of at most ``max_bytes`` bytes each; a larger page gets a list of its own."""
        batch: list[int] = []
        bytes_left = max_bytes
        for page in pages:
            size = self.kinds[page >= self.arena.pages].page_bytes
            if batch and size > bytes_left:
                yield batch
                batch, bytes_left = [], max_bytes
            batch.append(page)
            bytes_left -= size
        if batch:
            yield batch

    def page_views(self, pages: Sequence[int]) -> list[memoryview]:
        """Return the bytes of these pages, region by region, in order."""
        views: list[memoryview] = []
        for kind in self.kinds:
            indices = kind.region_indices(pages)
            slices: dict[tuple[int, int], list[slice]] = {}  # by stride and size: regions with the same share them
            for region in kind.regions if indices else ():
                stride, size = shape = region.stride, region.size
                if shape not in slices:
                    runs = consecutive_runs(indices) if stride == size else ((index, 1) for index in zip(indices))
                    slices[shape] = [slice(at := first * stride, at + count * size) for (first,), count in runs]
                views += map(self.view[region.offset :].__getitem__, slices[shape])
        return views

    def page_checksum(self, pages: Sequence[int]) -> int:
        """Return the CRC-32 of the bytes of these pages, region by region."""
        checksum = 0
        for view in self.page_views(pages):
            checksum = zlib.crc32(view, checksum)
        return checksum


def arena_bytes(arena: Arena) -> int:
    """Return how many bytes the file of an arena must have."""
    return max(
        (
            region.offset + max(kind.page_count - 1, 0) * region.stride + region.size
            for kind in page_kinds(arena)
            for region in kind.regions
        ),
        default=0,
    )


def page_kinds(arena: Arena) -> list[PageKind]:
    """Return the kinds of an arena's pages: KV pages, and states."""
    return [PageKind(0, arena.pages, arena.regions), PageKind(arena.pages, arena.states, arena.state_regions)]


def remaining_views(views: list[memoryview], count: int) -> list[memoryview]:
    """Return these views without their first ``count`` bytes."""
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]]
        count -= len(view)
    return []


def consecutive_runs(*sides: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Divide parallel lists of numbers into runs whose numbers are consecutive in every list. Yield the first numbers
    of each run, one for each list, and its length."""
    run_start: tuple[int, ...] = ()
    count = 0
    for numbers in zip(*sides, strict=True):
        if count and all(number == start + count for number, start in zip(numbers, run_start, strict=True)):
            count += 1
            continue
        if count:
            yield run_start, count
        run_start, count = numbers, 1
    if count:
        yield run_start, count
