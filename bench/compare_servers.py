"""``make bench``: compares parley with the servers of ``make bench-peers`` on the same models, prompts and loads.

Each turn starts every server once, in a rotating order. Each load waits until the machine is quiet; the machine's
bandwidth and rates are measured before and after. Every result is appended to ``.peers/results.jsonl`` at once, and a
new run continues there (remove the file to start over). ``performance_page.py`` turns it into tables.
"""

from __future__ import annotations

import argparse
import compileall
import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from contestant import Contestant, ContestantFailed
from install_peers import MODELS, ROOT
from load_mixes import LOADS, START, LoadMix, word_tokens
from machine_limits import Limits, measure_limits
from machine_usage import CpuClock, describe_machine, wait_quiet
from peer_servers import PEERS, tcmalloc
from results_file import Turn, append_record, plan_turns, read_records

import parley
from parley.native import library

AROUND = 2.5  # estimated seconds per load for measuring the machine and waiting
LONGEST = 30.0  # seconds to wait for a quiet machine, each time


def estimate_seconds(todo: list[Turn]) -> float:
    """Return the approximate seconds that all turns take."""
    return sum(PEERS[turn.peer].start + 10 + sum(LOADS[load].seconds + AROUND for load in turn.loads) for turn in todo)


class TurnRunner:
    """Runs turns. ``patience``: total seconds to spend on waiting for a quiet machine.

    ``few``: at most this many requests of each load, with 8 tokens each, to check that everything works.
    """

    def __init__(self, out: Path, patience: float, few: int | None):
        self.out = out
        self.patience = patience
        self.few = few

    def run_turn(self, turn: Turn) -> bool:
        """Run one contestant's turn. Return whether it succeeded."""
        peer = PEERS[turn.peer]
        head = {"peer": turn.peer, "turn": turn.number}
        try:
            self.wait_for_quiet(None)
            contestant = Contestant(peer, self.out.parent / "log" / f"{turn.peer}.log")
            try:
                contestant.pool = word_tokens(MODELS / peer.model)
                append_record(
                    self.out,
                    {"kind": "ready", **head, "seconds": contestant.seconds, "memory": contestant.memory_bytes()},
                )
                contestant.run_load(self.reduce_mix(START), f"start {turn.number}")
                around = measure_limits()
                for load in turn.loads:
                    record, around = self.run_load(contestant, load, turn.number, around)
                    append_record(self.out, {"kind": "load", **head, "load": load, **record})
                append_record(self.out, {"kind": "end", **head, "memory": contestant.memory_bytes()})
            finally:
                contestant.stop()
        except (ContestantFailed, OSError) as error:
            append_record(self.out, {"kind": "failed", **head, "reason": str(error)})
            print(f"  {turn.peer}: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def wait_for_quiet(self, pid: int | None) -> float:
        """Wait for a quiet machine, within the remaining patience. Return the cores that other programs use."""
        began = time.monotonic()
        used = wait_quiet(pid, min(self.patience, LONGEST))
        self.patience = max(0.0, self.patience - (time.monotonic() - began - 1))
        return used

    def run_load(self, contestant: Contestant, name: str, turn: int, before: Limits) -> tuple[dict[str, Any], Limits]:
        """Run one load. Return its record with the machine's limits before and after, and the limits after, which the
        next load uses."""
        waited = self.wait_for_quiet(contestant.process.pid)
        clock = CpuClock.read_clock(contestant.process.pid)
        result = contestant.run_load(self.reduce_mix(LOADS[name]), f"{name} {turn}")
        later = CpuClock.read_clock(contestant.process.pid)
        after = measure_limits()
        for reason, count in result["reasons"].items():
            print(f"  {count} requests failed: {reason}", file=sys.stderr, flush=True)
        noise = {"others_before": waited, "others": clock.others_cores(later), "taken": clock.stolen_cores(later)}
        rates = {"before": dataclasses.asdict(before), "after": dataclasses.asdict(after)}
        print(f"  {name:9} {result['requests_per_second']:8.2f} req/s  others {noise['others']:.2f}", flush=True)
        return {**noise, **rates, "result": result}, after

    def reduce_mix(self, mix: LoadMix) -> LoadMix:
        """Return the load, reduced if ``few`` is set."""
        if self.few is None:
            return mix
        least = min(self.few, mix.requests)
        return dataclasses.replace(mix, requests=least, clients=min(least, mix.clients), output=min(8, mix.output))


def parley_version() -> str:
    """Return the version of parley, from git."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT.parent, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no server after this time")
    parser.add_argument("--patience", type=float, default=300, help="total seconds to wait for a quiet machine")
    parser.add_argument("--few", type=int, help="at most this many requests of each load: a rehearsal")
    parser.add_argument("--out", type=Path, default=ROOT / "results.jsonl")
    options = parser.parse_args()
    present = {}
    for name in options.only:
        if PEERS[name].missing_file:
            print(f"{name} is skipped: {PEERS[name].missing_file}. make bench-peers makes it.", file=sys.stderr)
        elif loads := [load for load in PEERS[name].loads if load in options.loads]:
            present[name] = loads
    todo = plan_turns(read_records(options.out), present, options.turns)
    print(f"{len(todo)} starts, about {estimate_seconds(todo) / 60:.0f} minutes", flush=True)
    if todo:
        with_what = {"parley": parley_version(), "tcmalloc": bool(tcmalloc()), "when": time.strftime("%Y-%m-%d")}
        append_record(options.out, {"kind": "machine", **describe_machine(), **with_what})
    run = TurnRunner(options.out, options.patience, options.few)
    # Compile now if necessary, and not while a start is timed. Others' modules were compiled when they were installed.
    library.load_kernels()
    compileall.compile_dir(Path(parley.__file__).parent, quiet=1)
    failed = 0
    end = time.monotonic() + options.minutes * 60
    for number, turn in enumerate(todo):
        if time.monotonic() > end:
            print(f"{len(todo) - number} starts are left for the next run.", file=sys.stderr)
            break
        minutes = estimate_seconds(todo[number:]) / 60
        print(f"turn {turn.number + 1}, {turn.peer} ({minutes:.0f} minutes left)", flush=True)
        failed += not run.run_turn(turn)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
