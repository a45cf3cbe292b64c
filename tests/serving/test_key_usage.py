"""The usage of API keys: counted per day, key and model, and kept in a file."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
from support.http_client import HELLO_CHAT, build_request

from parley.child_process import python_command
from parley.serving.keys import usage_store
from parley.serving.keys.usage_store import SCHEMA_VERSION, BadUsageFile, UsageStore, day_text
from parley.settings.key_file import make_key

DAY = 86_400.0
COMPLETION = {"prompt": "a b c", "max_tokens": 4}  # 4 tokens and 4


class StoppedClock:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def test_counts_add_up_over_days_keys_models_and_restarts(tmp_path: Path) -> None:
    file, clock = str(tmp_path / "usage.db"), StoppedClock(500 * DAY)
    for _ in range(2):
        store = UsageStore(file, clock)
        store.add_request("k1", "alice", "m", 10, 4, 5)
        store.add_request("k1", "alice", "n", 1, 0, 1)
        store.add_request("k2", "bob", "m", 2, 0, 2)
        store.close()
    clock.seconds += DAY
    store = UsageStore(file, clock)
    store.add_request("k1", "alice2", "m", 1, 1, 1)
    days = day_text(500 * DAY), day_text(501 * DAY)
    assert store.list_usage(*days, "", "", 99) == [
        (days[0], "k1", "alice", "m", 2, 20, 8, 10),
        (days[0], "k1", "alice", "n", 2, 2, 0, 2),
        (days[0], "k2", "bob", "m", 2, 4, 0, 4),
        (days[1], "k1", "alice2", "m", 1, 1, 1, 1),
    ]
    assert [row.model for row in store.list_usage(days[0], days[0], "alice", "", 99)] == ["m", "n"]
    assert [row.key_name for row in store.list_usage(days[0], days[0], "", "m", 1)] == ["alice"]
    assert store.tokens_of_day("k1") == 2 and store.tokens_of_day("k2") == 0
    clock.seconds += 400 * DAY
    store.add_request("k1", "alice", "m", 1, 1, 1)
    assert [row.requests for row in store.list_usage("0000-00-00", "9999-99-99", "", "", 99)] == [1, 1]
    store.close()


def test_request_that_ends_during_a_write_keeps_the_name_of_its_key(tmp_path: Path, monkeypatch) -> None:
    store = UsageStore(str(tmp_path / "usage.db"), StoppedClock(500 * DAY))
    remove_old_days = store._remove_old_days

    def end_request(database) -> None:
        remove_old_days(database)
        monkeypatch.undo()
        store.add_request("k2", "bob", "m", 1, 0, 1)

    monkeypatch.setattr(store, "_remove_old_days", end_request)
    store.add_request("k1", "alice", "m", 1, 0, 1)
    store.write_pending()
    rows = store.list_usage("0000-00-00", "9999-99-99", "", "", 99)
    store.close()
    assert [(row.key_id, row.key_name) for row in rows] == [("k1", "alice"), ("k2", "bob")]


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "usage.db"
    file.write_bytes(b"no database" * 100)
    with pytest.raises(BadUsageFile, match="cannot be used: file is not a database"):
        UsageStore(str(file))
    missing = "no/usage.db cannot be used: No such file or directory. Make its folder, or name another file."
    with pytest.raises(BadUsageFile, match=missing):
        UsageStore(str(tmp_path / "no" / "usage.db"))
    with sqlite3.connect(tmp_path / "new.db") as database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    database.close()
    with pytest.raises(BadUsageFile, match=f"has version {SCHEMA_VERSION + 1}"):
        UsageStore(str(tmp_path / "new.db"))


def test_a_locked_file_loses_nothing(tmp_path: Path) -> None:
    file = str(tmp_path / "usage.db")
    store = UsageStore(file)
    store._database.execute("PRAGMA busy_timeout = 1")
    with sqlite3.connect(file, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        store.add_request("k", "alice", "m", 1, 0, 1)
        with pytest.raises(sqlite3.OperationalError):
            store.write_pending()
        store.add_request("k", "alice", "m", 1, 0, 1)
        other.execute("COMMIT")
    other.close()
    (row,) = store.list_usage("0000-00-00", "9999-99-99", "", "", 9)
    assert (row.requests, row.prompt_tokens, row.key_name) == (2, 2, "alice")
    store.close()


def test_a_full_disk_is_logged_once_and_loses_what_exceeds_memory(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(usage_store, "WRITE_SECONDS", 0.001)
    monkeypatch.setattr(usage_store, "MAX_PENDING", 100)
    store = UsageStore(str(tmp_path / "usage.db"))
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(110):
        store.add_request("k", "alice", f"model {number} {'x' * 100}", 1, 0, 1)
    for _ in range(3):
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            store.write_pending()
    while not caplog.records:  # the thread has tried as well
        time.sleep(0.01)
    store._database.execute("PRAGMA max_page_count = 1000")
    store.write_pending()
    assert len(store.list_usage("0000-00-00", "9999-99-99", "", "", 999)) == 100
    store.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"The usage of keys is kept in memory, since {tmp_path / 'usage.db'} cannot be written: the disk is full. Make "
        "room there, or name a file on another disk.",
        "The usage of keys is written again.",
        "The usage of 10 requests was lost: memory keeps no more rows that wait to be written.",
    ]


def test_usage_that_is_lost_at_the_end_is_logged(tmp_path: Path, caplog) -> None:
    file = str(tmp_path / "usage.db")
    store = UsageStore(file)
    store._database.execute("PRAGMA busy_timeout = 1")
    with sqlite3.connect(file, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        store.add_request("k", "alice", "m", 1, 0, 1)
        store.close()
    other.close()
    assert caplog.records[-1].getMessage() == (
        f"Usage is lost (1 requests), since {file} cannot be written: database is locked."
    )


def test_a_disk_that_hangs_keeps_the_server_neither_from_serving_nor_from_ending(tmp_path: Path, caplog) -> None:
    file = str(tmp_path / "usage.db")
    store = UsageStore(file)
    store.add_request("k", "alice", "m", 3, 0, 4)
    store.write_pending()
    with store._database_lock:  # a write that does not end
        store.add_request("k", "alice", "m", 1, 0, 1)
        assert store.tokens_of_day("k") == 7
        store.close(timeout=0.01)
        assert caplog.messages == [f"The last usage may be lost, since {file} was not written in 0.01 s."]
    store._thread.join()
    reopened = UsageStore(file)
    assert reopened.tokens_of_day("k") == 9
    reopened.close()


KILLED = """
import os, sys, time
from parley.serving.keys.usage_store import UsageStore
store = UsageStore(sys.argv[1])
store.add_request("k", "alice", "m", 7, 0, 7)
while not store._database.in_transaction and store._pending:
    time.sleep(0.01)
store._database_lock.acquire()
os.kill(os.getpid(), 9)
"""


def test_usage_counted_before_a_kill_is_on_disk(tmp_path: Path) -> None:
    file = str(tmp_path / "usage.db")
    killed = subprocess.run(python_command("-c", KILLED, file), env=os.environ, check=False)
    assert killed.returncode == -9
    store = UsageStore(file)
    assert store.tokens_of_day("k") == 14
    store.close()


async def test_admins_read_what_requests_used_also_if_they_were_cancelled(serve, tmp_path: Path) -> None:
    key, hashed = make_key("alice", tokens_per_day=1000)
    admin, hashed_admin = make_key("boss", admin=True)
    headers, admin_headers = ({"authorization": f"Bearer {api_key}"} for api_key in (key, admin))
    server = await serve(hashed_keys=(hashed, hashed_admin), usage_db=str(tmp_path / "usage.db"), tick=0.005)
    for _ in range(2):
        assert (await server.post("/v1/completions", COMPLETION, **headers)).status == 200
    assert (await server.post("/v1/completions", COMPLETION | {"n": 0}, **headers)).status == 400
    connection = await server.connect()
    long = HELLO_CHAT | {"stream": True, "max_tokens": 200, "ignore_eos": True}
    await connection.send(build_request("POST", "/v1/chat/completions", long, headers))
    await connection.head()
    connection.close()
    await server.wait_until_idle()
    assert (await server.get("/v1/usage", **headers)).status == 403
    page = (await server.get("/v1/usage", **admin_headers)).json
    (row,) = page["data"]
    assert (row["key"], row["model"], row["requests"]) == ("alice", "tiny", 3)
    assert row["prompt_tokens"] > 8 and 8 < row["completion_tokens"] < 208
    for query, status in (("start=2020-01-01&end=2020-02-01", 200), ("start=x", 400), ("no=1", 400), ("key=bob", 200)):
        answer = await server.get(f"/v1/usage?{query}", **admin_headers)
        assert answer.status == status, query
        assert status != 200 or answer.json["data"] == []


async def test_without_a_file_usage_is_not_kept(serve) -> None:
    answer = await (await serve()).get("/v1/usage")
    assert answer.status == 404 and "--usage-db" in answer.json["error"]["message"]
