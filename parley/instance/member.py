"""A server as a member of a cluster: a service, its node and its peer, brought together for those who take part in a
request. How requests come in is in ``entry``, what is done with them in ``prefill`` and ``decode``.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from parley.instance.node import Node
from parley.instance.role import Address
from parley.kv.memory import BadArena
from parley.kv.peer import Peer
from parley.kv.taker import Taker
from parley.kv.transport import LinkError
from parley.server.app import App
from parley.server.model import Model
from parley.server.service import Service
from parley.types import Arena, ModelInfo

log = logging.getLogger("parley.instance")


class Member:
    """Of the cluster whose instances know each other by the node's secret. ``apps``: of its ports. ``take``: is given
    what another member hands over."""

    take: Callable[[Taker], Awaitable[None]]

    def __init__(self, service: Service, peer: Peer, apps: Sequence[App]):
        self.service = service
        self._apps = apps
        self.node: Node = service.node
        self.peer = peer
        self._tasks: set[asyncio.Task[None]] = set()
        self._unlinked: dict[Address, str] = {}  # why, as it was said last
        self.node.arrive = self.share
        for model in service.models:
            self.share(model)

    def app(self, apis: str) -> App | None:
        """Which of them answers what was handed over by a port with these APIs."""
        return next((app for app in self._apps if app.apis == apis), None)

    async def listen(self, host: str, port: int) -> None:
        """Let other members hand over to this one. Raises OSError."""
        await self.peer.listen(host, port, self.take)
        self.node.port, self.node.reach = self.peer.port, self.reach

    def share(self, model: Model) -> None:
        """Have pages of a model that is served, from when it is loaded on."""
        model.engine.load_observers.append(partial(self._began, model))
        if model.engine.info is not None:
            self._began(model, model.engine.info)

    def _began(self, model: Model, info: ModelInfo) -> None:
        arena = info.arena
        if arena is None and model.engine.scripted:
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
