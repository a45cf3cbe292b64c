"""Totals over the answers of an attached server, with the state of its KV cache and queue from its metrics."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from parley.worker.attached.server_metrics import CacheTotals, ServerMetrics
from parley.worker.vllm.outputs.step_totals import StepTotals


class ServerTotals(StepTotals):
    """Counters since the server was first reached, and its gauges of the last poll, which count all of its clients."""

    def __init__(self, kv_pages: int):
        super().__init__(kv_pages)
        self._earlier: ServerMetrics | None = None

    def record_server(self, metrics: ServerMetrics) -> None:
        """Record the server's metrics. Counters grow by the difference to the last ones."""
        earlier = self._earlier or metrics
        self._earlier = metrics
        grown = CacheTotals(
            max(0, metrics.prefix_cache_stats.queries - earlier.prefix_cache_stats.queries),
            max(0, metrics.prefix_cache_stats.hits - earlier.prefix_cache_stats.hits),
        )
        self.record_scheduler(0, metrics._replace(prefix_cache_stats=grown))
        self.count_preemptions(max(0, metrics.preemptions - earlier.preemptions))

    def _current_cores(self, computing: int) -> Collection[Any]:
        """Return the server's statistics, also while nothing of this process is computed there."""
        return self._cores.values()
