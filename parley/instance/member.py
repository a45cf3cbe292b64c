"""A server as a member of a cluster: its node and its peer, brought together for those who take part in a request.

How requests come in is in ``entry``, what is done with them in ``prefill`` and ``decode``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from parley.disagg.kv.peer import Peer
from parley.instance.node import Node


class Member:
    """Of the cluster whose instances know each other by the node's secret."""

    def __init__(self, node: Node, peer: Peer):
        self.node = node
        self.peer = peer
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, body: bytes) -> None:
        """Keys and values of this request's prompt are going to be here."""
        info = self.node.models[0].engine.info
        if info is not None:
            self.node.note(body, info.kv_blocks * info.block_size)

    def count(self, **more: float) -> None:
        """Add to what is counted of hand-overs."""
        for name, value in more.items():
            self.node.transfers[name] = self.node.transfers.get(name, 0) + value

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something apart from all requests."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End everything that ``spawn`` began, and all links."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peer.close()
