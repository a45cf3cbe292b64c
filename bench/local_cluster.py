"""A local cluster for measurements: a coordinator and instances, whose engines are simulated by a cost model.

Only the engines' runner is simulated. Servers, the links between them, the coordinator and its file are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from parley.worker.simulated_engine import SimulatedCosts

START = 60.0  # seconds until all processes must be ready
CHUNK = 512  # prompt tokens per step of a prefill instance
ALONE = 4  # a prefill step may take this many times as long if no request waits (parley/core/step_budget.py)
WHOLE = 10.0  # seconds of a step if prompts are not chunked


@dataclass(frozen=True)
class Setup:
    """A cluster. ``ratio``: P and D, or None for ``instances`` mixed ones. ``whole``: these do not chunk prompts."""

    ratio: tuple[int, int] | None
    instances: int
    separate: str = "always"
    algorithm: str = "predicted"
    whole: bool = False

    @property
    def name(self) -> str:
        """The setup's name in tables."""
        if self.ratio is None:
            return f"{self.instances} mixed, whole prompts" if self.whole else f"{self.instances} mixed"
        more = "" if self.separate == "always" else f", {self.separate}"
        return f"{self.ratio[0]} P, {self.ratio[1]} D{more}"

    @property
    def roles(self) -> list[str]:
        """The roles of the instances."""
        if self.ratio is None:
            return ["mixed"] * self.instances
        return ["prefill"] * self.ratio[0] + ["decode"] * self.ratio[1]


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process's living threads, user and system, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def user_seconds(pid: int) -> float:
    """Return the CPU seconds of a process outside of the kernel, as the kernel samples them: for long loads."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process, now and at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    now, most = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) << 10 for name in ("VmRSS", "VmHWM"))  # type: ignore[index]
    return now, most


@dataclass
class RunningCluster:
    """``port`` of the coordinator, and ``pid`` of its process."""

    port: int
    pid: int


@asynccontextmanager
async def run_cluster(setup: Setup, costs: SimulatedCosts, tpot: float) -> AsyncIterator[RunningCluster]:
    """Run a cluster and yield it when ready. ``tpot``: seconds of a decode step at most, on the cost model's clock."""
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "costs.toml"
        model.write_text(
            "".join(f"{name} = {json.dumps(value)}\n" for name, value in msgspec.to_builtins(costs).items())
        )
        lines = [f"{name}_port = {free_port()}\n" for name in ("management", "metrics", "status")]
        lines.append(f'max_requests = 90000\nsingle_node_max_requests = 90000\nseparate = "{setup.separate}"\n')
        lines.append(f'algorithm_type = "{setup.algorithm}"\n')
        try:
            for role in setup.roles:
                port, step = (
                    free_port(),
                    costs.batch_seconds(CHUNK) / ALONE if role == "prefill" else WHOLE if setup.whole else tpot,
                )
                lines.append(f'[[instances]]\nurl = "http://127.0.0.1:{port}"\nrole = "{role}"\n')
                options = ["--cost-model", str(model), "--role", role, "--port", str(port), "--peer-port", "0"]
                options += [
                    "--name",
                    "m",
                    "--step-ms",
                    f"{1e3 * step / costs.speed:.3f}",
                    "--max-queue",
                    "4096",
                    "--quiet",
                ]
                running.append(_start_parley("serve", *options))
            config, port = Path(folder) / "coordinator.toml", free_port()
            config.write_text("".join(lines))
            coordinator = _start_parley("coordinator", "--config", str(config), "--port", str(port), "--quiet")
            running.append(coordinator)
            async with asyncio.timeout(START):
                await wait_until_ready(port, len(setup.roles))
            yield RunningCluster(port, coordinator.pid)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


def _start_parley(*command: str) -> subprocess.Popen[bytes]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "parley", *command], **quiet)  # type: ignore[call-overload]


async def wait_until_ready(port: int, instances: int = 0) -> None:
    """Wait until the coordinator and this many instances are ready."""
    while True:
        await asyncio.sleep(0.1)
        try:
            status, _ = await http_get(port, "/health/ready")
            if status != 200:
                continue
            _, body = await http_get(port, "/metrics") if instances else (200, b"")
        except OSError:
            continue
        match = re.search(rb'instances{state="ready"} (\d+)', body)
        if not instances or (match and int(match[1]) == instances):
            return


async def http_get(port: int, path: str) -> tuple[int, bytes]:
    """Return status and body of a GET request. Raises OSError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer[9:12] or b"0"), answer.partition(b"\r\n\r\n")[2]
