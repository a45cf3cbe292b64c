"""Strangers hold every connection of a process that has few file descriptors. Probes and planes still answer, and
clients are served again once the strangers' connections have aged."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.free_ports import free_port

grpc = pytest.importorskip("grpc")

DESCRIPTORS = 256
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty SETTINGS
LIVE_METHOD = "/inference.GRPCInferenceService/ServerLive"
WATCH_METHOD = "/grpc.health.v1.Health/Watch"
nightly = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes a minute: PARLEY_NIGHTLY=1")


class Stranger:
    """Keeps connections to a port for as long as the server does, and replaces those that the server closes.

    ``hello``: what it sends on each of them.
    """

    def __init__(self, port: int, hello: bytes = b"", count: int = DESCRIPTORS):
        self._address, self._hello, self._count = ("127.0.0.1", port), hello, count
        self._sockets: list[socket.socket] = []
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._hold_connections, daemon=True)
        self._thread.start()

    def _hold_connections(self) -> None:
        while not self.stop.wait(0.5):
            self._sockets = [sock for sock in self._sockets if not self._close_ended(sock)]
            while len(self._sockets) < self._count and not self.stop.is_set():
                with contextlib.suppress(OSError):
                    self._sockets.append(socket.create_connection(self._address, 1))
                    self._sockets[-1].sendall(self._hello)
                    self._sockets[-1].setblocking(False)

    @staticmethod
    def _close_ended(sock: socket.socket) -> bool:
        """Close a connection that the server has closed; return whether it has."""
        try:
            if sock.recv(4096):
                return False
        except BlockingIOError:
            return False
        except OSError:
            pass
        sock.close()
        return True

    def settle(self) -> None:
        """Wait until it has opened as many connections as it wants."""
        wait_until(lambda: len(self._sockets) >= self._count - 8)

    def leave(self) -> None:
        self.stop.set()
        self._thread.join()
        for sock in self._sockets:
            sock.close()


def wait_until(condition: Callable[[], object], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def http_status(port: int, path: str, body: bytes = b"") -> int:
    """Return the status of a request on a new connection, 0 if the server closed it without an answer."""
    method = "POST" if body else "GET"
    request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            sock.sendall(request)
            return int(sock.recv(4096)[9:12] or 0)
    except (OSError, ValueError):
        return 0


def grpc_answers(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            channel.unary_unary(LIVE_METHOD)(b"", timeout=2)
        except grpc.RpcError:
            return False
        return True


@contextlib.contextmanager
def few_descriptors(log: Path, *words: object) -> Iterator[None]:
    """Run a parley command with few descriptors."""
    command = [sys.executable, "-m", "parley", *map(str, words)]
    limited = ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", *command]
    with log.open("w") as output:
        process = subprocess.Popen(limited, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def open_strangers(*attacks: tuple[int, bytes]) -> Iterator[Sequence[Stranger]]:
    holding = [Stranger(*attack) for attack in attacks]
    try:
        for stranger in holding:
            stranger.settle()
        yield holding
    finally:
        for stranger in holding:
            stranger.stop.set()
        for stranger in holding:
            stranger.leave()


COMPLETION = json.dumps({"prompt": "a", "max_tokens": 2}).encode()


def test_a_server_answers_probes_and_clients_while_strangers_hold_its_connections(tmp_path: Path) -> None:
    port, grpc_port = free_port(), free_port()
    ages = ("--header-timeout", "2s", "--idle-timeout", "2s")
    with few_descriptors(
        tmp_path / "log", "serve", "--scripted-engine", "--port", port, "--grpc-port", grpc_port, *ages
    ):
        wait_until(lambda: http_status(port, "/health/ready") == 200)
        with open_strangers((port, b""), (grpc_port, HTTP2_HELLO)):
            for _ in range(10):
                assert http_status(port, "/health/ready") == 200
                time.sleep(0.1)
            wait_until(lambda: http_status(port, "/v1/completions", COMPLETION) == 200)
        wait_until(lambda: grpc_answers(grpc_port))
        assert http_status(port, "/v1/completions", COMPLETION) == 200


@pytest.mark.parametrize("start", [b"G", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["unfinished", "idle"])
@nightly
def test_connections_of_strangers_age_although_they_have_sent_something(tmp_path: Path, start: bytes) -> None:
    port = free_port()
    with few_descriptors(tmp_path / "log", "serve", "--scripted-engine", "--port", port):
        wait_until(lambda: http_status(port, "/health/ready") == 200)
        with open_strangers((port, start)):
            for _ in range(40):
                assert http_status(port, "/health/ready") == 200
                time.sleep(0.1)
            wait_until(lambda: http_status(port, "/v1/completions", COMPLETION) == 200)


def test_health_watches_of_strangers_do_not_keep_grpc_clients_out(tmp_path: Path) -> None:
    """gRPC never closes a connection with an open call, so calls that do nothing are limited as well."""
    port, grpc_port = free_port(), free_port()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 60_000)]
    serve_words = ("serve", "--scripted-engine", "--port", port)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            few_descriptors(tmp_path / "log", *serve_words, "--grpc-port", grpc_port, "--idle-timeout", "2s")
        )
        wait_until(lambda: grpc_answers(grpc_port) and http_status(port, "/health/ready") == 200)
        channels = [grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=options) for _ in range(DESCRIPTORS)]
        for channel in channels:
            stack.callback(channel.close)
        watches = [channel.unary_stream(WATCH_METHOD)(b"") for channel in channels]
        for watch in watches[:8]:
            with contextlib.suppress(grpc.RpcError):
                next(iter(watch))
        assert http_status(port, "/health/ready") == 200
        wait_until(lambda: grpc_answers(grpc_port))


def test_a_coordinator_answers_probes_and_its_planes_while_strangers_hold_its_connections(tmp_path: Path) -> None:
    predict, management, metrics, status, grpc_port = ports = [free_port() for _ in range(5)]
    names = ("predict_port", "management_port", "metrics_port", "status_port", "grpc_port")
    config = tmp_path / "coordinator.toml"
    config.write_text("".join(f"{name} = {port}\n" for name, port in zip(names, ports, strict=True)))
    with few_descriptors(tmp_path / "log", "coordinator", "--config", config):
        wait_until(lambda: http_status(status, "/v1/health") == 200)
        with open_strangers(*((port, HTTP2_HELLO if port == grpc_port else b"") for port in ports)):
            for _ in range(10):
                assert http_status(status, "/v1/health") == 200
                assert http_status(predict, "/health/live") == 200
                assert http_status(management, "/v1/tasks") in (200, 400)
                assert http_status(metrics, "/metrics") == 200
                time.sleep(0.1)
