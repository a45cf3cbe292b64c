"""The records of all tenants in a file: a bounded SQLite database that several servers may share.

When the store is full, the tenant whose records are the largest loses its oldest ones.

Ages are those of the machine's time, as only that outlives processes. It may be set back, which leaves records with
times to come: a record is as old as its time is far from the present, in either direction, except that only earlier
ones expire.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from parley.dialects.records import RecordChange, RecordTooLarge
from parley.errors import NotReady
from parley.serving.file_faults import describe_fault, fault_reason
from parley.serving.lasting_fault import LastingFault

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL, name TEXT NOT NULL, kept_at REAL NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL,
    UNIQUE (tenant, name));
CREATE INDEX IF NOT EXISTS records_by_age ON records (kept_at);
CREATE INDEX IF NOT EXISTS records_by_tenant ON records (tenant, number);
CREATE INDEX IF NOT EXISTS records_by_name ON records (name);
CREATE TABLE IF NOT EXISTS parts (
    tenant TEXT NOT NULL, part TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (tenant, part)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS parts_by_record ON parts (number);
CREATE TABLE IF NOT EXISTS sizes (tenant TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS record_added AFTER INSERT ON records BEGIN
    INSERT INTO sizes VALUES (new.tenant, new.size) ON CONFLICT DO UPDATE SET size = size + new.size;
END;
CREATE TRIGGER IF NOT EXISTS record_dropped AFTER DELETE ON records BEGIN
    UPDATE sizes SET size = size - old.size WHERE tenant = old.tenant;
    DELETE FROM sizes WHERE tenant = old.tenant AND size <= 0;
    DELETE FROM parts WHERE number = old.number;
END;
"""
BY_NAME = "WHERE tenant = ? AND name = ?"
BY_PART = "WHERE number = (SELECT number FROM parts WHERE tenant = ? AND part = ?)"
RECORD_OVERHEAD, PART_OVERHEAD = 500, 300  # approximate bytes in addition to the data
EXPIRY_SECONDS = 1.0  # seconds between two removals of expired records
# How long to wait for another process that writes: the first time, and for some seconds after that failed. Servers
# write for milliseconds. A process that locks the file for longer, as VACUUM does, must not delay the event loop for
# each request.
LOCK_SECONDS, NEXT_LOCK_SECONDS = 1.0, 0.02
IMPATIENT_SECONDS = 10.0


class BadRecordFile(Exception):
    """The file of the store cannot be used. The message is one sentence for an operator."""


class RecordStore:
    """All records. ``size``: bytes at most; 0: nothing is kept. ``lifetime``: seconds.

    All calls raise NotReady if the file cannot be read or written now: it is locked or damaged, or its disk
    is full. ``faults``: how often that happened.
    """

    def __init__(self, size: int, lifetime: float, file: str, *, clock: Callable[[], float] = time.time):
        self.size, self.lifetime, self.faults = size, lifetime, 0
        self._last_expiry = float("-inf")  # in the time of the clock
        self._clock = clock
        self._lock = threading.Lock()  # bodies are read in threads
        self._file = Path(file).absolute()
        self._database = _open_database(file)
        self._lock_seconds = LOCK_SECONDS
        self._failed_at = float("-inf")
        self._fault = LastingFault("The store of responses can be used again.")

    def save_record(self, tenant: str, name: str, data: bytes, parts: Sequence[str] = ()) -> bool:
        """Keep a record, and drop expired and old ones. Return False if it is too large for the store."""
        with self._use_database():
            is_kept = self._write_record(tenant, name, data, parts)
        self._fault.report_end()  # on a full disk, records are still found
        return is_kept

    def update_record(self, tenant: str, name: str, change: RecordChange) -> bool:
        """Replace a record by the result of ``change``. Return whether the record exists. Raises RecordTooLarge."""
        with self._use_database() as database:
            database.execute("BEGIN IMMEDIATE")  # other processes wait, so that none changes the record meanwhile
            data = self._select_records(BY_NAME, tenant, name)
            if data is not None and not self._write_record(tenant, name, *change(data)):
                raise RecordTooLarge
        if data is not None:
            self._fault.report_end()
        return data is not None

    def find_record(self, tenant: str, name: str) -> bytes | None:
        """Return a record, None if there is none."""
        with self._use_database():
            return self._select_records(BY_NAME, tenant, name)

    def list_names(self, tenant: str, prefix: str) -> list[str]:
        """Return the names of a tenant's records that begin with ``prefix``, in alphabetical order."""
        query = "SELECT name FROM records WHERE tenant = ? AND name >= ? AND name < ? AND kept_at >= ? ORDER BY name"
        values = (tenant, prefix, _prefix_end(prefix), self._clock() - self.lifetime)
        with self._use_database() as database:
            rows = database.execute(query, values).fetchall()
        return [name for (name,) in rows]

    def list_all(self, prefix: str) -> list[tuple[str, str]]:
        """Return tenant and name of all records whose names begin with ``prefix``, in the order of their names."""
        query = "SELECT tenant, name FROM records WHERE name >= ? AND name < ? AND kept_at >= ? ORDER BY name"
        with self._use_database() as database:
            rows = database.execute(query, (prefix, _prefix_end(prefix), self._clock() - self.lifetime)).fetchall()
        return [(tenant, name) for tenant, name in rows]

    def find_part(self, tenant: str, part: str) -> bytes | None:
        """Return the record that has this part, None if there is none."""
        with self._use_database():
            return self._select_records(BY_PART, tenant, part)

    def touch_record(self, tenant: str, name: str) -> None:
        """Let a record count as new."""
        with self._use_database() as database:
            values = (self._clock(), tenant, name)
            database.execute("UPDATE records SET kept_at = ? WHERE tenant = ? AND name = ?", values)

    def touch_records(self, tenant: str, prefix: str) -> None:
        """Let the records of a tenant whose names begin with ``prefix`` count as new."""
        query = "UPDATE records SET kept_at = ? WHERE tenant = ? AND name >= ? AND name < ?"
        with self._use_database() as database:
            database.execute(query, (self._clock(), tenant, prefix, _prefix_end(prefix)))

    def age_record(self, tenant: str, name: str, seconds: float) -> None:
        """Let a record count as touched this many seconds ago."""
        with self._use_database() as database:
            database.execute(f"UPDATE records SET kept_at = ? {BY_NAME}", (self._clock() - seconds, tenant, name))

    def claim_record(self, tenant: str, name: str, seconds: float) -> bool:
        """Touch a record unless its age is less than ``seconds``. Return whether this call touched it: of several
        processes that claim a record at a time, only one gets True.
        """
        now = self._clock()
        query = f"UPDATE records SET kept_at = ? {BY_NAME} AND kept_at NOT BETWEEN ? AND ?"
        with self._use_database() as database:
            return database.execute(query, (now, tenant, name, now - seconds, now + seconds)).rowcount > 0

    def record_age(self, tenant: str, name: str) -> float:
        """Return the seconds since a record was kept or touched; 0 if there is none."""
        query = "SELECT kept_at FROM records WHERE tenant = ? AND name = ?"
        with self._use_database() as database:
            row = database.execute(query, (tenant, name)).fetchone()
        return 0.0 if row is None else abs(self._clock() - float(row[0]))

    def delete_record(self, tenant: str, name: str) -> bool:
        """Drop a record. Return whether there was one."""
        with self._use_database() as database:
            return database.execute("DELETE FROM records WHERE tenant = ? AND name = ?", (tenant, name)).rowcount > 0

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    @contextmanager
    def _use_database(self) -> Iterator[sqlite3.Connection]:
        """Hold the database for one transaction. Raises NotReady."""
        with self._lock:
            try:
                with self._database as database:
                    yield database
            except sqlite3.DatabaseError as error:
                self.faults += 1
                self._failed_at = time.monotonic()
                self._wait_for_locks(NEXT_LOCK_SECONDS)
                fault = describe_fault(self._file, error)
                self._fault.report("The store of responses in %s cannot be used: %s", self._file, fault)
                raise NotReady(
                    f"The store of responses cannot be used now: {fault_reason(self._file, error)}."
                ) from None
            if time.monotonic() - self._failed_at > IMPATIENT_SECONDS:
                self._wait_for_locks(LOCK_SECONDS)

    def _wait_for_locks(self, seconds: float) -> None:
        """From now on, wait at most this many seconds for the locks of other processes."""
        if seconds != self._lock_seconds:
            self._lock_seconds = seconds
            with suppress(sqlite3.ProgrammingError):  # the database has been closed
                self._database.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")

    def _select_records(self, condition: str, *values: str) -> bytes | None:
        query = f"SELECT data FROM records {condition} AND kept_at >= ?"
        row = self._database.execute(query, (*values, self._clock() - self.lifetime)).fetchone()
        return None if row is None else bytes(row[0])

    def _write_record(self, tenant: str, name: str, data: bytes, parts: Sequence[str]) -> bool:
        size = len(data) + RECORD_OVERHEAD + PART_OVERHEAD * len(parts)
        if size > self.size:
            return False
        database, now = self._database, self._clock()
        database.execute("DELETE FROM records WHERE tenant = ? AND name = ?", (tenant, name))
        row = database.execute(
            "INSERT INTO records (tenant, name, kept_at, size, data) VALUES (?, ?, ?, ?, ?)",
            (tenant, name, now, size, data),
        )
        database.executemany(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?)", [(tenant, part, row.lastrowid) for part in parts]
        )
        if abs(now - self._last_expiry) >= EXPIRY_SECONDS:
            self._last_expiry = now
            database.execute("DELETE FROM records WHERE kept_at < ?", (now - self.lifetime,))
        self._make_room()
        return True

    def _make_room(self) -> None:
        """Drop the oldest records of the tenants with the most, until the rest fits."""
        while self._total_size() > self.size:
            self._database.execute(
                "DELETE FROM records WHERE number = (SELECT min(number) FROM records WHERE tenant = "
                "(SELECT tenant FROM sizes ORDER BY size DESC LIMIT 1))"
            )

    def _total_size(self) -> int:
        (total,) = self._database.execute("SELECT coalesce(sum(size), 0) FROM sizes").fetchone()
        return int(total)


def _prefix_end(prefix: str) -> str:
    """Return the smallest text that comes after all texts with the prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _open_database(file: str) -> sqlite3.Connection:
    """Open the database; a new file is readable by its owner only. Raises BadRecordFile."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        database = sqlite3.connect(file, timeout=LOCK_SECONDS, check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(SCHEMA)
        return database
    except (OSError, sqlite3.Error) as error:
        fault = describe_fault(file, error)
        raise BadRecordFile(f"The file for responses {Path(file)} cannot be used: {fault}") from None
