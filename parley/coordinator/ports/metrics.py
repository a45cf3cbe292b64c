"""The metrics port: the sums of all instances' metrics and the coordinator's own, in Prometheus text format.

The names of its own series, listed here and in docs/coordinator.md, begin with ``parley:cluster_``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import get_args

from parley.coordinator.ports.merge_metrics import gather
from parley.coordinator.ports.port import Asked, Plane, Reply
from parley.coordinator.routing.admission import Choice
from parley.coordinator.routing.health import Ask, Unanswered
from parley.coordinator.routing.instance import Instance, State
from parley.coordinator.routing.instance_table import Table
from parley.metrics.series import Group, header, labels, scalar

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
FRESH = 3.0  # seconds that the merged pages of instances stay cached

Read = Callable[[Instance], float]
EACH: tuple[tuple[str, str, str, Read], ...] = (
    ("gauge", "instance_tasks", "Requests on the instance.", lambda each: each.tasks),
    ("gauge", "instance_prefill_tokens", "Tokens sent to the instance and not prefilled yet.",
     lambda each: each.prefill.tokens),
    ("gauge", "instance_slots_used", "Slots used by its requests.",
     lambda each: each.prefill.slots + each.decode.slots),
    ("gauge", "instance_blocks_used", "KV blocks in use, as it reports.", lambda each: each.used),
    ("gauge", "instance_blocks_total", "KV blocks of the instance.", lambda each: each.blocks),
    ("gauge", "instance_waiting", "Waiting requests, as it reports.", lambda each: each.waiting),
    ("gauge", "instance_running", "Running requests, as it reports.", lambda each: each.running),
    ("gauge", "pinned_blocks", "KV blocks kept for others to fetch, as it reports.", lambda each: each.pinned),
    ("gauge", "reserved_blocks", "KV blocks reserved for handovers, as it reports.", lambda each: each.reserved),
    ("gauge", "instance_prefill_rate", "Prompt tokens per second, as it reports.", lambda each: each.prefill_rate),
    ("gauge", "instance_decode_rate", "Tokens per second, as it reports.", lambda each: each.decode_rate),
    ("counter", "transfers_total", "Handovers of KV pages, as it reports.",
     lambda each: each.transfers.get("count", 0)),
    ("counter", "transfer_bytes_total", "Bytes of KV pages that it handed over, as it reports.",
     lambda each: each.transfers.get("bytes", 0)),
    ("counter", "instance_transfer_seconds_total", "Seconds that its handovers took, as it reports.",
     lambda each: each.transfers.get("seconds", 0)),
)  # fmt: skip


class Metrics:
    """The metrics port, served by ``app``."""

    def __init__(self, table: Table, choice: Choice, ask: Ask, host: str = "127.0.0.1"):
        self._table, self._choice, self._ask = table, choice, ask
        self._gathered, self._when = "", float("-inf")
        self._one = asyncio.Lock()
        self.app = Plane({("GET", "/metrics"): self.page}, host)

    async def page(self, asked: Asked) -> Reply:
        """Return the whole metrics page."""
        return Reply(200, (await self._sums() + self.own()).encode(), CONTENT_TYPE)

    async def _sums(self) -> str:
        """Return the merged pages of the instances that answer; concurrent callers share one scrape."""
        async with self._one:
            if self._table.clock() - self._when >= FRESH:
                pages = await asyncio.gather(*map(self._scrape, self._table.usable()))
                self._gathered, self._when = gather([page for page in pages if page is not None]), self._table.clock()
        return self._gathered

    async def _scrape(self, instance: Instance) -> tuple[str, float] | None:
        try:
            status, body = await self._ask(f"{instance.metrics}/metrics", timeout=2.0)
        except Unanswered:
            return None
        return (body.decode("utf-8", "replace"), float(instance.blocks)) if status == 200 else None

    def own(self) -> str:
        """Render the coordinator's own series."""
        tally, now = self._choice.tally, self._table.clock()
        parts = [
            _plain("gauge", "ready", "1 while requests are accepted.", float(self._choice.possible())),
            _plain("counter", "requests_total", "Requests received for scheduling.", tally.requests),
            _plain("counter", "retries_total", "Attempts after the first.", tally.retries),
            _plain("gauge", "requests_open", "Requests on instances.", self._choice.open),
            _plain("gauge", "requests_waiting", "Requests that wait for an instance.", self._choice.waiting),
            _by("counter", "requests_ended_total", "Attempts that ended.", "how", tally.ended.counts.items()),
            _by("counter", "requests_refused_total", "Requests refused.", "status", tally.refusals.counts.items()),
            _by("counter", "choices_total", "Placements by where a request runs.", "how", tally.choices.counts.items()),
            _plain("counter", "requests_good_total", "Requests that met slo_ttft and slo_tpot.", tally.good),
            _plain(
                "gauge", "goodput_ratio", "Share of finished requests that met both objectives.", self._choice.goodput
            ),
            _plain("counter", "output_tokens_total", "Tokens of requests that ended well.", tally.output_tokens),
        ]
        for name, help, each in (
            ("ttft_seconds", "From the placement to the first token.", tally.ttft),
            ("tpot_seconds", "Seconds per token after the second, one value per request.", tally.tpot),
            ("transfer_seconds", "From P's last token to D's first.", tally.transfer),
        ):
            parts += [header("histogram", f"parley:cluster_{name}", help)]
            parts += each.lines(f"parley:cluster_{name}", "", "own")
        named = [(labels({"instance": str(each.id), "role": each.role}), each) for each in self._table]
        for kind, name, help, read in EACH:
            groups: list[Group] = [(common, [("", read(each))]) for common, each in named]
            parts.append(scalar(kind, f"parley:cluster_{name}", help, groups))
        counts = dict.fromkeys(get_args(State), 0)
        for instance in self._table:
            counts[instance.state(now)] += 1
        parts.append(_by("gauge", "instances", "Instances by state.", "state", counts.items()))
        return "".join(parts)


def _plain(kind: str, name: str, help: str, value: float) -> str:
    return scalar(kind, f"parley:cluster_{name}", help, [("", [("", value)])])


def _by(kind: str, name: str, help: str, label: str, values: Iterable[tuple[str, float]]) -> str:
    each = [(labels({label: value}), number) for value, number in values]
    return scalar(kind, f"parley:cluster_{name}", help, [("", each)])
