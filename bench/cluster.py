"""Goodput of simulated clusters: the gain of separating prefill from decode, and the effect of the routing policy.

    python bench/cluster.py [--quick] [--costs NAME] [--instances N] [--parts goodput,modes,affinity]

Engines are simulated (``parley/worker/simulated.py``): scheduler, pages and links are the real ones, a step takes as
long as a cost model in ``costs/`` says, and nothing is computed. So the figures are of that model on such machines.
The coordinator and the servers are real and their time counts, as accurately as this machine's cores allow.
Goodput is the highest rate at which 90 % of requests get their first token and all later ones in time, searched
over rates. All setups have the same number of instances and get the same requests. Steps of instances that decode take
no longer than the time limit per token, those of mixed ones too: they chunk their prompts accordingly. "Whole prompts"
are mixed instances without chunked prefill.

Noise: a rate is judged by ``--requests`` requests, so a share of 90 % is accurate to 3.5 points at 80 of them, and 2
at 240. The search interpolates between two rates that were tried. Differences below 10 % are not significant.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import uvloop
from arrivals import CHAT, CODING, SHARED, Asked, Seen, Slo, Trace, Traffic, requests
from fleet import Setup, cluster
from loads import vocabulary
from report import table

from parley import demo
from parley.worker.simulated import Costs, read

COSTS = Path(__file__).parent / "costs"
ENOUGH = 0.9  # share of the requests that must be in time
STEP = 1.35  # factor between two rates, until one is too low and one too high
TTFT = 5.0  # TTFT limit, as a multiple of an idle instance's TTFT
LEVELS = {"tight": 2.0, "loose": 5.0}  # the same for TPOT


@dataclass(frozen=True)
class Result:
    """``rate``: requests per second of the cost model. ``sign`` is ">" if no rate that was tried was too high, "<" if
    all were. ``at``: the measurements at the highest rate that was not too high, or at the lowest."""

    rate: float
    sign: str
    at: Seen


class Bench:
    """Runs setups under the options of the command line."""

    def __init__(self, costs: Costs, options: argparse.Namespace):
        self.costs, self.options = costs, options
        self.pool = vocabulary(Path(demo.folder()))

    def asked(self, trace: Trace, turn: int) -> list[Asked]:
        """Return the requests of a turn; turn 0 warms up."""
        count = self.options.requests if turn else self.options.warm
        return list(requests(trace, count, self.pool, self.options.seed, turn))

    def guess(self, trace: Trace) -> float:
        """Return a rate that the instances might sustain."""
        costs, (prompt, output) = self.costs, trace.mean
        each = costs.batch(2048) / 2048 * prompt + (costs.batch(32) / 32 + costs.context * prompt) * output
        return 0.7 * self.options.instances / each

    async def goodput(self, setup: Setup, trace: Trace, slo: Slo) -> Result:
        """Search the highest rate with enough requests in time."""
        low: Seen | None = None
        high: Seen | None = None
        rate = self.guess(trace)
        async with cluster(setup, self.costs, slo.tpot) as running:
            traffic = Traffic(running.port, self.costs.speed)
            await traffic.run(self.asked(trace, 0), rate / 2, slo)
            for turn in range(1, self.options.probes + 1):
                seen = await traffic.run(self.asked(trace, turn), rate, slo)
                if self.options.verbose:
                    print(f"  {setup.name}: {said(seen)}", flush=True)
                if seen.good >= ENOUGH:
                    low, rate = seen, math.sqrt(rate * high.rate) if high else rate * STEP
                else:
                    high, rate = seen, math.sqrt(rate * low.rate) if low else rate / STEP
        near = low or high
        assert near is not None
        if low is None or high is None:
            return Result(near.rate, ">" if low else "<", near)
        part = (low.good - ENOUGH) / max(1e-9, low.good - high.good)
        return Result(low.rate * (high.rate / low.rate) ** part, "", near)

    async def at(self, setup: Setup, trace: Trace, slo: Slo, rate: float) -> Seen:
        """Return the clients' measurements at one rate."""
        async with cluster(setup, self.costs, slo.tpot) as running:
            traffic = Traffic(running.port, self.costs.speed)
            await traffic.run(self.asked(trace, 0), rate / 2, slo)
            return await traffic.run(self.asked(trace, 1), rate, slo)


def said(seen: Seen) -> str:
    """Return one line of text about a rate."""
    times = [f"{median(each):.3f}" if each else "-" for each in (seen.ttft, seen.tpot)]
    return f"{seen.rate:.2f}/s: {seen.good:.0%} in time, TTFT {times[0]} s, TPOT {times[1]} s, {seen.errors} refused"


def splits(instances: int, quick: bool, trace: Trace) -> list[tuple[int, int]]:
    """Return the numbers of P and D to try; the quick run has only the one that fits the trace."""
    if quick:
        p = instances - 1 if trace.output < 50 else instances // 2
        return [(p, instances - p)]
    return [(p, instances - p) for p in range(instances - 1, 0, -1)]


async def goodput(bench: Bench, traces: Iterable[Trace], levels: Iterable[str]) -> None:
    """Print the goodput of each setup, trace and time limit."""
    n = bench.options.instances
    lines = []
    for trace in traces:
        for level in levels:
            slo = Slo.of(trace, bench.costs, TTFT, LEVELS[level])
            setups = [Setup(None, n), Setup(None, n, whole=True)]
            setups += [Setup(ratio, n) for ratio in splits(n, bench.options.quick, trace)]
            base = 0.0
            for setup in setups:
                found = await bench.goodput(setup, trace, slo)
                base = base or found.rate
                shown = f"{found.sign}{found.rate:.2f}", f"{found.sign}{found.rate / base:.2f}"
                lines.append([trace.name, f"{slo.ttft:.2f} / {slo.tpot * 1e3:.0f}", setup.name, *shown,
                              f"{found.at.good:.0%}", *times(found.at)])  # fmt: skip
                print(" | ".join(lines[-1]), flush=True)
    head = ["Trace", "SLO: TTFT s / TPOT ms", "Instances", "Goodput, req/s", "of mixed", "in time next to it", *TIMES]
    print("\n" + table(head, lines) + "\n", flush=True)


async def modes(bench: Bench, traces: Iterable[Trace]) -> None:
    """Compare separate = always, auto, never, at rates near the cluster's capacity."""
    lines, n = [], bench.options.instances
    for trace in traces:
        slo = Slo.of(trace, bench.costs, TTFT, LEVELS["tight"])
        for rate in (0.5, 1.0):
            for mode in ("always", "auto", "never"):
                seen = await bench.at(Setup(splits(n, True, trace)[0], n, mode), trace, slo, rate * bench.guess(trace))
                lines.append([trace.name, mode, f"{seen.rate:.2f}", f"{seen.good:.0%}", *times(seen)])
                print(" | ".join(lines[-1]), flush=True)
    print("\n" + table(["Trace", "separate", "req/s", "in time", *TIMES], lines) + "\n", flush=True)


async def affinity(bench: Bench) -> None:
    """Compare prefix-aware routing with routing by load alone, on prompts with shared prefixes."""
    lines, n = [], bench.options.instances
    slo = Slo.of(SHARED, bench.costs, TTFT, LEVELS["tight"])
    for ratio in (None, splits(n, True, SHARED)[0]):
        for algorithm in ("predicted", "load_balance"):
            setup = Setup(ratio, n, algorithm=algorithm)
            seen = await bench.at(setup, SHARED, slo, bench.guess(CODING))
            lines.append([setup.name, algorithm, f"{seen.rate:.2f}", f"{seen.cached:.0%}", f"{seen.good:.0%}",
                          *times(seen)])  # fmt: skip
            print(" | ".join(lines[-1]), flush=True)
    head = ["Instances", "algorithm_type", "req/s", "prompts cached", "in time", *TIMES]
    print("\n" + table(head, lines) + "\n", flush=True)


TIMES = ["TTFT p50 / p90, s", "TPOT p50 / p90, ms"]


def times(seen: Seen) -> list[str]:
    """Return the spread of TTFT and TPOT as text."""

    def spread(values: list[float], scale: float, digits: int) -> str:
        if not values:
            return "-"
        ordered = sorted(values)
        at = [ordered[int(len(ordered) * share)] * scale for share in (0.5, 0.9)]
        return " / ".join(f"{each:.{digits}f}" for each in at)

    return [spread(seen.ttft, 1, 2), spread(seen.tpot, 1e3, 0)]


async def main(options: argparse.Namespace) -> None:
    costs = read(str(COSTS / f"{options.costs}.toml"))
    if options.speed:
        costs = msgspec.structs.replace(costs, speed=options.speed)
    bench = Bench(costs, options)
    print(f"{options.instances} instances by the cost model {options.costs}, {costs.speed:g} of its seconds in one; "
          f"{options.requests} requests for each rate\n", flush=True)  # fmt: skip
    if "goodput" in options.parts:
        await goodput(bench, (CODING, CHAT), ["tight"] if options.quick else list(LEVELS))
    if "modes" in options.parts:
        await modes(bench, (CODING, CHAT))
    if "affinity" in options.parts:
        await affinity(bench)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one ratio, one SLO, few requests")
    parser.add_argument("--costs", default="a100-13b")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--parts", type=lambda text: text.split(","))
    parser.add_argument("--requests", type=int)
    parser.add_argument("--probes", type=int)
    parser.add_argument("--warm", type=int, default=24)
    parser.add_argument("--speed", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    given.parts = given.parts or (["goodput"] if given.quick else ["goodput", "modes", "affinity"])
    given.requests = given.requests or (80 if given.quick else 240)
    given.probes = given.probes or (3 if given.quick else 4)
    uvloop.run(main(given))
