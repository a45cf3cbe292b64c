"""Objects that clients list by their age."""

import threading

import pytest

from parley.dialects.stored_objects import ObjectKind
from parley.interrupt import Abandoned, run_until_abandoned
from parley.serving.records.background import BackgroundRunner, tenant_records
from parley.serving.records.memory_records import MemoryRecordStore


def test_list_ends_at_the_next_object_when_nobody_waits_for_it():
    store, kind = MemoryRecordStore(1 << 20, 3600.0), ObjectKind("note", "note-")
    records = tenant_records(store, BackgroundRunner(store), "")
    for number in range(9):
        kind.save(records, f"note-{number}", number, b"{}")
    abandoned, read_count = threading.Event(), 0

    def skip_object(data: bytes) -> None:
        nonlocal read_count
        read_count += 1
        abandoned.set()

    with pytest.raises(Abandoned):
        run_until_abandoned(lambda: kind.list_page(records, skip_object, limit=9), abandoned)
    assert read_count == 1
