"""The audit log of calls that may change the server."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.http_client import HELLO_CHAT

from parley.child_process import python_command
from parley.serving.keys import audit_log
from parley.serving.keys.audit_log import append_line
from parley.settings.key_file import make_key
from parley.web import refusal_limit
from parley.web.refusal_limit import RefusalLimit


async def test_calls_that_may_change_the_server_are_recorded_whether_or_not_they_are_allowed(serve, tmp_path: Path):
    (key, hashed), (admin, hashed_admin) = make_key("alice"), make_key("boss", admin=True)
    file = tmp_path / "audit.jsonl"
    server = await serve(hashed_keys=(hashed, hashed_admin), audit_log=str(file))
    calls = [("boss", admin, 200), ("alice", key, 403), ("", "wrong", 401)]
    for _, sent_key, status in calls:
        headers = {"authorization": f"Bearer {sent_key}"}
        assert (await server.post("/reset_prefix_cache?x=1", {"note": "a\nb"}, **headers)).status == status
        assert (await server.post("/v1/chat/completions", HELLO_CHAT, **headers)).status in (200, 401)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["key"], line["status"]) for line in lines] == [(name, status) for name, _, status in calls]
    assert {line["path"] for line in lines} == {"/reset_prefix_cache?x=1"}
    assert lines[0]["client"] == "127.0.0.1" and lines[0]["key_id"] and not lines[2]["key_id"]
    assert "admin" in lines[1]["error"] and key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_the_body_of_an_admin_call_is_recorded_and_a_full_disk_does_not_fail_it(serve, tmp_path: Path, caplog):
    server = await serve(audit_log=str(tmp_path / "audit.jsonl"))
    assert (await server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})).status >= 400
    (line,) = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert json.loads(line["body"]) == {"lora_name": "a", "lora_path": "b"} and line["status"] >= 400
    full = await serve(audit_log="/dev/full")
    assert (await full.post("/reset_prefix_cache")).status == 200
    assert "The audit log /dev/full cannot be written (the disk is full): {" in caplog.text


async def test_a_flood_of_calls_without_an_admin_key_does_not_fill_the_file(serve, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(refusal_limit, "WINDOW_SECONDS", 3600.0)
    limits: list[RefusalLimit] = []
    monkeypatch.setattr(audit_log, "RefusalLimit", lambda report: limits.append(RefusalLimit(report)) or limits[-1])
    (key, hashed), (admin, hashed_admin) = make_key("alice"), make_key("boss", admin=True)
    file = tmp_path / "audit.jsonl"
    server = await serve(hashed_keys=(hashed, hashed_admin), audit_log=str(file))
    for sent_key, calls in ((key, 80), ("wrong", 60), (admin, 70)):
        for _ in range(calls):
            await server.post("/reset_prefix_cache", authorization=f"Bearer {sent_key}")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert Counter(line["status"] for line in lines) == {403: 50, 401: 50, 200: 70}
    limits[-1].end_window()
    last = json.loads(file.read_text().splitlines()[-1])
    assert last["error"].startswith("40 lines of refused requests were left out within 3600 s") and last["time"]
    assert "30 with status 403 of 127.0.0.1" in last["error"]


# A limit on the size of files behaves as a disk that becomes full: the write of a line is cut short.
FULL_DISK = """
import errno, os, resource, sys
from parley.serving.keys import audit_log
from parley.serving.keys.audit_log import append_line
file = sys.argv[1]
append_line(file, "first")
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8, most))
try:
    append_line(file, "second")
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
append_line(file, "third")
"""


def test_no_part_of_a_line_stays_in_the_file_when_the_disk_becomes_full(tmp_path: Path):
    file = tmp_path / "audit.jsonl"
    command = python_command("-c", FULL_DISK, str(file))
    run = subprocess.run(command, env=os.environ, check=True, capture_output=True, text=True)
    assert run.stdout == "No space left on device\n"
    assert file.read_text() == "first\nthird\n"


def test_a_pipe_that_nobody_reads_stops_nothing(tmp_path: Path):
    pipe = tmp_path / "audit"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
        append_line(str(pipe), "nobody has opened it")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    append_line(str(pipe), "line")
    assert os.read(reader, 100) == b"line\n"
    with pytest.raises(BlockingIOError):
        for _ in range(1000):
            append_line(str(pipe), "nobody reads it" * 200)
    os.close(reader)
