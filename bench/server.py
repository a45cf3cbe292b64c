"""Start a server, load it as its clients would, and print what they saw beside what the machine could do at best.

    python bench/server.py MODEL [--concurrency 1,8,32] [--runs 3] [parley serve flags …]

For each concurrency: medians over the runs of `parley bench` (256 prompt tokens, 64 output tokens), the limits measured
right before, and ratios to them. Also: seconds until ready, and memory. Markdown on standard output.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from limits import Limits, measure

PROMPT, OUTPUT = 256, 64
METERS = ("ttft_ms", "tpot_ms")


class Server:
    """``parley serve`` on a free port. ``seconds`` is how long it took from the start of the process to ready."""

    def __init__(self, model: str, flags: list[str]):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        command = [sys.executable, "-m", "parley", "serve", model, "--port", self.url.rpartition(":")[2], "--quiet"]
        began = time.perf_counter()
        self.process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL)
        while not self._ready():
            if self.process.poll() is not None:
                sys.exit(f"the server ended with {self.process.returncode}")
            time.sleep(0.02)
        self.seconds = time.perf_counter() - began

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health/ready", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def memory(self) -> tuple[int, int]:
        """Resident bytes of the API process and of the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        mine, theirs = (sum(map(_resident, pids)) for pids in ([str(self.process.pid)], children))
        return mine, theirs

    def bench(self, concurrency: int, seed: int) -> dict:
        """One run of ``parley bench``."""
        command = [sys.executable, "-m", "parley", "bench", "--url", self.url, "--json", "--seed", str(seed)]
        command += ["--concurrency", str(concurrency), "--prompt-len", str(PROMPT), "--output-len", str(OUTPUT)]
        command += ["--requests", str(max(6, 2 * concurrency))]
        result: dict = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return result

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def _resident(pid: str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def sizes(folder: Path) -> tuple[int, float, int]:
    """Of a Llama-shaped model: bytes of weights, operations per token without the head, bytes of KV per token."""
    config = json.loads((folder / "config.json").read_text())
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    kv = 2 * layers * config["num_key_value_heads"] * dim * 2
    body = weights // 2 - config["vocab_size"] * hidden
    return weights, 2.0 * body, kv


def row(concurrency: int, runs: list[dict], limits: Limits, folder: Path) -> str:
    """One line of the table. The limit of a decode step reads all weights once and every sequence's KV."""
    weights, operations, kv = sizes(folder)
    context = PROMPT + OUTPUT // 2
    step = limits.decode(weights, concurrency * context * kv, concurrency * (operations + weights / 8))
    whole = limits.prefill(concurrency * PROMPT * operations) + OUTPUT * step
    ttft, tpot = (statistics.median(run[meter]["p50"] for run in runs) for meter in METERS)
    ttft99, tpot99 = (statistics.median(run[meter]["p99"] for run in runs) for meter in METERS)
    rate = statistics.median(run["output_tokens_per_second"] for run in runs)
    return (
        f"| {concurrency} | {ttft:.0f} / {ttft99:.0f} | {tpot:.1f} / {tpot99:.1f} | {rate:.0f}"
        f" | {limits.bandwidth / 1e9:.0f} | {limits.compute / 1e9:.0f}"
        f" | {limits.prefill(PROMPT * operations) * 1e3:.0f} | {step * 1e3:.1f}"
        f" | {rate / (concurrency * OUTPUT / whole):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--runs", type=int, default=3)
    options, flags = parser.parse_known_args()
    server = Server(str(options.model), flags)
    try:
        api, engine = server.memory()
        print(
            f"\nReady in {server.seconds:.1f} s; memory then: API process {api >> 20} MiB, engine {engine >> 20} MiB.\n"
        )
        print("| at once | TTFT p50 / p99 ms | TPOT p50 / p99 ms | tokens/s | GB/s | GFLOP/s", end="")
        print(" | limit: prefill ms | limit: step ms | share of limit's tokens/s |")
        print("|---|---|---|---|---|---|---|---|---|")
        for concurrency in map(int, options.concurrency.split(",")):
            limits = measure()
            runs = [server.bench(concurrency, seed) for seed in range(options.runs)]
            print(row(concurrency, runs, limits, options.model), flush=True)
        api, engine = server.memory()
        print(f"\nMemory at the end: API process {api >> 20} MiB, engine {engine >> 20} MiB.")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
