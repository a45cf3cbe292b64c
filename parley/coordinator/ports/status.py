"""The status port: probes, and a page with the live state of the cluster (which polls ``/data``)."""

from __future__ import annotations

import time
from typing import Any

from parley.coordinator.access import reading_access
from parley.coordinator.ports.management import ManagementPort
from parley.coordinator.ports.port import AdminPort, AdminReply, AdminRequest
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.instance_table import InstanceTable
from parley.ui import PAGE_HEADERS, page_files

PAGE_NAME = "cluster.html"
UP_REPLY, DOWN_REPLY = AdminReply(), AdminReply(503)


def page_file_reply(name: str) -> AdminReply:
    """Return a file of the web page, or 404."""
    file = page_files().get(name)
    return AdminReply(404) if file is None else AdminReply(200, file.body, file.content_type, headers=PAGE_HEADERS)


class StatusPort:
    """The status port, served by ``app``."""

    def __init__(
        self, table: InstanceTable, scheduler: InstanceScheduler, management: ManagementPort, host: str = "127.0.0.1"
    ):
        self._table, self._scheduler, self._management = table, scheduler, management
        self._started_at = table.clock()
        alive = {
            ("GET", path): lambda _: UP_REPLY for path in ("/v1/startup", "/v1/health", "/v2/health/live", "/health")
        }
        ready = {
            ("GET", path): management.cluster_readiness
            for path in ("/v1/readiness", "/v2/health/ready", "/health/ready")
        }
        self.app = AdminPort(
            {
                **alive,
                **ready,
                ("GET", "/v2/models/*/ready"): self.model_readiness,
                ("GET", "/"): lambda _: page_file_reply(PAGE_NAME),
                ("GET", "/ui/*"): lambda request: page_file_reply(request.matched_segment),
                ("GET", "/data"): lambda _: AdminReply.from_json(self.page_data()),
            },
            host,
            reading_access(table.options, host),
            is_open=lambda path: path not in ("/", "/data"),
        )

    def model_readiness(self, request: AdminRequest) -> AdminReply:
        """Answer a readiness probe for one model."""
        is_known_model = any(request.matched_segment in instance.models for instance in self._table)
        return (
            UP_REPLY
            if is_known_model and self._management.master and self._table.is_cluster_ready(request.matched_segment)
            else DOWN_REPLY
        )

    def page_data(self) -> dict[str, Any]:
        """Return the data of the page. Counters only grow, so that the page can compute rates."""
        counters, table = self._scheduler.counters, self._table
        return {
            "time": time.time(),
            "up": table.clock() - self._started_at,
            "ready": self._scheduler.can_serve(),
            "master": self._management.master,
            "open": self._scheduler.open_requests,
            "waiting": self._scheduler.queued_requests,
            "requests": counters.requests,
            "retries": counters.retries,
            "failed": counters.failures,
            "refused": counters.refusals.total_count,
            "choices": counters.placements.by_label,
            "output_tokens": counters.output_tokens,
            "goodput": self._scheduler.goodput_share,
            "slo": {"ttft": counters.slo_ttft, "tpot": counters.slo_tpot},
            "ttft": {"sum": counters.ttft.observed_sum, "count": counters.ttft.observed_count},
            "tpot": {"sum": counters.tpot.observed_sum, "count": counters.tpot.observed_count},
            "transfer": {"sum": counters.transfer.observed_sum, "count": counters.transfer.observed_count},
            "instances": [
                self._instance_data(instance) for instance in sorted(table, key=lambda instance: instance.id)
            ],
            "alarms": list(self._management.alarms)[-8:],
        }

    def _instance_data(self, instance: ClusterInstance) -> dict[str, Any]:
        return {
            "id": instance.id,
            "url": instance.url,
            "role": instance.role,
            "share": instance.p_percentage if instance.role == "flex" else None,
            "group": instance.group,
            "state": instance.phase_at(self._table.clock()),
            "attached": instance.has_result_stream,
            "paused": instance.breaker.is_open(self._table.clock()),
            "epoch": instance.epoch,
            "models": sorted(instance.models),
            "tasks": instance.tasks,
            "prefills": instance.prefill.tasks,
            "decodes": instance.decode.tasks,
            "slots": instance.slots,
            "slots_used": max(instance.prefill.slots, instance.decode.slots),
            "blocks": instance.blocks,
            "blocks_used": instance.used_blocks,
            "waiting": instance.waiting,
            "running": instance.running,
            "pinned": instance.pinned,
            "reserved": instance.reserved,
            "prefill_rate": instance.prefill_rate,
            "decode_rate": instance.decode_rate,
            "transfers": instance.transfers,
        }
