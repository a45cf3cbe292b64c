"""Arenas of random bytes for handover tests."""

import fcntl
import mmap
import os
import random
from dataclasses import dataclass, field
from typing import Self

from parley.disagg.kv.shared_memory import FINAL_SIZE
from parley.types import Arena, LayerRegion


@dataclass
class PageMemory:
    """A memfd with regions of pages, laid out like an engine's; ``sealed`` keeps it from being truncated. The numbers
    after those of pages belong to ``state_count`` states, which lie in regions of ``state_sizes``."""

    page_count: int = 16
    sizes: tuple[int, ...] = (64, 32)
    gap: int = 0  # bytes between the pages of a region
    layout: str = "model=demo;dtype=bfloat16"
    seed: int = 0
    sealed: bool = True
    state_count: int = 0
    state_sizes: tuple[int, ...] = ()
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        self.fd = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
        self.regions, offset = [], 24
        for size in self.sizes:
            self.regions.append(LayerRegion(offset, size + self.gap, size))
            offset += self.page_count * (size + self.gap) + (8, 8, 24)[len(self.regions) % 3]
        self.state_regions = []
        for size in self.state_sizes:
            self.state_regions.append(LayerRegion(offset, size, size))
            offset += self.state_count * size
        os.ftruncate(self.fd, max(offset, 1))
        if self.sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, FINAL_SIZE)
        self.buffer = mmap.mmap(self.fd, max(offset, 1))
        if self.seed:
            block = random.Random(self.seed).randbytes(65537)  # not a multiple of a page size: all pages differ
            self.buffer[:] = (block * (len(self.buffer) // len(block) + 1))[: len(self.buffer)]

    @property
    def arena(self) -> Arena:
        states = self.state_count, self.state_regions
        return Arena(os.getpid(), self.fd, self.page_count, self.regions, self.layout, *states)

    def read_page(self, number: int) -> bytes:
        regions = self.regions
        if number >= self.page_count:
            number, regions = number - self.page_count, self.state_regions
        return b"".join(self.buffer[(at := r.offset + number * r.stride) : at + r.size] for r in regions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.buffer.close()
        os.close(self.fd)
