"""Merges the metrics pages of several instances into one page, adding up equal series.

Counters, histograms and gauges are summed. Ratios are not: cache ratios are averaged, weighted by cache size, and hit
rates are recomputed from their counters. Series that only carry labels (``_info``) get the value 1. Series about one
process or machine are left out. Knows Prometheus' text format, and only the names needed to recognize these kinds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SERIES_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?")
# Name suffixes of averaged gauges.
AVERAGED_SUFFIXES = (
    "_perc",
    "_usage",
    "_rate",
    "_ratio",
    "_fraction",
    "start_progress",
)
HIT_RATES = {  # hit rate -> the counters (hits, lookups) that it is computed from
    "npu_prefix_cache_hit_rate": ("npu_radix_match_hit_num", "all_radix_match_num"),
}


def merge_pages(pages: Sequence[tuple[str, float]]) -> str:
    """Merge ``pages``, each with its weight. Series keep the order of first appearance, below their HELP and TYPE."""
    header_lines: dict[str, list[str]] = {}
    order: dict[str, dict[str, list[tuple[float, float]]]] = {}  # head -> series -> values and weights
    kinds: dict[str, str] = {}
    for page, weight in pages:
        name = ""
        for line in page.splitlines():
            if line.startswith("#"):
                parts = line.split(maxsplit=3)
                if len(parts) < 3 or parts[1] not in ("HELP", "TYPE"):
                    continue
                name = parts[2]
                lines = header_lines.setdefault(name, [])
                if len(lines) < 2 and not any(known.startswith(f"# {parts[1]} ") for known in lines):
                    lines.append(line)
                if parts[1] == "TYPE":
                    kinds[name] = parts[3] if len(parts) > 3 else "untyped"
                continue
            match = SERIES_LINE.fullmatch(line.strip())
            if match is None:
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            owner = name if match[1].startswith(name) and name else match[1]
            series = match[1] + (match[2] or "")
            order.setdefault(owner, {}).setdefault(series, []).append((value, weight))
    parts = []
    for name, owner_series in order.items():
        if name.startswith(("process_", "nv_cpu_", "parley_build_info")):
            continue
        parts += [f"{line}\n" for line in header_lines.get(name, ())]
        if name.endswith("_info"):
            parts += [f"{series} 1\n" for series in owner_series]
            continue
        averaged = kinds.get(name, "gauge") in ("gauge", "untyped") and name.endswith(AVERAGED_SUFFIXES)
        for series, values in owner_series.items():
            parts.append(f"{series} {_merged_value(name, series, values, order, averaged):.17g}\n")
    return "".join(parts)


def _merged_value(
    name: str,
    series: str,
    values: Sequence[tuple[float, float]],
    all_series: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    averaged: bool,
) -> float:
    if name in HIT_RATES:
        hits, lookups = (
            sum(value for value, _ in all_series.get(part, {}).get(series.replace(name, part, 1), ()))
            for part in HIT_RATES[name]
        )
        return hits / lookups if lookups else 0.0
    if averaged:
        weights = sum(weight for _, weight in values)
        return sum(value * weight for value, weight in values) / weights if weights else 0.0
    return sum(value for value, _ in values)
