"""The whole server as a user starts it: ``python -m parley serve`` with the built-in model, on a port of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.free_ports import free_port


class ServerProcess:
    """A running server with small helpers to inspect it from outside."""

    def __init__(self, *flags: str, log: Path):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "parley", "serve", "--port", str(self.port), *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def get(self, path: str) -> tuple[int, str]:
        """Returns status and body of a GET; (0, "") while nothing listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (urllib.error.URLError, OSError):
            return 0, ""

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def wait(self, condition: Callable[[], bool], seconds: float = 60.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.05)
        return False

    def ready(self) -> bool:
        return self.get("/health/ready")[0] == 200

    def metric(self, name: str) -> float:
        """Returns the sum over all series of a metric; 0 when it is absent."""
        text = self.get("/metrics")[1]
        return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))

    def children(self) -> list[int]:
        """Returns the process ids of the server's children."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def resident(self) -> int:
        """Returns the resident bytes of the server and its children."""
        total = 0
        for pid in [self.process.pid, *self.children()]:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total

    def stop(self) -> int:
        """Ends the server as a service manager would; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(45)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def output(self) -> str:
        return self.log.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server with the built-in model for all tests of a file."""
    started = ServerProcess("--kv-memory", "64MiB", log=tmp_path_factory.mktemp("served") / "server.log")
    try:
        assert started.wait(started.ready), started.output()
        yield started
    finally:
        started.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers; all are stopped at the end."""
    running: list[ServerProcess] = []

    def start(*flags: str, wait: bool = True) -> ServerProcess:
        server = ServerProcess(*flags, log=tmp_path / f"server-{len(running)}.log")
        running.append(server)
        if wait:
            assert server.wait(server.ready), server.output()
        return server

    yield start
    for server in running:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
