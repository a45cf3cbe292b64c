"""The records of all tenants in the memory of one process: dictionaries, which find and store a record in microseconds.

Keeps the same records as ``RecordStore``, which is for a file that outlives the process. Ages are those of the steady
clock, so records do not expire because somebody sets the machine's time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from parley.dialects.records import RecordChange, RecordTooLarge
from parley.serving.records.record_store import PART_OVERHEAD, RECORD_OVERHEAD

RecordKey = tuple[str, str]  # tenant, and name


class MemoryRecord(msgspec.Struct):
    """A record. ``kept_at``: when it was kept or touched. ``size``: in bytes, with its share of the dictionaries."""

    data: bytes
    parts: tuple[str, ...]
    kept_at: float
    size: int


class MemoryRecordStore:
    """All records. ``size``: bytes at most; 0: nothing is kept. ``lifetime``: seconds."""

    faults = 0  # memory has none

    def __init__(self, size: int, lifetime: float, *, clock: Callable[[], float] = time.monotonic):
        self.size, self.lifetime = size, lifetime
        self._records: dict[RecordKey, MemoryRecord] = {}  # in order of expiry
        self._names: dict[str, dict[str, None]] = {}  # of each tenant's records, oldest first
        self._parts: dict[RecordKey, str] = {}  # tenant, and name of a part -> name of the record that has it
        self._sizes: dict[str, int] = {}  # of each tenant's records, in bytes
        self._total_size = 0
        self._clock = clock
        self._lock = threading.Lock()  # bodies are read in threads

    def save_record(self, tenant: str, name: str, data: bytes, parts: Sequence[str] = ()) -> bool:
        """Keep a record, and drop expired and old ones. Return False if it is too large for the store."""
        with self._lock:
            return self._write_record(tenant, name, data, parts)

    def update_record(self, tenant: str, name: str, change: RecordChange) -> bool:
        """Replace a record by the result of ``change``. Return whether the record exists. Raises RecordTooLarge."""
        with self._lock:
            data = self._find_record(tenant, name)
            if data is not None and not self._write_record(tenant, name, *change(data)):
                raise RecordTooLarge
        return data is not None

    def find_record(self, tenant: str, name: str) -> bytes | None:
        """Return a record, None if there is none."""
        with self._lock:
            return self._find_record(tenant, name)

    def list_names(self, tenant: str, prefix: str) -> list[str]:
        """Return the names of a tenant's records that begin with ``prefix``, in alphabetical order."""
        with self._lock:
            names = self._names.get(tenant, ())
            return sorted(
                name for name in names if name.startswith(prefix) and self._find_record(tenant, name) is not None
            )

    def find_part(self, tenant: str, part: str) -> bytes | None:
        """Return the record that has this part, None if there is none."""
        with self._lock:
            name = self._parts.get((tenant, part))
            return None if name is None else self._find_record(tenant, name)

    def touch_record(self, tenant: str, name: str) -> None:
        """Let a record count as new."""
        with self._lock:
            self._touch_record(tenant, name)

    def touch_records(self, tenant: str, prefix: str) -> None:
        """Let the records of a tenant whose names begin with ``prefix`` count as new."""
        with self._lock:
            for name in self._names.get(tenant, ()):
                if name.startswith(prefix):
                    self._touch_record(tenant, name)

    def record_age(self, tenant: str, name: str) -> float:
        """Return the seconds since a record was kept or touched; 0 if there is none."""
        with self._lock:
            record = self._records.get((tenant, name))
        return 0.0 if record is None else self._clock() - record.kept_at

    def delete_record(self, tenant: str, name: str) -> bool:
        """Drop a record. Return whether there was one."""
        with self._lock:
            return self._drop_record(tenant, name)

    def close(self) -> None:
        """Do nothing."""

    def _touch_record(self, tenant: str, name: str) -> None:
        record = self._records.pop((tenant, name), None)
        if record is not None:
            record.kept_at = self._clock()
            self._records[tenant, name] = record

    def _find_record(self, tenant: str, name: str) -> bytes | None:
        record = self._records.get((tenant, name))
        return None if record is None or record.kept_at < self._clock() - self.lifetime else record.data

    def _write_record(self, tenant: str, name: str, data: bytes, parts: Sequence[str]) -> bool:
        size = len(data) + RECORD_OVERHEAD + PART_OVERHEAD * len(parts)
        if size > self.size:
            return False
        self._drop_record(tenant, name)
        now = self._clock()
        self._records[tenant, name] = MemoryRecord(data, tuple(parts), now, size)
        self._names.setdefault(tenant, {})[name] = None
        for part in parts:
            self._parts[tenant, part] = name
        self._add_size(tenant, size)
        while self._records[oldest := next(iter(self._records))].kept_at < now - self.lifetime:
            self._drop_record(*oldest)
        while self._total_size > self.size:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop_record(largest, next(iter(self._names[largest])))
        return True

    def _add_size(self, tenant: str, size: int) -> None:
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
        self._total_size += size

    def _drop_record(self, tenant: str, name: str) -> bool:
        record = self._records.pop((tenant, name), None)
        if record is None:
            return False
        for part in record.parts:
            if self._parts.get((tenant, part)) == name:  # else a newer record has it
                del self._parts[tenant, part]
        del self._names[tenant][name]
        self._add_size(tenant, -record.size)
        if not self._names[tenant]:
            del self._names[tenant], self._sizes[tenant]
        return True
