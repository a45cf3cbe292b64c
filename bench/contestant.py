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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from load_mixes import LoadDriver, LoadMix, draw_prompts
from machine_usage import process_tree, tree_memory
from peer_servers import Peer

from parley.cli.client import ServerAddress
from parley.cli.load.generator import RequestSample
from parley.cli.load.summary import summarize_load
from parley.dialects.bench import LoadShape

STARTING = 900.0  # seconds; compilation takes long on a busy machine


class ContestantFailed(Exception):
    """The contestant did not start, or it exited. The message is one sentence."""


class Contestant:
    """A peer, ready after construction. ``seconds``: time from its start until ready. Raises Failed."""

    def __init__(self, peer: Peer, log: Path):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
        self.peer = peer
        self.pool: list[int] = []
        self._driver = LoadDriver(port)
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
            self._wait_until_ready(f"http://127.0.0.1:{port}{peer.ready}", began + STARTING)
        except BaseException:
            self.stop()
            raise
        self.seconds = time.perf_counter() - began

    def _wait_until_ready(self, url: str, deadline: float) -> None:
        while not self._is_ready(url):
            if self.process.poll() is not None:
                raise ContestantFailed(f"it exited with {self.process.returncode} before it was ready")
            if time.perf_counter() > deadline:
                raise ContestantFailed(f"it was not ready within {STARTING:g} s")
            time.sleep(0.02)

    def _is_ready(self, url: str) -> bool:
        if not self.peer.ready:
            return bool(self._read_line())
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _read_line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def memory_bytes(self) -> int:
        """Return the bytes of all its processes."""
        return tree_memory(self.process.pid)

    def run_load(self, mix: LoadMix, seed: str) -> dict[str, Any]:
        """Run a load. Return a summary as that of ``parley bench``. Raises Failed if the contestant exits."""
        result = self._driver.run_mix(mix, self.pool, seed) if self.peer.ready else self._run_worker_load(mix, seed)
        if self.process.poll() is not None:
            raise ContestantFailed(f"it exited with {self.process.returncode} under load")
        return result

    def _run_worker_load(self, mix: LoadMix, seed: str) -> dict[str, Any]:
        _, counted = draw_prompts(mix, self.pool, seed)
        order = {"prompts": counted, "clients": mix.clients, "output": mix.output}
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise ContestantFailed(f"it no longer takes orders ({error})") from None
        if (answer := self._read_line()) is None:
            raise ContestantFailed("it exited under load")
        samples = [
            RequestSample(
                one["start"], one["end"], 200, arrivals=one["arrivals"], prompt_tokens=len(prompt), tokens=mix.output
            )
            for one, prompt in zip(answer["requests"], counted, strict=True)
        ]
        return summarize_load(samples, answer["seconds"], mix.clients, LoadShape("m", mix.output, 0))

    @property
    def address(self) -> ServerAddress:
        """Where the server listens."""
        return self._driver.address

    def pause(self) -> None:
        """Stop its processes for now, parents first: it uses no processor while another contestant is measured."""
        for pid in process_tree(self.process.pid):
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes run again, parents last, which would miss their children."""
        for pid in reversed(process_tree(self.process.pid)):
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Interrupt the contestant and its children, then kill those that remain."""
        if self.process.poll() is None:
            self.resume()
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


@contextmanager
def paused_contestants(peers: Sequence[Peer], log: Path) -> Iterator[list[Contestant]]:
    """Start contestants, each paused until its turn. All are stopped at the end. Raises ContestantFailed."""
    with ExitStack() as stack:
        contestants = []
        for peer in peers:
            contestants.append(contestant := Contestant(peer, log))
            stack.callback(contestant.stop)
            contestant.pause()
        yield contestants
