"""A server as a member of a cluster: its instance state and its peer, combined for the stages of a request.

Requests arrive in ``request_intake``; their stages are in ``prefill`` and ``decode``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from parley.disagg.kv.peer import KVPeer
from parley.instance.instance_state import InstanceState


class ClusterMember:
    """A member of the cluster whose instances share the secret in the instance state."""

    def __init__(self, instance_state: InstanceState, peer: KVPeer):
        self.instance_state = instance_state
        self.peer = peer
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def task_count(self) -> int:
        """Number of running coroutines that ``spawn_task`` started."""
        return len(self._tasks)

    def note_prompt(self, body: bytes, owner: str) -> None:
        """Record the prompt of a request whose keys and values will be computed or received here."""
        info = self.instance_state.models[0].engine.info
        if info is not None:
            self.instance_state.record_prompt(body, info.kv_pages * info.page_tokens, owner)

    def count_transfers(self, **amounts: float) -> None:
        """Add to the statistics of handovers."""
        for name, value in amounts.items():
            self.instance_state.transfers[name] = self.instance_state.transfers.get(name, 0) + value

    def spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that may outlive its request."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close_member(self) -> None:
        """Cancel everything that ``spawn_task`` started, and close all links."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peer.close_peer()
