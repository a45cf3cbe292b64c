"""Goodput of simulated clusters: the gain of separating prefill from decode, and the effect of the routing policy.

    python bench/cluster_goodput.py [--quick] [--costs NAME] [--instances N] [--parts goodput,modes,affinity]

Engines are simulated (``parley/worker/simulated_engine.py``): scheduler, pages and links are real, but a step computes
nothing and takes the time that a cost model in ``cost_models/`` predicts. So the figures hold for the model and the
machines that the cost model describes. The coordinator and the servers are real and their time counts, as accurately as
this machine's cores allow. Goodput is the highest rate at which 90 % of requests get their first token and all later
ones in time; it is found by a search over rates. All setups have the same number of instances and get the same
requests. Mixed and decode instances chunk their prompts so that no step exceeds the time limit per token. "Whole
prompts" are mixed instances without chunked prefill.

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
from load_mixes import word_tokens
from local_cluster import Setup, run_cluster
from performance_page import markdown_table
from random_arrivals import CHAT, CODING, SHARED, RateResult, Slo, TimedRequest, Trace, Traffic, draw_requests

from parley import demo
from parley.worker.simulated_engine import SimulatedCosts, read_costs

COSTS = Path(__file__).parent / "cost_models"
ENOUGH = 0.9  # share of the requests that must be in time
STEP = 1.35  # factor between two rates, until one is too low and one too high
TTFT = 5.0  # TTFT limit, as a multiple of an idle instance's TTFT
LEVELS = {"tight": 2.0, "loose": 5.0}  # the same for TPOT


@dataclass(frozen=True)
class GoodputResult:
    """``rate``: requests per second of the cost model. ``sign`` is ">" if no rate that was tried was too high, "<" if
    all were. ``at``: the measurements at the highest rate that was not too high, or at the lowest."""

    rate: float
    sign: str
    at: RateResult


class ClusterBench:
    """Runs setups under the options of the command line."""

    def __init__(self, costs: SimulatedCosts, options: argparse.Namespace):
        self.costs, self.options = costs, options
        self.pool = word_tokens(Path(demo.model_folder()))

    def trace_requests(self, trace: Trace, turn: int) -> list[TimedRequest]:
        """Return the requests of a turn; turn 0 warms up."""
        count = self.options.requests if turn else self.options.warm
        return list(draw_requests(trace, count, self.pool, self.options.seed, turn))

    def estimate_rate(self, trace: Trace) -> float:
        """Return a rate that the instances might sustain."""
        costs, (prompt, output) = self.costs, trace.mean_lengths
        request_seconds = (
            costs.batch_seconds(2048) / 2048 * prompt + (costs.batch_seconds(32) / 32 + costs.context * prompt) * output
        )
        return 0.7 * self.options.instances / request_seconds

    async def search_goodput(self, setup: Setup, trace: Trace, slo: Slo) -> GoodputResult:
        """Search the highest rate with enough requests in time."""
        low: RateResult | None = None
        high: RateResult | None = None
        rate = self.estimate_rate(trace)
        async with run_cluster(setup, self.costs, slo.tpot) as running:
            traffic = Traffic(running.port, self.costs.speed)
            await traffic.send_at_rate(self.trace_requests(trace, 0), rate / 2, slo)
            for turn in range(1, self.options.probes + 1):
                result = await traffic.send_at_rate(self.trace_requests(trace, turn), rate, slo)
                if self.options.verbose:
                    print(f"  {setup.name}: {describe_rate(result)}", flush=True)
                if result.good >= ENOUGH:
                    low, rate = result, math.sqrt(rate * high.rate) if high else rate * STEP
                else:
                    high, rate = result, math.sqrt(rate * low.rate) if low else rate / STEP
        near = low or high
        assert near is not None
        if low is None or high is None:
            return GoodputResult(near.rate, ">" if low else "<", near)
        part = (low.good - ENOUGH) / max(1e-9, low.good - high.good)
        return GoodputResult(low.rate * (high.rate / low.rate) ** part, "", near)

    async def measure_at_rate(self, setup: Setup, trace: Trace, slo: Slo, rate: float) -> RateResult:
        """Return the clients' measurements at one rate."""
        async with run_cluster(setup, self.costs, slo.tpot) as running:
            traffic = Traffic(running.port, self.costs.speed)
            await traffic.send_at_rate(self.trace_requests(trace, 0), rate / 2, slo)
            return await traffic.send_at_rate(self.trace_requests(trace, 1), rate, slo)


def describe_rate(result: RateResult) -> str:
    """Return one line of text about a rate."""
    times = [f"{median(seconds):.3f}" if seconds else "-" for seconds in (result.ttft, result.tpot)]
    return (
        f"{result.rate:.2f}/s: {result.good:.0%} in time, TTFT {times[0]} s, TPOT {times[1]} s, {result.errors} refused"
    )


def role_splits(instances: int, quick: bool, trace: Trace) -> list[tuple[int, int]]:
    """Return the numbers of P and D to try; the quick run has only the one that fits the trace."""
    if quick:
        p = instances - 1 if trace.output < 50 else instances // 2
        return [(p, instances - p)]
    return [(p, instances - p) for p in range(instances - 1, 0, -1)]


async def compare_goodput(bench: ClusterBench, traces: Iterable[Trace], levels: Iterable[str]) -> None:
    """Print the goodput of each setup, trace and time limit."""
    n = bench.options.instances
    lines = []
    for trace in traces:
        for level in levels:
            slo = Slo.from_idle_times(trace, bench.costs, TTFT, LEVELS[level])
            setups = [Setup(None, n), Setup(None, n, whole=True)]
            setups += [Setup(ratio, n) for ratio in role_splits(n, bench.options.quick, trace)]
            base = 0.0
            for setup in setups:
                goodput = await bench.search_goodput(setup, trace, slo)
                base = base or goodput.rate
                columns = f"{goodput.sign}{goodput.rate:.2f}", f"{goodput.sign}{goodput.rate / base:.2f}"
                lines.append([trace.name, f"{slo.ttft:.2f} / {slo.tpot * 1e3:.0f}", setup.name, *columns,
                              f"{goodput.at.good:.0%}", *format_times(goodput.at)])  # fmt: skip
                print(" | ".join(lines[-1]), flush=True)
    head = ["Trace", "SLO: TTFT s / TPOT ms", "Instances", "Goodput, req/s", "of mixed", "in time next to it", *TIMES]
    print("\n" + markdown_table(head, lines) + "\n", flush=True)


async def compare_modes(bench: ClusterBench, traces: Iterable[Trace]) -> None:
    """Compare separate = always, auto, never, at rates near the cluster's capacity."""
    lines, n = [], bench.options.instances
    for trace in traces:
        slo = Slo.from_idle_times(trace, bench.costs, TTFT, LEVELS["tight"])
        for rate in (0.5, 1.0):
            for mode in ("always", "auto", "never"):
                result = await bench.measure_at_rate(
                    Setup(role_splits(n, True, trace)[0], n, mode), trace, slo, rate * bench.estimate_rate(trace)
                )
                lines.append([trace.name, mode, f"{result.rate:.2f}", f"{result.good:.0%}", *format_times(result)])
                print(" | ".join(lines[-1]), flush=True)
    print("\n" + markdown_table(["Trace", "separate", "req/s", "in time", *TIMES], lines) + "\n", flush=True)


async def compare_affinity(bench: ClusterBench) -> None:
    """Compare prefix-aware routing with routing by load alone, on prompts with shared prefixes."""
    lines, n = [], bench.options.instances
    slo = Slo.from_idle_times(SHARED, bench.costs, TTFT, LEVELS["tight"])
    for ratio in (None, role_splits(n, True, SHARED)[0]):
        for algorithm in ("predicted", "load_balance"):
            setup = Setup(ratio, n, algorithm=algorithm)
            result = await bench.measure_at_rate(setup, SHARED, slo, bench.estimate_rate(CODING))
            lines.append([setup.name, algorithm, f"{result.rate:.2f}", f"{result.cached:.0%}", f"{result.good:.0%}",
                          *format_times(result)])  # fmt: skip
            print(" | ".join(lines[-1]), flush=True)
    head = ["Instances", "algorithm_type", "req/s", "prompts cached", "in time", *TIMES]
    print("\n" + markdown_table(head, lines) + "\n", flush=True)


TIMES = ["TTFT p50 / p90, s", "TPOT p50 / p90, ms"]


def format_times(result: RateResult) -> list[str]:
    """Return the spread of TTFT and TPOT as text."""

    def spread(values: list[float], scale: float, digits: int) -> str:
        if not values:
            return "-"
        ordered = sorted(values)
        at = [ordered[int(len(ordered) * share)] * scale for share in (0.5, 0.9)]
        return " / ".join(f"{number:.{digits}f}" for number in at)

    return [spread(result.ttft, 1, 2), spread(result.tpot, 1e3, 0)]


async def main(options: argparse.Namespace) -> None:
    costs = read_costs(str(COSTS / f"{options.costs}.toml"))
    if options.speed:
        costs = msgspec.structs.replace(costs, speed=options.speed)
    bench = ClusterBench(costs, options)
    print(f"{options.instances} instances by the cost model {options.costs}, {costs.speed:g} of its seconds in one; "
          f"{options.requests} requests for each rate\n", flush=True)  # fmt: skip
    if "goodput" in options.parts:
        await compare_goodput(bench, (CODING, CHAT), ["tight"] if options.quick else list(LEVELS))
    if "modes" in options.parts:
        await compare_modes(bench, (CODING, CHAT))
    if "affinity" in options.parts:
        await compare_affinity(bench)


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
    options = parser.parse_args()
    options.parts = options.parts or (["goodput"] if options.quick else ["goodput", "modes", "affinity"])
    options.requests = options.requests or (80 if options.quick else 240)
    options.probes = options.probes or (3 if options.quick else 4)
    uvloop.run(main(options))
