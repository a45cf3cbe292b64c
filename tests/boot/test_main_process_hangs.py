"""API processes whose main process hangs: their clients get an error in time, and are served once it continues."""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.api_process_server import LONG, ProcessServer, slow_model

TIMEOUT = 3
HANGS = "The server's main process does not answer."


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[ProcessServer]:
    model = tmp_path / "tiny"
    flags = [*slow_model(folder, model), "--api-processes", "2", "--engine-timeout", f"{TIMEOUT}s"]
    with ProcessServer(model, *flags) as server:
        yield server.wait_until_ready()


def stop_main(server: ProcessServer) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED)


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000, "stream": True}


def test_clients_get_errors_in_their_apis_form_and_are_served_again(server: ProcessServer):
    streams = [server.open("/v1/completions", LONG) for _ in range(4)]
    streams.append(server.open("/v1/messages", CHAT | {"model": "tiny", "ignore_eos": True}))
    passed = server.open("/v1/responses", {"input": "a", "max_output_tokens": 4000, "stream": True, "ignore_eos": True})
    ends = time.monotonic() + TIMEOUT + 0.5
    while time.monotonic() < ends:  # no stream is cut because it is long
        for stream in (*streams, passed):
            assert stream.readline()
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(server.call, "/v1/responses", {"input": "a", "max_output_tokens": 4000})
        assert server.wait_for(lambda: len(server.activity()["requests"]) == 7)
        stop_main(server)
        assert waiting.result()[0] == 503
    for stream in streams:
        with stream:
            last = stream.read().decode()
            assert HANGS in last
    assert "event: error" in last  # of Anthropic's API
    with passed, pytest.raises(http.client.IncompleteRead):
        passed.read()
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 16}),
        ("/v1/messages", CHAT | {"model": "tiny", "max_tokens": 2, "stream": False}),
    ):
        status, content, headers = server.call(path, body)
        assert (status, content["error"]["message"]) == (503, HANGS) and headers["retry-after"] == "2"
    assert server.get("/health/ready")[0] == 503
    os.kill(server.process.pid, signal.SIGCONT)
    assert server.wait_for(lambda: sum("The main process answers again" in line for line in server.lines) == 2)
    assert server.wait_for(lambda: server.is_idle)
    with ThreadPoolExecutor(8) as clients:
        body = {"prompt": "a", "max_tokens": 2}
        assert set(clients.map(lambda _: server.call("/v1/completions", body)[0], range(24))) == {200}
    assert not [line for line in server.lines if "Traceback" in line]
