"""Objects that clients keep on a server and list by their age: stored completions, files, batches.

The name of an object's record consists of its kind, its time of creation and its id. So sorting by name sorts by age,
to the second. The record is found by a part that is named after kind and id, with a slash between them; parts of other
records have no slash in their names, even if clients choose their ids.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from parley.dialects.records import TenantRecords
from parley.interrupt import stop_if_abandoned

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """A kind of objects. ``name``: begins the names of their records. ``id_prefix``: begins their ids."""

    name: str
    id_prefix: str

    def record_name(self, object_id: str, created: int) -> str:
        """Return the name of an object's record. ``created``: in seconds since the epoch."""
        return f"{self.name}/{created:012d}/{object_id}"

    def save(self, records: TenantRecords, object_id: str, created: int, data: bytes) -> None:
        """Keep an object in place of any other of this name."""
        records.save_record(self.record_name(object_id, created), data, (self._part_name(object_id),))

    def update(self, records: TenantRecords, object_id: str, created: int, change: Callable[[bytes], bytes]) -> bool:
        """Replace an object by the result of ``change``. Return whether it exists."""
        parts = (self._part_name(object_id),)
        return records.update_record(self.record_name(object_id, created), lambda data: (change(data), parts))

    def find(self, records: TenantRecords, object_id: str) -> bytes | None:
        """Return an object, None if there is none."""
        return records.find_part(self._part_name(object_id)) if object_id.startswith(self.id_prefix) else None

    def _part_name(self, object_id: str) -> str:
        return f"{self.name}/{object_id}"

    def list_page(
        self,
        records: TenantRecords,
        read_object: Callable[[bytes], T | None],
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = True,
    ) -> tuple[list[T], bool]:
        """Return at most ``limit`` objects that ``read_object`` does not pass over by returning None, and whether there
        are more. ``after``: the name of the record before the first one."""
        objects: list[T] = []
        for name in self._names_after(records.list_names(self.name + "/"), after, newest_first=newest_first):
            stop_if_abandoned()
            data = records.find_record(name)
            listed = None if data is None else read_object(data)
            if listed is None:
                continue
            if len(objects) == limit:
                return objects, True
            objects.append(listed)
        return objects, False

    def _names_after(self, names: list[str], after: str | None, *, newest_first: bool) -> Sequence[str]:
        """Return the names that follow a name in the order of a list; the name itself need not exist."""
        if newest_first:
            return names[::-1] if after is None else [name for name in reversed(names) if name < after]
        return names if after is None else names[bisect_right(names, after) :]
