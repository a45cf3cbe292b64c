"""Runs one contestant: starts it, loads it, measures its memory and stops it. It is an HTTP server or a pipe worker.

Its output goes to a log. It has its own process group, so that all of its processes can be stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from loads import Driver, Mix, prompts
from machine import memory
from peers import Peer

from parley.cli.load import Sample, summary
from parley.dialects.bench import Shape

STARTING = 900.0  # seconds; compilation takes long on a busy machine


class Failed(Exception):
    """The contestant did not start, or it exited. The message is one sentence."""


class Contestant:
    """A peer, ready after construction. ``seconds``: time from its start until ready. Raises Failed."""

    def __init__(self, peer: Peer, log: Path):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
        self.peer = peer
        self.pool: list[int] = []
        self._driver = Driver(port)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **peer.env}
        began = time.perf_counter()
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                list(map(str, peer.command(port))),
                stdin=subprocess.PIPE,
                stdout=file if peer.ready else subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait(f"http://127.0.0.1:{port}{peer.ready}", began + STARTING)
        except BaseException:
            self.stop()
            raise
        self.seconds = time.perf_counter() - began

    def _wait(self, url: str, deadline: float) -> None:
        while not self._ready(url):
            if self.process.poll() is not None:
                raise Failed(f"it exited with {self.process.returncode} before it was ready")
            if time.perf_counter() > deadline:
                raise Failed(f"it was not ready within {STARTING:g} s")
            time.sleep(0.02)

    def _ready(self, url: str) -> bool:
        if not self.peer.ready:
            return bool(self._line())
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def memory(self) -> int:
        """Return the bytes of all its processes."""
        return memory(self.process.pid)

    def run(self, mix: Mix, seed: str) -> dict[str, Any]:
        """Run a load. Return a summary as that of ``parley bench``. Raises Failed if the contestant exits."""
        result = self._driver.run(mix, self.pool, seed) if self.peer.ready else self._work(mix, seed)
        if self.process.poll() is not None:
            raise Failed(f"it exited with {self.process.returncode} under load")
        return result

    def _work(self, mix: Mix, seed: str) -> dict[str, Any]:
        _, counted = prompts(mix, self.pool, seed)
        order = {"prompts": counted, "clients": mix.clients, "output": mix.output}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Failed(f"it no longer takes orders ({error})") from None
        if (told := self._line()) is None:
            raise Failed("it exited under load")
        samples = [
            Sample(
                one["start"], one["end"], 200, arrivals=one["arrivals"], prompt_tokens=len(prompt), tokens=mix.output
            )
            for one, prompt in zip(told["requests"], counted, strict=True)
        ]
        return summary(samples, told["seconds"], mix.clients, Shape("m", mix.output, 0))

    def stop(self) -> None:
        """Interrupt the contestant and its children, then kill those that remain."""
        for sign, patience in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, sign)
                try:
                    self.process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue
        with contextlib.suppress(ProcessLookupError):  # children that outlived it
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
