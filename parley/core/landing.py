"""Pages that another instance fills: taken for the tokens of a prompt, found in the cache as soon as they have landed.

A *landing* holds what the prefix cache has of a prompt, and pages for the rest of it. Those whose content is on its way
are lost to everybody else until it has come or is known not to come. So they are only taken where there is room beside
all that runs, and never while one that ran waits for pages. The others may be taken away at any time (``revoke``): then
they stay in the cache until somebody needs the room, and whoever looks for them in vain computes them.

Such pages are written by no step and cleared by none: all their bytes are overwritten. One that was given back without
content goes to its next holder as any other does, and is cleared for it.

Knows pages, hashes and whose content they stand for; nothing of how bytes travel, and nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from parley.core.blocks import BlockPool, extend, root
from parley.core.sequence import BLOCK_SIZE
from parley.core.shelf import Entry, Shelf

OFF = "The engine keeps no prefixes, so it cannot take pages from others."
KNOWN = "Something is reserved under this key already."
TOKENS = "A token id is outside of the vocabulary."
FULL = "There is no capacity for so many pages."
OTHER = "The adapter of this name is another one here."
GONE = "It was given back."


class Taken(NamedTuple):
    """What ``Reserve`` is answered with: see ``engine.messages.Reserved``."""

    skip: int = 0
    pages: Sequence[int] = ()
    error: str = ""
    digest: str = ""


@dataclass(eq=False, slots=True)
class Landing:
    """``hashes`` of the prompt, as far as it comes. ``pages`` are to be filled, the first ``landed`` of them are.
    ``held``: those with content, found or landed, that were not taken away."""

    hashes: list[bytes]
    held: list[int]
    pages: list[int]
    landed: int = 0

    @property
    def moving(self) -> list[int]:
        return self.pages[self.landed :]


Answer = Callable[[Taken], None]


class Landings:
    """Landings by key. ``names``: what the hashes of all prompts begin with; None where nothing is ever found.

    ``room()`` says how many pages may be taken.
    """

    def __init__(self, pool: BlockPool, shelf: Shelf, names: str | None, vocab_size: int, room: Callable[[], int]):
        self._pool = pool
        self._shelf = shelf
        self._names = names
        self._vocab_size = vocab_size
        self._room = room
        self._landings: dict[str, Landing] = {}
        self._asked: dict[str, Answer] = {}  # those that wait for an adapter

    @property
    def moving(self) -> int:
        """How many pages are on their way."""
        return sum(len(landing.pages) - landing.landed for landing in self._landings.values())

    @property
    def reserved(self) -> int:
        """How many pages are held, one that several hold as often."""
        return sum(len(each.held) + len(each.pages) - each.landed for each in self._landings.values())

    def tables(self) -> Iterator[list[int]]:
        """What each landing holds, for checks of conservation."""
        return ([*landing.held, *landing.moving] for landing in self._landings.values())

    def reserve(self, key: str, token_ids: list[int], salt: str, adapter: str, digest: str, answer: Answer) -> None:
        """Take pages for the whole pages of these tokens. ``answer`` is called, now or when the adapter is known."""
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
        """The first ``count`` of its pages have their content. Unknown keys are ignored."""
        landing = self._landings.get(key)
        if landing is None:
            return
        skip = len(landing.hashes) - len(landing.pages)
        while landing.landed < min(count, len(landing.pages)):
            block, digest = landing.pages[landing.landed], landing.hashes[skip + landing.landed]
            if not self._pool.publish(block, digest):  # somebody was faster, and that page stays
                there = self._pool.find(digest)
                assert there is not None
                self._pool.share(there)
                self._pool.drop([block])
                block = there
            landing.held.append(block)
            landing.landed += 1

    def cut(self, key: str, count: int) -> None:
        """No more than the first ``count`` of its pages are going to come; nobody writes into the others. Unknown keys
        are ignored."""
        landing = self._landings.get(key)
        if landing is not None and (surplus := landing.pages[max(count, landing.landed) :]):
            del landing.pages[-len(surplus) :], landing.hashes[-len(surplus) :]
            self._pool.drop(surplus)

    def free(self, key: str) -> None:
        """Hold nothing for it any more. Unknown keys are ignored."""
        landing = self._landings.pop(key, None)
        if landing is not None:
            self._pool.drop([*landing.held, *landing.moving])
        elif key in self._asked:
            self._shelf.cancel(_place(key))
            self._asked.pop(key)(Taken(error=GONE))

    def revoke(self) -> bool:
        """Hold what the newest landing has got no longer. False: none has got anything."""
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
        self._shelf.give(entry)  # its work will want it again; to keep it until then could keep that work waiting
        answer = self._asked.pop(key)
        if digest not in ("", content):
            answer(Taken(error=OTHER, digest=content))
        else:
            answer(self._take(key, token_ids, root(self._names, salt, content), content))

    def _failed(self, key: str, reason: str) -> None:
        self._asked.pop(key)(Taken(error=reason))


def _place(key: str) -> str:
    """What the shelf knows it by; no work is called so."""
    return f"\0{key}"
