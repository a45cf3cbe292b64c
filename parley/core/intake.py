"""From a work's arrival to its beginning: whether it can be done, and what it has to wait for.

A work may have a grammar that is to be read, and an adapter that is not in memory. Both happen beside the steps, and
nobody else waits for it; whoever needs neither begins at once. Knows nothing of sequences and steps, and belongs to
the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

from parley.core.beam import capacity
from parley.core.sequence import Adapter, Runner
from parley.core.shelf import Entry, Fetch, Fetched, Shelf
from parley.types import Work

Prepare = Callable[[Work, Callable[[], None]], None]  # makes a work ready, then calls that in the loop's thread


def refusal(work: Work, runner: Runner, context: int, blocks: int, slots: int) -> str | None:
    """Why the work cannot be done. The API process has checked all this; a defect there must not hang anybody."""
    if not work.token_ids:
        return "The prompt has no tokens."
    if len(work.token_ids) > context:
        return f"The prompt has {len(work.token_ids)} tokens, but only {context} fit."
    if work.pooling is None and not runner.generates:
        return "The model makes vectors only."
    if work.beam is not None:
        beams, room = work.beam.width, capacity(blocks, work.beam.width)
        if beams > slots or (work.max_tokens and len(work.token_ids) >= room):
            return f"{beams} beams do not fit: at most {slots} of {room} tokens each do."
    if work.pooling is not None and (work.pooling.dimensions or 1) > runner.dimensions:
        return f"The model makes vectors of {runner.dimensions} dimensions."
    size = runner.vocab_size
    if not all(_known(ids, size) for ids in (work.token_ids, *work.given)):
        return f"A token id of the prompt is outside of the vocabulary (0 to {size - 1})."
    if work.given and (len(work.given) != work.n or work.pooling is not None or (work.beam and any(work.given))):
        return "What was drawn before does not belong to these choices."
    if any(len(work.token_ids) + len(ids) > context for ids in work.given):
        return f"The prompt and what was drawn before do not fit into {context} tokens."
    return None


def _known(ids: list[int], size: int) -> bool:
    """Are all of them tokens of a vocabulary of this size?"""
    return not ids or (set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < size)


def at_once(runner: Runner) -> Fetch:
    """Reads adapters while everybody waits."""

    def fetch(folder: str, done: Callable[[Fetched], None]) -> None:
        try:
            fetched: Fetched = runner.fetch(folder)
        except Exception as error:
            fetched = str(error)
        done(fetched)

    return fetch


class Intake:
    """Works that wait for what they need, and the adapters of those that have begun.

    ``begin(work, wanted, added, adapter)`` is called when all is there, ``refuse(work, wanted, reason)`` when it cannot
    be had. ``wanted``: those of its choices that were not cancelled; ``added``: when it came, time.perf_counter.
    """

    def __init__(
        self,
        shelf: Shelf,
        prepare: Prepare | None,
        begin: Callable[[Work, set[int], float, Adapter | None], None],
        refuse: Callable[[Work, set[int], str], None],
    ):
        self._shelf = shelf
        self._prepare = prepare
        self._begin = begin
        self._refuse = refuse
        self._wanted: dict[str, set[int]] = {}  # by work that waits
        self._entries: dict[str, Entry] = {}  # by work that has begun, and has an adapter

    def __len__(self) -> int:
        """How many works wait."""
        return len(self._wanted)

    def __contains__(self, id: str) -> bool:
        return id in self._wanted

    def add(self, work: Work) -> None:
        """Let a work begin, now or later."""
        self._wanted[work.id] = set(range(work.n))
        prepared = partial(self._prepared, work, perf_counter())
        if self._prepare is not None:
            self._prepare(work, prepared)
        else:
            prepared()

    def cancel(self, id: str, index: int = -1) -> set[int]:
        """One choice of a work that waits is not wanted any more, or (-1) none is. Which were; unknown: none."""
        wanted = self._wanted.get(id, set())
        gone = wanted & {index} if index >= 0 else wanted
        if gone:
            self._wanted[id] = wanted - gone
            if not self._wanted[id]:
                del self._wanted[id]
                self._shelf.cancel(id)
        return gone

    def end(self, id: str) -> None:
        """A work that had begun has ended: others may have its adapter's place."""
        if (entry := self._entries.pop(id, None)) is not None:
            self._shelf.give(entry)

    def _prepared(self, work: Work, added: float) -> None:
        if work.id not in self._wanted:
            return
        if work.adapter:
            self._shelf.take(work.id, work.adapter, partial(self._ready, work, added), partial(self._failed, work))
        else:
            self._begin(work, self._wanted.pop(work.id), added, None)

    def _ready(self, work: Work, added: float, entry: Entry) -> None:
        self._entries[work.id] = entry
        self._begin(work, self._wanted.pop(work.id), added, entry.adapter)

    def _failed(self, work: Work, reason: str) -> None:
        self._refuse(work, self._wanted.pop(work.id), reason)
