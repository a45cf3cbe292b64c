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
    """A memfd with regions of pages, laid out like an engine's; ``sealed`` keeps it from being truncated."""

    page_count: int = 16
    sizes: tuple[int, ...] = (64, 32)
    gap: int = 0  # bytes between the pages of a region
    layout: str = "model=demo;dtype=bfloat16"
    seed: int = 0
    sealed: bool = True
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        self.fd = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
        self.regions, offset = [], 24
        for size in self.sizes:
            self.regions.append(LayerRegion(offset, size + self.gap, size))
            offset += self.page_count * (size + self.gap) + (8, 8, 24)[len(self.regions) % 3]
        os.ftruncate(self.fd, max(offset, 1))
        if self.sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, FINAL_SIZE)
        self.buffer = mmap.mmap(self.fd, max(offset, 1))
        if self.seed:
            block = random.Random(self.seed).randbytes(65537)  # not a multiple of a page size: all pages differ
            self.buffer[:] = (block * (len(self.buffer) // len(block) + 1))[: len(self.buffer)]

    @property
    def arena(self) -> Arena:
        return Arena(os.getpid(), self.fd, self.page_count, self.regions, self.layout)

    def read_page(self, number: int) -> bytes:
        return b"".join(self.buffer[(at := r.offset + number * r.stride) : at + r.size] for r in self.regions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.buffer.close()
        os.close(self.fd)
