"""LRU cache of the embeddings of media items, by the digests of the items.

Sequences hold the embeddings that they may still need. Held embeddings are never dropped, so they may exceed the
capacity; ``EncodeQueue`` decides whether more is encoded then.

Knows nothing of sequences; everything belongs to the engine loop's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from parley.core.sequence import ItemEmbeddings


@dataclass(eq=False, slots=True)
class _CacheEntry:
    embeddings: ItemEmbeddings
    holder_count: int = 0


class EmbeddingCache:
    """Embeddings of at most ``capacity`` bytes, unless more are held. ``used_bytes``: of all embeddings;
    ``held_bytes``: of those that have a holder."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used_bytes = self.held_bytes = 0
        self._entries: OrderedDict[bytes, _CacheEntry] = OrderedDict()  # least recently used first

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def add_item(self, digest: bytes, embeddings: ItemEmbeddings) -> None:
        """Add the embeddings of an item. They have no holder, and stay at least until the next call of another
        method."""
        self._drop_idle(embeddings.nbytes)
        self._entries[digest] = _CacheEntry(embeddings)
        self.used_bytes += embeddings.nbytes

    def hold_item(self, digest: bytes) -> ItemEmbeddings | None:
        """Return the embeddings of an item with one more holder; None if they are not here."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._entries.move_to_end(digest)
        self.held_bytes += 0 if entry.holder_count else entry.embeddings.nbytes
        entry.holder_count += 1
        return entry.embeddings

    def release_item(self, digest: bytes) -> None:
        """Drop one holder. Without holders, the embeddings stay until room is needed."""
        entry = self._entries[digest]
        entry.holder_count -= 1
        if not entry.holder_count:
            self.held_bytes -= entry.embeddings.nbytes
            self._drop_idle(0)

    def check_invariants(self, holders: Counter[bytes]) -> None:
        """Check the numbers of holders and bytes, for tests. Raises AssertionError."""
        entries = self._entries
        assert {digest: entry.holder_count for digest, entry in entries.items() if entry.holder_count} == dict(holders)
        assert self.used_bytes == sum(entry.embeddings.nbytes for entry in entries.values())
        assert self.held_bytes == sum(entry.embeddings.nbytes for entry in entries.values() if entry.holder_count)

    def _drop_idle(self, room: int) -> None:
        """Drop embeddings without holders, least recently used first, until ``room`` bytes fit."""
        if self.used_bytes + room <= self.capacity:
            return
        for digest, entry in list(self._entries.items()):
            if not entry.holder_count:
                del self._entries[digest]
                self.used_bytes -= entry.embeddings.nbytes
                if self.used_bytes + room <= self.capacity:
                    return
