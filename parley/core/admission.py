"""Admission of requests: reject those that cannot run, and wait for their grammar and LoRA adapter.

A request may have a grammar that must be compiled and an adapter that is not in memory. Both are prepared outside the
steps and delay no other request; a request that needs neither starts at once. Knows nothing of sequences and steps, and
belongs to the engine loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

from parley.core.adapter_cache import Entry, Fetch, Fetched, Shelf
from parley.core.search.beam import capacity
from parley.core.sequence import Adapter, Runner
from parley.types import Work

Prepare = Callable[[Work, Callable[[], None]], None]  # prepares a request, then calls back in the loop's thread


def refusal(work: Work, runner: Runner, context: int, blocks: int, slots: int) -> str | None:
    """Return why the request cannot run, or None. The API process checks all this too; these checks keep a defect there
    from blocking other requests."""
    if not work.token_ids:
        return "The prompt has no tokens."
    if len(work.token_ids) > context:
        return f"The prompt has {len(work.token_ids)} tokens, but only {context} fit."
    if work.pooling is None and not runner.generates:
        return "The model only returns vectors."
    if work.beam is not None:
        beams, room = work.beam.width, capacity(blocks, work.beam.width)
        if beams > slots or (work.max_tokens and len(work.token_ids) >= room):
            return f"{beams} beams do not fit. At most {slots} beams of {room} tokens each do."
    if work.pooling is not None and (work.pooling.dimensions or 1) > runner.dimensions:
        return f"The model returns vectors of {runner.dimensions} dimensions."
    size = runner.vocab_size
    if not all(_known(ids, size) for ids in (work.token_ids, *work.given)):
        return f"A token id of the prompt is outside the vocabulary (0 to {size - 1})."
    if work.given and (len(work.given) != work.n or work.pooling is not None or (work.beam and any(work.given))):
        return "The prior output tokens do not match the choices of the request."
    if any(len(work.token_ids) + len(ids) > context for ids in work.given):
        return f"The prompt and the prior output tokens do not fit into {context} tokens."
    return None


def _known(ids: list[int], size: int) -> bool:
    """Whether all ids are tokens of a vocabulary of this size."""
    return not ids or (set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < size)


def at_once(runner: Runner) -> Fetch:
    """Return a fetch function that reads adapters synchronously, blocking the loop."""

    def fetch(folder: str, done: Callable[[Fetched], None]) -> None:
        try:
            fetched: Fetched = runner.fetch(folder)
        except Exception as error:
            fetched = str(error)
        done(fetched)

    return fetch


class Intake:
    """Requests that wait for a grammar or an adapter, and the adapters of those that have started.

    ``start_request(request, wanted_choices, queued_at, adapter)`` is called when everything is ready,
    ``reject_request(request, wanted_choices, reason)`` when it cannot be prepared. ``wanted_choices``: those that were
    not cancelled; ``queued_at``: arrival, time.perf_counter.
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
        self._wanted: dict[str, set[int]] = {}  # by waiting request
        self._entries: dict[str, Entry] = {}  # by started request with an adapter

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._wanted)

    def __contains__(self, id: str) -> bool:
        return id in self._wanted

    def add(self, work: Work) -> None:
        """Start a request, now or when its grammar and adapter are ready."""
        self._wanted[work.id] = set(range(work.n))
        prepared = partial(self._prepared, work, perf_counter())
        if self._prepare is not None:
            self._prepare(work, prepared)
        else:
            prepared()

    def cancel(self, id: str, index: int = -1) -> set[int]:
        """Cancel one choice of a waiting request, or (-1) all. Returns the cancelled choices; none for unknown ids."""
        wanted = self._wanted.get(id, set())
        gone = wanted & {index} if index >= 0 else wanted
        if gone:
            self._wanted[id] = wanted - gone
            if not self._wanted[id]:
                del self._wanted[id]
                self._shelf.cancel(id)
        return gone

    def end(self, id: str) -> None:
        """A started request has finished: release its adapter."""
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
