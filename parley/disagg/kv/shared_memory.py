"""Shared memory transport between processes of one host: the receiver reads the sender's arena itself.

The sender passes the open file of its arena over a Unix socket (``file_passing``), for reading only. The receiver
trusts nothing that the offer says about the file. It only accepts a memfd that can neither shrink nor grow, whose seals
are final, that is long enough for the pages of the offer, and that is not its own arena.

It maps that file, and copies all pieces of a page, or of adjacent pages, in one call that releases the interpreter
lock. Access to a mapping of a truncated file kills the process; the seals prevent that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from parley.disagg.kv.arena import MappedArena, PageKind, arena_bytes, consecutive_runs, page_kinds
from parley.disagg.kv.file_passing import NAME_BYTES, TOKEN_BYTES, FileSender, receive_file
from parley.disagg.kv.mapped_files import FileIdentity, MappedFiles
from parley.disagg.kv.transport import KVTransport, LinkLost, OfferUnusable
from parley.types import Arena, LayerRegion

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    PageGrid = npt.NDArray[np.uint8]
    PageGridPair = tuple[PageGrid, PageGrid]

FINAL_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # seals that every arena has


class SharedMemoryOffer(msgspec.Struct, array_like=True, frozen=True):
    """How to get the file of an arena, and its contents. ``sender`` and ``token``: see ``file_passing``."""

    sender: bytes
    token: bytes
    pages: int
    regions: list[LayerRegion]
    states: int = 0
    state_regions: list[LayerRegion] = []


class KindPair(NamedTuple):
    """A kind of pages in the sender's arena and in this one. ``grids``: pairs of arrays with their bytes."""

    sender_kind: PageKind
    own_kind: PageKind
    grids: list[PageGridPair]


class SharedMemoryTransport(KVTransport):
    """Reads the sender's arena. ``file_sender`` is used as a sender, ``mapped_files`` as a receiver."""

    name = "shared"

    def __init__(self, mapped_arena: MappedArena, file_sender: FileSender, mapped_files: MappedFiles):
        self._arena = mapped_arena
        self._file_sender = file_sender
        self._mapped_files = mapped_files
        self._token = b""  # the token of the offered file
        self._source_identity: FileIdentity | None = None  # the identity of the sender's arena, once it is mapped
        self._kind_pairs: list[KindPair] = []
        self._closed = False
        self._lock = threading.Lock()  # protects the mapping

    def make_offer(self) -> bytes:
        """Keep the arena's file ready for the receiver; return how to get it. Raises OSError."""
        self._token = self._file_sender.offer_file(self._arena.fd)
        arena = self._arena.arena
        return msgspec.msgpack.encode(
            SharedMemoryOffer(
                self._file_sender.name, self._token, arena.pages, arena.regions, arena.states, arena.state_regions
            )
        )

    def use_offer(self, offer: bytes) -> None:
        """Get, verify and map the sender's arena. Raises OfferUnusable, LinkLost."""
        try:
            source = msgspec.msgpack.decode(offer, type=SharedMemoryOffer)
        except msgspec.DecodeError as error:
            raise OfferUnusable(f"the offer cannot be decoded: {error}") from None
        regions = [*source.regions, *source.state_regions]
        numbers = [source.pages, source.states, *(number for region in regions for number in _region_numbers(region))]
        overlap = any(region.stride < region.size for region in regions)
        if min(numbers) < 0 or max(numbers) >= 1 << 48 or overlap:
            raise OfferUnusable("the offer has numbers out of range")
        if (len(source.sender), len(source.token)) != (NAME_BYTES, TOKEN_BYTES):
            raise OfferUnusable("the offer has a name or a token of another length")
        arena = Arena(0, -1, source.pages, source.regions, "", source.states, source.state_regions)
        sizes = [[region.size for region in kind.regions] for kind in page_kinds(arena)]
        if sizes != [[region.size for region in kind.regions] for kind in self._arena.kinds]:
            raise OfferUnusable("the offer has pages of other sizes")
        try:
            file = receive_file(source.sender, source.token)
            try:
                self._check_file(file, arena)
                self._map_source(file, arena)
            finally:
                os.close(file)
        except OSError as error:
            raise OfferUnusable(f"the sender's memory cannot be opened: {error.strerror or error}") from None

    def _check_file(self, file: int, arena: Arena) -> None:
        """Check that a file can hold the arena for as long as it is mapped. Raises OfferUnusable, OSError."""
        sender_stat, own_stat = os.fstat(file), os.fstat(self._arena.fd)
        if sender_stat.st_dev != own_stat.st_dev:
            raise OfferUnusable("the file is not a memfd with pages of the usual size")
        if sender_stat.st_ino == own_stat.st_ino:
            raise OfferUnusable("the file is this instance's own arena")
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & FINAL_SIZE != FINAL_SIZE:
            raise OfferUnusable("the file could be truncated while it is read")
        if arena_bytes(arena) > sender_stat.st_size:
            raise OfferUnusable("the file is shorter than the pages that it should hold")

    def _map_source(self, arena_fd: int, arena: Arena) -> None:
        """Map the sender's file. Raises LinkLost if the link was closed, and OSError."""
        with self._lock:
            if self._closed:
                raise LinkLost("The link was closed.")
            assert self._arena.mapping is not None
            self._source_identity, source = self._mapped_files.acquire_mapping(arena_fd)
            own_mapping = self._arena.mapping
            self._kind_pairs = [
                KindPair(theirs, ours, _paired_grids((source, theirs), (own_mapping, ours)))
                for theirs, ours in zip(page_kinds(arena), self._arena.kinds, strict=True)
            ]

    def send_pages(self, pages: Sequence[int]) -> None:
        """Do nothing: the receiver reads the pages in place."""

    def fetch_pages(self, sender_pages: Sequence[int], own_pages: Sequence[int]) -> None:
        """Copy pages from the sender's arena. Raises LinkLost."""
        pairs = self._kind_pairs  # stay mapped while they are in use
        if not pairs:
            raise LinkLost("The sender's memory is not open.")
        copies = [
            (pair.sender_kind.region_indices(sender_pages), pair.own_kind.region_indices(own_pages), pair.grids)
            for pair in pairs
        ]
        if sum(len(sender_indices) for sender_indices, _, _ in copies) < len(sender_pages):
            raise LinkLost("The sender named pages outside its arena.")
        if any(len(sender_indices) != len(own_indices) for sender_indices, own_indices, _ in copies):
            raise LinkLost("The sender named pages of another kind.")
        for sender_indices, own_indices, grids in copies:
            for (source_start, target_start), count in consecutive_runs(sender_indices, own_indices):
                for source, target in grids:
                    target[:, target_start : target_start + count] = source[:, source_start : source_start + count]

    def close_transport(self) -> None:
        """Withdraw the offered file, and unmap the sender's arena when no copy uses it any more."""
        self._file_sender.withdraw_file(self._token)
        with self._lock:
            self._closed = True
            self._kind_pairs = []
            if self._source_identity is not None:
                self._mapped_files.release_mapping(self._source_identity)
                self._source_identity = None


def _paired_grids(sender: tuple[mmap.mmap, PageKind], receiver: tuple[mmap.mmap, PageKind]) -> list[PageGridPair]:
    """Return pages of one kind in both arenas as arrays [regions, pages, bytes]; regions of equal shape and distance
    share one pair."""
    groups: list[list[tuple[LayerRegion, LayerRegion]]] = []
    for pair in sorted(zip(sender[1].regions, receiver[1].regions, strict=True), key=lambda pair: pair[1].offset):
        if groups and _extends_group(pair, groups[-1]):
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return [
        (_page_grid(*sender, [theirs for theirs, _ in group]), _page_grid(*receiver, [ours for _, ours in group]))
        for group in groups
    ]


def _extends_group(pair: tuple[LayerRegion, LayerRegion], group: list[tuple[LayerRegion, LayerRegion]]) -> bool:
    """Whether a region matches those of a group on both sides, in shape and in distance from the group's last one."""
    return all(
        (region.size, region.stride) == (last.size, last.stride)
        and (len(group) == 1 or region.offset - last.offset == last.offset - previous.offset)
        for region, last, previous in zip(pair, group[-1], group[-2:][0], strict=True)
    )


def _page_grid(memory: mmap.mmap, kind: PageKind, regions: Sequence[LayerRegion]) -> PageGrid:
    """Return regions of one shape and equal distances as an array uint8 [regions, pages, bytes]."""
    import numpy as np  # imported late: it starts threads, and most servers transfer no pages

    first, step = regions[0], regions[-1].offset - regions[-2:][0].offset
    return np.ndarray(
        (len(regions), kind.page_count, first.size), np.uint8, memory, first.offset, (step, first.stride, 1)
    )


def _region_numbers(region: LayerRegion) -> tuple[int, int, int]:
    """Return the numbers of a region for range checks."""
    return region.offset, region.stride, region.size
