"""The status port: probes, and a page with the live state of the cluster (``page.html``, which polls ``/data``)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from parley.coordinator.ports.management import Management
from parley.coordinator.ports.port import Asked, Plane, Reply
from parley.coordinator.routing.admission import Choice
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.instance_table import Table

PAGE = Path(__file__).with_name("page.html")
HTML = b"text/html; charset=utf-8"
UP, DOWN = Reply(), Reply(503)


class Status:
    """The status port, served by ``app``."""

    def __init__(self, table: Table, choice: Choice, management: Management, host: str = "127.0.0.1"):
        self._table, self._choice, self._management = table, choice, management
        self._began = table.clock()
        page = Reply(200, PAGE.read_bytes(), HTML)
        alive = {("GET", path): lambda _: UP for path in ("/v1/startup", "/v1/health", "/v2/health/live", "/health")}
        ready = {("GET", path): self.ready for path in ("/v1/readiness", "/v2/health/ready", "/health/ready")}
        self.app = Plane(
            {
                **alive,
                **ready,
                ("GET", "/v2/models/*/ready"): self.model,
                ("GET", "/"): lambda _: page,
                ("GET", "/data"): lambda _: Reply.json(self.data()),
            },
            host,
        )

    def ready(self, asked: Asked) -> Reply:
        """Answer a readiness probe."""
        return UP if self._management.master and self._choice.possible() else DOWN

    def model(self, asked: Asked) -> Reply:
        """Answer a readiness probe for one model."""
        known = any(asked.rest in each.models for each in self._table)
        return UP if known and self._management.master and self._table.ready(asked.rest) else DOWN

    def data(self) -> dict[str, Any]:
        """Return the data of the page. Counters only grow, so that the page can compute rates."""
        tally, table = self._choice.tally, self._table
        return {
            "time": time.time(),
            "up": table.clock() - self._began,
            "ready": self._choice.possible(),
            "master": self._management.master,
            "open": self._choice.open,
            "waiting": self._choice.waiting,
            "requests": tally.requests,
            "retries": tally.retries,
            "ended": tally.ended.counts,
            "refused": tally.refusals.total,
            "choices": tally.choices.counts,
            "output_tokens": tally.output_tokens,
            "goodput": self._choice.goodput,
            "slo": {"ttft": tally.slo_ttft, "tpot": tally.slo_tpot},
            "ttft": {"sum": tally.ttft.sum, "count": tally.ttft.total},
            "tpot": {"sum": tally.tpot.sum, "count": tally.tpot.total},
            "transfer": {"sum": tally.transfer.sum, "count": tally.transfer.total},
            "instances": [self._shown(each) for each in sorted(table, key=lambda each: each.id)],
            "alarms": list(self._management.alarms)[-8:],
        }

    def _shown(self, each: Instance) -> dict[str, Any]:
        return {
            "id": each.id,
            "url": each.url,
            "role": each.role,
            "share": each.p_percentage if each.role == "flex" else None,
            "group": each.group,
            "state": each.state(self._table.clock()),
            "attached": each.attached,
            "epoch": each.epoch,
            "models": sorted(each.models),
            "tasks": each.tasks,
            "prefills": each.prefill.tasks,
            "decodes": each.decode.tasks,
            "slots": each.slots,
            "slots_used": max(each.prefill.slots, each.decode.slots),
            "blocks": each.blocks,
            "blocks_used": each.used,
            "waiting": each.waiting,
            "running": each.running,
            "pinned": each.pinned,
            "reserved": each.reserved,
            "prefill_rate": each.prefill_rate,
            "decode_rate": each.decode_rate,
            "transfers": each.transfers,
        }
