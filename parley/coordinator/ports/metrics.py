"""The metrics port: the sums of all instances' metrics and the coordinator's own, in Prometheus text format.

The names of its own series, listed here and in docs/coordinator.md, begin with ``parley:cluster_``.
Faults of its own store of responses are added to those of the instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import get_args

from parley.coordinator.access import reading_access
from parley.coordinator.ports.merge_metrics import merge_pages
from parley.coordinator.ports.port import AdminPort, AdminReply, AdminRequest
from parley.coordinator.routing.health import AskInstance, Unanswered
from parley.coordinator.routing.instance import ClusterInstance, InstancePhase
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.instance_table import InstanceTable
from parley.errors import Forbidden
from parley.metrics.process import process_lines
from parley.metrics.record_faults import record_fault_lines
from parley.metrics.series import SampleGroup, format_labels, metric_header, scalar_lines
from parley.types import Tenant

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
CACHE_SECONDS = 3.0  # seconds that the merged pages of instances stay cached

InstanceValue = Callable[[ClusterInstance], float]
INSTANCE_SERIES: tuple[tuple[str, str, str, InstanceValue], ...] = (
    ("gauge", "instance_tasks", "Requests on the instance.", lambda instance: instance.tasks),
    ("gauge", "instance_prefill_tokens", "Tokens sent to the instance and not prefilled yet.",
     lambda instance: instance.prefill.tokens),
    ("gauge", "instance_slots_used", "Slots used by its requests.",
     lambda instance: instance.prefill.slots + instance.decode.slots),
    ("gauge", "instance_blocks_used", "KV blocks in use, as it reports.", lambda instance: instance.used_blocks),
    ("gauge", "instance_blocks_total", "KV blocks of the instance.", lambda instance: instance.blocks),
    ("gauge", "instance_waiting", "Waiting requests, as it reports.", lambda instance: instance.waiting),
    ("gauge", "instance_running", "Running requests, as it reports.", lambda instance: instance.running),
    ("gauge", "pinned_blocks", "KV blocks kept for others to fetch, as it reports.", lambda instance: instance.pinned),
    ("gauge", "reserved_blocks", "KV blocks reserved for handovers, as it reports.",
     lambda instance: instance.reserved),
    ("gauge", "instance_prefill_rate", "Prompt tokens per second, as it reports.",
     lambda instance: instance.prefill_rate),
    ("gauge", "instance_decode_rate", "Tokens per second, as it reports.", lambda instance: instance.decode_rate),
    ("counter", "transfers_total", "Handovers of KV pages, as it reports.",
     lambda instance: instance.transfers.get("count", 0)),
    ("counter", "transfer_bytes_total", "Bytes of KV pages that it handed over, as it reports.",
     lambda instance: instance.transfers.get("bytes", 0)),
    ("counter", "instance_transfer_seconds_total", "Seconds that its handovers took, as it reports.",
     lambda instance: instance.transfers.get("seconds", 0)),
)  # fmt: skip


class MetricsPort:
    """The metrics port, served by ``app``. ``count_record_faults``: as of ``InferenceFront.record_faults``."""

    def __init__(
        self,
        table: InstanceTable,
        scheduler: InstanceScheduler,
        ask_instance: AskInstance,
        host: str = "127.0.0.1",
        *,
        count_record_faults: Callable[[], int] = lambda: 0,
    ):
        self._count_record_faults = count_record_faults
        self._table, self._scheduler, self._ask_instance = table, scheduler, ask_instance
        self._pages: list[tuple[ClusterInstance, str]] = []
        self._scraped_at = float("-inf")
        self._scrape_lock = asyncio.Lock()
        self.app = AdminPort({("GET", "/metrics"): self.metrics_page}, host, reading_access(table.options, host))

    async def metrics_page(self, request: AdminRequest) -> AdminReply:
        """Return the whole metrics page."""
        own_faults = record_fault_lines(self._count_record_faults())
        page = await self._merge_instances(self._table, own_faults) + self.own_series() + process_lines()
        return AdminReply(200, page.encode(), CONTENT_TYPE)

    async def page_of_key(self, tenant: Tenant) -> bytes:
        """Return the page for a client's key. If it is limited to some models, the page is about the instances that
        have no others. Raises Forbidden if there are none."""
        if not tenant.models:
            return (await self.metrics_page(AdminRequest("", (), b""))).body
        visible = [instance for instance in self._table if has_only_models(instance, tenant.models)]
        if not visible:
            raise Forbidden("This API key may use the models of no instance alone, so it sees no metrics.")
        return (await self._merge_instances(visible) + _instance_values(visible)).encode()

    async def _merge_instances(self, instances: Iterable[ClusterInstance], own_page: str = "") -> str:
        """Merge the pages of those instances that answer, and ``own_page``. Concurrent callers share one scrape."""
        async with self._scrape_lock:
            if self._table.clock() - self._scraped_at >= CACHE_SECONDS:
                scraped = await asyncio.gather(*map(self._scrape_instance, self._table.usable_instances()))
                self._pages = [page for page in scraped if page is not None]
                self._scraped_at = self._table.clock()
        merged = set(instances)
        pages = [(text, float(instance.blocks)) for instance, text in self._pages if instance in merged]
        return merge_pages([*pages, (own_page, 0.0)])

    async def _scrape_instance(self, instance: ClusterInstance) -> tuple[ClusterInstance, str] | None:
        try:
            status, body = await self._ask_instance(f"{instance.metrics}/metrics", timeout=2.0)
        except Unanswered:
            return None
        return (instance, body.decode("utf-8", "replace")) if status == 200 else None

    def own_series(self) -> str:
        """Render the coordinator's own series: of requests, and of each instance as the coordinator sees it."""
        counts = dict.fromkeys(get_args(InstancePhase), 0)
        for instance in self._table:
            counts[instance.phase_at(self._table.clock())] += 1
        phases = _labelled_series("gauge", "instances", "Instances by state.", "state", counts.items())
        return "".join([*self._request_series(), _instance_values(self._table), phases])

    def _request_series(self) -> list[str]:
        counters = self._scheduler.counters
        parts = [
            _single_series("gauge", "ready", "1 while requests are accepted.", float(self._scheduler.can_serve())),
            _single_series("counter", "requests_total", "Requests received for scheduling.", counters.requests),
            _single_series("counter", "retries_total", "Attempts after the first.", counters.retries),
            _single_series("gauge", "requests_open", "Requests on instances.", self._scheduler.open_requests),
            _single_series(
                "gauge", "requests_waiting", "Requests that wait for an instance.", self._scheduler.queued_requests
            ),
            _single_series(
                "counter", "requests_failed_total", "Requests failed after all attempts.", counters.failures
            ),
            _labelled_series(
                "counter", "requests_ended_total", "Attempts that ended.", "how", counters.ended.by_label.items()
            ),
            _labelled_series(
                "counter", "requests_refused_total", "Requests refused.", "status", counters.refusals.by_label.items()
            ),
            _labelled_series(
                "counter",
                "choices_total",
                "Placements by where a request runs.",
                "how",
                counters.placements.by_label.items(),
            ),
            _single_series("counter", "requests_good_total", "Requests that met slo_ttft and slo_tpot.", counters.good),
            _single_series(
                "gauge",
                "goodput_ratio",
                "Share of finished requests that met both objectives.",
                self._scheduler.goodput_share,
            ),
            _single_series(
                "counter", "output_tokens_total", "Tokens of requests that ended well.", counters.output_tokens
            ),
        ]
        for name, help_text, distribution in (
            ("ttft_seconds", "From the placement to the first token.", counters.ttft),
            ("tpot_seconds", "Seconds per token after the second, one value per request.", counters.tpot),
            ("transfer_seconds", "From P's last token to D's first.", counters.transfer),
        ):
            parts += [metric_header("histogram", f"parley:cluster_{name}", help_text)]
            parts += distribution.histogram_lines(f"parley:cluster_{name}", "", "own")
        return parts


def has_only_models(instance: ClusterInstance, names: Collection[str]) -> bool:
    """Whether an instance has models, and each of them has one of these names."""
    if not instance.offered_models:
        return bool(instance.models) and all(name in names for name in instance.models)
    return all(any(name in names for name in model.names) for model in instance.offered_models)


def _instance_values(instances: Iterable[ClusterInstance]) -> str:
    """Render the series of instances as the coordinator sees them."""
    labelled_instances = [
        (format_labels({"instance": str(instance.id), "role": instance.role}), instance) for instance in instances
    ]
    parts = []
    for kind, name, help_text, read_value in INSTANCE_SERIES:
        groups: list[SampleGroup] = [(labels, [("", read_value(instance))]) for labels, instance in labelled_instances]
        parts.append(scalar_lines(kind, f"parley:cluster_{name}", help_text, groups))
    return "".join(parts)


def _single_series(kind: str, name: str, help_text: str, value: float) -> str:
    return scalar_lines(kind, f"parley:cluster_{name}", help_text, [("", [("", value)])])


def _labelled_series(kind: str, name: str, help_text: str, label: str, values: Iterable[tuple[str, float]]) -> str:
    labelled_values = [(format_labels({label: value}), number) for value, number in values]
    return scalar_lines(kind, f"parley:cluster_{name}", help_text, [("", labelled_values)])
