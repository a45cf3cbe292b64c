"""KV pages as numbers: reference counts, the list of free pages, and the prefix cache (pages found by their content).

A page (*block*) holds keys and values of PAGE_SIZE consecutive tokens. Several sequences may hold the same page, so a
page counts its references; it is *free* when the count is 0. Freeing a page does not erase it: if the page was filled
completely, its content is known by a hash, and until the page is reused a later request with the same prefix can pick
it up again. Free pages therefore wait in one list, and their position in the list is the whole eviction policy:

    head  [never filled, or content evicted] … [freed long ago] … [freed just now]  tail
    ^ allocated here                                              freed here, when the content has a hash ^

A sequence's pages are freed last page first, so the tail of a prompt is evicted before its beginning (a prefix is
useful without its tail, a tail is useless without its prefix). The list is doubly linked through two arrays, so a page
can leave the middle of it (when it is found by its hash) in constant time.

The hash of a page covers all tokens up to its end, because keys and values depend on all of them. It is chained:
``hash(i) = SHA-256(hash(i - 1), tokens of page i)``, cut to 128 bits. The chain starts from everything else that
decides the content (model, adapter) and from the client's cache salt: prompts with different salts never share a page.
SHA-256 prevents a client from forging a collision to read or poison another client's pages.

All images have the same placeholder tokens. So the hash of a page that overlaps a media item also covers the digest
of the whole item, even if the item continues after the page, and its start relative to the page.

This module knows nothing of sequences or tensors.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from operator import attrgetter

from parley.core.pages.cache_events import CacheEventLog
from parley.core.sequence import PAGE_SIZE
from parley.types import MediaItem

HASH_BYTES = 16

_token_struct = struct.Struct(f"<{PAGE_SIZE}I")
_item_start_struct = struct.Struct("<i")
_by_item_end = attrgetter("end")


@lru_cache(256)
def hash_chain_root(*names: str) -> bytes:
    """Return the start of a hash chain. Different names (model, adapter, salt) give chains that never meet."""
    state = sha256()
    for name in names:
        data = name.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)  # the length keeps ("ab", "c") and ("a", "bc") apart
    return state.digest()[:HASH_BYTES]


def long_rope_root(chain_root: bytes) -> bytes:
    """Return the start of the chain for sequences that use the long rotary factors: their keys differ."""
    return sha256(chain_root + b"long rope").digest()[:HASH_BYTES]


def extend_hashes(
    hashes: list[bytes], chain_root: bytes, tokens: Sequence[int], page_count: int, media: Sequence[MediaItem]
) -> None:
    """Append to ``hashes`` until it covers the first ``page_count`` pages of ``tokens``. The chain starts at
    ``chain_root``. ``media``: the items among the tokens, in order."""
    for page in range(len(hashes), page_count):
        parent = hashes[-1] if hashes else chain_root
        data = _token_struct.pack(*tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE])
        if media:
            data += _describe_media(media, page * PAGE_SIZE)
        hashes.append(sha256(parent + data).digest()[:HASH_BYTES])


def _describe_media(media: Sequence[MediaItem], page_start: int) -> bytes:
    """Return the digest and relative start of each item that the page overlaps."""
    description = b""
    for item in media[bisect_right(media, page_start, key=_by_item_end) :]:
        if item.start >= page_start + PAGE_SIZE:
            break
        description += item.digest + _item_start_struct.pack(item.start - page_start)
    return description


def count_pages(tokens: int) -> int:
    """Return the number of pages that ``tokens`` tokens need."""
    return -(-tokens // PAGE_SIZE)


def count_transferable_pages(tokens: int, *, has_states: bool) -> int:
    """Return how many pages of a prefix of ``tokens`` tokens are transferred between instances: all full ones. If
    layers keep a state, never the page of the last token: the receiver computes that token from the state before it."""
    return (tokens - 1 if has_states else tokens) // PAGE_SIZE


class PagePool:
    """A pool of ``page_count`` pages, numbered from 0. ``free_count`` of them have no holder.

    ``event_log`` records the removal of pages from the prefix cache. The code that caches a page records that, because
    the pool does not know its tokens. ``on_drop`` is called with the hash of a page that leaves the prefix cache.
    """

    def __init__(self, page_count: int, event_log: CacheEventLog | None = None):
        self.page_count = page_count
        self.event_log = event_log
        self.on_drop: Callable[[bytes], None] = lambda digest: None
        self.free_count = page_count
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # tokens found there
        self._reference_counts = [0] * page_count
        self._hashes: list[bytes | None] = [None] * page_count
        self._cache: dict[bytes, int] = {}
        # Ring of free pages. Entry ``page_count`` is not a page; it marks the seam between tail and head.
        self._next = [*range(1, page_count + 1), 0]
        self._previous = [page_count, *range(page_count)]

    @property
    def used_count(self) -> int:
        """Number of pages that have a holder."""
        return self.page_count - self.free_count

    def allocate(self) -> int:
        """Allocate a page with one reference and evict its old content. Raises IndexError when no page is free."""
        page: int = self._next[self.page_count]
        if page == self.page_count:
            raise IndexError("no free page")
        self._remove_from_free_list(page)
        self._drop_hash(page)
        self._reference_counts[page] = 1
        return page

    def add_reference(self, page: int) -> None:
        """Add one reference to a cached page; a free page leaves the free list."""
        if self._reference_counts[page] == 0:
            self._remove_from_free_list(page)
        self._reference_counts[page] += 1

    def release_pages(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page of a table (in the table's order)."""
        for page in reversed(pages):
            self._reference_counts[page] -= 1
            if self._reference_counts[page] == 0:
                self._add_to_free_list(page)

    def find_cached(self, digest: bytes) -> int | None:
        """Return the page with this content, or None."""
        return self._cache.get(digest)

    def count_free(self, pages: Iterable[int]) -> int:
        """Return how many of these pages are free: sharing them reduces ``free_count`` by that number."""
        return sum(self._reference_counts[page] == 0 for page in pages)

    def cache_page(self, page: int, digest: bytes) -> bool:
        """Add a page to the prefix cache. False if another page with the same content is cached; that one stays."""
        if digest in self._cache:
            return False
        self._cache[digest] = page
        self._hashes[page] = digest
        return True

    def evict_page(self, page: int) -> None:
        """Remove a page from the prefix cache, because it was not written after all or its content is not trusted."""
        self._drop_hash(page)
        if self._reference_counts[page] == 0:
            self._remove_from_free_list(page)
            self._add_to_free_list(page)

    def clear_cache(self) -> bool:
        """Empty the prefix cache. Returns False and does nothing while a page is held."""
        if self.used_count:
            return False
        for digest, page in self._cache.items():
            self._hashes[page] = None
            self.on_drop(digest)
        self._cache.clear()
        if self.event_log is not None:
            self.event_log.record_cleared()
        return True

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Check page conservation: references equal table entries, free + used = all, hash to page is one to one.

        For tests. Raises AssertionError.
        """
        references = Counter(page for table in tables for page in table)
        assert all(self._reference_counts[page] == references[page] for page in range(self.page_count)), (
            "references != table entries"
        )
        assert references.keys() <= set(range(self.page_count)), "a table lists a page that does not exist"
        free_list: list[int] = []
        page = self._next[self.page_count]
        while page != self.page_count and len(free_list) <= self.page_count:
            assert self._previous[self._next[page]] == page, "the free list is broken"
            free_list.append(page)
            page = self._next[page]
        assert sorted(free_list) == [page for page in range(self.page_count) if not references[page]], (
            "free + used != all"
        )
        assert self.free_count == len(free_list), "the free count is wrong"
        hashed_pages = {digest: page for page, digest in enumerate(self._hashes) if digest is not None}
        assert hashed_pages == self._cache, "hashes and cache disagree"
        assert 0 <= self.prefix_hits <= self.prefix_queries, "more hits than queries"

    def _drop_hash(self, page: int) -> None:
        digest = self._hashes[page]
        if digest is not None:
            del self._cache[digest]
            self._hashes[page] = None
            self.on_drop(digest)
            if self.event_log is not None:
                self.event_log.record_removed(digest)

    def _remove_from_free_list(self, page: int) -> None:
        previous_page, next_page = self._previous[page], self._next[page]
        self._next[previous_page], self._previous[next_page] = next_page, previous_page
        self.free_count -= 1

    def _add_to_free_list(self, page: int) -> None:
        seam = self.page_count
        if self._hashes[page] is None:
            before, after = seam, self._next[seam]  # head: overwriting it first loses nothing
        else:
            before, after = self._previous[seam], seam
        self._next[before] = self._previous[after] = page
        self._previous[page], self._next[page] = before, after
        self.free_count += 1
