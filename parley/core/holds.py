"""What is held of a pool for other instances: leases, whose pages they read, and landings, whose pages they fill.

Says how that and the sequences here leave each other room. Pages that are being read or filled cannot be taken back,
and it is not up to this engine when that ends. So whatever is admitted must fit beside them: a sequence with all of its
tokens, or it would take its pages from others in vain; a landing beside the longest sequence that runs. Then the first
in order gets on, or waits for the end of a transfer and for nothing else.

Knows when somebody may begin, and nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parley.core.blocks import BlockPool, pages
from parley.core.landing import Answer, Landings
from parley.core.lease import Leases
from parley.core.scheduler import Scheduler
from parley.core.sequence import Sequence
from parley.core.shelf import Shelf


class Holds:
    """``names``: what the hashes of all prompts begin with; None where no prefix is kept. ``tell(id, pages)`` is called
    with what the lease of a work has got. ``changed``: something is held or free of which nobody has told.

    ``scheduler`` is to be set before anything is called, where there are pages.
    """

    scheduler: Scheduler

    def __init__(
        self, pool: BlockPool, shelf: Shelf, names: str | None, vocab_size: int, tell: Callable[[str, list[int]], None]
    ):
        self.changed = False
        self._pool = pool
        self._leases = Leases(pool, tell, self._move)
        self._landings = Landings(pool, shelf, names, vocab_size, self._room)
        self.lease, self.begin = self._leases.open, self._leases.begin
        self.grow, self.start = self._leases.grow, self._leases.start
        self.revoke, self.urge = self._landings.revoke, self._leases.urge

    @property
    def pinned(self) -> int:
        """Pages that others read."""
        return self._leases.pinned

    @property
    def reserved(self) -> int:
        """Pages for what others compute, one that is kept for several of their works as often."""
        return self._landings.reserved

    def tables(self) -> Iterator[list[int]]:
        """All that is held, for checks of conservation."""
        yield from self._leases.tables()
        yield from self._landings.tables()

    def reserve(self, key: str, token_ids: list[int], salt: str, adapter: str, digest: str, answer: Answer) -> None:
        """Take pages for a prompt that another instance computes, as ``engine.messages.Reserve`` says."""
        self._landings.reserve(key, token_ids, salt, adapter, digest, answer)
        self.changed = True

    def land(self, key: str, count: int) -> None:
        """So many of them have their content."""
        self._landings.land(key, count)
        self.changed = True

    def cut(self, key: str, count: int) -> None:
        """No more than so many of them are going to have it."""
        self._landings.cut(key, count)
        self.changed = True

    def free(self, key: str) -> None:
        """They are not held any longer."""
        self._landings.free(key)
        self.changed = True

    def release(self, id: str) -> None:
        """The lease of a work ends."""
        self._leases.release(id)
        self.changed = True

    def fits(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether all tokens of one that waits have room beside what cannot be taken back. ``found``: pages that it
        would find in the cache, some of which may be held themselves."""
        taken = self._leases.claimed(sequence) + self._landings.moving
        return self._leases.need(sequence, found) <= self._pool.size - taken

    def _room(self) -> int:
        """How many pages may be taken for a landing."""
        taken = self._leases.claimed() + self._landings.moving
        longest = max((pages(len(sequence) + 1) for sequence in self.scheduler.running), default=0)
        return min(self.scheduler.spare(), self._pool.size - taken - longest)

    def _move(self, sequence: Sequence, priority: float) -> None:
        self.scheduler.move(sequence, priority)
