"""Shared memory transport between processes of one host: the receiver reads the sender's arena itself.

The receiver opens the arena as /proc/PID/fd/N of the sender's process, which the kernel allows to the same user.
Process ids mean something else on another host or in another container. So the sender also offers a second file with
random bytes: the receiver trusts the process id if it finds these bytes there, and the arena file if the inode is the
same.

It maps that file, and copies all pieces of a page, or of adjacent pages, in one call that releases the interpreter
lock. Access to a mapping of a truncated file kills the process, so a file is mapped only if it can never shrink: a
memfd with a seal against shrinking and small pages, like this process's own arena.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from parley.disagg.kv.arena import MappedArena, arena_bytes, consecutive_runs
from parley.disagg.kv.mapped_files import FileIdentity, MappedFiles
from parley.disagg.kv.transport import KVTransport, LinkLost, OfferUnusable
from parley.types import Arena, LayerRegion

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    PageGrid = npt.NDArray[np.uint8]
    PageGridPair = tuple[PageGrid, PageGrid]

PROCESS_NONCE_BYTES = 32


class SharedMemoryOffer(msgspec.Struct, array_like=True, frozen=True):
    """The arena in the sender's process, and the file with random bytes. ``place``: device and inode of the arena."""

    arena: Arena
    place: tuple[int, int]
    proof: int
    nonce: bytes


class SharedMemoryTransport(KVTransport):
    """Reads the sender's arena. ``process_proof`` identifies this process as a sender; ``mapped_files`` is used as a
    receiver."""

    name = "shared"

    def __init__(self, mapped_arena: MappedArena, process_proof: ProcessProof, mapped_files: MappedFiles):
        self._arena = mapped_arena
        self._process_proof = process_proof
        self._mapped_files = mapped_files
        self._source_identity: FileIdentity | None = None  # of the sender's arena, once it is mapped
        self._source_pages = 0  # in the sender's arena
        self._grid_pairs: list[PageGridPair] = []  # pairs: sender's arena, own arena
        self._closed = False
        self._lock = threading.Lock()  # protects the mapping

    def make_offer(self) -> bytes:
        """Return the location of the arena and of the file with random bytes."""
        arena, file_stat = self._arena.arena, os.fstat(self._arena.fd)
        own_arena = Arena(os.getpid(), self._arena.fd, arena.pages, arena.regions, "")
        return msgspec.msgpack.encode(
            SharedMemoryOffer(
                own_arena, (file_stat.st_dev, file_stat.st_ino), self._process_proof.fd, self._process_proof.nonce
            )
        )

    def use_offer(self, offer: bytes) -> None:
        """Verify and map the sender's arena. Raises OfferUnusable, LinkLost."""
        try:
            source = msgspec.msgpack.decode(offer, type=SharedMemoryOffer)
        except msgspec.DecodeError as error:
            raise OfferUnusable(f"the offer cannot be decoded: {error}") from None
        arena = source.arena
        numbers = [
            arena.pid,
            arena.fd,
            arena.pages,
            source.proof,
            *(n for r in arena.regions for n in _region_numbers(r)),
        ]
        overlap = any(region.stride < region.size for region in arena.regions)
        if min(numbers) < 0 or max(numbers) >= 1 << 48 or overlap or len(source.nonce) != PROCESS_NONCE_BYTES:
            raise OfferUnusable("the offer has numbers out of range")
        if [region.size for region in arena.regions] != self._arena.sizes:
            raise OfferUnusable("the offer has pages of other sizes")
        try:
            with _open_process_file(arena.pid, source.proof) as proof_fd:
                if os.pread(proof_fd, PROCESS_NONCE_BYTES, 0) != source.nonce:
                    raise OfferUnusable("that process id belongs to another process here")
            with _open_process_file(arena.pid, arena.fd) as arena_fd:
                file_stat = os.fstat(arena_fd)
                if (file_stat.st_dev, file_stat.st_ino) != source.place or arena_bytes(arena) > file_stat.st_size:
                    raise OfferUnusable("that file is another one here")
                same_device = file_stat.st_dev == os.fstat(self._arena.fd).st_dev
                if not (same_device and fcntl.fcntl(arena_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK):
                    raise OfferUnusable("the file could be truncated while it is read")
                self._map_source(arena_fd, arena)
        except OSError as error:
            raise OfferUnusable(f"the memory of the sender's process cannot be opened: {error.strerror}") from None

    def _map_source(self, arena_fd: int, arena: Arena) -> None:
        """Map the sender's file. Raises LinkLost if the link was closed, and OSError."""
        with self._lock:
            if self._closed:
                raise LinkLost("The link was closed.")
            assert self._arena.mapping is not None
            self._source_identity, source = self._mapped_files.acquire_mapping(arena_fd)
            self._grid_pairs = _paired_grids((source, arena), (self._arena.mapping, self._arena.arena))
            self._source_pages = arena.pages

    def send_pages(self, pages: Sequence[int]) -> None:
        """Do nothing: the receiver reads the pages in place."""

    def fetch_pages(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """Copy pages from the sender's arena. Raises LinkLost."""
        grids = self._grid_pairs  # stay mapped while they are in use
        if not grids:
            raise LinkLost("The sender's memory is not open.")
        if min(theirs) < 0 or max(theirs) >= self._source_pages:
            raise LinkLost("The sender named pages outside its arena.")
        for (first, own), count in consecutive_runs(theirs, ours):
            for source, target in grids:
                target[:, own : own + count] = source[:, first : first + count]

    def close_transport(self) -> None:
        """Unmap the sender's arena, when no copy uses it any more."""
        with self._lock:
            self._closed = True
            self._grid_pairs = []
            if self._source_identity is not None:
                self._mapped_files.release_mapping(self._source_identity)
                self._source_identity = None


class ProcessProof:
    """A file with random bytes, which lets another process verify that it has found this one."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(PROCESS_NONCE_BYTES)
        self.fd = os.memfd_create("parley-kv", os.MFD_CLOEXEC)
        os.write(self.fd, self.nonce)

    def close_proof(self) -> None:
        """Close the file."""
        os.close(self.fd)


@contextmanager
def _open_process_file(pid: int, fd: int) -> Iterator[int]:
    """Open a regular file of another process for reading. Raises OSError, OfferUnusable."""
    path = f"/proc/{pid}/fd/{fd}"
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe or a device may have side effects
        raise OfferUnusable("that file is another one here")
    opened_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield opened_fd
    finally:
        os.close(opened_fd)


def _paired_grids(theirs: tuple[mmap.mmap, Arena], ours: tuple[mmap.mmap, Arena]) -> list[PageGridPair]:
    """Return both arenas as arrays [regions, pages, bytes]; regions of equal shape and distance share one pair."""
    groups: list[list[tuple[LayerRegion, LayerRegion]]] = []
    for pair in sorted(zip(theirs[1].regions, ours[1].regions, strict=True), key=lambda pair: pair[1].offset):
        if groups and _extends_group(pair, groups[-1]):
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return [(_page_grid(*theirs, [a for a, _ in group]), _page_grid(*ours, [b for _, b in group])) for group in groups]


def _extends_group(pair: tuple[LayerRegion, LayerRegion], group: list[tuple[LayerRegion, LayerRegion]]) -> bool:
    """Whether a region matches those of a group on both sides, in shape and in distance from the group's last one."""
    return all(
        (region.size, region.stride) == (last.size, last.stride)
        and (len(group) == 1 or region.offset - last.offset == last.offset - before.offset)
        for region, last, before in zip(pair, group[-1], group[-2:][0], strict=True)
    )


def _page_grid(memory: mmap.mmap, arena: Arena, regions: Sequence[LayerRegion]) -> PageGrid:
    """Return regions of one shape and equal distances as an array uint8 [regions, pages, bytes]."""
    import numpy as np  # imported late: it starts threads, and most servers transfer no pages

    first, step = regions[0], regions[-1].offset - regions[-2:][0].offset
    return np.ndarray((len(regions), arena.pages, first.size), np.uint8, memory, first.offset, (step, first.stride, 1))


def _region_numbers(region: LayerRegion) -> tuple[int, int, int]:
    """Return the numbers of a region for range checks."""
    return region.offset, region.stride, region.size
