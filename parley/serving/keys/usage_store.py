"""The usage of each key per day and model: counted in memory, and kept in a SQLite file.

A thread writes new counts, at most once per second, so that requests never wait for the disk. If the process is
killed, at most the last second is missing. Rows of old days are removed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from parley.serving.file_faults import describe_fault, fault_reason
from parley.serving.lasting_fault import LastingFault

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL, key_name TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, key_id, model)) WITHOUT ROWID;
"""
ADD_ROW = """
INSERT INTO usage (day, key_id, model, key_name, requests, prompt_tokens, cached_tokens, completion_tokens)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET key_name = excluded.key_name, requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens, cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens
"""
SELECT_ROWS = """
SELECT day, key_id, key_name, model, requests, prompt_tokens, cached_tokens, completion_tokens FROM usage
WHERE day BETWEEN ? AND ? AND (? = '' OR key_name = ?) AND (? = '' OR model = ?)
ORDER BY day, key_name, key_id, model LIMIT ?
"""
WRITE_SECONDS = 1.0  # between two writes
KEPT_DAYS = 400
DAY_SECONDS = 86_400
MAX_PENDING = 100_000  # rows in memory while the file cannot be written; further ones are lost
LOCK_SECONDS = 5.0  # how long to wait for another process that writes
CLOSE_SECONDS = 12.0  # how long the last writes may take: each may wait for another process

log = logging.getLogger("parley.server")


PendingKey = tuple[int, str, str]  # the day since the epoch, the key's id, the model


class BadUsageFile(Exception):
    """The file cannot be used. The message is one sentence for an operator."""


class UsageRow(NamedTuple):
    """The usage of a model by a key on a day (UTC, as YYYY-MM-DD). ``key_id``: the tenant's id, "" without keys."""

    day: str
    key_id: str
    key_name: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageStore:
    """The usage of all keys. Several processes may use one file. ``clock`` returns seconds since the epoch.

    Reads have a connection of their own, which waits for no writer: the first request of a key reads what it has used.

    Raises BadUsageFile.
    """

    def __init__(self, file: str, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._lock = threading.Lock()  # protects the counts
        self._database_lock, self._reader_lock = threading.Lock(), threading.Lock()
        self._file = Path(file).absolute()
        self._database = _open_database(file)
        self._reader = sqlite3.connect(file, timeout=0.0, check_same_thread=False)
        self._pending: dict[PendingKey, list[int]] = {}  # counts by day, key's id and model
        self._key_names: dict[str, str] = {}
        self._closed, self._has_news = threading.Event(), threading.Event()
        self._last_day = ""
        self._lost_requests = 0  # lost since the file was last written
        self._fault = LastingFault("The usage of keys is written again.")
        self._thread = threading.Thread(target=self._run_writer, name="parley-usage", daemon=True)
        self._thread.start()

    def add_request(
        self, key_id: str, key_name: str, model: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int
    ) -> None:
        """Count a request that has ended."""
        key = (int(self._clock() // DAY_SECONDS), key_id, model)
        with self._lock:
            wakes_writer = not self._pending
            counts = self._pending.get(key)
            if counts is None:
                if len(self._pending) >= MAX_PENDING:
                    self._lost_requests += 1
                    return
                counts = self._pending[key] = [0, 0, 0, 0]
                self._key_names[key_id] = key_name
            counts[0] += 1
            counts[1] += prompt_tokens
            counts[2] += cached_tokens
            counts[3] += completion_tokens
        if wakes_writer:
            self._has_news.set()

    def list_usage(self, first_day: str, last_day: str, key_name: str, model: str, limit: int) -> list[UsageRow]:
        """Return the usage of these days, at most ``limit`` rows; empty names mean all. Raises sqlite3.Error."""
        self.write_pending()
        with self._database_lock:
            rows = self._database.execute(SELECT_ROWS, (first_day, last_day, *[key_name] * 2, *[model] * 2, limit))
            return [UsageRow(*row) for row in rows]

    def tokens_of_day(self, key_id: str) -> int:
        """Return the tokens that a key has used today. Raises sqlite3.Error."""
        query = "SELECT coalesce(sum(prompt_tokens + completion_tokens), 0) FROM usage WHERE day = ? AND key_id = ?"
        with self._reader_lock:
            return int(self._reader.execute(query, (day_text(self._clock()), key_id)).fetchone()[0])

    def fault_reason(self, error: sqlite3.Error) -> str:
        """Return why a call of this store failed, as a clause for clients."""
        return fault_reason(self._file, error)

    def write_pending(self) -> None:
        """Write the new counts; keep them if that fails. Raises sqlite3.Error."""
        with self._database_lock:
            with self._lock:
                pending, self._pending = self._pending, {}
                names = dict(self._key_names)
            rows = [
                (day_text(day * DAY_SECONDS), key_id, model, names.get(key_id, ""), *counts)
                for (day, key_id, model), counts in pending.items()
            ]
            try:
                with self._database as database:
                    database.executemany(ADD_ROW, rows)
                    self._remove_old_days(database)
            except sqlite3.Error:
                self._keep_pending(pending)
                raise
            self._fault.report_end()
            with self._lock:
                lost, self._lost_requests = self._lost_requests, 0
                names = self._key_names  # includes those of requests that ended meanwhile
                self._key_names = {key_id: names[key_id] for _, key_id, _ in self._pending}
            if lost:
                log.error("The usage of %d requests was lost: memory keeps no more rows that wait to be written.", lost)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write everything, and close the file; give up after ``timeout`` seconds."""
        self._closed.set()
        self._has_news.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.error("The last usage may be lost, since %s was not written in %g s.", self._file, timeout)

    def _close_database(self) -> None:
        try:
            self.write_pending()
        except sqlite3.Error as error:
            requests = self._lost_requests + sum(counts[0] for counts in self._pending.values())
            if requests:
                text = "Usage is lost (%d requests), since %s cannot be written: %s"
                log.error(text, requests, self._file, describe_fault(self._file, error))
        with self._database_lock, self._reader_lock:
            self._database.close()
            self._reader.close()

    def _keep_pending(self, pending: dict[PendingKey, list[int]]) -> None:
        with self._lock:
            for key, counts in pending.items():
                newer = self._pending.get(key, [0, 0, 0, 0])
                self._pending[key] = [old + new for old, new in zip(counts, newer, strict=True)]

    def _remove_old_days(self, database: sqlite3.Connection) -> None:
        if (today := day_text(self._clock())) != self._last_day:
            self._last_day = today
            database.execute("DELETE FROM usage WHERE day < ?", (day_text(self._clock() - KEPT_DAYS * DAY_SECONDS),))

    def _run_writer(self) -> None:
        while self._has_news.wait() and not self._closed.is_set():
            self._has_news.clear()
            try:
                self.write_pending()
            except sqlite3.Error as error:
                self._has_news.set()  # try again
                text = "The usage of keys is kept in memory, since %s cannot be written: %s"
                self._fault.report(text, self._file, describe_fault(self._file, error))
            self._closed.wait(WRITE_SECONDS)
        self._close_database()


def tokens_of_day(store: UsageStore | None) -> Callable[[str], int]:
    """Return a function that returns the tokens which a key has used today, as far as a store knows them."""

    def find_tokens(key_id: str) -> int:
        try:
            return 0 if store is None else store.tokens_of_day(key_id)
        except sqlite3.Error as error:
            log.error("The usage of a key cannot be read, so today's counts as 0: %s.", error)
            return 0

    return find_tokens


def day_text(seconds: float) -> str:
    """Return the day of a time, in seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def _open_database(file: str) -> sqlite3.Connection:
    """Open the database; a new file is readable by its owner only. Raises BadUsageFile."""
    path = Path(file)
    try:
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        database = sqlite3.connect(file, timeout=LOCK_SECONDS, check_same_thread=False)
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise BadUsageFile(f"The file for usage {path} has version {version}; this parley knows {SCHEMA_VERSION}.")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(SCHEMA)
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return database
    except (OSError, sqlite3.Error) as error:
        fault = describe_fault(file, error)
        raise BadUsageFile(f"The file for usage {path} cannot be used: {fault}") from None
