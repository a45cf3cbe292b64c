"""Pages between processes of one host: the taker reads the giver's arena by itself, and the giver does nothing.

The taker opens the arena as /proc/PID/fd/N of the giver's process, which the kernel allows to the same user. Process
numbers mean something else on another host, or in another container, so the giver has a second file with random bytes,
which it also tells: the taker believes the process number if it finds them there, and the file if it is the same inode.

It reads with ``preadv`` instead of mapping the file: what another process cuts short is then a short read, and not the
end of this one. The file's pages side by side are one call, whatever the order of the own ones.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing

import msgspec

from parley.kv.memory import Memory, extent, rest
from parley.kv.transport import Guard, Lost, Transport, Unreachable
from parley.types import Arena, Region

NONCE = 32
MOST = 1024  # pieces of one read (IOV_MAX)


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """The arena as the giver's process has it, and the file with random bytes. ``place``: device and inode."""

    arena: Arena
    place: tuple[int, int]
    proof: int
    nonce: bytes


class Shared(Transport):
    """Reads the other process's arena. ``proof``: of the giver's side."""

    name = "shared"

    def __init__(self, memory: Memory, proof: Proof | None = None):
        self._memory = memory
        self._proof = proof
        self._theirs: Arena | None = None
        self._file: _File | None = None

    def offer(self) -> bytes:
        assert self._proof is not None
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
        if min(numbers) < 0 or max(numbers) >= 1 << 48 or len(theirs.nonce) != NONCE:
            raise Unreachable("the offer has numbers that cannot be")
        if [region.size for region in arena.regions] != self._memory.sizes:
            raise Unreachable("the offer has pages of other sizes")
        try:
            proof = _File(arena.pid, theirs.proof)
            with closing(proof):
                if os.pread(proof.fd, NONCE, 0) != theirs.nonce:
                    raise Unreachable("the process of that number is another one here")
            file = _File(arena.pid, arena.fd)
        except OSError as error:
            raise Unreachable(f"its process's memory cannot be opened: {error.strerror}") from None
        if file.place != theirs.place or extent(arena) > file.size:
            file.close()
            raise Unreachable("the file is another one here")
        self._theirs, self._file = arena, file

    def send(self, pages: Sequence[int]) -> None:
        """Nothing: they are where they are."""

    def fetch(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        arena, file = self._theirs, self._file
        if arena is None or file is None:
            raise Lost("The giver's memory is not open.")
        if min(theirs) < 0 or max(theirs) >= arena.pages:
            raise Lost("The giver named pages outside of its arena.")
        own, view = self._memory.arena.regions, self._memory.view
        joined = all(region.stride == region.size for region in (*arena.regions, *own))
        reads = list(pair(theirs, ours, MOST if joined else 1))
        with file.use():
            for source, target in zip(arena.regions, own, strict=True):
                start, stride, size = target.offset, target.stride, target.size
                for first, count, places in reads:
                    offset = source.offset + first * source.stride
                    views = [view[(at := start + page * stride) : at + run * size] for page, run in places]
                    done = os.preadv(file.fd, views, offset)
                    if done < count * size:
                        _read(file.fd, offset + done, rest(views, done))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Proof:
    """A file with random bytes, by which another process knows that it has found this one."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE)
        self.fd = os.memfd_create("parley-kv", os.MFD_CLOEXEC)
        os.write(self.fd, self.nonce)

    def close(self) -> None:
        os.close(self.fd)


class _File(Guard):
    """A regular file of another process, open for reading. Raises OSError, Unreachable."""

    def __init__(self, pid: int, fd: int):
        super().__init__()
        path = f"/proc/{pid}/fd/{fd}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe or a device may have effects
            raise Unreachable("the file is another one here")
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self.fd)
        self.place, self.size = (found.st_dev, found.st_ino), found.st_size

    def _free(self) -> None:
        os.close(self.fd)


def pair(theirs: Sequence[int], ours: Sequence[int], most: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Pages that one call reads: the first of theirs, how many follow each other, and runs (first, length) of ours.

    ``most``: of such runs; with 1 each page is a call of its own.
    """
    first, count = theirs[0], 0
    places: list[tuple[int, int]] = []
    for source, target in zip(theirs, ours, strict=True):
        page, run = places[-1] if places else (target, 0)
        if count and (source != first + count or most == 1 or (len(places) == most and target != page + run)):
            yield first, count, places
            first, count, places, page, run = source, 0, [], target, 0
        if run and target == page + run:
            places[-1] = (page, run + 1)
        else:
            places.append((target, 1))
        count += 1
    yield first, count, places


def _read(fd: int, offset: int, places: list[memoryview]) -> None:
    while places:
        count = os.preadv(fd, places, offset)
        if not count:
            raise Lost("The giver's memory ends before its pages do.")
        offset += count
        places = rest(places, count)


def _numbers(region: Region) -> tuple[int, int, int]:
    return region.offset, region.stride, region.size
