"""The targets, how the medians meet them, and the computed bounds that the machine's limits set.

A target compares medians of the same load on the same machine. This module neither measures nor prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from limits import Limits, ModelSize
from loads import LOADS, START, LoadMix
from peers import KV, PEERS
from results import Results, ratio

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

    def ratio_against(ours: str, theirs: str, load: str, path: str) -> Callable[[Results], float | None]:
        return lambda results: ratio(results.median(ours, load, path), results.median(theirs, load, path))

    def at_best(ours: str, theirs: str, load: str, path: str, kind: str) -> Callable[[Results], float | None]:
        size = sizes["0.5b"]
        return lambda results: ratio(
            best_possible(results, size, ours, load, path, kind), results.median(theirs, load, path)
        )

    targets = []

    def add_target(what: str, ours: str, theirs: str, load: str, path: str, goal: float, least: bool) -> None:
        kind = PEERS[ours].kind
        limit = at_best(ours, theirs, load, path, kind) if PEERS[ours].model != "tiny" else lambda results: None
        targets.append(Target(what, goal, least, ratio_against(ours, theirs, load, path), limit=limit))

    for kind, theirs, name, goals in (
        ("bf16", "vllm-bf16", "vLLM bf16", (1.15, 1.3, 0.9, 0.95, 1.2)),
        ("w8a8", "vllm-w8a8", "vLLM W8A8", (1.35, 1.5, 0.65, 0.85, 1.3)),
    ):
        ours, (c32, c8, tpot, ttft, prefix) = f"parley-{kind}", goals
        add_target(f"c32 req/s, {kind} over {name}", ours, theirs, "c32", RATE, c32, True)
        add_target(f"c8 req/s, {kind} over {name}", ours, theirs, "c8", RATE, c8, True)
        add_target(f"c1 TPOT, {kind} over {name}", ours, theirs, "c1", TPOT, tpot, False)
        other, title = ("llama-bf16", "llama.cpp bf16") if kind == "bf16" else ("openvino-int8", "OpenVINO int8")
        add_target(f"c1 TPOT, {kind} over {title}", ours, other, "c1", TPOT, 1.0, False)
        if kind == "w8a8":
            add_target(f"c1 TPOT, int8 (its head too) over {title}", "parley-int8", other, "c1", TPOT, 1.0, False)
        add_target(f"c1 TTFT, {kind} over {name}", ours, theirs, "c1", TTFT, ttft, False)
        share = 0.6 if kind == "bf16" else 0.36
        add_target(f"prefill of 2,048, {kind} over torch forms bf16", ours, "torch-bf16", "prefill", TTFT, share, False)
        for load, clients in (("prefix", 8), ("prefix32", 32)):
            what = f"1,024 shared, {clients} at once, req/s, {kind} over {name}"
            add_target(what, ours, theirs, load, RATE, prefix, True)
    add_target("c1 TPOT, int4 over llama.cpp Q4_0", "parley-int4", "llama-q4", "c1", TPOT, 0.65, False)
    for kind, shares in (("bf16", (0.94, 0.95)), ("w8a8", (0.92, 0.92))):
        ours = f"parley-{kind}"
        for load, share in zip(("c8", "c32"), shares, strict=True):
            what = f"{load} req/s, {kind}, of the limit"
            targets.append(Target(what, share, True, limit_share(sizes["0.5b"], ours, load, kind)))
            what = f"{load} TTFT p50, {kind} over vLLM"
            targets.append(Target(what, 0.6, False, ratio_against(ours, f"vllm-{kind}", load, TTFT)))
    for load, tokens in (("long8k", "8,192"), ("long32k", "32,640")):
        for theirs, name in (("vllm-long", "vLLM"), ("llama-long", "llama.cpp")):
            what = f"prompt of {tokens}, bf16 over {name}"
            add_target(f"{what}: TTFT", "parley-long", theirs, load, TTFT, 0.8, False)
            add_target(f"{what}: TPOT", "parley-long", theirs, load, TPOT, 0.6, False)
    for theirs, name in (("vllm-tiny", "vLLM"), ("llama-tiny", "llama.cpp")):
        add_target(f"10M model, 1-token replies, req/s over {name}", "parley-tiny", theirs, "api", RATE, 2.0, True)
    add_target(
        "10M model, 64-token streams, tokens/s over vLLM", "parley-tiny", "vllm-tiny", "stream", TOKENS, 2.0, True
    )
    targets.append(
        Target(
            "ready with the 0.5B model, bf16",
            2.0,
            False,
            lambda r: r.record_median("ready", "parley-bf16", "seconds"),
            "s",
        )
    )
    targets.append(
        Target(
            "vLLM's start over parley's, bf16",
            12.0,
            True,
            lambda r: ratio(
                r.record_median("ready", "vllm-bf16", "seconds"), r.record_median("ready", "parley-bf16", "seconds")
            ),
        )
    )
    for kind in ("bf16", "w8a8"):
        peer = f"parley-{kind}"
        targets.append(
            Target(
                f"memory beyond weights and KV, {kind}",
                600.0,
                False,
                lambda r, peer=peer, kind=kind: to_megabytes(extra_bytes(r, peer, sizes["0.5b"], kind)),
                "MB",
            )
        )
        targets.append(
            Target(
                f"ITL p99 at c8 while 4,000 tokens arrive, {kind}: --step-ms + a decode step",
                1.1,
                False,
                lambda r, peer=peer: ratio(r.median(peer, "stall", "visitor.p99_ms"), allowed_gap_ms(r, peer)),
            )
        )
    return targets


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
