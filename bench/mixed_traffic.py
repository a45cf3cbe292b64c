"""Part of ``make bench``: goodput of parley and vLLM on mixed lengths, at random arrivals.

    python bench/mixed_traffic.py [--peer vllm] [--model 0.5b] [--requests 64] [--share 0.7] [--slo 2,0.15]

Prompts of 32 to 4,096 tokens and outputs of 1 to 512 are log-normal, arrivals are a Poisson process. A server's
capacity is its requests per second with ``CLIENTS`` of them always open. Both servers then get the same requests at
70 % of each capacity. A request is good if its first token comes within 2 s, and the others within 150 ms each on
average; goodput is the good requests per second. A server is paused while the other is measured. vLLM is that of
``make engines``; ``--peer parley`` compares a second parley, to check the bench. The table is written to
``.peers/mixed.md`` for ``performance_page.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import uvloop
from contestant import Contestant, ContestantFailed, paused_contestants
from install_peers import MODELS, ROOT
from load_mixes import word_tokens
from machine_usage import CpuClock
from peer_servers import Peer, parley_peer, vllm_peer
from performance_page import markdown_table
from random_arrivals import RateResult, Slo, TimedRequest, Trace, Traffic, draw_requests
from random_model import SHAPES, write_model

CLIENTS = 16  # of the closed loop that measures the capacity
MIXED = Trace("mixed", 256, 1.0, 64, 1.2, prompt_limits=(32, 4096), output_limits=(1, 512))
MAX_CONTEXT = "8192"  # tokens; vLLM's setting


class MixedLoad:
    """Sends the trace's requests to the servers. Each turn has new prompts; lengths and arrivals stay the same."""

    def __init__(self, pool: list[int], options: argparse.Namespace):
        self.pool, self.count = pool, options.requests
        self.slo = Slo(*map(float, options.slo.split(",")))
        self.patience = self.slo.ttft + self.slo.tpot * MIXED.output_limits[1]

    def draw(self, turn: int) -> list[TimedRequest]:
        """Return the requests of a turn."""
        return list(draw_requests(MIXED, self.count, self.pool, 0, turn))

    def measure_capacity(self, contestant: Contestant) -> float:
        """Return the requests per second with CLIENTS open requests."""
        traffic = Traffic(contestant.address.port, 1.0)
        return uvloop.run(traffic.send_in_loop(self.draw(0), CLIENTS))

    def measure_rate(self, contestant: Contestant, rate: float, turn: int) -> RateResult:
        """Return the clients' measurements at ``rate`` requests per second."""
        traffic = Traffic(contestant.address.port, 1.0, patience=self.patience)
        return uvloop.run(traffic.send_at_rate(self.draw(turn), rate, self.slo))


def compare_servers(peers: tuple[Peer, Peer], load: MixedLoad, share: float) -> Iterator[list[str]]:
    """Yield a row for each server and rate. Raises ContestantFailed."""
    with paused_contestants(peers, ROOT / "log" / "mixed.log") as contestants:

        def resumed(contestant: Contestant) -> Contestant:
            for other in contestants:
                if other is not contestant:
                    other.pause()
            contestant.resume()
            return contestant

        capacities = [load.measure_capacity(resumed(contestant)) for contestant in contestants]
        for turn, (capacity, owner) in enumerate(zip(capacities, peers, strict=True), 1):
            rate, goodputs = share * capacity, []
            for contestant in contestants:
                clock = CpuClock.read_clock(resumed(contestant).process.pid)
                result = load.measure_rate(contestant, rate, turn)
                others = clock.others_cores(CpuClock.read_clock(contestant.process.pid))
                goodputs.append(rate * result.good)
                yield [
                    f"{rate:.3g}: {share:.0%} of {owner.title}'s {capacity:.3g}",
                    contestant.peer.title,
                    f"{goodputs[-1]:.3g}",
                    f"{result.good:.0%}",
                    middle_and_worst(result.ttft, "{:.2f}"),
                    middle_and_worst([1e3 * seconds for seconds in result.tpot], "{:.0f}"),
                    str(result.errors),
                    f"{others:.2f}",
                ]
            ratio = goodputs[0] / goodputs[1] if goodputs[1] else float("inf")
            print(f"goodput over {peers[1].title}: {ratio:.2f}", file=sys.stderr, flush=True)


def middle_and_worst(values: list[float], form: str) -> str:
    """Return the median and the 90th percentile."""
    if not values:
        return "-"
    return " / ".join(form.format(value) for value in (median(values), sorted(values)[9 * len(values) // 10]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", choices=("vllm", "parley"), default="vllm")
    parser.add_argument("--model", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--requests", type=int, default=64, help="of each load")
    parser.add_argument("--share", type=float, default=0.7, help="of the capacity")
    parser.add_argument("--slo", default="2,0.15", metavar="TTFT,TPOT", help="seconds")
    options = parser.parse_args()
    folder: Path = MODELS / options.model
    if not (folder / "model.safetensors").exists():
        write_model(folder, SHAPES[options.model])
    ours = parley_peer("parley", options.model, "bf16", ())
    theirs = (
        vllm_peer("vLLM", options.model, "bf16", (), "--max-model-len", MAX_CONTEXT)
        if options.peer == "vllm"
        else parley_peer("peer", options.model, "bf16", ())
    )
    if theirs.missing_file:
        print(f"{theirs.title} is not installed: {theirs.missing_file}. make engines installs vLLM.", file=sys.stderr)
        return 1
    head = [
        "Requests/s", "Server", "Goodput/s", "Good", "TTFT p50 / p90, s", "TPOT p50 / p90, ms", "Errors",
        "Others' cores",
    ]  # fmt: skip
    rows = []
    try:
        for row in compare_servers((ours, theirs), MixedLoad(word_tokens(folder), options), options.share):
            print(" | ".join(row), file=sys.stderr, flush=True)
            rows.append(row)
    except ContestantFailed as error:
        print(f"A server failed: {error}.", file=sys.stderr)
        return 1
    text = markdown_table(head, rows)
    print(text)
    if options.model == "0.5b" and options.peer == "vllm":
        (ROOT / "mixed.md").write_text(text + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
