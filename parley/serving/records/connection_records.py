"""Records that live no longer than a client's connection. They are never written to a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from parley.errors import Overloaded
from parley.serving.records.memory_records import MemoryRecordStore
from parley.web.random_ids import draw_id

CONNECTION_RECORD_BYTES = 64 << 20  # shared by all connections of a process
RECORD_SECONDS = 3600.0


class ConnectionStore(MemoryRecordStore):
    """The records of all connections of a process, and the number of connections of each client. A connection is a
    tenant of this store."""

    def __init__(self) -> None:
        super().__init__(CONNECTION_RECORD_BYTES, RECORD_SECONDS)
        self._open_counts: Counter[str] = Counter()

    @contextmanager
    def count_connection(self, client: str, limit: int | None) -> Iterator[None]:
        """Count a connection while it is open. ``client``: the id of its tenant, "" for one without an API key, which
        has no limit. Raises Overloaded if it has ``limit`` connections already."""
        if not client or limit is None:
            yield
            return
        if self._open_counts[client] >= limit:
            raise Overloaded(f"This API key has {limit} sessions, as many as it may have at a time. Close one first.")
        self._open_counts[client] += 1
        try:
            yield
        finally:
            self._open_counts[client] -= 1
            if not self._open_counts[client]:
                del self._open_counts[client]


class RecordsOfConnection:
    """The records of one connection."""

    def __init__(self, store: MemoryRecordStore):
        self._store, self._connection = store, draw_id().hex()
        self._names: set[str] = set()

    def save_record(self, name: str, data: bytes) -> None:
        """Keep a record in place of any other of this name."""
        self._names.add(name)
        self._store.save_record(self._connection, name, data)

    def find_record(self, name: str) -> bytes | None:
        """Return the record of this name, None if there is none."""
        return self._store.find_record(self._connection, name)

    def delete_record(self, name: str) -> None:
        """Drop the record of this name, if there is one."""
        self._names.discard(name)
        self._store.delete_record(self._connection, name)

    def close(self) -> None:
        """Drop all of them."""
        for name in tuple(self._names):
            self.delete_record(name)
