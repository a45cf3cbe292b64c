"""A server in a process of its own."""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path


class ServerProcess:
    """A process that runs ``parley serve`` with the scripted engine. Must be closed, as a context manager does."""

    def __init__(self, folder: Path, *flags: str):
        command = [sys.executable, "-m", "parley", "serve", str(folder), "--fake-engine", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += (line.rstrip() for line in self.process.stdout)

    def wait_for_line(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Return the match of the first line, behind this number of lines, that has the pattern."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            for line in self.lines[after:]:
                if match := re.search(pattern, line):
                    return match
            time.sleep(0.01)
        raise AssertionError(self.lines)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.05)
        return False

    @property
    def url(self) -> str:
        return self.wait_for_line(r"http://127\.0\.0\.1:\d+")[0]

    def ready(self) -> "ServerProcess":
        self.wait_for_line(r"^ready in ")
        return self

    def get(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    def stream(self, tokens: int):
        body = {"prompt": "a", "max_tokens": tokens, "stream": True}
        return urllib.request.urlopen(self.url + "/v1/completions", json.dumps(body).encode(), timeout=60)

    def end(self) -> int:
        """Waits until the process has ended; returns its exit code."""
        code = self.process.wait(120)
        self._reader.join(5)
        return code

    def close(self) -> None:
        self.process.kill()
        with self.process:  # waits and closes the pipe
            self._reader.join(5)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
