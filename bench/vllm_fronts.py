"""Compares parley in front of vLLM with vLLM's own server: CPU time in front of vLLM's engine, and speed.

    python bench/vllm_fronts.py [--model FOLDER] [--python PATH] [--turns N] [--requests N] [--clients N] [-- FLAGS]

Both servers run the same vLLM (``make engines``) with the same FLAGS of vLLM. They take turns: while one is measured,
the processes of the other are stopped. A turn has two loads from ``--clients`` connections: requests for one token, and
streams of 64 tokens. The processor time is the kernel's count for all processes but vLLM's engine core and its workers:
for parley the API process and the host, for vLLM its API server. Ratios are parley's number over vLLM's, so that load
of the machine that both see cancels out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from local_cluster import cpu_seconds, free_port, http_get
from machine_usage import process_tree

from parley import demo

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_PYTHON = Path(os.environ.get("PARLEY_ENGINES", ROOT / ".engines")) / "vllm" / "bin" / "python"
START_SECONDS = 900.0
PROMPT = list(range(20, 28))
ENGINE_TITLES = ("EngineCore", "VLLM::Worker")  # vLLM names its processes
NAME = "m"


class Load(NamedTuple):
    """Requests for ``tokens`` tokens each. ``share``: of --requests."""

    title: str
    tokens: int
    stream: bool
    share: float


class Result(NamedTuple):
    """What a server did of a load. ``cpu``: its seconds in front of the engine; ``seconds``: by the clock."""

    cpu: float
    seconds: float
    requests: int
    tokens: int


LOADS = (Load("1 token", 1, False, 1.0), Load("streams of 64 tokens", 64, True, 0.25))
# The ratio, and what parley promises of it.
RATIOS = {
    "CPU seconds": (lambda result: result.cpu / result.requests, "at most 0.6"),
    "requests/s": (lambda result: result.requests / result.seconds, "at least 1.05"),
    "tokens/s": (lambda result: result.tokens / result.seconds, "at least 1.1 for streams"),
}


class Server:
    """A server that has been started in a process group of its own. Its output goes to a log."""

    def __init__(self, title: str, command: Sequence[str], port: int, log: Path, environment: dict[str, str]):
        self.title, self.port, self._log = title, port, log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    async def wait_until_ready(self) -> None:
        """Wait until the server answers. Raises SystemExit if it ends or takes too long."""
        end = time.monotonic() + START_SECONDS
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{self.title} did not start:\n{self._log.read_text()[-3000:]}")
            try:
                status, _ = await http_get(self.port, "/v1/models")
                ready, _ = await http_get(self.port, "/health")
            except OSError:
                status = ready = 0
            if status == ready == 200:
                return
            await asyncio.sleep(0.5)

    @property
    def front_cpu(self) -> float:
        """CPU seconds of all processes but those of vLLM's engine."""
        total = 0.0
        for pid in process_tree(self._process.pid):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_text()
                total += 0 if any(name in title for name in ENGINE_TITLES) else cpu_seconds(pid)
            except OSError:
                continue
        return total

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server."""
        for pid in process_tree(self._process.pid):
            send_signal(pid, number)

    def stop(self) -> None:
        """End the server and its processes."""
        processes = process_tree(self._process.pid)
        self.signal_all(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for pid in processes:
            send_signal(pid, signal.SIGKILL)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@contextmanager
def run_servers(options: argparse.Namespace, folder: Path) -> Iterator[list[Server]]:
    """Start parley with vLLM, and vLLM's own server."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    plain = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    model, batch, length = str(options.model), str(options.clients), "2048"
    ports = free_port(), free_port()
    own = [sys.executable, "-m", "parley", "serve", model, "--name", NAME, "--port", str(ports[0]), "--quiet"]
    own += ["--engine", "vllm", "--engine-python", str(options.python), "--engine-timeout", "0"]
    own += ["--max-batch", batch, "--max-model-len", length, "--", *options.flags]
    other = [str(options.python), "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", NAME]
    other += ["--port", str(ports[1]), "--max-num-seqs", batch, "--max-model-len", length]
    other += ["--generation-config", "vllm", "--disable-uvicorn-access-log", *options.flags]
    with ExitStack() as stack:
        servers = [
            Server("parley", own, ports[0], folder / "parley.log", environment),
            Server("vLLM", other, ports[1], folder / "vllm.log", plain),
        ]
        for server in servers:
            stack.callback(server.stop)
        yield servers


async def send_load(server: Server, load: Load, requests: int, clients: int) -> Result:
    """Send a load over ``clients`` connections and measure it. Raises SystemExit if an answer is not whole."""
    left = requests
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": load.tokens, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"stream": load.stream}).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    message = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content

    async def send_requests() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        while left > 0:
            left -= 1
            writer.write(message)
            answer = await read_answer(reader)
            if load.stream and (b"data: [DONE]" not in answer[-40:] or answer.count(b"data: ") < 3):
                sys.exit(f"{server.title} gave a stream that is not whole: {answer[:300]!r}")
        writer.close()

    cpu, began = server.front_cpu, time.perf_counter()
    await asyncio.gather(*(send_requests() for _ in range(clients)))
    seconds = time.perf_counter() - began
    return Result(server.front_cpu - cpu, seconds, requests, requests * load.tokens)


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """Return the body of an answer. Raises SystemExit if its status is not 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    parts: list[bytes] = []
    if size:
        parts.append(await reader.readexactly(int(size)))
    else:
        while length := int(await reader.readline(), 16):
            parts.append((await reader.readexactly(length + 2))[:-2])
        await reader.readexactly(2)
    if b" 200 " not in head[:20]:
        sys.exit(f"A request failed: {head[:40]!r} {b''.join(parts)[:300]!r}")
    return b"".join(parts)


async def measure_turn(servers: Sequence[Server], options: argparse.Namespace) -> dict[str, list[Result]]:
    """Return what each server did of each load, one server after the other."""
    results: dict[str, list[Result]] = {load.title: [] for load in LOADS}
    for server in servers:
        server.signal_all(signal.SIGCONT)
        for load in LOADS:
            requests = max(options.clients, int(options.requests * load.share))
            await send_load(server, load, options.clients, options.clients)  # connections, caches
            results[load.title].append(await send_load(server, load, requests, options.clients))
        server.signal_all(signal.SIGSTOP)
    return results


async def compare_servers(options: argparse.Namespace) -> None:
    """Print the ratios of each turn, and their medians."""
    with tempfile.TemporaryDirectory() as folder, run_servers(options, Path(folder)) as servers:
        for server in servers:
            await server.wait_until_ready()
            server.signal_all(signal.SIGSTOP)
        turns = []
        for number in range(1, options.turns + 1):
            turns.append(await measure_turn(servers, options))
            print(f"turn {number}", flush=True)
            for title, (own, other) in turns[-1].items():
                print(f"  {title}:")
                for server, result in zip(servers, (own, other), strict=True):
                    print(
                        f"    {server.title:7} {1e3 * result.cpu / result.requests:8.2f} ms of CPU per request, "
                        f"{result.requests / result.seconds:8.1f} requests/s, {result.tokens / result.seconds:8.0f} "
                        "tokens/s",
                        flush=True,
                    )
    print("\nparley over vLLM: the median of the turns, and each turn")
    for load in LOADS:
        for name, (read, promise) in RATIOS.items():
            ratios = [read(turn[load.title][0]) / read(turn[load.title][1]) for turn in turns]
            turn_ratios = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"  {load.title:22} {name:12} {median(ratios):6.2f}  ({turn_ratios}; {promise})")


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", type=Path, default=demo.model_folder(), help="a folder (default: the built-in model)"
    )
    parser.add_argument("--python", type=Path, default=DEFAULT_PYTHON, help="the Python that vLLM is installed for")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000, help="for one token; a quarter as many streams")
    parser.add_argument("--clients", type=int, default=64)
    words, flags = sys.argv[1:], ["--enforce-eager"]
    if "--" in words:
        words, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    options = parser.parse_args(words)
    options.flags = flags
    return options


if __name__ == "__main__":
    asyncio.run(compare_servers(read_options()))
