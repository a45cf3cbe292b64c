"""Servers in processes of their own, as users start them: ``python -m parley serve``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.free_ports import free_port

STOP_SECONDS = 45


class ServerProcess:
    """A process that runs ``parley serve`` with some arguments. Must be closed, as a context manager does.

    ``port``: 0 leaves it to the system or to the arguments; then the server's banner says it.
    """

    def __init__(self, *arguments: str | Path, port: int = 0):
        self.port = port
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._closed_output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "parley", "serve", "--port", str(port), *map(str, arguments)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"},
        )

    def output(self) -> str:
        """Return all that the server and its children have written."""
        if self._log.closed:
            return self._closed_output
        descriptor = self._log.fileno()  # `pread` leaves the position, at which the server writes
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()

    @property
    def lines(self) -> list[str]:
        """The complete lines of the output."""
        return [line.rstrip() for line in self.output().split("\n")[:-1]]

    def wait_for_line(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Return the match of the first line, behind this number of lines, that has the pattern."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            has_ended = self.process.poll() is not None
            for line in self.lines[after:]:
                if match := re.search(pattern, line):
                    return match
            if has_ended:
                break
            time.sleep(0.01)
        raise AssertionError(self.lines)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> bool:
        """Wait until the condition is met, and return whether it was."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.05)
        return False

    @property
    def url(self) -> str:
        """The address of the server; it listens there, if the system chose the port."""
        return f"http://127.0.0.1:{self.port}" if self.port else self.wait_for_line(r"http://127\.0\.0\.1:\d+")[0]

    def is_ready(self) -> bool:
        """Whether the server answers that it is ready."""
        return self.get("/health/ready")[0] == 200

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of a GET; (0, "") while nothing listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body of a POST."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def stream(self, tokens: int) -> Any:
        """Open a streamed completion."""
        body = {"prompt": "a", "max_tokens": tokens, "stream": True}
        return urllib.request.urlopen(self.url + "/v1/completions", json.dumps(body).encode(), timeout=60)

    def metric(self, name: str) -> float:
        """Return the sum over all series of a metric; 0 if it is absent."""
        series = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
        return sum(map(float, re.findall(series, self.get("/metrics")[1], re.MULTILINE)))

    def children(self, module: str = "") -> list[int]:
        """Return the ids of the server's child processes, or of those that run a module."""
        children = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                try:
                    if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                        children.append(child)
                except OSError:  # it has just ended
                    continue
        return children

    def resident_bytes(self) -> int:
        """Return the resident memory of the server and its children."""
        pages = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in [self.process.pid, *self.children()])
        return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")

    def wait_for_end(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return self.process.wait(120)

    def stop(self) -> int:
        """End the server as a service manager does, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def close(self) -> None:
        """Kill the process if it still runs. Its output can still be read."""
        self.process.kill()
        self.process.wait()
        if not self._log.closed:
            self._closed_output = self.output()
            self._log.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ScriptedServer(ServerProcess):
    """A server of a folder's model with the scripted engine."""

    def __init__(self, folder: Path, *flags: str):
        super().__init__(folder, "--scripted-engine", *flags)

    def wait_until_ready(self) -> ScriptedServer:
        """Wait until the server writes that it is ready."""
        self.wait_for_line(r"^ready in ")
        return self


@contextmanager
def running_server(*arguments: str | Path, seconds: float = 60) -> Iterator[ServerProcess]:
    """Start a server on a free port, which must be ready in ``seconds``, and stop it at the end."""
    with ServerProcess(*arguments, port=free_port()) as server:
        assert server.wait_for(server.is_ready, seconds), server.output()
        yield server
        server.stop()
