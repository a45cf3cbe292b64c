"""Reservations: pages that another instance fills with a prompt's KV cache. They are cached as soon as they arrive.

A reservation holds the cached prefix of a prompt and pages for the rest. Pages whose content is on its way are
unavailable to others until it has arrived or is known not to come. So they are only allocated where they fit next to
all running sequences, and never while a preempted sequence waits for pages. Received pages can be revoked at any time
(``revoke_reservation``): they then stay in the prefix cache until the room is needed, and a request that no longer
finds them recomputes them.

No step writes or clears such pages: all their bytes are overwritten by the transfer. A page that is returned without
content is cleared for its next holder like any other.

Knows pages, hashes and their keys; nothing of transports and nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from parley.core.adapter_cache import Entry, Shelf
from parley.core.pages.block_pool import BlockPool, extend, root
from parley.core.sequence import BLOCK_SIZE

OFF = "The prefix cache is off: the engine keeps no prefixes, so it cannot receive pages."
KNOWN = "Something is reserved under this key already."
TOKENS = "A token id is outside the vocabulary."
FULL = "There is no capacity for so many pages."
OTHER = "The adapter of this name has different content here."
GONE = "The reservation was freed."


class Taken(NamedTuple):
    """Answer to ``Reserve``; see ``engine.messages.Reserved``."""

    skip: int = 0
    pages: Sequence[int] = ()
    error: str = ""
    digest: str = ""


@dataclass(eq=False, slots=True)
class Landing:
    """One reservation. ``hashes``: of all its pages, in prompt order. ``pages`` await their content; the first
    ``received_count`` of them have received it. ``held_pages``: pages with content, cached or received, that were not
    revoked."""

    hashes: list[bytes]
    held: list[int]
    pages: list[int]
    landed: int = 0

    @property
    def moving(self) -> list[int]:
        """Pages that have not been received."""
        return self.pages[self.landed :]


Answer = Callable[[Taken], None]


class Landings:
    """Reservations by key. ``root_name``: root name of all prompt hashes; None where no prefix is cached.

    ``reservable_pages()`` returns how many pages may be reserved now.
    """

    def __init__(self, pool: BlockPool, shelf: Shelf, names: str | None, vocab_size: int, room: Callable[[], int]):
        self._pool = pool
        self._shelf = shelf
        self._names = names
        self._vocab_size = vocab_size
        self._room = room
        self._landings: dict[str, Landing] = {}
        self._asked: dict[str, Answer] = {}  # waiting for an adapter

    @property
    def moving(self) -> int:
        """Number of pages that have not been received."""
        return sum(len(landing.pages) - landing.landed for landing in self._landings.values())

    @property
    def reserved(self) -> int:
        """Number of pages held; a page shared by several reservations counts once for each."""
        return sum(len(each.held) + len(each.pages) - each.landed for each in self._landings.values())

    def tables(self) -> Iterator[list[int]]:
        """Return the page table of each reservation, for conservation checks."""
        return ([*landing.held, *landing.moving] for landing in self._landings.values())

    def reserve(self, key: str, token_ids: list[int], salt: str, adapter: str, digest: str, answer: Answer) -> None:
        """Reserve the whole pages of these tokens. ``answer`` is called now, or when the adapter is in memory."""
        if self._names is None:
            answer(Taken(error=OFF))
        elif key in self._landings or key in self._asked:
            answer(Taken(error=KNOWN))
        elif token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            answer(Taken(error=TOKENS))
        elif adapter:
            self._asked[key] = answer
            ready = partial(self._ready, key, token_ids, salt, digest)
            self._shelf.take(_place(key), adapter, ready, partial(self._failed, key))
        else:
            answer(self._take(key, token_ids, root(self._names, salt)))

    def land(self, key: str, count: int) -> None:
        """Mark the first ``count`` pages of a reservation as received. Unknown keys are ignored."""
        landing = self._landings.get(key)
        if landing is None:
            return
        skip = len(landing.hashes) - len(landing.pages)
        while landing.landed < min(count, len(landing.pages)):
            block, digest = landing.pages[landing.landed], landing.hashes[skip + landing.landed]
            if not self._pool.publish(block, digest):  # another page has this content already and stays
                there = self._pool.find(digest)
                assert there is not None
                self._pool.share(there)
                self._pool.drop([block])
                block = there
            landing.held.append(block)
            landing.landed += 1

    def cut(self, key: str, count: int) -> None:
        """Give up all but the first ``count`` pages of a reservation; no other instance writes the rest. Unknown keys
        are ignored."""
        landing = self._landings.get(key)
        if landing is not None and (surplus := landing.pages[max(count, landing.landed) :]):
            del landing.pages[-len(surplus) :], landing.hashes[-len(surplus) :]
            self._pool.drop(surplus)

    def free(self, key: str) -> None:
        """Free a reservation. Unknown keys are ignored."""
        landing = self._landings.pop(key, None)
        if landing is not None:
            self._pool.drop([*landing.held, *landing.moving])
        elif key in self._asked:
            self._shelf.cancel(_place(key))
            self._asked.pop(key)(Taken(error=GONE))

    def revoke(self) -> bool:
        """Drop the received pages of the newest reservation that has any. False if no reservation has any."""
        for landing in reversed(self._landings.values()):
            if landing.held:
                self._pool.drop(landing.held)
                landing.held = []
                return True
        return False

    def _take(self, key: str, token_ids: list[int], start: bytes, digest: str = "") -> Taken:
        hashes: list[bytes] = []
        extend(hashes, start, token_ids, len(token_ids) // BLOCK_SIZE)
        found: list[int] = []
        for each in hashes:
            if (block := self._pool.find(each)) is None:
                break
            found.append(block)
        need = len(hashes) - len(found)
        if hashes and need + self._pool.idle(found) > self._room():
            return Taken(error=FULL, digest=digest)
        for block in found:
            self._pool.share(block)
        landing = self._landings[key] = Landing(hashes, found, [self._pool.take() for _ in range(need)])
        return Taken(len(found), landing.pages, "", digest)

    def _ready(self, key: str, token_ids: list[int], salt: str, digest: str, entry: Entry) -> None:
        assert entry.adapter is not None and self._names is not None
        content = entry.adapter.digest.hex()
        self._shelf.give(entry)  # its request takes it again; keeping it until then could block that request
        answer = self._asked.pop(key)
        if digest not in ("", content):
            answer(Taken(error=OTHER, digest=content))
        else:
            answer(self._take(key, token_ids, root(self._names, salt, content), content))

    def _failed(self, key: str, reason: str) -> None:
        self._asked.pop(key)(Taken(error=reason))


def _place(key: str) -> str:
    """Return this reservation's id for the adapter cache; no request id begins with NUL."""
    return f"\0{key}"
