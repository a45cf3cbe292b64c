"""Answers that the coordinator gives itself: whether it is ready, its version, its metrics and its load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from parley.coordinator import refusals
from parley.coordinator.ports.metrics import CONTENT_TYPE
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.downstream.client_keys import ClientKeys
from parley.coordinator.proxy.paths import ApiPath
from parley.coordinator.routing.instance_table import InstanceTable
from parley.dialects.reply import Answer
from parley.dialects.route import RouteKind
from parley.types import Tenant
from parley.version import __version__


class LocalAnswers:
    """Answers requests about the coordinator. ``count_others``: the number of open requests besides the answered one.

    ``metrics_page`` renders the metrics; ``strict``: say in the documented words that no request can be served.
    """

    def __init__(
        self,
        table: InstanceTable,
        metrics_page: Callable[[Tenant], Awaitable[bytes]],
        client_keys: ClientKeys | None,
        strict: bool,
        count_others: Callable[[], int],
    ):
        self._table, self._metrics_page, self._client_keys = table, metrics_page, client_keys
        self._strict, self._count_others = strict, count_others

    async def answer_request(self, kind: RouteKind, path: ApiPath, client: DownstreamClient, *, is_ready: bool) -> bool:
        """Answer a request that concerns the coordinator itself; False if it does not. Raises ParleyError, ClientGone.

        ``is_ready``: requests can be served now.
        """
        write = path.route.writer
        if kind in ("live", "ready") and write is not None:
            probe_answer: Answer = write(kind == "live" or is_ready)
            await client.send_answer(probe_answer)
        elif kind == "live":
            await client.send_response(b'{"status":"live"}')
        elif kind == "ready" and is_ready:
            await client.send_response(b'{"status":"ready"}')
        elif kind == "ready":
            state = self._explain_waiting()
            await client.send_response(msgspec.json.encode(state), 503, extra_headers=((b"retry-after", b"1"),))
        elif kind == "health":
            if not is_ready:
                raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
            await client.send_response(b"")
        elif kind == "metrics":
            await client.send_response(await self._metrics_page(client.tenant), content_type=CONTENT_TYPE)
        elif kind == "version" and write is not None:
            await client.send_response(write(__version__), content_type=path.route.content_types[0].encode())
        elif kind == "usage" and self._client_keys is not None:
            await client.send_response(await self._client_keys.usage_page(client))
        elif kind == "load" and write is not None:
            await client.send_response(write(self._count_others()))
        else:
            return False
        return True

    def _explain_waiting(self) -> dict[str, object]:
        """Return the answer while no request can be served: the states of instances, and a reason if one is known."""
        text = refusals.TEXTS.cluster_not_ready
        state: dict[str, object] = {
            "status": "waiting",
            "message": text if self._strict else refusals.plain_sentence(text),
            "instances": {str(instance.id): instance.phase_at(self._table.clock()) for instance in self._table},
        }
        if missing := self._table.explain_lack():
            state["reason"] = missing
        return state
