"""Reads the state of a vLLM server's KV cache and queue from its ``/metrics``, in Prometheus' text format."""

from __future__ import annotations

import re
from typing import NamedTuple

SAMPLE = re.compile(r'^vllm:(\w+)(?:\{((?:"(?:\\.|[^"\\])*"|[^}"])*)\})? (\S+)', re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')
CACHE_CONFIG = "cache_config_info"


class CacheTotals(NamedTuple):
    """Tokens looked up in the prefix cache, and tokens of those that were found."""

    queries: int = 0
    hits: int = 0


class ServerMetrics(NamedTuple):
    """A server's metrics, summed over its engines; ``kv_cache_usage`` is their mean, from 0 to 1.

    It has the attributes of vLLM's ``SchedulerStats``; counters are totals since the server's start.
    """

    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: CacheTotals = CacheTotals()
    preemptions: int = 0
    kv_pages: int = 0
    block_size: int = 0
    spec_decoding_stats: None = None


def read_server_metrics(page: bytes) -> ServerMetrics:
    """Return the metrics in a page. Those that the page lacks are 0."""
    values: dict[str, list[float]] = {}
    sizes: list[tuple[int, int]] = []
    for name, labels, value in SAMPLE.findall(page.decode("utf-8", "replace")):
        if name == CACHE_CONFIG:
            config = dict(LABEL.findall(labels))
            sizes.append((_read_count(config.get("num_gpu_blocks")), _read_count(config.get("block_size"))))
        else:
            values.setdefault(name, []).append(_read_number(value))
    usage = values.get("kv_cache_usage_perc", [0.0])
    return ServerMetrics(
        num_waiting_reqs=_sum_samples(values, "num_requests_waiting"),
        kv_cache_usage=sum(usage) / len(usage),
        prefix_cache_stats=CacheTotals(
            _sum_samples(values, "prefix_cache_queries_total"), _sum_samples(values, "prefix_cache_hits_total")
        ),
        preemptions=_sum_samples(values, "num_preemptions_total"),
        kv_pages=sum(blocks for blocks, _ in sizes),
        block_size=max((size for _, size in sizes), default=0),
    )


def _sum_samples(values: dict[str, list[float]], name: str) -> int:
    return int(sum(values.get(name, ())))


def _read_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if abs(number) < float("inf") else 0.0  # NaN is no number either


def _read_count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
