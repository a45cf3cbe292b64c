"""Compares the speed of two commits in pairs, and fails if the second one is slower.

    python bench/compare_commits.py A B [--only api engine …] [--pairs 15] [--tolerance 3]

A and B name commits; ``.`` is this checkout as it is now. Each commit is unpacked below ``.peers/guard`` with its own
kernels. Both run the same loads (``commit_loads.py``, of this checkout) by turns of a second or so, A B B A, so that
other programs slow both. Every pair has two new processes, because the same code may be 10 % faster or slower in one
process than in the next. The result of a load is the median of the ratios of its pairs, with an interval that has the
true median in it with a probability of 99 %. B is slower where the whole interval lies above the tolerance; where only
a part of it does, more pairs are needed to tell. A load that one of the commits cannot run is left out. The exit code
is 1 if anything is slower. Prints Markdown.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / ".peers" / "guard"
LOADS_PROGRAM = Path(__file__).with_name("commit_loads.py")
LOADS = ("kernels", "engine", "api", "coordinator")
CONFIDENCE = 0.99
MIN_PAIRS = 8  # fewer have no interval of that confidence


class GuardError(Exception):
    """Nothing can be compared. The message is one sentence."""


@dataclass(frozen=True)
class PairedResult:
    """A measure of both commits: medians, the median ratio of B to A, and the interval of that median."""

    a: float
    b: float
    ratio: float
    low: float
    high: float

    def verdict(self, tolerance: float) -> str:
        """Return what can be said. ``tolerance``: the ratio less 1 that counts as equal."""
        if self.low > 1 + tolerance:
            return "slower"
        if self.high < 1 - tolerance:
            return "faster"
        if self.high <= 1 + tolerance:
            return "not slower"
        return "cannot tell: more pairs"


def compare_pairs(pairs: Sequence[tuple[float, float]]) -> PairedResult:
    """Return the result of pairs of costs, of A and of B."""
    ratios = sorted(b / a for a, b in pairs)
    outside = interval_rank(len(ratios))
    return PairedResult(
        median(a for a, _ in pairs), median(b for _, b in pairs), median(ratios), ratios[outside], ratios[-1 - outside]
    )


def interval_rank(count: int) -> int:
    """Return how many of the sorted values lie on each side of an interval that has the median in it, as the values
    are above or below their median with equal probability (the sign test)."""
    outside, probability = 0, 0.5**count
    while outside + 1 < count / 2:
        probability += math.comb(count, outside + 1) * 0.5**count
        if 2 * probability > 1 - CONFIDENCE:
            break
        outside += 1
    return outside


def unpack_commit(name: str) -> Path:
    """Return the folder of a commit, with compiled kernels. Raises GuardError."""
    if name == ".":
        tree = REPOSITORY
    else:
        resolved = subprocess.run(
            ["git", "rev-parse", "--verify", f"{name}^{{commit}}"], cwd=REPOSITORY, capture_output=True, text=True
        )
        if resolved.returncode:
            raise GuardError(f"There is no commit {name}.")
        tree = FOLDER / resolved.stdout.strip()[:12]
        if not tree.exists():
            archive = subprocess.run(
                ["git", "archive", name, "parley"], cwd=REPOSITORY, capture_output=True, check=True
            )
            partial = tree.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(partial, filter="data")
            for library in (REPOSITORY / "parley" / "native").glob("kernels-*.so"):  # named by their sources
                shutil.copy2(library, partial / "parley" / "native")
            partial.rename(tree)
    subprocess.run([sys.executable, "parley/native/build.py"], cwd=tree, capture_output=True)  # else: torch's forms
    return tree


class Worker:
    """A process that runs the loads on one commit."""

    def __init__(self, tree: Path):
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, LOADS_PROGRAM], cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run_load(self, name: str) -> dict[str, float]:
        """Run one turn of a load. Return its costs by measure. Raises GuardError."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(name, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise GuardError(str(answer["error"]).rstrip("."))
        return answer

    def stop(self) -> None:
        """End the process and what it started."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def run_pair(trees: Sequence[Path], load: str) -> dict[str, tuple[float, float]]:
    """Run a load on both commits, in new processes. Return the least costs by measure. Raises GuardError."""
    with ExitStack() as stack:
        workers = [Worker(tree) for tree in trees]
        for worker in workers:
            stack.callback(worker.stop)
        for worker in workers:  # makes the load, and warms up
            worker.run_load(load)
        turns: tuple[list[dict[str, float]], ...] = ([], [])
        for which in (0, 1, 1, 0):
            turns[which].append(workers[which].run_load(load))
    shared = [measure for measure in turns[0][0] if measure in turns[1][0]]
    return {
        measure: (min(turn[measure] for turn in turns[0]), min(turn[measure] for turn in turns[1]))
        for measure in shared
    }


def compare_commits(options: argparse.Namespace) -> int:
    """Run all loads and print the table. Return the number of measures that are slower. Raises GuardError."""
    trees = [unpack_commit(name) for name in (options.a, options.b)]
    slower = 0
    print(f"| Measure | {options.a}, µs | {options.b}, µs | ratio (99 % of confidence) | |\n|---|---|---|---|---|")
    for load in options.only:
        try:
            pairs = [run_pair(trees, load) for _ in range(options.pairs)]
        except GuardError as error:
            print(f"{load} is left out: {error}.", file=sys.stderr, flush=True)
            continue
        for measure in pairs[0]:
            result = compare_pairs([pair[measure] for pair in pairs])
            verdict = result.verdict(options.tolerance / 100)
            slower += verdict == "slower"
            interval = f"{result.ratio:.3f} ({result.low:.3f} to {result.high:.3f})"
            print(f"| {measure} | {result.a:.4g} | {result.b:.4g} | {interval} | {verdict} |", flush=True)
    return slower


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="a commit")
    parser.add_argument("b", metavar="B", help="a commit, or . for this checkout")
    parser.add_argument("--only", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--pairs", type=int, default=15, help=f"at least {MIN_PAIRS}")
    parser.add_argument("--tolerance", type=float, default=3, help="percent that count as equal")
    options = parser.parse_args()
    if options.pairs < MIN_PAIRS:
        parser.error(f"--pairs must be {MIN_PAIRS} or more")
    try:
        return 1 if compare_commits(options) else 0
    except GuardError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
