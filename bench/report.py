"""Writes the measured parts of docs/performance.md, and docs/performance.svg, from results of other scripts.

``python bench/report.py [RESULTS]`` reads the lines of ``compare.py`` and ``quality.py``. A part lies between
``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``; text outside of these is written by hand. A part without results
is not changed. A file NAME.md in the folder of the results fills the part of that name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from chart import Bar, Panel, draw, number
from install import LLAMA, MODELS, OPENVINO, ROOT, VLLM
from limits import Size
from loads import LOADS
from peers import PEERS
from results import Record, Results, middle, read
from targets import METER, RATE, TOKENS, TPOT, TTFT, allowed, beyond, bound, targets

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
CHART = PAGE.with_suffix(".svg")
NOTHING = "-"
CHARTS = {
    "c1": (TOKENS, "tokens/s"),
    "c8": (RATE, "requests/s"),
    "c32": (RATE, "requests/s"),
    "prefix32": (RATE, "requests/s"),
    "api": (RATE, "requests/s"),
    "stream": (TOKENS, "tokens/s"),
}


def fill(page: str, name: str, text: str) -> str:
    """Return the page with a part replaced. Raises ValueError unless the page has the part exactly once."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    new, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text.strip()}\n{end}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the page has the part {name} {count} times")
    return new


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: float | None, scale: float = 1) -> str:
    """Return a value as text, or ``-`` if it was not measured."""
    return NOTHING if value is None else number(value * scale)


def machine(results: Results) -> str:
    """Describe the machine and the versions of all software."""
    said = [r for r in results.records if r["kind"] == "machine"][-1]
    around = [limits for run in results.loads for limits in (run["before"], run["after"])]

    def spread(key: str, scale: float) -> str:
        values = sorted(limits[key] * scale for limits in around)
        return f"{number(values[0])} / {number(middle(values) or 0)} / {number(values[-1])}"

    lines = [
        f"Measured {said['when']}, parley at {said['parley']}: {said['cores']} cores of {said['cpu']} (family/model "
        f"{said['family']}: {said['instructions']}), {said['memory'] / 2**30:.0f} GiB, Python {said['python']}. "
        f"vLLM {VLLM} (CPU build, {'with' if said['tcmalloc'] else 'without'} tcmalloc), "
        f"llama.cpp of llama-cpp-python {LLAMA}, OpenVINO GenAI {OPENVINO}."
    ]
    if around:
        lines.append(
            f"The machine around {len(results.loads)} loads, least / median / most: memory {spread('bandwidth', 1e-9)} "
            f"GB/s, products of bf16 {spread('bf16', 1e-9)} and of int8 {spread('int8', 1e-9)} GOP/s. Other programs "
            f"used {middle([run['others'] for run in results.loads]):.2f} cores in the median load and "
            f"{max(run['others'] for run in results.loads):.2f} in the worst."
        )
    return "\n\n".join([*lines, f"![Servers on the same machine, models and loads]({CHART.name})"])


def judged(results: Results) -> str:
    """Return the table of targets."""
    rows = []
    for target in targets({"0.5b": Size.read(MODELS / "0.5b")}):
        value = target.value(results)
        goal = f"{'≥' if target.least else '≤'} {target.goal:g} {target.unit}".strip()
        verdict = NOTHING if value is None else "yes" if target.met(value) else "**no**"
        rows.append([target.what, goal, f"{shown(value)} {target.unit}".strip(), verdict, shown(target.limit(results))])
    return table(["Target", "Goal", "Measured", "Met", "Best possible here (computed)"], rows)


def loads(results: Results, model: str) -> str:
    """Return all numbers of one model, load by load, the best first."""
    size = Size.read(MODELS / model)
    rows = []
    for load, mix in LOADS.items():
        path = METER.get(load, TPOT)
        found = [
            (peer, runs)
            for peer, who in PEERS.items()
            if who.weights.name.startswith(model) and (runs := results.runs(peer, load))
        ]
        upwards = path in (TPOT, TTFT) or load == "stall"

        def rank(entry: tuple[str, list[Record]], load=load, path=path, upwards=upwards) -> float:
            value = results.median(entry[0], load, path) or 0
            return value if upwards else -value

        for peer, runs in sorted(found, key=rank):
            each, around = results.values(peer, load, RATE), results.limits(runs) or {}
            best = bound(results, size, peer, load, path, PEERS[peer].kind) if model == "0.5b" else None
            rows.append(
                [
                    f"{load}: {mix.title}",
                    PEERS[peer].title,
                    str(len(runs)),
                    *(
                        " / ".join(shown(results.median(peer, load, f"{meter}.{share}")) for share in ("p50", "p99"))
                        for meter in ("ttft_ms", "tpot_ms", "itl_ms")
                    ),
                    shown(results.median(peer, load, TOKENS)),
                    f"{shown(middle(each))} ({shown(min(each))} to {shown(max(each))})",
                    NOTHING if best is None else f"{shown(best)} {'ms' if upwards else 'req/s'}",
                    shown(around.get("bandwidth"), 1e-9),
                    f"{max(run['others'] for run in runs):.2f}",
                ]
            )
    head = ["Load", "Server", "Turns", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "ITL p50 / p99 ms", "Output tokens/s"]
    return table([*head, "req/s (range)", "Limit", "GB/s around", "Others' cores, worst"], rows)


def stalls(results: Results) -> str:
    """Return the gaps of streams while a long prompt is prefilled."""
    rows = []
    for peer, who in PEERS.items():
        if results.runs(peer, "stall"):
            gaps = (shown(results.median(peer, "stall", f"visitor.{share}_ms")) for share in ("p50", "p99", "p100"))
            least = allowed(results, peer) if peer.startswith("parley") else None
            ttft = results.median(peer, "stall", "visitor.ttft_ms")
            rows.append([who.title, " / ".join(gaps), shown(least), shown(ttft)])
    return table(
        ["Server", "ITL p50 / p99 / most, ms", "Allowed: --step-ms + a decode step", "TTFT of the long prompt, ms"],
        rows,
    )


def servers(results: Results) -> str:
    """Return start-up times and memory."""
    rows = []
    for peer, who in PEERS.items():
        if results.of("ready", peer, "seconds") is None:
            continue
        extra = None
        if peer in ("parley-bf16", "parley-w8a8"):
            extra = beyond(results, peer, Size.read(MODELS / "0.5b"), who.kind)
        weights = sum(file.stat().st_size for file in files(who.weights))
        rows.append(
            [
                f"{who.title}, {'10M' if who.weights.name.startswith('tiny') else '0.5B'}",
                shown(results.of("ready", peer, "seconds")),
                shown(results.of("ready", peer, "memory"), 1e-6),
                shown(results.of("end", peer, "memory"), 1e-6),
                shown(weights, 1e-6),
                shown(extra, 1e-6),
            ]
        )
    head = ["Server", "Ready after, s", "MB when ready", "MB at the end", "MB of weights on disk"]
    return table([*head, "MB beyond weights and KV"], rows)


def files(weights: Path) -> list[Path]:
    """Return the weight files."""
    return [weights] if weights.is_file() else [*weights.glob("*.safetensors"), *weights.glob("openvino_model.bin")]


def quality(results: Results) -> str:
    """Return the quality loss of quantization, from the last measurement of each variant."""
    last = {(r["model"], r["variant"]): r for r in results.records if r["kind"] == "quality"}
    if not last:
        raise LookupError("quality was not measured")
    rows = [
        [
            r["model"],
            r["variant"],
            NOTHING if r.get("exact") is None else f"{100 * r['exact']:.1f} % of {r['asked']}",
            f"{100 * r['agreement']:.1f} % of {r['tokens']}",
            f"{100 * r['prefix']:.1f} %",
            number(r["difference"]),
            number(r["worst"]),
        ]
        for r in last.values()
    ]
    head = ["Model", "Numbers", "Evaluation: exact answers", "Greedy tokens that agree"]
    return table([*head, "before the first that differs", "Mean of logprob differences", "largest"], rows)


def panels(results: Results) -> list[Panel]:
    """Return the panels of the chart."""
    found = []
    for load, (path, unit) in CHARTS.items():
        bars = [
            Bar(who.title, middle(values) or 0, min(values), max(values), peer.startswith("parley"))
            for peer, who in PEERS.items()
            if (values := results.values(peer, load, path))
        ]
        model = "10M model" if load in ("api", "stream") else "0.5B model"
        ordered = sorted(bars, key=lambda bar: -bar.value)
        found.append(Panel(f"{model}, {LOADS[load].title}: {unit}, more is better", ordered))
    return found


PARTS: dict[str, Callable[[Results], str]] = {
    "machine": machine,
    "targets": judged,
    "loads": lambda results: loads(results, "0.5b"),
    "stalls": stalls,
    "tiny": lambda results: loads(results, "tiny"),
    "servers": servers,
    "quality": quality,
}


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results.jsonl"
    results = Results(read(source))
    page = PAGE.read_text("utf-8")
    for name, make in PARTS.items():
        try:
            page = fill(page, name, make(results))
        except LookupError as error:
            print(f"{name} is not changed: {error}", file=sys.stderr)
    for file in source.parent.glob("*.md"):
        try:
            page = fill(page, file.stem, file.read_text("utf-8"))
        except ValueError as error:
            print(f"{file} is skipped: {error}", file=sys.stderr)
    PAGE.write_text(page, "utf-8")
    CHART.write_text(draw(panels(results)), "utf-8")


if __name__ == "__main__":
    main()
