"""Every line of a whole server is JSON if that is asked for: of its start, requests, lost engine, and end."""

from __future__ import annotations

import json
import os
import signal

import pytest

pytestmark = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="starts a server twice: PARLEY_NIGHTLY=1")
QUESTION = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}


def read_lines(text: str) -> list[dict]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level"} <= line.keys() for line in lines)
    return lines


def test_every_line_is_json_from_the_start_to_the_end(serve):
    server = serve("--log-format", "json", "--log-bodies", "--kv-memory", "64MiB")
    assert server.post("/v1/chat/completions", QUESTION)[0] == 200
    assert server.post("/v1/chat/completions", {"messages": 7})[0] == 400
    assert server.get("/nowhere")[0] == 404
    for pid in server.children():
        os.kill(pid, signal.SIGKILL)
    assert server.wait_for(lambda: "restart" in server.output()) and server.wait_for(server.is_ready)
    assert server.stop() == 0
    lines = read_lines(server.output())
    messages = " ".join(line.get("message", "") for line in lines)
    for part in ("KV cache", "ready in", "restart"):
        assert part in messages
    refused = [line for line in lines if line.get("status") in (400, 404)]
    assert len(refused) == 2 and all(line["error"] for line in refused), refused
    assert {"error", "warning"} & {line["level"] for line in lines}


def test_lines_below_the_level_are_left_out(serve):
    server = serve("--log-format", "json", "--log-level", "warning", "--kv-memory", "64MiB")
    assert server.post("/v1/chat/completions", QUESTION)[0] == 200
    assert server.get("/nowhere")[0] == 404
    assert server.stop() == 0
    lines = read_lines(server.output())
    assert not [line for line in lines if line["level"] in ("info", "debug") and "status" in line]
