"""Pages between processes of one host: the taker reads the giver's arena by itself, and the giver does nothing.

The taker opens the arena as /proc/PID/fd/N of the giver's process, which the kernel allows to the same user. Process
numbers mean something else on another host, or in another container, so the giver has a second file with random bytes,
which it also tells: the taker believes the process number if it finds them there, and the file if it is the same inode.

It maps that file, and copies all pieces of a page, or of pages side by side, by one call that lets go of the
interpreter's lock. To touch a mapping of a file that was cut short is the end of a process, so a file is mapped only if
it can never shrink: a memfd with a seal that says so, of small pages, as the own one is.
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

from parley.kv.maps import Maps, Place
from parley.kv.memory import Memory, extent, runs
from parley.kv.transport import Lost, Transport, Unreachable
from parley.types import Arena, Region

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Grid = npt.NDArray[np.uint8]
    Grids = tuple[Grid, Grid]

NONCE = 32


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """The arena as the giver's process has it, and the file with random bytes. ``place``: device and inode."""

    arena: Arena
    place: tuple[int, int]
    proof: int
    nonce: bytes


class Shared(Transport):
    """Reads the other process's arena. ``proof`` is of this process, as a giver's, ``maps`` as a taker's."""

    name = "shared"

    def __init__(self, memory: Memory, proof: Proof, maps: Maps):
        self._memory = memory
        self._proof = proof
        self._maps = maps
        self._place: Place | None = None  # of the giver's arena, when it is mapped
        self._pages = 0  # of that
        self._grids: list[Grids] = []  # of that and the own one
        self._closed = False
        self._lock = threading.Lock()  # of what is mapped

    def offer(self) -> bytes:
        arena, found = self._memory.arena, os.fstat(self._memory.fd)
        here = Arena(os.getpid(), self._memory.fd, arena.pages, arena.regions, "")
        return msgspec.msgpack.encode(Offer(here, (found.st_dev, found.st_ino), self._proof.fd, self._proof.nonce))

    def reach(self, offer: bytes) -> None:
        try:
            theirs = msgspec.msgpack.decode(offer, type=Offer)
        except msgspec.DecodeError as error:
            raise Unreachable(f"the offer cannot be read: {error}") from None
        arena = theirs.arena
        numbers = [arena.pid, arena.fd, arena.pages, theirs.proof, *(n for r in arena.regions for n in _numbers(r))]
        overlap = any(region.stride < region.size for region in arena.regions)
        if min(numbers) < 0 or max(numbers) >= 1 << 48 or overlap or len(theirs.nonce) != NONCE:
            raise Unreachable("the offer has numbers that cannot be")
        if [region.size for region in arena.regions] != self._memory.sizes:
            raise Unreachable("the offer has pages of other sizes")
        try:
            with _opened(arena.pid, theirs.proof) as proof:
                if os.pread(proof, NONCE, 0) != theirs.nonce:
                    raise Unreachable("the process of that number is another one here")
            with _opened(arena.pid, arena.fd) as file:
                found = os.fstat(file)
                if (found.st_dev, found.st_ino) != theirs.place or extent(arena) > found.st_size:
                    raise Unreachable("the file is another one here")
                alike = found.st_dev == os.fstat(self._memory.fd).st_dev
                if not (alike and fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK):
                    raise Unreachable("the file could be cut short while it is read")
                self._map(file, arena)
        except OSError as error:
            raise Unreachable(f"its process's memory cannot be opened: {error.strerror}") from None

    def _map(self, file: int, arena: Arena) -> None:
        with self._lock:
            if self._closed:
                raise Lost("The link was closed.")
            assert self._memory.map is not None
            self._place, source = self._maps.take(file)
            self._grids = _grids((source, arena), (self._memory.map, self._memory.arena))
            self._pages = arena.pages

    def send(self, pages: Sequence[int]) -> None:
        """Nothing: they are where they are."""

    def fetch(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        grids = self._grids  # they stay mapped while they are in use
        if not grids:
            raise Lost("The giver's memory is not open.")
        if min(theirs) < 0 or max(theirs) >= self._pages:
            raise Lost("The giver named pages outside of its arena.")
        for (first, own), count in runs(theirs, ours):
            for source, target in grids:
                target[:, own : own + count] = source[:, first : first + count]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._grids = []
            if self._place is not None:
                self._maps.give(self._place)
                self._place = None


class Proof:
    """A file with random bytes, by which another process knows that it has found this one."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE)
        self.fd = os.memfd_create("parley-kv", os.MFD_CLOEXEC)
        os.write(self.fd, self.nonce)

    def close(self) -> None:
        os.close(self.fd)


@contextmanager
def _opened(pid: int, fd: int) -> Iterator[int]:
    """A regular file of another process, for reading. Raises OSError, Unreachable."""
    path = f"/proc/{pid}/fd/{fd}"
    if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe or a device may have effects
        raise Unreachable("the file is another one here")
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield file
    finally:
        os.close(file)


def _grids(theirs: tuple[mmap.mmap, Arena], ours: tuple[mmap.mmap, Arena]) -> list[Grids]:
    """Both arenas as arrays [regions, pages, bytes]: one of each for regions that are alike and at equal distances."""
    groups: list[list[tuple[Region, Region]]] = []
    for pair in sorted(zip(theirs[1].regions, ours[1].regions, strict=True), key=lambda pair: pair[1].offset):
        if groups and _joins(pair, groups[-1]):
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return [(_grid(*theirs, [a for a, _ in group]), _grid(*ours, [b for _, b in group])) for group in groups]


def _joins(pair: tuple[Region, Region], group: list[tuple[Region, Region]]) -> bool:
    """Is a region, on both sides, as those of a group are, and as far behind its last one as they are apart?"""
    return all(
        (one.size, one.stride) == (last.size, last.stride)
        and (len(group) == 1 or one.offset - last.offset == last.offset - before.offset)
        for one, last, before in zip(pair, group[-1], group[-2:][0], strict=True)
    )


def _grid(memory: mmap.mmap, arena: Arena, regions: Sequence[Region]) -> Grid:
    import numpy as np  # not before there are pages: it makes threads, and most servers share none

    first, step = regions[0], regions[-1].offset - regions[-2:][0].offset
    return np.ndarray((len(regions), arena.pages, first.size), np.uint8, memory, first.offset, (step, first.stride, 1))


def _numbers(region: Region) -> tuple[int, int, int]:
    return region.offset, region.stride, region.size
