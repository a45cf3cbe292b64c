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

from parley.disagg.kv.arena import Memory, extent, runs
from parley.disagg.kv.mapped_files import Maps, Place
from parley.disagg.kv.transport import Lost, Transport, Unreachable
from parley.types import Arena, Region

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Grid = npt.NDArray[np.uint8]
    Grids = tuple[Grid, Grid]

NONCE = 32


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """The arena in the sender's process, and the file with random bytes. ``place``: device and inode of the arena."""

    arena: Arena
    place: tuple[int, int]
    proof: int
    nonce: bytes


class Shared(Transport):
    """Reads the sender's arena. ``process_proof`` identifies this process as a sender; ``mapped_files`` is used as a
    receiver."""

    name = "shared"

    def __init__(self, memory: Memory, proof: Proof, maps: Maps):
        self._memory = memory
        self._proof = proof
        self._maps = maps
        self._place: Place | None = None  # of the sender's arena, once it is mapped
        self._pages = 0  # in the sender's arena
        self._grids: list[Grids] = []  # pairs: sender's arena, own arena
        self._closed = False
        self._lock = threading.Lock()  # protects the mapping

    def offer(self) -> bytes:
        """Return the location of the arena and of the file with random bytes."""
        arena, found = self._memory.arena, os.fstat(self._memory.fd)
        here = Arena(os.getpid(), self._memory.fd, arena.pages, arena.regions, "")
        return msgspec.msgpack.encode(Offer(here, (found.st_dev, found.st_ino), self._proof.fd, self._proof.nonce))

    def reach(self, offer: bytes) -> None:
        """Verify and map the sender's arena. Raises OfferUnusable, LinkLost."""
        try:
            theirs = msgspec.msgpack.decode(offer, type=Offer)
        except msgspec.DecodeError as error:
            raise Unreachable(f"the offer cannot be decoded: {error}") from None
        arena = theirs.arena
        numbers = [arena.pid, arena.fd, arena.pages, theirs.proof, *(n for r in arena.regions for n in _numbers(r))]
        overlap = any(region.stride < region.size for region in arena.regions)
        if min(numbers) < 0 or max(numbers) >= 1 << 48 or overlap or len(theirs.nonce) != NONCE:
            raise Unreachable("the offer has numbers out of range")
        if [region.size for region in arena.regions] != self._memory.sizes:
            raise Unreachable("the offer has pages of other sizes")
        try:
            with _opened(arena.pid, theirs.proof) as proof:
                if os.pread(proof, NONCE, 0) != theirs.nonce:
                    raise Unreachable("that process id belongs to another process here")
            with _opened(arena.pid, arena.fd) as file:
                found = os.fstat(file)
                if (found.st_dev, found.st_ino) != theirs.place or extent(arena) > found.st_size:
                    raise Unreachable("that file is another one here")
                alike = found.st_dev == os.fstat(self._memory.fd).st_dev
                if not (alike and fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK):
                    raise Unreachable("the file could be truncated while it is read")
                self._map(file, arena)
        except OSError as error:
            raise Unreachable(f"the memory of the sender's process cannot be opened: {error.strerror}") from None

    def _map(self, file: int, arena: Arena) -> None:
        """Map the sender's file. Raises LinkLost if the link was closed, and OSError."""
        with self._lock:
            if self._closed:
                raise Lost("The link was closed.")
            assert self._memory.map is not None
            self._place, source = self._maps.take(file)
            self._grids = _grids((source, arena), (self._memory.map, self._memory.arena))
            self._pages = arena.pages

    def send(self, pages: Sequence[int]) -> None:
        """Do nothing: the receiver reads the pages in place."""

    def fetch(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """Copy pages from the sender's arena. Raises LinkLost."""
        grids = self._grids  # stay mapped while they are in use
        if not grids:
            raise Lost("The sender's memory is not open.")
        if min(theirs) < 0 or max(theirs) >= self._pages:
            raise Lost("The sender named pages outside its arena.")
        for (first, own), count in runs(theirs, ours):
            for source, target in grids:
                target[:, own : own + count] = source[:, first : first + count]

    def close(self) -> None:
        """Unmap the sender's arena, when no copy uses it any more."""
        with self._lock:
            self._closed = True
            self._grids = []
            if self._place is not None:
                self._maps.give(self._place)
                self._place = None


class Proof:
    """A file with random bytes, which lets another process verify that it has found this one."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE)
        self.fd = os.memfd_create("parley-kv", os.MFD_CLOEXEC)
        os.write(self.fd, self.nonce)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


@contextmanager
def _opened(pid: int, fd: int) -> Iterator[int]:
    """Open a regular file of another process for reading. Raises OSError, OfferUnusable."""
    path = f"/proc/{pid}/fd/{fd}"
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe or a device may have side effects
        raise Unreachable("that file is another one here")
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield file
    finally:
        os.close(file)


def _grids(theirs: tuple[mmap.mmap, Arena], ours: tuple[mmap.mmap, Arena]) -> list[Grids]:
    """Return both arenas as arrays [regions, pages, bytes]; regions of equal shape and distance share one pair."""
    groups: list[list[tuple[Region, Region]]] = []
    for pair in sorted(zip(theirs[1].regions, ours[1].regions, strict=True), key=lambda pair: pair[1].offset):
        if groups and _joins(pair, groups[-1]):
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return [(_grid(*theirs, [a for a, _ in group]), _grid(*ours, [b for _, b in group])) for group in groups]


def _joins(pair: tuple[Region, Region], group: list[tuple[Region, Region]]) -> bool:
    """Whether a region matches those of a group on both sides, in shape and in distance from the group's last one."""
    return all(
        (one.size, one.stride) == (last.size, last.stride)
        and (len(group) == 1 or one.offset - last.offset == last.offset - before.offset)
        for one, last, before in zip(pair, group[-1], group[-2:][0], strict=True)
    )


def _grid(memory: mmap.mmap, arena: Arena, regions: Sequence[Region]) -> Grid:
    """Return regions of one shape and equal distances as an array uint8 [regions, pages, bytes]."""
    import numpy as np  # imported late: it starts threads, and most servers transfer no pages

    first, step = regions[0], regions[-1].offset - regions[-2:][0].offset
    return np.ndarray((len(regions), arena.pages, first.size), np.uint8, memory, first.offset, (step, first.stride, 1))


def _numbers(region: Region) -> tuple[int, int, int]:
    """Return the numbers of a region for range checks."""
    return region.offset, region.stride, region.size
