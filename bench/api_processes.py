"""Measures what API processes gain: the CPU time of the busiest process per request and token, against one process.

    python bench/api_processes.py MODEL [--processes 1 2] [--rounds 3] [--clients 64] [--requests 2000] [--output 64]

``parley serve`` runs with an engine process whose steps take ``--pause`` seconds. The clients of ``profile_api.py``
send its loads, with ``--clients`` and ``--requests`` for each API process. The busiest process limits the server if
each process has a core; so the gain is the busiest process's time with one API process over its time with several. The
numbers of processes take turns, and the table has medians. CPU time is measured, because machines are shared and may
have fewer cores than processes. Prints Markdown.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median

from profile_api import LOADS, count_answers, load_parser, run_clients, start_process

COSTS = "rows = [[1, {pause}], [512, {pause}]]\nblocks = 8192\nlength = 4096\n"
MAIN, API = "main process", "API process"


class ServerUnderLoad:
    """``parley serve`` with a number of API processes."""

    def __init__(self, model: Path, costs: Path, processes: int):
        self.processes = processes
        command = [sys.executable, "-m", "parley", "serve", str(model), "--port", "0", "--cost-model", str(costs)]
        command += ["--max-batch", "512", "--quiet", "--api-processes", str(processes)]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self.port = 0
        for line in self._server.stdout:
            if match := re.search(r"http://127\.0\.0\.1:(\d+)/health", line):
                self.port = int(match[1])
            if line.startswith("ready in "):
                break
        else:
            raise SystemExit("The server did not start.")

    def processor_seconds(self) -> dict[int, float]:
        """Return the CPU time of each process that serves clients, by its id; the main process comes first."""
        process_ids = [self._server.pid]
        for task in Path(f"/proc/{self._server.pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                if b"parley.boot.api_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    process_ids.append(int(child))
        return {number: read_processor_seconds(number) for number in process_ids}

    def measure_load(self, options: Namespace, output: int, stream: bool) -> list[float]:
        """Return the microseconds of each process per request or token of a load, after a short one to warm up."""
        length, costs, number = output or options.output, [0.0], options.clients * self.processes
        tokens = count_answers(options, output, stream) * self.processes
        for requests in (number, tokens // length):
            before = self.processor_seconds()
            clients = start_process(run_clients, self.port, number, requests, length, stream)
            clients.join()
            after = self.processor_seconds()
            costs = [(after[number] - before[number]) * 1e6 / tokens for number in before]
        return costs

    def close(self) -> None:
        """End the server."""
        self._server.terminate()
        self._server.wait()


def read_processor_seconds(process_id: int) -> float:
    """Return the CPU time of all threads of a process."""
    return time.clock_gettime((~process_id << 3) | 2)  # the kernel's number of its clock: clock_getcpuclockid(3)


def main() -> None:
    parser = load_parser(__doc__)
    parser.set_defaults(pause=0.01)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    measured: dict[tuple[str, int], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.toml"
        costs.write_text(COSTS.format(pause=options.pause))
        servers = [ServerUnderLoad(options.model, costs, number) for number in options.processes]
        try:
            for _ in range(options.rounds):
                for title, *kind in LOADS:
                    for server in servers:
                        turn_costs = server.measure_load(options, *kind)
                        measured.setdefault((title, server.processes), []).append(turn_costs)
        finally:
            for server in servers:
                server.close()
    print(format_table(measured, options.processes[0]))


def format_table(measured: dict[tuple[str, int], list[list[float]]], first: int) -> str:
    """Return the table. ``measured``: the microseconds of each process, by load and number of API processes."""
    lines = [
        "| µs per | API processes | main process | API processes, each | busiest | all | gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for (title, processes), rounds in measured.items():
        busiest = [max(costs) for costs in rounds]
        single = [max(costs) for costs in measured[title, first]]
        gain = median(one / several for one, several in zip(single, busiest, strict=True))
        process_costs = ", ".join(f"{median(column):.1f}" for column in list(zip(*rounds, strict=True))[1:]) or "-"
        lines.append(
            f"| {title} | {processes} | {median(costs[0] for costs in rounds):.1f} | {process_costs} | "
            f"{median(busiest):.1f} | {median(map(sum, rounds)):.1f} | {gain:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
