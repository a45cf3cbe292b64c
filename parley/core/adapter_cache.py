"""LRU cache of LoRA adapters: all registered adapters by name, and at most ``capacity`` of them in memory.

An adapter that is not in memory is read outside the steps; only the requests that need it wait. While running requests
use ``capacity`` adapters, the first request that waits for another one blocks those after it. So it starts when earlier
requests have ended, no matter how many arrive later.

This module knows neither the content of adapters nor their use. Only the engine loop's thread may use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parley.core.sequence import LoadedAdapter

FetchedAdapter = LoadedAdapter | str  # str: why it cannot be read
# Reads the adapter of a folder, then calls the callback in the loop's thread.
FetchAdapter = Callable[[str, Callable[[FetchedAdapter], None]], None]


@dataclass(eq=False)
class AdapterEntry:
    """An adapter with its name and folder. ``holder_count``: number of active requests that use it."""

    name: str
    folder: str
    adapter: LoadedAdapter | None = None
    is_loading: bool = False
    holder_count: int = 0


@dataclass(eq=False)
class _AdapterWait:
    """A request that waits for an adapter, with its two callbacks."""

    request_id: str
    entry: AdapterEntry
    on_ready: Callable[[AdapterEntry], None]
    on_failed: Callable[[str], None]


class AdapterCache:
    """Keeps at most ``capacity`` adapters in memory. ``folders``: initially registered adapters, by name."""

    def __init__(self, capacity: int, fetch: FetchAdapter, folders: Mapping[str, str] | None = None):
        self.capacity = capacity
        self._fetch = fetch
        self._registered = {name: AdapterEntry(name, folder) for name, folder in (folders or {}).items()}
        # In memory or being read; least recently used first.
        self._loaded: OrderedDict[AdapterEntry, None] = OrderedDict()
        self._waiting: OrderedDict[str, _AdapterWait] = OrderedDict()

    def register_adapter(self, name: str, folder: str, on_done: Callable[[str], None]) -> None:
        """Read an adapter and register it under this name; ``on_done`` is called with an error, or "" on success.

        Running requests keep a previous adapter of that name.
        """
        entry = AdapterEntry(name, folder)

        def on_fetched(fetched: FetchedAdapter) -> None:
            if not isinstance(fetched, str):
                self._drop_unused(self._registered.get(name))
                self._registered[name] = entry
                if self._make_room():
                    entry.adapter = fetched
                    self._loaded[entry] = None
            on_done(fetched if isinstance(fetched, str) else "")
            self._serve_waiting()

        self._fetch(folder, on_fetched)

    def unregister_adapter(self, name: str) -> bool:
        """Unregister an adapter; requests that use it or wait for it are unaffected. False if the name is unknown."""
        entry = self._registered.pop(name, None)
        self._drop_unused(entry)
        self._serve_waiting()
        return entry is not None

    def acquire_adapter(
        self, request_id: str, name: str, on_ready: Callable[[AdapterEntry], None], on_failed: Callable[[str], None]
    ) -> None:
        """Acquire an adapter for a request: ``on_ready`` or ``on_failed`` is called, now or later. Release the entry
        with ``release_adapter``."""
        entry = self._registered.get(name)
        if entry is None:
            on_failed("There is no adapter of this name.")
            return
        self._waiting[request_id] = _AdapterWait(request_id, entry, on_ready, on_failed)
        self._serve_waiting()

    def release_adapter(self, entry: AdapterEntry) -> None:
        """Release an adapter, because its request has ended."""
        entry.holder_count -= 1
        if self._registered.get(entry.name) is not entry:
            self._drop_unused(entry)
        self._serve_waiting()

    def cancel_acquire(self, request_id: str) -> None:
        """Stop waiting for an adapter. Unknown ids are ignored."""
        if self._waiting.pop(request_id, None) is not None:
            self._serve_waiting()

    @property
    def waiting_count(self) -> int:
        """Number of requests that wait for an adapter."""
        return len(self._waiting)

    @property
    def loaded_entries(self) -> list[AdapterEntry]:
        """The adapters in memory or being read, least recently used first."""
        return list(self._loaded)

    def _serve_waiting(self) -> None:
        """Serve waiting requests in order: give them adapters in memory, and read others while there is room."""
        for wait in list(self._waiting.values()):
            entry = wait.entry
            if self._waiting.get(wait.request_id) is not wait or entry.is_loading:
                continue
            if entry.adapter is None:
                if not self._make_room():
                    return
                self._load_entry(entry)
                continue
            del self._waiting[wait.request_id]
            entry.holder_count += 1
            self._loaded.move_to_end(entry)
            wait.on_ready(entry)

    def _load_entry(self, entry: AdapterEntry) -> None:
        """Read an adapter. There must be room for it."""

        def on_loaded(fetched: FetchedAdapter) -> None:
            entry.is_loading = False
            if isinstance(fetched, str):
                del self._loaded[entry]
                for wait in [wait for wait in self._waiting.values() if wait.entry is entry]:
                    del self._waiting[wait.request_id]
                    wait.on_failed(fetched)
            else:
                entry.adapter = fetched
            self._serve_waiting()
            if self._registered.get(entry.name) is not entry:
                self._drop_unused(entry)

        entry.is_loading = True
        self._loaded[entry] = None
        self._fetch(entry.folder, on_loaded)

    def _make_room(self) -> bool:
        """Make room for one more adapter by evicting the least recently used idle one. False if none is idle."""
        while len(self._loaded) >= self.capacity:
            idle_entry = next(
                (entry for entry in self._loaded if not entry.holder_count and not entry.is_loading), None
            )
            if idle_entry is None:
                return False
            del self._loaded[idle_entry]
            idle_entry.adapter = None
        return True

    def _drop_unused(self, entry: AdapterEntry | None) -> None:
        """Drop an adapter that is no longer registered from memory, unless a request uses it or waits for it."""
        if entry is not None and not entry.holder_count and entry in self._loaded and not entry.is_loading:
            is_awaited = any(wait.entry is entry for wait in self._waiting.values())
            if not is_awaited:
                del self._loaded[entry]
                entry.adapter = None
