"""A server as a member of a cluster: what comes in by a coordinator's order, and what other members hand over.

It brings together a service, its results, its role and its peer; what is done with a request is in ``prefill`` and
``decode``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from parley.dialects.dialect import Answer
from parley.instance import heads
from parley.instance.decode import accept
from parley.instance.prefill import Prefill
from parley.instance.results import Results
from parley.instance.role import Place, Role
from parley.kv.peer import Peer
from parley.kv.taker import Taker
from parley.server.app import App
from parley.server.respond import Exchange


class Member:
    """``app`` answers what is handed over. ``own``: where others find this one. ``secret``: the cluster's."""

    def __init__(
        self, app: App, results: Results, peer: Peer, role: Role, own: Callable[[], Place], secret: str = ""
    ):
        self.app = app
        self.results = results
        self.peer = peer
        self.role = role
        self._own = own
        self._secret = secret
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self, exchange: Exchange) -> Answer | None:
        """Which leg of its request an exchange is, by its headers; or the answer that refuses it."""
        if b"req-type" not in exchange.headers and self.role.name == "mixed":
            return None
        try:
            order = heads.read(exchange.headers, self.role, self._own(), self._secret)
        except heads.Refused as refused:
            return refused.answer
        exchange.identify(order.identity or exchange.unique)
        exchange.created = int(time.time()) if order.created is None else order.created
        exchange.leg = leg = Prefill(self, exchange, order)
        exchange.divert(leg.front)
        return None

    async def accept(self, taker: Taker) -> None:
        """A request that another member has begun."""
        if self.role.unknown or self.role.name == "prefill":
            await taker.refuse(f"Its role is {self.role.name}.")
        else:
            await accept(self, taker)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside all requests."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is still done beside them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
