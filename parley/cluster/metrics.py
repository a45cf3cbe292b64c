"""The metrics port: what all instances count, added up, and what the coordinator counts itself, in Prometheus' format.

Names of its own series are here and in docs/coordinator.md; they begin with ``parley:cluster_``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import get_args

from parley.cluster.choice import Choice
from parley.cluster.exposition import gather
from parley.cluster.health import Ask, Unanswered
from parley.cluster.instance import Instance, State
from parley.cluster.plane import Asked, Plane, Reply
from parley.cluster.table import Table
from parley.metrics.series import Group, header, labels, scalar

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
FRESH = 3.0  # seconds in which what instances told is told again

Read = Callable[[Instance], float]
EACH: tuple[tuple[str, str, str, Read], ...] = (
    ("gauge", "instance_tasks", "Requests that are there.", lambda each: each.tasks),
    ("gauge", "instance_prefill_tokens", "Tokens sent there that are still to be prefilled.",
     lambda each: each.prefill.tokens),
    ("gauge", "instance_slots_used", "Slots that its requests take.",
     lambda each: each.prefill.slots + each.decode.slots),
    ("gauge", "instance_blocks_used", "KV blocks in use, as it says.", lambda each: each.used),
    ("gauge", "instance_blocks_total", "KV blocks that it has.", lambda each: each.blocks),
    ("gauge", "instance_waiting", "Requests that wait there, as it says.", lambda each: each.waiting),
    ("gauge", "instance_running", "Requests that run there, as it says.", lambda each: each.running),
    ("gauge", "pinned_blocks", "KV blocks kept for others to fetch, as it says.", lambda each: each.pinned),
    ("gauge", "reserved_blocks", "KV blocks kept for what others give, as it says.", lambda each: each.reserved),
    ("gauge", "instance_prefill_rate", "Prompt tokens per second, as it says.", lambda each: each.prefill_rate),
    ("gauge", "instance_decode_rate", "Tokens per second, as it says.", lambda each: each.decode_rate),
    ("counter", "transfers_total", "Hand-overs of KV pages, as it says.",
     lambda each: each.transfers.get("count", 0)),
    ("counter", "transfer_bytes_total", "Bytes of KV pages that it handed over, as it says.",
     lambda each: each.transfers.get("bytes", 0)),
    ("counter", "instance_transfer_seconds_total", "Seconds that its hand-overs took, as it says.",
     lambda each: each.transfers.get("seconds", 0)),
)  # fmt: skip


class Metrics:
    def __init__(self, table: Table, choice: Choice, ask: Ask, host: str = "127.0.0.1"):
        self._table, self._choice, self._ask = table, choice, ask
        self._gathered, self._when = "", float("-inf")
        self._one = asyncio.Lock()
        self.app = Plane({("GET", "/metrics"): self.page}, host)

    async def page(self, asked: Asked) -> Reply:
        return Reply(200, (await self._sums() + self.own()).encode(), CONTENT_TYPE)

    async def _sums(self) -> str:
        """Of the instances that answer; who asks meanwhile waits for the same."""
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
        """The coordinator's own series."""
        tally, now = self._choice.tally, self._table.clock()
        parts = [
            _plain("gauge", "ready", "1 while requests are taken.", float(self._choice.possible())),
            _plain("counter", "requests_total", "Requests that came to be given to instances.", tally.requests),
            _plain("counter", "retries_total", "Attempts beyond the first.", tally.retries),
            _plain("gauge", "requests_open", "Requests that instances have.", self._choice.open),
            _plain("gauge", "requests_waiting", "Requests that nobody has room for.", self._choice.waiting),
            _by("counter", "requests_ended_total", "Attempts that ended.", "how", tally.ended.counts.items()),
            _by("counter", "requests_refused_total", "Requests refused.", "status", tally.refusals.counts.items()),
            _by("counter", "choices_total", "Choices by where a request runs.", "how", tally.choices.counts.items()),
            _plain("counter", "requests_good_total", "Requests that met slo_ttft and slo_tpot.", tally.good),
            _plain(
                "gauge", "goodput_ratio", "Of the requests that are over, those that met both.", self._choice.goodput
            ),
            _plain("counter", "output_tokens_total", "Tokens of requests that ended well.", tally.output_tokens),
        ]
        for name, help, each in (
            ("ttft_seconds", "From the choice to the first token.", tally.ttft),
            ("tpot_seconds", "Seconds per token behind the second, one value for each request.", tally.tpot),
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
