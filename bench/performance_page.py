"""Writes the measured parts of docs/performance.md, and docs/performance.svg, from results of other scripts.

``python bench/performance_page.py [RESULTS]`` reads the lines of ``compare_servers.py`` and
``quantization_quality.py``. A part lies between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``; text outside of
these is written by hand. A part without results is not changed. A file NAME.md in the folder of the results fills the
part of that name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from bar_chart import Bar, Panel, draw_chart, format_number
from install_peers import LLAMA, MODELS, OPENVINO, ROOT, VLLM
from load_mixes import LOADS
from machine_limits import ModelSize
from peer_servers import PEERS
from results_file import Record, Results, median_or_none, read_records
from speed_targets import METER, RATE, TOKENS, TPOT, TTFT, allowed_gap_ms, best_possible, extra_bytes, list_targets

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
CHART = PAGE.with_suffix(".svg")
NOTHING = "-"
Row = TypeVar("Row")
CHARTS = {
    "c1": (TOKENS, "tokens/s"),
    "c8": (RATE, "requests/s"),
    "c32": (RATE, "requests/s"),
    "prefix32": (RATE, "requests/s"),
    "api": (RATE, "requests/s"),
    "stream": (TOKENS, "tokens/s"),
}


def fill_part(page: str, name: str, text: str) -> str:
    """Return the page with a part replaced. Raises ValueError unless the page has the part exactly once."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    new, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text.strip()}\n{end}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the page has the part {name} {count} times")
    return new


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def require_rows(rows: list[Row]) -> list[Row]:
    """Return the rows. Raises LookupError if there are none, because an empty table must not replace a full one."""
    if not rows:
        raise LookupError("it was not measured")
    return rows


def format_value(value: float | None, scale: float = 1) -> str:
    """Return a value as text, or ``-`` if it was not measured."""
    return NOTHING if value is None else format_number(value * scale)


def machine_part(results: Results) -> str:
    """Describe the machine and the versions of all software."""
    machine = require_rows([r for r in results.records if r["kind"] == "machine"])[-1]
    around = [limits for run in results.loads for limits in (run["before"], run["after"])]

    def spread(key: str, scale: float) -> str:
        values = sorted(limits[key] * scale for limits in around)
        return (
            f"{format_number(values[0])} / {format_number(median_or_none(values) or 0)} / {format_number(values[-1])}"
        )

    lines = [
        f"Measured {machine['when']}, parley at {machine['parley']}: {machine['cores']} cores of {machine['cpu']} "
        f"(family/model {machine['family']}: {machine['instructions']}), {machine['memory'] / 2**30:.0f} GiB, "
        f"Python {machine['python']}. "
        f"vLLM {VLLM} (CPU build, {'with' if machine['tcmalloc'] else 'without'} tcmalloc), "
        f"llama.cpp of llama-cpp-python {LLAMA}, OpenVINO GenAI {OPENVINO}."
    ]
    if around:
        lines.append(
            f"The machine around {len(results.loads)} loads, least / median / most: memory {spread('bandwidth', 1e-9)} "
            f"GB/s, products of bf16 {spread('bf16', 1e-9)} and of int8 {spread('int8', 1e-9)} GOP/s. Other programs "
            f"used {median_or_none([run['others'] for run in results.loads]):.2f} cores in the median load and "
            f"{max(run['others'] for run in results.loads):.2f} in the worst."
        )
    return "\n\n".join([*lines, f"![Servers on the same machine, models and loads]({CHART.name})"])


def targets_table(results: Results) -> str:
    """Return the table of targets."""
    require_rows(results.loads)
    rows = []
    for target in list_targets({"0.5b": ModelSize.from_config(MODELS / "0.5b")}):
        value = target.value(results)
        goal = f"{'≥' if target.least else '≤'} {target.goal:g} {target.unit}".strip()
        verdict = NOTHING if value is None else "yes" if target.meets_goal(value) else "**no**"
        rows.append(
            [
                target.what,
                goal,
                f"{format_value(value)} {target.unit}".strip(),
                verdict,
                format_value(target.limit(results)),
            ]
        )
    return markdown_table(["Target", "Goal", "Measured", "Met", "Best possible here (computed)"], rows)


def loads_table(results: Results, model: str) -> str:
    """Return all numbers of one model, load by load, the best first."""
    require_rows(results.loads)
    size = ModelSize.from_config(MODELS / model)
    rows = []
    for load, mix in LOADS.items():
        path = METER.get(load, TPOT)
        entries = [
            (peer, runs)
            for peer, who in PEERS.items()
            if who.weights.name.startswith(model) and (runs := results.runs(peer, load))
        ]
        upwards = path in (TPOT, TTFT) or load == "stall"

        def rank(entry: tuple[str, list[Record]], load=load, path=path, upwards=upwards) -> float:
            value = results.median(entry[0], load, path) or 0
            return value if upwards else -value

        for peer, runs in sorted(entries, key=rank):
            rates, around = results.values(peer, load, RATE), results.limits(runs) or {}
            best = best_possible(results, size, peer, load, path, PEERS[peer].kind) if model == "0.5b" else None
            rows.append(
                [
                    f"{load}: {mix.title}",
                    PEERS[peer].title,
                    str(len(runs)),
                    *(
                        " / ".join(
                            format_value(results.median(peer, load, f"{meter}.{share}")) for share in ("p50", "p99")
                        )
                        for meter in ("ttft_ms", "tpot_ms", "itl_ms")
                    ),
                    format_value(results.median(peer, load, TOKENS)),
                    f"{format_value(median_or_none(rates))} ({format_value(min(rates))} to {format_value(max(rates))})",
                    NOTHING if best is None else f"{format_value(best)} {'ms' if upwards else 'req/s'}",
                    format_value(around.get("bandwidth"), 1e-9),
                    f"{max(run['others'] for run in runs):.2f}",
                ]
            )
    head = ["Load", "Server", "Turns", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "ITL p50 / p99 ms", "Output tokens/s"]
    return markdown_table([*head, "req/s (range)", "Limit", "GB/s around", "Others' cores, worst"], require_rows(rows))


def stalls_table(results: Results) -> str:
    """Return the gaps of streams while a long prompt is prefilled."""
    rows = []
    for peer, who in PEERS.items():
        if results.runs(peer, "stall"):
            gaps = (
                format_value(results.median(peer, "stall", f"visitor.{share}_ms")) for share in ("p50", "p99", "p100")
            )
            least = allowed_gap_ms(results, peer) if peer.startswith("parley") else None
            ttft = results.median(peer, "stall", "visitor.ttft_ms")
            rows.append([who.title, " / ".join(gaps), format_value(least), format_value(ttft)])
    return markdown_table(
        ["Server", "ITL p50 / p99 / most, ms", "Allowed: --step-ms + a decode step", "TTFT of the long prompt, ms"],
        require_rows(rows),
    )


def servers_table(results: Results) -> str:
    """Return start-up times and memory."""
    rows = []
    for peer, who in PEERS.items():
        if results.record_median("ready", peer, "seconds") is None:
            continue
        extra = None
        if peer in ("parley-bf16", "parley-w8a8"):
            extra = extra_bytes(results, peer, ModelSize.from_config(MODELS / "0.5b"), who.kind)
        weights = sum(file.stat().st_size for file in weight_files(who.weights))
        rows.append(
            [
                f"{who.title}, {'10M' if who.weights.name.startswith('tiny') else '0.5B'}",
                format_value(results.record_median("ready", peer, "seconds")),
                format_value(results.record_median("ready", peer, "memory"), 1e-6),
                format_value(results.record_median("end", peer, "memory"), 1e-6),
                format_value(weights, 1e-6),
                format_value(extra, 1e-6),
            ]
        )
    head = ["Server", "Ready after, s", "MB when ready", "MB at the end", "MB of weights on disk"]
    return markdown_table([*head, "MB beyond weights and KV"], require_rows(rows))


def weight_files(weights: Path) -> list[Path]:
    """Return the weight files."""
    return [weights] if weights.is_file() else [*weights.glob("*.safetensors"), *weights.glob("openvino_model.bin")]


def quality_table(results: Results) -> str:
    """Return the quality loss of quantization, from the last measurement of each variant."""
    last = {(r["model"], r["variant"]): r for r in results.records if r["kind"] == "quality"}
    rows = [
        [
            r["model"],
            r["variant"],
            NOTHING if r.get("exact") is None else f"{100 * r['exact']:.1f} % of {r['asked']}",
            f"{100 * r['agreement']:.1f} % of {r['tokens']}",
            f"{100 * r['prefix']:.1f} %",
            format_number(r["difference"]),
            format_number(r["worst"]),
        ]
        for r in last.values()
    ]
    head = ["Model", "Numbers", "Evaluation: exact answers", "Greedy tokens that agree"]
    return markdown_table(
        [*head, "before the first that differs", "Mean of logprob differences", "largest"], require_rows(rows)
    )


def chart_panels(results: Results) -> list[Panel]:
    """Return the panels of the chart."""
    panels = []
    for load, (path, unit) in CHARTS.items():
        bars = [
            Bar(who.title, median_or_none(values) or 0, min(values), max(values), peer.startswith("parley"))
            for peer, who in PEERS.items()
            if (values := results.values(peer, load, path))
        ]
        model = "10M model" if load in ("api", "stream") else "0.5B model"
        ordered = sorted(bars, key=lambda bar: -bar.value)
        panels.append(Panel(f"{model}, {LOADS[load].title}: {unit}, more is better", ordered))
    return panels


PARTS: dict[str, Callable[[Results], str]] = {
    "machine": machine_part,
    "targets": targets_table,
    "loads": lambda results: loads_table(results, "0.5b"),
    "stalls": stalls_table,
    "tiny": lambda results: loads_table(results, "tiny"),
    "servers": servers_table,
    "quality": quality_table,
}


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results.jsonl"
    results = Results(read_records(source))
    page = PAGE.read_text("utf-8")
    for name, make in PARTS.items():
        try:
            page = fill_part(page, name, make(results))
        except LookupError as error:
            print(f"{name} is not changed: {error}", file=sys.stderr)
    for file in source.parent.glob("*.md"):
        try:
            page = fill_part(page, file.stem, file.read_text("utf-8"))
        except ValueError as error:
            print(f"{file} is skipped: {error}", file=sys.stderr)
    PAGE.write_text(page, "utf-8")
    if results.loads:
        CHART.write_text(draw_chart(chart_panels(results)), "utf-8")


if __name__ == "__main__":
    main()
