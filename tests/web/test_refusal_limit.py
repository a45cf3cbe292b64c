"""Refused requests are all in the log, until they are so many that the log would fill a disk: then they are counted."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from typing import Any

import pytest

from parley.log_lines import JsonFormatter
from parley.web import logs, refusal_limit
from parley.web.logs import MAX_QUEUED_LINES, QueueingHandler
from parley.web.refusal_limit import LINES_PER_CLIENT, LINES_PER_WINDOW, RefusalLimit


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> RefusalLimit:
    monkeypatch.setattr(logs, "_refusal_limit", limit := RefusalLimit())
    return limit


async def test_lines_of_one_client_are_counted_above_the_limit(limit: RefusalLimit, caplog) -> None:
    allowed = [limit.allows_line("10.0.0.7", "401") for _ in range(LINES_PER_CLIENT + 30)]
    assert allowed == [True] * LINES_PER_CLIENT + [False] * 30
    assert limit.allows_line("10.0.0.8", "401") and limit.allows_line("10.0.0.7", "400")
    limit.end_window()
    assert [record.getMessage() for record in caplog.records] == [
        "30 lines of refused requests were left out within 10 s: 30 with status 401 of 10.0.0.7."
    ]
    assert limit.allows_line("10.0.0.7", "401")


async def test_many_clients_share_a_limit_and_every_line_is_counted(limit: RefusalLimit, caplog) -> None:
    total = 5 * LINES_PER_WINDOW
    allowed = sum(limit.allows_line(f"10.0.{number >> 8}.{number & 255}", "401") for number in range(total))
    limit.end_window()
    (line,) = [record.getMessage() for record in caplog.records]
    assert allowed == LINES_PER_WINDOW
    assert line.startswith(f"{total - allowed} lines of refused requests were left out")


async def test_count_is_logged_without_further_refusals(limit: RefusalLimit, caplog, monkeypatch) -> None:
    monkeypatch.setattr(refusal_limit, "WINDOW_SECONDS", 0.01)
    for _ in range(LINES_PER_CLIENT + 1):
        limit.allows_line("", "429")
    while not caplog.records:
        await asyncio.sleep(0.005)
    assert "1 lines of refused requests were left out" in caplog.text and "an unknown client" in caplog.text


async def test_refused_requests_of_a_server_are_limited_and_others_are_not(limit: RefusalLimit, serve, caplog) -> None:
    server = await serve(access_log=True, api_keys=("right",))
    caplog.set_level(logging.INFO, "parley.access")
    wrong, right = ({"authorization": f"Bearer {key}"} for key in ("wrong-key-of-mine", "right"))
    for _ in range(LINES_PER_CLIENT + 5):
        assert (await server.call("GET", "/v1/models", b"", wrong)).status == 401
    for _ in range(3):
        assert (await server.call("GET", "/v1/models", b"", right)).status == 200
    lines = [record.getMessage() for record in caplog.records]
    assert sum("status=401" in line for line in lines) == LINES_PER_CLIENT
    assert sum("status=200" in line for line in lines) == 3
    assert "wrong-key-of-mine" not in caplog.text and "key=key-1" in lines[-1]


async def test_connection_whose_request_cannot_be_read_is_logged(limit: RefusalLimit, serve, caplog) -> None:
    server = await serve(access_log=True)
    caplog.set_level(logging.INFO, "parley.access")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"nonsense\x1b[31m\r\n\r\n")
    await reader.read()
    writer.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "status=400" in line and "client=127.0.0.1" in line and "error=Invalid HTTP request received." in line


async def test_logged_values_of_clients_stay_on_one_line(limit: RefusalLimit, serve, caplog) -> None:
    server = await serve(access_log=True, log_bodies=True)
    caplog.set_level(logging.INFO, "parley.access")
    body = b'{"model": "tiny", "prompt": [5], "max_tokens": 1}\n\n2026-01-31 12:30:01 error forged\x1b[2J'
    await server.call("POST", "/v1/completions", body, {"content-type": "application/json"})
    from parley.log_lines import TextFormatter

    (record,) = caplog.records
    text = TextFormatter().format(record)
    assert text.isprintable() and "\\n\\n2026-01-31 12:30:01 error forged\\x1b[2J" in text
    assert len(json.loads(JsonFormatter().format(record))["request"]) <= 2000


async def test_access_log_line_of_a_refused_request_is_complete(limit: RefusalLimit, serve, caplog) -> None:
    server = await serve(access_log=True, api_keys=("first", "second"))
    caplog.set_level(logging.INFO, "parley.access")
    headers = {"authorization": "Bearer second", "content-type": "application/json", "x-request-id": "mine"}
    for body in (b'{"model": "tiny", "prompt": "Hi", "temperature": 9}', b'{"model": "none", "prompt": "Hi"}'):
        await server.call("POST", "/v1/completions", body, headers)
    wrong, unknown = (json.loads(JsonFormatter().format(record)) for record in caplog.records)
    known = {"id": "mine", "api": "openai", "client": "127.0.0.1", "key": "key-2"}
    assert wrong.items() >= {**known, "status": 400, "model": "tiny", "field": "temperature"}.items()
    assert unknown.items() >= {**known, "status": 404, "model": "none", "field": "model"}.items()
    assert "temperature" in wrong["error"] and "none" in unknown["error"]


def test_lines_that_come_too_fast_are_counted(capfd) -> None:
    inlet = QueueingHandler(JsonFormatter())

    def emit(text: str, *arguments: Any) -> None:
        inlet.handle(logging.LogRecord("parley.x", logging.INFO, "", 0, text, arguments, None))

    for number in range(MAX_QUEUED_LINES + 7):
        emit("line %d", number)
    threading.Thread(target=inlet.run_writer, daemon=True).start()
    deadline, text = time.monotonic() + 30, ""
    while "dropped" not in text and time.monotonic() < deadline:
        text += capfd.readouterr().err
    assert json.loads(text.splitlines()[-1])["message"].startswith("7 log lines were dropped")
