"""An item of the output that the model is writing, and the events that begin and end it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from parley.dialects.openai.responses.events import EventStream

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Item = dict[str, Any]


class OpenItem(ABC):
    """An item that the model is writing."""

    prefix: str  # of its id

    def __init__(self, unique_id: str, output_index: int, events: EventStream):
        self.id = f"{self.prefix}_{unique_id}{output_index:04x}"
        self._events = events
        self._place: dict[str, Any] = {"item_id": self.id, "output_index": output_index}
        self._index = output_index

    def open(self) -> None:
        """Write the events that announce the item. Not called for an answer in one piece."""
        self._events.write("response.output_item.added", output_index=self._index, item=self.snapshot("in_progress"))

    def close(self, status: ItemStatus) -> Item:
        """Write the events that end the item, and return it."""
        if self._events.enabled:
            self._close_parts()
        item = self.snapshot(status)
        self._events.write("response.output_item.done", output_index=self._index, item=item)
        return item

    @abstractmethod
    def snapshot(self, status: ItemStatus) -> Item:
        """Return the item as it is now."""

    @abstractmethod
    def _close_parts(self) -> None:
        """Write the events that end the item's parts. Not called for an answer in one piece."""
