"""Merges the metrics pages of several instances into one page, adding up equal series.

Counters, histograms and gauges are summed. Ratios are not: cache ratios are averaged, weighted by cache size, and hit
rates are recomputed from their counters. Series that only carry labels (``_info``) get the value 1. Series about one
process or machine are left out. Knows Prometheus' text format, and only the names needed to recognize these kinds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

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


UNMERGED_PREFIXES = ("process_", "nv_cpu_", "parley_build_info")  # prefixes of metrics about one process or machine

WeightedValue = tuple[float, float]  # a value of one page, and the weight of that page


class _Metric:
    """One metric of all pages: its HELP and TYPE lines, its ``kind``, and the values of each of its series."""

    def __init__(self) -> None:
        self.header_lines: list[str] = []
        self.kind = "untyped"
        self.series: dict[str, list[WeightedValue]] = {}

    def add_header(self, line: str, keyword: str, value: str) -> None:
        """Keep a HELP or TYPE line, unless another page had one before; the last TYPE counts."""
        if not any(header_line.startswith(f"# {keyword} ") for header_line in self.header_lines):
            self.header_lines.append(line)
        if keyword == "TYPE":
            self.kind = value or "untyped"


def merge_pages(pages: Sequence[tuple[str, float]]) -> str:
    """Merge ``pages``, each with its weight. Series keep the order of first appearance, below their HELP and TYPE."""
    metrics: dict[str, _Metric] = {}
    for page, weight in pages:
        _read_page(page, weight, metrics)
    lines: list[str] = []
    for name, metric in metrics.items():
        if metric.series and not name.startswith(UNMERGED_PREFIXES):
            lines += metric.header_lines
            lines += [f"{series} {_merged_value(name, series, metrics)}" for series in metric.series]
    return "".join(f"{line}\n" for line in lines)


def _read_page(page: str, weight: float, metrics: dict[str, _Metric]) -> None:
    """Add the lines of a page to the metrics, by name. Lines of other forms are left out."""
    name = ""  # the metric whose header lines were read last
    for line in page.splitlines():
        if line.startswith("#"):
            _, keyword, *header_words = [*line.split(maxsplit=3), "", ""]
            if keyword in ("HELP", "TYPE") and header_words[0]:
                name = header_words[0]
                metrics.setdefault(name, _Metric()).add_header(line, keyword, header_words[1])
        elif (match := SERIES_LINE.fullmatch(line.strip())) is not None:
            series_name, labels = match[1], match[2] or ""
            with suppress(ValueError):
                value = float(match[3])
                # The series of a histogram have suffixes: NAME_bucket, NAME_sum.
                owner = name if name and series_name.startswith(name) else series_name
                series = metrics.setdefault(owner, _Metric()).series
                series.setdefault(series_name + labels, []).append((value, weight))


def _merged_value(name: str, series: str, metrics: Mapping[str, _Metric]) -> str:
    """Return the value of a series over all pages, as text."""
    metric = metrics[name]
    if name.endswith("_info"):
        return "1"
    if name in HIT_RATES:
        hits, lookups = (_sum_of(metrics.get(part), series.replace(name, part, 1)) for part in HIT_RATES[name])
        return _format_value(hits / lookups if lookups else 0.0)
    if metric.kind in ("gauge", "untyped") and name.endswith(AVERAGED_SUFFIXES):
        weights = sum(weight for _, weight in metric.series[series])
        total = sum(value * weight for value, weight in metric.series[series])
        return _format_value(total / weights if weights else 0.0)
    return _format_value(_sum_of(metric, series))


def _sum_of(metric: _Metric | None, series: str) -> float:
    """Return the sum of a series over all pages; 0 without the series."""
    return sum(value for value, _ in metric.series.get(series, ())) if metric is not None else 0.0


def _format_value(value: float) -> str:
    return f"{value:.17g}"
