"""Watching a service's health over gRPC. Knows the protocol's message, not where the state comes from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from parley.dialects.triton.rpc import control
from parley.dialects.triton.rpc.messages import Message
from parley.errors import NotFound

LOOK = 0.25  # seconds between two checks


async def watch(look: Callable[[], Awaitable[Message]], write: Callable[[bytes], Awaitable[Any]]) -> None:
    """Send a service's state now and after every change, until cancelled."""
    told = None
    while True:
        try:
            state = await look()
        except NotFound:
            state = control.STATE(status="SERVICE_UNKNOWN")
        if state != told:
            await write(state.SerializeToString())
            told = state
        await asyncio.sleep(LOOK)
