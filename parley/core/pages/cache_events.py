"""Events of the prefix cache for external observers: pages that are stored and removed.

If there is an observer, the pool and its users record events here, and the loop passes them on after each step. Slow
work, such as encoding, is left to the observer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parley.core.sequence import PAGE_SIZE
from parley.types import MediaItem


class PagesStored(NamedTuple):
    """Consecutive pages that can be found from now on. ``parent_hash``: that of the page before; None for a prompt's
    first. ``start``: the position of their first token. ``media``: the items of the prompt that their hashes cover."""

    hashes: list[bytes]
    parent_hash: bytes | None
    token_ids: list[int]
    start: int
    adapter: str
    cache_salt: str
    media: Sequence[MediaItem]


class PageRemoved(NamedTuple):
    """A page that cannot be found any more."""

    digest: bytes


class CacheCleared(NamedTuple):
    """The cache is empty."""


CacheEvent = PagesStored | PageRemoved | CacheCleared


class CacheEventLog:
    """The events since they were last taken."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def record_stored(
        self,
        indices: Sequence[int],
        hashes: Sequence[bytes],
        tokens: Sequence[int],
        adapter: str,
        cache_salt: str,
        media: Sequence[MediaItem],
    ) -> None:
        """Record new pages by their indices in a sequence, ascending; the pages between them were cached already.

        ``hashes`` and ``tokens`` are those of the whole sequence.
        """
        range_start = 0
        for range_end in range(1, len(indices) + 1):
            if range_end < len(indices) and indices[range_end] == indices[range_end - 1] + 1:
                continue
            start, end = indices[range_start], indices[range_end - 1] + 1
            self._events.append(
                PagesStored(
                    list(hashes[start:end]),
                    hashes[start - 1] if start else None,
                    list(tokens[start * PAGE_SIZE : end * PAGE_SIZE]),
                    start * PAGE_SIZE,
                    adapter,
                    cache_salt,
                    media,
                )
            )
            range_start = range_end

    def record_removed(self, digest: bytes) -> None:
        """Record that a page was removed."""
        self._events.append(PageRemoved(digest))

    def record_cleared(self) -> None:
        """Record that all pages were removed."""
        self._events.append(CacheCleared())

    def take_events(self) -> list[CacheEvent]:
        """Return the events, and forget them."""
        events, self._events = self._events, []
        return events
