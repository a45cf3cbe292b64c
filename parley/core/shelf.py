"""Which adapters there are, and which of them are in memory: so many, of those that were used last.

An adapter that is wanted and not in memory is read beside the steps, and only the works that want it wait. While open
works hold all places, nobody else may take another adapter either: a work that waits for a place gets it when those
before it have ended, however many come after it.

Knows neither what an adapter is nor what works do with it. All of it belongs to the loop's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parley.core.sequence import Adapter

Fetched = Adapter | str  # or why it cannot be read
Fetch = Callable[
    [str, Callable[[Fetched], None]], None
]  # (folder, done): reads it, and calls done in the loop's thread


@dataclass(eq=False)
class Entry:
    """An adapter by one name and from one folder. ``holders``: works that need it."""

    name: str
    folder: str
    adapter: Adapter | None = None
    fetching: bool = False
    holders: int = 0


@dataclass(eq=False)
class _Wait:
    id: str
    entry: Entry
    ready: Callable[[Entry], None]
    failed: Callable[[str], None]


class Shelf:
    """``places`` adapters at most are kept in memory. ``folders``: those that are known from the beginning, by name."""

    def __init__(self, places: int, fetch: Fetch, folders: Mapping[str, str] | None = None):
        self.places = places
        self._fetch = fetch
        self._known = {name: Entry(name, folder) for name, folder in (folders or {}).items()}
        self._held: OrderedDict[Entry, None] = OrderedDict()  # in memory or on the way there; used last comes last
        self._queue: OrderedDict[str, _Wait] = OrderedDict()

    def put(self, name: str, folder: str, told: Callable[[str], None]) -> None:
        """Read an adapter, and know it by this name if nothing is wrong with it; ``told`` why not, or nothing.

        Works that run with another one of that name keep it.
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
        """Know it no longer; works that have it or wait for it are not concerned. False if nobody knew it."""
        entry = self._known.pop(name, None)
        self._forget(entry)
        self._turn()
        return entry is not None

    def take(self, id: str, name: str, ready: Callable[[Entry], None], failed: Callable[[str], None]) -> None:
        """Have an adapter for the work ``id``: one of the two is called, at once or later. ``give`` gives it back."""
        entry = self._known.get(name)
        if entry is None:
            failed("There is no adapter of this name.")
            return
        self._queue[id] = _Wait(id, entry, ready, failed)
        self._turn()

    def give(self, entry: Entry) -> None:
        """A work has ended."""
        entry.holders -= 1
        if self._known.get(entry.name) is not entry:
            self._forget(entry)
        self._turn()

    def cancel(self, id: str) -> None:
        """A work that waits is to wait no longer."""
        if self._queue.pop(id, None) is not None:
            self._turn()

    @property
    def waiting(self) -> int:
        """How many works wait for an adapter."""
        return len(self._queue)

    def _turn(self) -> None:
        """Let works have what is there, and have read what there is room for."""
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
        """Whether one more may be in memory; of those that nobody needs the one goes that was not used for longest."""
        while len(self._held) >= self.places:
            idle = next((entry for entry in self._held if not entry.holders and not entry.fetching), None)
            if idle is None:
                return False
            del self._held[idle]
            idle.adapter = None
        return True

    def _forget(self, entry: Entry | None) -> None:
        """It is known no longer: it leaves memory as soon as nobody needs it."""
        if entry is not None and not entry.holders and entry in self._held and not entry.fetching:
            wanted = any(wait.entry is entry for wait in self._queue.values())
            if not wanted:
                del self._held[entry]
                entry.adapter = None
