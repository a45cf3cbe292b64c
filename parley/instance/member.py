"""A server as a member of a cluster: its instance state and its peer, combined for the stages of a request.

Requests arrive in ``entry``; their stages are in ``prefill`` and ``decode``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from parley.disagg.kv.peer import Peer
from parley.instance.node import Node


class Member:
    """A member of the cluster whose instances share the secret in the instance state."""

    def __init__(self, node: Node, peer: Peer):
        self.node = node
        self.peer = peer
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, body: bytes) -> None:
        """Record the prompt of a request whose keys and values will be computed or received here."""
        info = self.node.models[0].engine.info
        if info is not None:
            self.node.note(body, info.kv_blocks * info.block_size)

    def count(self, **more: float) -> None:
        """Add to the statistics of handovers."""
        for name, value in more.items():
            self.node.transfers[name] = self.node.transfers.get(name, 0) + value

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that may outlive its request."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel everything that ``spawn`` started, and close all links."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peer.close()
