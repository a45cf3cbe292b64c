"""Chooses where records are kept: in memory, or in a file that several servers may share and that outlives them."""

from __future__ import annotations

from parley.serving.records.memory_records import MemoryRecordStore
from parley.serving.records.record_store import RecordStore

AnyRecordStore = RecordStore | MemoryRecordStore


def open_record_store(size: int, lifetime: float, file: str | None) -> AnyRecordStore:
    """Return the store of a server. ``size``: bytes at most. ``lifetime``: seconds. Raises BadRecordFile."""
    return MemoryRecordStore(size, lifetime) if file is None else RecordStore(size, lifetime, file)
