"""Passes gRPC calls through to one instance unchanged, messages as bytes, and returns its answers.

Used for servers other than parley, whose calls this process cannot parse. Needs the extra ``grpc``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from parley.coordinator import refusals
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.instance_table import Table
from parley.disagg.wire.headers import OWN

Context = Any  # grpc.aio.ServicerContext, which has no types
UNSAID = "No ready instance has a gRPC address. Set the key grpc of the instance in the coordinator's file."
DROPPED = frozenset(("user-agent", "te", "content-type"))  # metadata of one connection only
ORDER = {"mixed": 0, "decode": 1, "flex": 2, "prefill": 3}  # preference by role for running a whole request


class Bypass:
    """The gRPC channels to instances, and the choice of an instance for each call."""

    def __init__(self, table: Table):
        self._table = table
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._open: dict[int, int] = {}  # open calls by instance id

    async def call(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        """Pass one call of any kind through to an instance; a unary call is a stream of one message."""
        instance = min((each for each in self._table.usable() if each.grpc), key=self._rank, default=None)
        if instance is None:
            unsaid = bool(self._table.usable())
            code = grpc.StatusCode.UNIMPLEMENTED if unsaid else grpc.StatusCode.UNAVAILABLE
            await context.abort(code, UNSAID if unsaid else refusals.NOT_READY)
            raise AssertionError  # abort has raised
        metadata = [
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if key not in DROPPED and not key.startswith(("grpc-", OWN.decode()))
        ]
        self._open[instance.id] = self._open.get(instance.id, 0) + 1
        call = self._channel(instance).stream_stream(method)(
            requests, metadata=metadata, timeout=context.time_remaining()
        )
        try:
            await context.send_initial_metadata(_kept(await call.initial_metadata()))
            async for message in call:
                await context.write(message)
        except grpc.aio.AioRpcError:
            pass  # the status is reported below
        finally:
            self._open[instance.id] -= 1
            if not call.done():
                call.cancel()
        context.set_trailing_metadata(_kept(await call.trailing_metadata()))
        context.set_code(await call.code())
        context.set_details(await call.details())

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()

    def _rank(self, each: Instance) -> tuple[int, int, int]:
        return ORDER.get(each.role, 4), self._open.get(each.id, 0) + each.tasks, each.id

    def _channel(self, instance: Instance) -> grpc.aio.Channel:
        if instance.grpc not in self._channels:
            unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
            self._channels[instance.grpc] = grpc.aio.insecure_channel(instance.grpc, options=unlimited)
        return self._channels[instance.grpc]


def _kept(metadata: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((key, value) for key, value in metadata or () if not key.startswith("grpc-"))
