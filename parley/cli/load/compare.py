"""Compares two files of results of ``parley bench --json``, and says which differences are within their noise.
The noise of a file is the spread of its runs if it has at least three of a load, otherwise that of the parts of each
run. A difference counts if Welch's t-test rejects equal means at 99 %; the degrees of freedom are those of the smaller
group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import median, variance
from typing import Any

LOAD_MEMBERS = ("concurrency", "request_rate", "dataset", "prompt_len", "output_len", "shared_prefix", "num_prefixes")
MEASURES = {  # the columns' names: member, member in it, whether less is better
    "TTFT p50, ms": ("ttft_ms", "p50", True),
    "TTFT p99, ms": ("ttft_ms", "p99", True),
    "TPOT p50, ms": ("tpot_ms", "p50", True),
    "TPOT p99, ms": ("tpot_ms", "p99", True),
    "ITL p50, ms": ("itl_ms", "p50", True),
    "ITL p99, ms": ("itl_ms", "p99", True),
    "latency p50, ms": ("latency_ms", "p50", True),
    "latency p99, ms": ("latency_ms", "p99", True),
    "output tokens/s": ("output_tokens_per_second", "", False),
    "requests/s": ("requests_per_second", "", False),
    "goodput, requests/s": ("goodput", "", False),
}
MIN_VALUES = 3  # fewer values say too little about their spread
# Quantiles of Student's t for 99 %, two-sided, from 2 degrees of freedom on; the last one serves for all above.
STUDENT_99 = (9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947)
WITHIN, UNKNOWN = "within the noise", "noise unknown"

FEW_RUNS = (
    f"Where a file has fewer than {MIN_VALUES} runs of a load, the noise is the spread within one run. The spread\n"
    "between runs needs more runs: repeat `parley bench --json >> FILE`."
)

Results = list[dict[str, Any]]


class CompareError(Exception):
    """Files that cannot be compared. The message is one sentence."""


@dataclass(frozen=True)
class Difference:
    """One measure in both files, as medians of their runs. ``ratio``: B over A, None if A is 0."""

    measure: str
    a: float
    b: float
    ratio: float | None
    verdict: str


@dataclass(frozen=True)
class LoadComparison:
    """A load in words, how many runs of it each file has, and the differences of its measures."""

    load: str
    runs: tuple[int, int]
    differences: list[Difference]


def read_bench_results(path: str) -> dict[tuple[Any, ...], Results]:
    """Return the results of a file by load, in the file's order. Raises CompareError."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        raise CompareError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CompareError(f"{path} is not text in UTF-8.") from None
    results: dict[tuple[Any, ...], Results] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            result = _parse_result(line)
            if result is None:
                raise CompareError(f"{path}, line {number}: this is not a result of `parley bench --json`.")
            results.setdefault(tuple(result.get(name) for name in LOAD_MEMBERS), []).append(result)
    if not results:
        raise CompareError(f"{path} has no result of `parley bench --json`.")
    return results


def _parse_result(line: str) -> dict[str, Any] | None:
    try:
        result = json.loads(line)
        for part in (result, *result.setdefault("parts", [])):
            for name in MEASURES:
                value = measured_value(part, name)
                if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                    return None
        load = [result.get(name) for name in LOAD_MEMBERS]
        valid = "ttft_ms" in result and all(value is None or isinstance(value, str | int | float) for value in load)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return result if valid else None


def measured_value(result: dict[str, Any], measure: str) -> Any:
    """Return a measure of a result or of a part of one, or None if it has none."""
    member, share, _ = MEASURES[measure]
    value = result.get(member)
    return value.get(share) if share and value is not None else value


def compare_files(first: str, second: str) -> list[LoadComparison]:
    """Return the comparison of each load. Raises CompareError unless both files have the same loads."""
    a_results, b_results = read_bench_results(first), read_bench_results(second)
    for path, other, loads in (
        (first, second, a_results.keys() - b_results),
        (second, first, b_results.keys() - a_results),
    ):
        if loads:
            described = sorted(map(describe_load, loads))
            raise CompareError(f"{path} has a load that {other} does not have: {described[0]}.")
    for load, results in a_results.items():
        limits = [result.get("slo") for result in (*results, *b_results[load])]
        if any(limit != limits[0] for limit in limits):
            raise CompareError(f"{first} and {second} count requests within different limits (--slo).")
    return [
        LoadComparison(
            describe_load(load), (len(results), len(b_results[load])), compare_load(results, b_results[load])
        )
        for load, results in a_results.items()
    ]


def describe_load(load: tuple[Any, ...]) -> str:
    """Return a load in words."""
    members = dict(zip(LOAD_MEMBERS, load, strict=True))
    head = f"{members['concurrency']} at once" if members["concurrency"] else f"{members['request_rate']} requests/s"
    if members["dataset"]:
        return f"{head}, {members['dataset']}"
    prefix = f", prefix {members['shared_prefix']}" if members["shared_prefix"] else ""
    count = f" of {members['num_prefixes']}" if prefix and (members["num_prefixes"] or 1) > 1 else ""
    return f"{head}, prompt {members['prompt_len']}, output {members['output_len']}{prefix}{count}"


def compare_load(a_results: Results, b_results: Results) -> list[Difference]:
    """Return the differences of all measures that both sides have."""
    differences = []
    for measure, (_, _, less_is_better) in MEASURES.items():
        sides = [_run_values(results, measure) for results in (a_results, b_results)]
        if all(sides):
            a, b = map(median, sides)
            noise = noise_limit(*(_spread_values(results, measure) for results in (a_results, b_results)))
            better = "better" if (b < a) == less_is_better else "worse"
            verdict = UNKNOWN if noise is None else WITHIN if abs(b - a) <= noise else better
            differences.append(Difference(measure, a, b, b / a if a else None, verdict))
    return differences


def _run_values(results: Results, measure: str) -> list[float]:
    return [value for result in results if (value := measured_value(result, measure)) is not None]


def _spread_values(results: Results, measure: str) -> list[float]:
    runs = _run_values(results, measure)
    if len(runs) >= MIN_VALUES:
        return runs
    return [value for result in results for value in _run_values(result["parts"], measure)]


def noise_limit(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the largest difference of two means that chance explains, or None for too few values."""
    if min(len(a), len(b)) < MIN_VALUES:
        return None
    freedom = min(len(a), len(b)) - 1
    quantile = STUDENT_99[min(freedom - 2, len(STUDENT_99) - 1)]
    return quantile * sqrt(variance(a) / len(a) + variance(b) / len(b))


def format_comparison(first: str, second: str, loads: Sequence[LoadComparison]) -> str:
    """Return the tables of all loads, with the names of the files as A and B."""
    lines = [f"A: {first}", f"B: {second}"]
    for comparison in loads:
        runs = "runs: {} and {}".format(*comparison.runs)
        lines += ["", f"{comparison.load} ({runs})", f"{'':<20} {'A':>10} {'B':>10} {'B/A':>6}"]
        for difference in comparison.differences:
            ratio = "-" if difference.ratio is None else f"{difference.ratio:.2f}"
            lines.append(
                f"{difference.measure:<20} {difference.a:>10.2f} {difference.b:>10.2f} {ratio:>6}  {difference.verdict}"
            )
    if any(min(comparison.runs) < MIN_VALUES for comparison in loads):
        lines += ["", FEW_RUNS]
    return "\n".join(lines)
