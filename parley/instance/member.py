"""A server as a member of a cluster: what comes in by a coordinator's order, and what other members hand over.

It brings together a service, its node and its peer; what is done with a request is in ``prefill`` and ``decode``.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from parley.dialects.dialect import Route
from parley.instance import handover, recompute
from parley.instance.decode import accept
from parley.instance.heads import Order
from parley.instance.node import Node
from parley.instance.prefill import Prefill
from parley.instance.role import Address
from parley.kv.memory import BadArena
from parley.kv.peer import Peer
from parley.kv.taker import Taker
from parley.kv.transport import LinkError
from parley.server.app import App
from parley.server.life import generate
from parley.server.model import Model
from parley.server.respond import Exchange
from parley.server.service import Service
from parley.types import Arena, ModelInfo

log = logging.getLogger("parley.instance")


class Member:
    """Of the cluster whose instances know each other by the node's secret. ``apps``: of its ports."""

    def __init__(self, service: Service, peer: Peer, apps: Sequence[App]):
        self.service = service
        self._apps = apps
        self.node: Node = service.node
        self.peer = peer
        self._tasks: set[asyncio.Task[None]] = set()
        self._unlinked: dict[Address, str] = {}  # why, as it was said last
        self.node.begin, self.node.arrive = self.begin, self.share
        for model in service.models:
            self.share(model)

    def app(self, apis: str) -> App | None:
        """Which of them answers what was handed over by a port with these APIs."""
        return next((app for app in self._apps if app.apis == apis), None)

    async def listen(self, host: str, port: int) -> None:
        """Let other members hand over to this one. Raises OSError."""
        await self.peer.listen(host, port, self.accept)
        self.node.port, self.node.reach = self.peer.port, self.reach

    def share(self, model: Model) -> None:
        """Have pages of a model that is served, from when it is loaded on."""
        model.engine.began = partial(self._began, model)
        if model.engine.info is not None:
            self._began(model, model.engine.info)

    def _began(self, model: Model, info: ModelInfo) -> None:
        arena = info.arena
        if arena is None and self.service.options.engine == "scripted":
            arena = Arena(0, -1, info.kv_blocks, [], "scripted")  # its pages hold nothing
        try:
            if arena is not None:
                self.peer.add(model.name, arena)
        except BadArena as error:
            log.error("Nothing can be handed over: %s", error)

    async def reach(self, address: Address) -> None:
        """Try to link with another member, and say why not unless that was said. Raises OSError."""
        for model in self.service.models:
            try:
                (await self.peer.connect(str(address), model.name)).close()
            except LinkError as error:
                if self._unlinked.get(address) != str(error):
                    self._unlinked[address] = str(error)
                    log.info("There is no link to %s: %s", address, error)
                raise OSError(errno.ENOLINK, str(error)) from None
        self._unlinked.pop(address, None)

    async def begin(self, service: Service, route: Route, exchange: Exchange, order: Order) -> None:
        """Do what a coordinator orders. Raises ParleyError, ClientGone, heads.Refused."""
        exchange.identify(order.identity or exchange.unique)
        exchange.created = int(time.time()) if order.created is None else order.created
        exchange.arrived -= order.spent
        handover.strip(exchange.headers)
        body = await exchange.peek()
        past, prompt = handover.split(exchange.before) if order.given else None, None
        if order.recompute and not order.client:
            opened = recompute.read(exchange.scope["path"], body)
            body, past, prompt = opened.body, opened.past, opened.prompt
            exchange.replace(body)
            if opened.unique:
                exchange.identify(opened.unique)
                exchange.created = opened.created
        exchange.leg = leg = Prefill(self, exchange, order, body, past, prompt)
        exchange.divert(leg.opening)
        self.note(body)
        del body
        await generate(service, route, exchange)

    async def accept(self, taker: Taker) -> None:
        """Take over a request that another member has begun, or refuse it."""
        role = self.node.role
        if role.unknown or not role.decodes:
            share = f" with {role.share} % for prompts" if role.name == "flex" else ""
            await taker.refuse(f"Its role is {role.name}{share}.")
        else:
            await accept(self, taker)

    def note(self, body: bytes) -> None:
        """Keys and values of this request's prompt are going to be here."""
        info = self.service.main.engine.info
        if info is not None:
            self.node.note(body, info.kv_blocks * info.block_size)

    def count(self, **more: float) -> None:
        """Add to what is counted of hand-overs."""
        for name, value in more.items():
            self.node.transfers[name] = self.node.transfers.get(name, 0) + value

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside all requests."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is still done beside them, and all links."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peer.close()
