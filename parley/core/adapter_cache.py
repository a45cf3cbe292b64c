"""LRU cache of LoRA adapters: all registered adapters by name, and at most ``capacity`` of them in memory.

An adapter that is needed and not in memory is read outside the steps; only the requests that need it wait. While active
requests hold all places, the first request that waits for a place blocks those after it. So it gets one when earlier
requests have ended, no matter how many arrive later.

Knows neither the content of adapters nor their use. Everything belongs to the engine loop's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parley.core.sequence import Adapter

Fetched = Adapter | str  # str: why it cannot be read
Fetch = Callable[
    [str, Callable[[Fetched], None]], None
]  # (folder, done): reads the adapter, then calls done in the loop's thread


@dataclass(eq=False)
class Entry:
    """An adapter with its name and folder. ``holder_count``: number of active requests that use it."""

    name: str
    folder: str
    adapter: Adapter | None = None
    fetching: bool = False
    holders: int = 0


@dataclass(eq=False)
class _Wait:
    """A request that waits for an adapter, with its two callbacks."""

    id: str
    entry: Entry
    ready: Callable[[Entry], None]
    failed: Callable[[str], None]


class Shelf:
    """Keeps at most ``capacity`` adapters in memory. ``folders``: initially registered adapters, by name."""

    def __init__(self, places: int, fetch: Fetch, folders: Mapping[str, str] | None = None):
        self.places = places
        self._fetch = fetch
        self._known = {name: Entry(name, folder) for name, folder in (folders or {}).items()}
        self._held: OrderedDict[Entry, None] = OrderedDict()  # in memory or being read; least recently used first
        self._queue: OrderedDict[str, _Wait] = OrderedDict()

    def put(self, name: str, folder: str, told: Callable[[str], None]) -> None:
        """Read an adapter and register it under this name; ``on_done`` is called with an error, or "" on success.

        Running requests keep a previous adapter of that name.
        """
        entry = Entry(name, folder)

        def done(fetched: Fetched) -> None:
            if not isinstance(fetched, str):
                self._forget(self._known.get(name))
                self._known[name] = entry
                if self._room():
                    entry.adapter = fetched
                    self._held[entry] = None
            told(fetched if isinstance(fetched, str) else "")
            self._turn()

        self._fetch(folder, done)

    def remove(self, name: str) -> bool:
        """Unregister an adapter; requests that use it or wait for it are unaffected. False if the name is unknown."""
        entry = self._known.pop(name, None)
        self._forget(entry)
        self._turn()
        return entry is not None

    def take(self, id: str, name: str, ready: Callable[[Entry], None], failed: Callable[[str], None]) -> None:
        """Acquire an adapter for a request: ``on_ready`` or ``on_failed`` is called, now or later. Release the entry
        with ``release_adapter``."""
        entry = self._known.get(name)
        if entry is None:
            failed("There is no adapter of this name.")
            return
        self._queue[id] = _Wait(id, entry, ready, failed)
        self._turn()

    def give(self, entry: Entry) -> None:
        """Release an adapter, because its request has ended."""
        entry.holders -= 1
        if self._known.get(entry.name) is not entry:
            self._forget(entry)
        self._turn()

    def cancel(self, id: str) -> None:
        """Stop waiting for an adapter. Unknown ids are ignored."""
        if self._queue.pop(id, None) is not None:
            self._turn()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an adapter."""
        return len(self._queue)

    def _turn(self) -> None:
        """Serve waiting requests in order: hand out adapters in memory, and read others where there is a place."""
        for wait in list(self._queue.values()):
            entry = wait.entry
            if self._queue.get(wait.id) is not wait or entry.fetching:
                continue
            if entry.adapter is None:
                if not self._room():
                    return
                self._read(entry)
                continue
            del self._queue[wait.id]
            entry.holders += 1
            self._held.move_to_end(entry)
            wait.ready(entry)

    def _read(self, entry: Entry) -> None:
        """Read an adapter into a free place."""

        def done(fetched: Fetched) -> None:
            entry.fetching = False
            if isinstance(fetched, str):
                del self._held[entry]
                for wait in [wait for wait in self._queue.values() if wait.entry is entry]:
                    del self._queue[wait.id]
                    wait.failed(fetched)
            else:
                entry.adapter = fetched
            self._turn()
            if self._known.get(entry.name) is not entry:
                self._forget(entry)

        entry.fetching = True
        self._held[entry] = None
        self._fetch(entry.folder, done)

    def _room(self) -> bool:
        """Make a place for one more adapter by evicting the least recently used idle one. False if none is idle."""
        while len(self._held) >= self.places:
            idle = next((entry for entry in self._held if not entry.holders and not entry.fetching), None)
            if idle is None:
                return False
            del self._held[idle]
            idle.adapter = None
        return True

    def _forget(self, entry: Entry | None) -> None:
        """Drop an adapter that is no longer registered from memory, unless a request uses it or waits for it."""
        if entry is not None and not entry.holders and entry in self._held and not entry.fetching:
            wanted = any(wait.entry is entry for wait in self._queue.values())
            if not wanted:
                del self._held[entry]
                entry.adapter = None
