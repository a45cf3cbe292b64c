"""Pages of the KV cache as numbers: who holds them, which are free, and which can be found again by their content.

A page (*block*) holds keys and values of BLOCK_SIZE consecutive tokens. Several sequences may hold the same page, so a
page counts its references; it is *free* when the count is 0. That is all a pool needs, but freeing a page does not
erase it: if the page was filled completely, its content is known by a hash, and until somebody else needs the room a
later request with the same beginning can pick it up again. Free pages therefore wait in one list, and their place in
it is the whole eviction policy:

    head  [never filled, or content forgotten] … [freed long ago] … [freed just now]  tail
    ^ taken here                                                  freed here, when the content has a hash ^

A sequence's pages are freed last page first, so that of one prompt the tail goes before the beginning (a prefix is of
use without its tail, a tail is of no use without its prefix). The list is doubly linked through two arrays, so a page
leaves the middle of it (found again by its hash) in constant time.

The hash of a page covers all tokens up to its end, because keys and values depend on all of them: it is chained,
``hash(i) = SHA-256(hash(i - 1), tokens of page i)``, cut to 128 bits. The chain starts from what else decides the
content (model, adapter) and from the client's salt: with different salts nothing is ever shared. SHA-256, so that
no client can forge a collision to read or poison another's pages.

The file knows nothing of sequences or tensors.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256

from parley.core.sequence import BLOCK_SIZE

HASH_BYTES = 16

_page = struct.Struct(f"<{BLOCK_SIZE}I")


@lru_cache(256)
def root(*names: str) -> bytes:
    """The start of a chain: different names (model, adapter, salt) give chains that never meet."""
    state = sha256()
    for name in names:
        data = name.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)  # the length keeps ("ab", "c") and ("a", "bc") apart
    return state.digest()[:HASH_BYTES]


def extend(hashes: list[bytes], start: bytes, tokens: Sequence[int], pages: int) -> None:
    """Append to ``hashes`` until it covers the first ``pages`` pages of ``tokens``. The chain's root is ``start``."""
    for page in range(len(hashes), pages):
        parent = hashes[-1] if hashes else start
        data = _page.pack(*tokens[page * BLOCK_SIZE : (page + 1) * BLOCK_SIZE])
        hashes.append(sha256(parent + data).digest()[:HASH_BYTES])


def pages(tokens: int) -> int:
    """How many pages that many tokens take."""
    return -(-tokens // BLOCK_SIZE)


class BlockPool:
    """``size`` pages, numbered from 0. ``free`` of them have no holder."""

    def __init__(self, size: int):
        self.size = size
        self.free = size
        self.queries = 0  # tokens looked up in the prefix cache
        self.hits = 0  # of those, found
        self._references = [0] * size
        self._hashes: list[bytes | None] = [None] * size
        self._cache: dict[bytes, int] = {}
        # Ring of free pages. Entry ``size`` is no page but the seam between tail and head.
        self._next = [*range(1, size + 1), 0]
        self._previous = [size, *range(size)]

    @property
    def used(self) -> int:
        return self.size - self.free

    def take(self) -> int:
        """A page with one reference, to be written; what it held is forgotten. Raises IndexError when none is free."""
        block = self._next[self.size]
        if block == self.size:
            raise IndexError("no free page")
        self._unlink(block)
        self._unhash(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a page that was found; a free page comes back to life."""
        if self._references[block] == 0:
            self._unlink(block)
        self._references[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each page of a table (in the table's order)."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._link(block)

    def find(self, digest: bytes) -> int | None:
        """The page with this content, if there still is one."""
        return self._cache.get(digest)

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these pages are free, so that sharing them takes room."""
        return sum(self._references[block] == 0 for block in blocks)

    def publish(self, block: int, digest: bytes) -> bool:
        """Make a page findable. False if another page with the same content already is: that one stays."""
        if digest in self._cache:
            return False
        self._cache[digest] = block
        self._hashes[block] = digest
        return True

    def forget(self, block: int) -> None:
        """Make a page unfindable, because it was not written after all or its content is not to be trusted."""
        self._unhash(block)
        if self._references[block] == 0:
            self._unlink(block)
            self._link(block)

    def clear(self) -> bool:
        """Make all pages unfindable. False, and nothing is done, while a page is held."""
        if self.used:
            return False
        for block in list(self._cache.values()):
            self._hashes[block] = None
        self._cache.clear()
        return True

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Conservation: references = entries of the given tables, free + used = all, the cache is one to one.

        For tests. Raises AssertionError.
        """
        held = Counter(block for table in tables for block in table)
        assert all(self._references[block] == held[block] for block in range(self.size)), "references != table entries"
        assert held.keys() <= set(range(self.size)), "a table names a page that does not exist"
        ring: list[int] = []
        block = self._next[self.size]
        while block != self.size and len(ring) <= self.size:
            assert self._previous[self._next[block]] == block, "the free list is torn"
            ring.append(block)
            block = self._next[block]
        assert sorted(ring) == [block for block in range(self.size) if not held[block]], "free + used != all"
        assert self.free == len(ring), "the free count is wrong"
        named = {digest: block for block, digest in enumerate(self._hashes) if digest is not None}
        assert named == self._cache, "hashes and cache disagree"
        assert 0 <= self.hits <= self.queries, "more hits than queries"

    def _unhash(self, block: int) -> None:
        digest = self._hashes[block]
        if digest is not None:
            del self._cache[digest]
            self._hashes[block] = None

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.free -= 1

    def _link(self, block: int) -> None:
        seam = self.size
        if self._hashes[block] is None:
            before, after = seam, self._next[seam]  # head: nothing is lost by writing here first
        else:
            before, after = self._previous[seam], seam
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.free += 1
