"""Watching a service's health over gRPC. Knows the protocol's message, not where the state comes from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from parley.dialects.triton.rpc import control
from parley.dialects.triton.rpc.messages import ProtoMessage
from parley.errors import NotFound

CHECK_INTERVAL = 0.25  # seconds between two checks


async def watch_health(
    get_state: Callable[[], Awaitable[ProtoMessage]], write: Callable[[bytes], Awaitable[Any]]
) -> None:
    """Send a service's state now and after every change, until cancelled."""
    last_state = None
    while True:
        try:
            state = await get_state()
        except NotFound:
            state = control.HEALTH_RESPONSE(status="SERVICE_UNKNOWN")
        if state != last_state:
            await write(state.SerializeToString())
            last_state = state
        await asyncio.sleep(CHECK_INTERVAL)
