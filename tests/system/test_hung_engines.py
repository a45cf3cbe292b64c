"""The engine process of a server is stopped, and the server notices that without losing a request or its readiness."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from parley.dialects.triton.rpc.messages import HEALTH_SCHEMA

grpc = pytest.importorskip("grpc")
READY_PATHS = ("/health", "/health/ready", "/ping", "/v2/health/ready", "/v2/models/parley-demo/ready",
               "/tgi/health", "/vllm/health", "/vllm/ping", "/triton/v2/health/ready")  # fmt: skip
COMPLETION = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
# A path with an endless body, and what its stream's last event contains.
STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({**COMPLETION, "max_tokens": 1900, "ignore_eos": True, "stream": True}, '"error":{'),
    "/tgi/generate_stream": (
        {
            "inputs": "Once upon a time",
            "parameters": {"max_new_tokens": 1900, "grammar": {"type": "regex", "value": "[a-z]{1900}"}},
        },
        '"error_type":',
    ),
}


def read_stream(url: str, path: str, lines: list[str]) -> None:
    call = urllib.request.Request(
        url + path, json.dumps(STREAMS[path][0]).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=60) as stream:
        lines += (line.decode().strip() for line in stream if line.startswith(b"data: "))


def is_serving(grpc_address: str) -> bool:
    """Whether the standard health service of gRPC says that the server takes requests."""
    answer = HEALTH_SCHEMA("HealthCheckResponse")
    with grpc.insecure_channel(grpc_address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", response_deserializer=answer.FromString)
        reply = check(HEALTH_SCHEMA("HealthCheckRequest")().SerializeToString(), timeout=20, wait_for_ready=True)
        return reply.status == 1


def test_stopped_engine_is_noticed_by_all_apis_and_replaced(serve: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        grpc_port = listener.getsockname()[1]
    address = f"127.0.0.1:{grpc_port}"
    server = serve("--kv-memory", "64MiB", "--engine-timeout", "2s", "--grpc-port", str(grpc_port))
    before = server.post("/v1/completions", COMPLETION)[1]["choices"]
    (engine,) = server.children()
    assert all(server.get(path)[0] == 200 for path in READY_PATHS) and is_serving(address)
    lines: dict[str, list[str]] = {path: [] for path in STREAMS}
    readers = [threading.Thread(target=read_stream, args=(server.url, *line)) for line in lines.items()]
    for reader in readers:
        reader.start()
    assert server.wait_for(lambda: all(map(len, lines.values())))
    os.kill(engine, signal.SIGSTOP)
    assert server.wait_for(lambda: not server.is_ready())
    assert not is_serving(address)
    statuses = {path: server.get(path)[0] for path in READY_PATHS}
    assert server.get("/health/live")[0] == 200
    assert all(status >= 400 for status in statuses.values()), statuses
    for reader in readers:
        reader.join(60)
    for path, (_, error) in STREAMS.items():
        assert any(error in line and "hung" in line for line in lines[path][-2:]), lines[path][-2:]
    assert server.wait_for(server.is_ready) and is_serving(address)
    assert engine not in server.children()
    assert server.post("/v1/completions", COMPLETION)[1]["choices"] == before
    assert server.stop() == 0


@pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes ten seconds: PARLEY_NIGHTLY=1")
def test_suspended_server_keeps_its_engine(serve: Callable[..., Any]) -> None:
    """Like the sleep of a laptop: both processes stop and resume, the engine a moment later."""
    server = serve("--kv-memory", "64MiB", "--engine-timeout", "2s")
    (engine,) = server.children()
    lines: list[str] = []
    reader = threading.Thread(target=read_stream, args=(server.url, "/v1/completions", lines))
    reader.start()
    assert server.wait_for(lambda: bool(lines))
    for process in (server.process.pid, engine):
        os.kill(process, signal.SIGSTOP)
    time.sleep(4)
    os.kill(server.process.pid, signal.SIGCONT)
    time.sleep(0.3)
    os.kill(engine, signal.SIGCONT)
    reader.join(60)
    assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]
    assert server.children() == [engine] and server.is_ready()
    assert server.stop() == 0
