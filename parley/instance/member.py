"""A server as a member of a cluster: what comes in by a coordinator's order, and what other members hand over.

It brings together a service, its results, its role and its peer; what is done with a request is in ``prefill`` and
``decode``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from parley.dialects.dialect import Route
from parley.instance import handover
from parley.instance.decode import accept
from parley.instance.heads import Order
from parley.instance.prefill import Prefill
from parley.instance.results import Results
from parley.instance.role import Role
from parley.kv.peer import Peer
from parley.kv.taker import Taker
from parley.server.app import App
from parley.server.life import generate
from parley.server.respond import Exchange
from parley.server.service import Service


class Member:
    """``app`` answers what is handed over."""

    def __init__(self, app: App, results: Results, peer: Peer, role: Role):
        self.app = app
        self.results = results
        self.peer = peer
        self.role = role
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, service: Service, route: Route, exchange: Exchange, order: Order) -> None:
        """Do what a coordinator orders. Raises ParleyError, ClientGone."""
        exchange.identify(order.identity or exchange.unique)
        exchange.created = int(time.time()) if order.created is None else order.created
        handover.strip(exchange.headers)
        body = await exchange.peek()
        past = handover.split(exchange.before) if order.given else None
        exchange.leg = leg = Prefill(self, exchange, order, body, past)
        exchange.divert(leg.front)
        del body
        await generate(service, route, exchange)

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
