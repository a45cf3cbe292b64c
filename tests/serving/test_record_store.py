"""The stores of records: what they find, what they drop when they are full, and what another process sees."""

import sqlite3
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parley.dialects.records import RecordTooLarge
from parley.errors import NotReady
from parley.serving.records.memory_records import MemoryRecordStore
from parley.serving.records.open_store import AnyRecordStore
from parley.serving.records.record_store import (
    LOCK_SECONDS,
    NEXT_LOCK_SECONDS,
    RECORD_OVERHEAD,
    BadRecordFile,
    RecordStore,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_file(file: Path, size: int = 1 << 20, clock: Clock | None = None) -> RecordStore:
    return RecordStore(size, 60.0, str(file), clock=clock or Clock())


@pytest.fixture(params=["memory", "file"])
def open_store(request, tmp_path) -> Callable[..., AnyRecordStore]:
    def open_it(size: int = 1 << 20, clock: Clock | None = None) -> AnyRecordStore:
        if request.param == "file":
            return open_file(tmp_path / "records.db", size, clock)
        return MemoryRecordStore(size, 60.0, clock=clock or Clock())

    return open_it


def test_finds_a_record_by_its_name_and_its_parts(open_store):
    store = open_store()
    store.save_record("t", "a", b"1", ["p", "q"])
    assert (store.find_record("t", "a"), store.find_part("t", "q"), store.find_record("t", "b")) == (b"1", b"1", None)
    store.save_record("t", "a", b"2", ["p"])
    assert (store.find_record("t", "a"), store.find_part("t", "p"), store.find_part("t", "q")) == (b"2", b"2", None)
    store.save_record("t", "b", b"3", ["p"])
    assert store.find_part("t", "p") == b"3"
    assert store.delete_record("t", "b") and not store.delete_record("t", "b")
    assert store.find_record("t", "b") is None and store.find_part("t", "p") is None


def test_a_tenant_sees_only_its_own_records(open_store):
    store = open_store()
    store.save_record("t", "a", b"1", ["p"])
    store.save_record("", "a", b"2", ["p"])
    assert (store.find_record("t", "a"), store.find_record("", "a"), store.find_part("t", "p")) == (b"1", b"2", b"1")
    assert (
        store.find_record("u", "a") is None and store.find_part("u", "p") is None and not store.delete_record("u", "a")
    )


def test_the_tenant_with_the_most_loses_its_oldest_records(open_store):
    record = b"x" * (1000 - RECORD_OVERHEAD)
    store = open_store(5000)
    store.save_record("small", "a", record)
    for number in range(6):
        store.save_record("large", f"r{number}", record)
    assert store.find_record("small", "a") == record
    assert [number for number in range(6) if store.find_record("large", f"r{number}")] == [2, 3, 4, 5]
    assert store.save_record("large", "last", b"") and not store.save_record("large", "huge", b"x" * 6000)
    assert store.find_record("large", "huge") is None and store.find_record("large", "r5")


@pytest.mark.parametrize("tenants", [1, 20])
def test_a_full_file_finds_its_oldest_record_at_once(tmp_path, tenants):
    store, steps = open_file(tmp_path / "records.db", 3000 * 600), 0

    def count_steps() -> None:
        nonlocal steps
        steps += 1

    for number in range(3000):
        store.save_record(f"t{number % tenants}", f"r{number}", b"x" * (600 - RECORD_OVERHEAD))
    store._database.set_progress_handler(count_steps, 1)  # each step of the database's own machine
    store.save_record("t0", "new", b"x" * (600 - RECORD_OVERHEAD))
    assert store.find_record("t0", "r0") is None and store.find_record("t0", "new")
    assert steps < 1000


def test_records_expire_unless_they_are_touched(open_store):
    clock = Clock()
    store = open_store(clock=clock)
    store.save_record("t", "a", b"1")
    store.save_record("t", "b", b"2")
    clock.now += 50
    store.touch_record("t", "b")
    clock.now += 15
    assert (store.find_record("t", "a"), store.find_record("t", "b"), store.record_age("t", "b")) == (None, b"2", 15.0)


def test_a_record_that_was_kept_before_the_clock_was_set_back_is_silent(tmp_path):
    """Its server would have touched it with the new time."""
    clock = Clock()
    store = open_file(tmp_path / "records.db", clock=clock)
    store.save_record("t", "a", b"1")
    store.save_record("t", "b", b"2")
    clock.now -= 3600
    assert store.record_age("t", "a") == 3600.0
    assert store.claim_record("t", "a", 90.0) and not store.claim_record("t", "a", 90.0)
    assert (store.record_age("t", "a"), store.find_record("t", "b")) == (0.0, b"2")


def test_expired_records_are_removed_after_the_clock_was_set_back(tmp_path):
    clock = Clock()
    store = open_file(tmp_path / "records.db", clock=clock)
    store.save_record("t", "a", b"1")
    clock.now -= 900
    store.save_record("t", "b", b"2")
    clock.now += 70
    store.save_record("t", "c", b"3")
    rows = store._database.execute("SELECT name FROM records ORDER BY name").fetchall()
    assert rows == [("a",), ("c",)]


def test_setting_the_time_changes_nothing_in_memory(monkeypatch):
    store = MemoryRecordStore(1 << 20, 60.0)
    store.save_record("t", "a", b"1")
    for seconds in (-36_000.0, 36_000.0):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: seconds)
        assert store.find_record("t", "a") == b"1" and 0 <= store.record_age("t", "a") < 60


def test_records_with_a_prefix_are_touched_together(open_store):
    clock = Clock()
    store = open_store(clock=clock)
    for tenant, name in (("t", "a/1"), ("t", "a/2"), ("t", "b"), ("u", "a/1")):
        store.save_record(tenant, name, b"1")
    clock.now += 50
    store.touch_records("t", "a/")
    clock.now += 15
    assert (store.list_names("t", "a"), store.find_record("t", "b"), store.list_names("u", "a")) == (
        ["a/1", "a/2"],
        None,
        [],
    )


def test_servers_with_one_file_share_their_records(tmp_path):
    file = tmp_path / "responses.db"
    one, two = open_file(file), open_file(file)
    one.save_record("t", "a", b"1", ["p"])
    assert two.find_part("t", "p") == b"1"
    two.delete_record("t", "a")
    assert one.find_record("t", "a") is None
    one.save_record("t", "b", b"2")
    one.close()
    two.close()
    assert open_file(file).find_record("t", "b") == b"2"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_loses_no_change_that_another_server_makes_at_the_same_time(tmp_path):
    file = tmp_path / "responses.db"
    stores = [open_file(file), open_file(file)]
    stores[0].save_record("t", "a", b"", [])

    def add_ten(store: RecordStore) -> None:
        for _ in range(10):
            assert store.update_record("t", "a", lambda data: (data + b"x", ["p"]))

    with ThreadPoolExecutor() as threads:
        list(threads.map(add_ten, [*stores, stores[0]]))
    assert stores[1].find_part("t", "p") == b"x" * 30
    assert not stores[0].update_record("t", "unknown", lambda data: (data, []))


def open_on_full_disk(folder, spare_pages):
    """A store with record ``a``, whose file may grow by so many pages."""
    store = open_file(folder / "responses.db")
    store.save_record("t", "a", b"1")
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages + spare_pages}")
    return store


def full_and_over(folder: Path) -> list[str]:
    return [
        f"The store of responses in {folder / 'responses.db'} cannot be used: the disk is full. Make room there, or "
        "name a file on another disk.",
        "The store of responses can be used again.",
    ]


def test_a_full_disk_is_logged_once_and_its_end_as_well(tmp_path, caplog):
    store = open_on_full_disk(tmp_path, spare_pages=0)
    for _ in range(3):
        with pytest.raises(NotReady, match="disk is full"):
            store.save_record("t", "b", b"x" * 100_000)
        assert store.find_record("t", "a") == b"1"
    assert store.faults == 3
    store._database.execute("PRAGMA max_page_count = 1000")
    store.save_record("t", "b", b"x" * 100_000)
    store.save_record("t", "c", b"3")
    assert [record.getMessage() for record in caplog.records] == full_and_over(tmp_path)


def test_a_disk_that_has_room_for_small_records_only_is_logged_once(tmp_path, caplog):
    store = open_on_full_disk(tmp_path, spare_pages=1)
    for _ in range(3):
        with pytest.raises(NotReady, match="disk is full"):
            store.save_record("t", "b", b"x" * 100_000)
        store.save_record("t", "c", b"3")
    assert [record.getMessage() for record in caplog.records] == full_and_over(tmp_path)


def test_a_change_that_fails_leaves_the_record(open_store):
    store = open_store()
    store.save_record("t", "a", b"1")
    with pytest.raises(KeyError):
        store.update_record("t", "a", lambda data: {}["missing"])
    assert store.find_record("t", "a") == b"1"
    store.save_record("t", "a", b"2")
    assert store.find_record("t", "a") == b"2"


def test_a_change_that_makes_a_record_too_large_leaves_it(open_store):
    store = open_store()
    store.save_record("t", "a", b"1", ["p"])
    for change in (b"x" * store.size, []), (b"2", ["q"] * store.size):
        with pytest.raises(RecordTooLarge):
            store.update_record("t", "a", lambda data, change=change: change)
        assert store.find_record("t", "a") == store.find_part("t", "p") == b"1"
    assert store.update_record("t", "a", lambda data: (data + b"2", []))
    assert store.find_record("t", "a") == b"12"


def test_says_that_a_locked_file_cannot_be_used_now(tmp_path, monkeypatch):
    monkeypatch.setattr("parley.serving.records.record_store.LOCK_SECONDS", 0.01)
    store = open_file(tmp_path / "responses.db")
    store.save_record("t", "a", b"1")
    other = sqlite3.connect(tmp_path / "responses.db")
    other.execute("BEGIN IMMEDIATE")
    for change in (
        lambda: store.save_record("t", "b", b"2"),
        lambda: store.delete_record("t", "a"),
        lambda: store.touch_record("t", "a"),
    ):
        with pytest.raises(NotReady, match="cannot be used now: database is locked"):
            change()
    assert store.find_record("t", "a") == b"1"
    other.rollback()
    store.save_record("t", "b", b"2")
    assert store.find_record("t", "b") == b"2"


def test_waits_for_a_locked_file_only_once_in_a_while(tmp_path, monkeypatch):
    """Each wait may hold up the event loop. Reads succeed meanwhile."""
    store = open_file(tmp_path / "responses.db")
    other = sqlite3.connect(tmp_path / "responses.db")
    waits: list[int] = []
    for locked in (False, True, False, True):
        waits.append(store._database.execute("PRAGMA busy_timeout").fetchone()[0])
        if locked:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(NotReady, match="locked"):
                store.save_record("t", "a", b"1")
            other.rollback()
        else:
            assert store.find_record("t", "a") is None
    monkeypatch.setattr("parley.serving.records.record_store.IMPATIENT_SECONDS", 0.0)
    store.save_record("t", "a", b"1")
    waits.append(store._database.execute("PRAGMA busy_timeout").fetchone()[0])
    first, later = 1000 * LOCK_SECONDS, 1000 * NEXT_LOCK_SECONDS
    assert waits == [first, first, later, later, first]
    store.close()


def test_says_that_a_damaged_file_cannot_be_used_now(tmp_path):
    file = tmp_path / "records.db"
    store = open_file(file)
    for number in range(50):
        store.save_record("a", str(number), bytes(2000))
    store.close()
    store = open_file(file)
    with file.open("r+b") as damaged:
        damaged.seek(4096)  # the first page has the schema
        damaged.write(b"\xff" * (file.stat().st_size - 4096))
    for use in (
        lambda: store.find_record("a", "7"),
        lambda: store.save_record("a", "new", b""),
        lambda: store.touch_record("a", "7"),
    ):
        with pytest.raises(NotReady, match="malformed"):
            use()
    store.close()


def test_refuses_a_file_that_is_no_database(tmp_path):
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(BadRecordFile, match="cannot be used: file is not a database"):
        open_file(tmp_path / "text")
    missing = "missing/file cannot be used: No such file or directory. Make its folder, or name another file."
    with pytest.raises(BadRecordFile, match=missing):
        open_file(tmp_path / "missing" / "file")
