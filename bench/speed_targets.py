"""The targets, how the medians meet them, and the computed bounds that the machine's limits set.

A target compares medians of the same load on the same machine. This module neither measures nor prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from load_mixes import LOADS, START, LoadMix
from machine_limits import Limits, ModelSize
from peer_servers import KV, PEERS
from results_file import Results, ratio

RATE, TOKENS, TPOT, TTFT = "requests_per_second", "output_tokens_per_second", "tpot_ms.p50", "ttft_ms.p50"
# The number that each load is meant for.
METER = {
    **dict.fromkeys(("c8", "c32", "prefix", "prefix32", "api"), RATE),
    "stream": TOKENS,
    "prefill": TTFT,
    "stall": "visitor.p99_ms",
}
STEP_MS = 250  # parley's default of --step-ms


@dataclass(frozen=True)
class Target:
    """One target. ``value`` is None if a part was not measured. ``least``: the goal is a minimum, else a maximum."""

    what: str
    goal: float
    least: bool
    value: Callable[[Results], float | None]
    unit: str = ""
    limit: Callable[[Results], float | None] = lambda results: None

    def meets_goal(self, value: float) -> bool:
        """Whether a value meets the goal."""
        return value >= self.goal if self.least else value <= self.goal


def best_possible(results: Results, size: ModelSize, peer: str, load: str, path: str, kind: str) -> float | None:
    """Return the best possible value of a load's number, by the limits measured around its runs."""
    around = results.limits(results.runs(peer, load))
    if around is None:
        return None
    limits, mix = Limits(**around), LOADS[load]
    context = mix.shared + mix.own + mix.output / 2
    if path == TPOT:
        return 1e3 * size.decode_seconds(limits, kind, mix.clients, context) if mix.clients == 1 else None
    if path == TTFT:
        return 1e3 * size.prefill_seconds(limits, kind, mix.own) if mix.clients == 1 else None
    if path == RATE and load in ("c1", "c8", "c32", "prefix", "prefix32"):
        return _request_rate(size, limits, kind, mix, context)
    return None


def _request_rate(size: ModelSize, limits: Limits, kind: str, mix: LoadMix, context: float) -> float:
    """Return the requests per second if prompts are prefilled one after another and all clients share every step."""
    prefill = mix.requests * size.prefill_seconds(limits, kind, mix.own, mix.shared)
    if mix.shared:
        prefill += size.prefill_seconds(limits, kind, mix.shared)
    steps = mix.requests / mix.clients * (mix.output - 1)
    return mix.requests / (prefill + steps * size.decode_seconds(limits, kind, mix.clients, context))


def limit_share(size: ModelSize, peer: str, load: str, kind: str) -> Callable[[Results], float | None]:
    """Return a function that computes the share of the best possible requests per second that a peer reaches."""
    return lambda results: ratio(results.median(peer, load, RATE), best_possible(results, size, peer, load, RATE, kind))


def list_targets(sizes: Mapping[str, ModelSize]) -> list[Target]:
    """Return all targets. ``sizes``: the model sizes of the folders that the 0.5B peers read."""
    size = sizes["0.5b"]
    return [
        *_serving_targets(size, "bf16", "vLLM bf16", (1.15, 1.3, 0.9, 0.95, 1.2)),
        *_serving_targets(size, "w8a8", "vLLM W8A8", (1.35, 1.5, 0.65, 0.85, 1.3)),
        _peer_target(size, "c1 TPOT, int4 over llama.cpp Q4_0", "parley-int4", "llama-q4", "c1", TPOT, 0.65),
        *_limit_targets(size, "bf16", {"c8": 0.94, "c32": 0.95}),
        *_limit_targets(size, "w8a8", {"c8": 0.92, "c32": 0.92}),
        *_long_prompt_targets(size),
        *_tiny_model_targets(size),
        *_start_targets(),
        *_process_targets(size, "bf16"),
        *_process_targets(size, "w8a8"),
    ]


def _peer_target(
    size: ModelSize, what: str, ours: str, theirs: str, load: str, path: str, goal: float, *, least: bool = False
) -> Target:
    """Return the target of a load's number at one peer, as a ratio to that of another. The limit: the best possible."""

    def limit(results: Results) -> float | None:
        best = best_possible(results, size, ours, load, path, PEERS[ours].kind)
        return ratio(best, results.median(theirs, load, path))

    has_limit = PEERS[ours].model != "tiny"
    value = ratio_against(ours, theirs, load, path)
    return Target(what, goal, least, value, limit=limit if has_limit else lambda results: None)


def ratio_against(ours: str, theirs: str, load: str, path: str) -> Callable[[Results], float | None]:
    """Return a function that computes the ratio of a load's number at one peer to that at another."""
    return lambda results: ratio(results.median(ours, load, path), results.median(theirs, load, path))


def _serving_targets(
    size: ModelSize, kind: str, name: str, goals: tuple[float, float, float, float, float]
) -> Iterator[Target]:
    """Yield the targets of a kind of weights. ``name``: of the vLLM to compare with. ``goals``: requests per second of
    32 clients and of 8, then TPOT and TTFT of one, then requests per second with a shared prefix."""
    ours, theirs, (c32, c8, tpot, ttft, prefix) = f"parley-{kind}", f"vllm-{kind}", goals
    yield _peer_target(size, f"c32 req/s, {kind} over {name}", ours, theirs, "c32", RATE, c32, least=True)
    yield _peer_target(size, f"c8 req/s, {kind} over {name}", ours, theirs, "c8", RATE, c8, least=True)
    yield _peer_target(size, f"c1 TPOT, {kind} over {name}", ours, theirs, "c1", TPOT, tpot)
    other, title = ("llama-bf16", "llama.cpp bf16") if kind == "bf16" else ("openvino-int8", "OpenVINO int8")
    yield _peer_target(size, f"c1 TPOT, {kind} over {title}", ours, other, "c1", TPOT, 1.0)
    if kind == "w8a8":
        what = f"c1 TPOT, int8 (its head too) over {title}"
        yield _peer_target(size, what, "parley-int8", other, "c1", TPOT, 1.0)
    yield _peer_target(size, f"c1 TTFT, {kind} over {name}", ours, theirs, "c1", TTFT, ttft)
    what, share = f"prefill of 2,048, {kind} over torch forms bf16", 0.6 if kind == "bf16" else 0.36
    yield _peer_target(size, what, ours, "torch-bf16", "prefill", TTFT, share)
    for load, clients in (("prefix", 8), ("prefix32", 32)):
        what = f"1,024 shared, {clients} at once, req/s, {kind} over {name}"
        yield _peer_target(size, what, ours, theirs, load, RATE, prefix, least=True)


def _limit_targets(size: ModelSize, kind: str, shares: Mapping[str, float]) -> Iterator[Target]:
    """Yield the targets by the machine's limits, and of the TTFT under load. ``shares``: of the limit, by load."""
    ours = f"parley-{kind}"
    for load, share in shares.items():
        yield Target(f"{load} req/s, {kind}, of the limit", share, True, limit_share(size, ours, load, kind))
        value = ratio_against(ours, f"vllm-{kind}", load, TTFT)
        yield Target(f"{load} TTFT p50, {kind} over vLLM", 0.6, False, value)


def _long_prompt_targets(size: ModelSize) -> Iterator[Target]:
    for load, tokens in (("long8k", "8,192"), ("long32k", "32,640")):
        for theirs, name in (("vllm-long", "vLLM"), ("llama-long", "llama.cpp")):
            what = f"prompt of {tokens}, bf16 over {name}"
            yield _peer_target(size, f"{what}: TTFT", "parley-long", theirs, load, TTFT, 0.8)
            yield _peer_target(size, f"{what}: TPOT", "parley-long", theirs, load, TPOT, 0.6)


def _tiny_model_targets(size: ModelSize) -> Iterator[Target]:
    for theirs, name in (("vllm-tiny", "vLLM"), ("llama-tiny", "llama.cpp")):
        what = f"10M model, 1-token replies, req/s over {name}"
        yield _peer_target(size, what, "parley-tiny", theirs, "api", RATE, 2.0, least=True)
    what = "10M model, 64-token streams, tokens/s over vLLM"
    yield _peer_target(size, what, "parley-tiny", "vllm-tiny", "stream", TOKENS, 2.0, least=True)


def _start_targets() -> Iterator[Target]:
    def ready_seconds(results: Results, peer: str) -> float | None:
        return results.record_median("ready", peer, "seconds")

    yield Target("ready with the 0.5B model, bf16", 2.0, False, lambda r: ready_seconds(r, "parley-bf16"), "s")
    yield Target(
        "vLLM's start over parley's, bf16",
        12.0,
        True,
        lambda r: ratio(ready_seconds(r, "vllm-bf16"), ready_seconds(r, "parley-bf16")),
    )


def _process_targets(size: ModelSize, kind: str) -> Iterator[Target]:
    """Yield the targets of a process's memory, and of its streams while a long prompt arrives."""
    peer = f"parley-{kind}"
    yield Target(
        f"memory beyond weights and KV, {kind}",
        600.0,
        False,
        lambda results: to_megabytes(extra_bytes(results, peer, size, kind)),
        "MB",
    )
    yield Target(
        f"ITL p99 at c8 while 4,000 tokens arrive, {kind}: --step-ms + a decode step",
        1.1,
        False,
        lambda results: ratio(results.median(peer, "stall", "visitor.p99_ms"), allowed_gap_ms(results, peer)),
    )


def allowed_gap_ms(results: Results, peer: str) -> float | None:
    """Return the milliseconds that a stream may wait during a prefill: the step limit and one decode step."""
    step = results.median(peer, "c8", "itl_ms.p50")
    return None if step is None else STEP_MS + step


def extra_bytes(results: Results, peer: str, size: ModelSize, kind: str) -> float | None:
    """Return the bytes beyond weights and KV cache: when ready, before any KV is written, or at the end if more.

    At the end the cache holds all written KV, up to its size.
    """
    start, end = (results.record_median(when, peer, "memory") for when in ("ready", "end"))
    if start is None or end is None:
        return None
    last: dict[str, dict[str, Any]] = {}
    for record in results.loads:
        if record["peer"] == peer and record["turn"] == 0:
            last[record["load"]] = record["result"]
    written_tokens = START.requests * (START.own + START.output)
    for r in last.values():
        visitor = r.get("visitor", {}).get("tokens", 0)
        written_tokens += r["prompt_tokens"] - r["cached_tokens"] + r["output_tokens"] + visitor
    return max(start, end - min(written_tokens * size.kv, KV)) - size.weight_bytes(kind)


def to_megabytes(count: float | None) -> float | None:
    """Return bytes in MB."""
    return None if count is None else count / 1e6
