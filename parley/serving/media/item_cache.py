"""Processed items that are kept for later requests, and the names that clients gave them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from parley.serving.media.memory_files import MemoryFile
from parley.types import ProcessedMedia

MAX_NAMES = 65_536  # names that clients gave to items, for all tenants together


@dataclass(frozen=True, eq=False)
class StoredItem:
    """A processed item with its features. The file of the features lasts as long as this object."""

    item: ProcessedMedia
    features: MemoryFile


class ItemCache:
    """Keeps the last used items: at most ``count``, with at most ``limit`` bytes of features. Requests may use items
    beyond that."""

    def __init__(self, limit: int, count: int):
        self._limit, self._count = limit, count
        self._size = 0
        self._items: OrderedDict[Hashable, StoredItem] = OrderedDict()
        self._keys_by_name: OrderedDict[Hashable, Hashable] = OrderedDict()

    def find_item(self, key: Hashable) -> StoredItem | None:
        """Return the item of a key, and mark it as just used."""
        if (item := self._items.get(key)) is not None:
            self._items.move_to_end(key)
        return item

    def add_item(self, key: Hashable, item: StoredItem) -> None:
        """Keep an item, and drop those that were used least recently."""
        if (previous := self._items.pop(key, None)) is not None:
            self._size -= previous.features.size
        self._items[key] = item
        self._size += item.features.size
        while self._size > self._limit or len(self._items) > self._count:
            self._size -= self._items.popitem(last=False)[1].features.size

    def find_name(self, name: Hashable) -> StoredItem | None:
        """Return the item that was last given a name, if it is still kept."""
        key = self._keys_by_name.get(name)
        return self.find_item(key) if key is not None else None

    def add_name(self, name: Hashable, key: Hashable) -> None:
        """Let a name stand for the item of a key from now on."""
        self._keys_by_name[name] = key
        self._keys_by_name.move_to_end(name)
        if len(self._keys_by_name) > MAX_NAMES:
            self._keys_by_name.popitem(last=False)

    def clear(self) -> None:
        """Drop all items that no request uses."""
        self._items.clear()
        self._size = 0
