"""Triton's API over gRPC, passed on: a call goes to one instance as it is, and what that says goes back. Messages stay
bytes. Imported only by who serves this port; it needs the extra ``grpc``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from parley.cluster import words
from parley.cluster.table import Instance, Table
from parley.instance.heads import OWN

Context = Any  # grpc.aio.ServicerContext, which has no types
HELD = frozenset(("user-agent", "te", "content-type"))  # metadata that belongs to one connection
ORDER = {"mixed": 0, "decode": 1, "flex": 2, "prefill": 3}  # who rather takes a whole request


class Port:
    """``limit``: bytes of a message. ``start`` and ``stop`` belong to one event loop."""

    def __init__(self, table: Table, limit: int):
        self._table = table
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._open: dict[int, int] = {}  # calls by instance
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", limit),
                   ("grpc.max_send_message_length", -1)]  # fmt: skip
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((_Every(self._pass),))

    async def start(self, host: str, port: int) -> str:
        """Listen; 0 takes a free port. Returns what clients write. Raises OSError."""
        name = f"[{host}]" if ":" in host else host
        try:
            bound = self._server.add_insecure_port(f"{name}:{port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host} port {port} for gRPC.") from error
        await self._server.start()
        return f"{name}:{bound}"

    async def stop(self, seconds: float) -> None:
        await self._server.stop(seconds)
        for channel in self._channels.values():
            await channel.close()

    async def _pass(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        """One call, whatever its kind: a single message is a stream of one."""
        instance = self._chosen()
        if instance is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, words.NOT_READY)
            raise AssertionError  # abort has raised
        metadata = [
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if key not in HELD and not key.startswith(("grpc-", OWN.decode()))
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
            pass  # which is what is told below
        finally:
            self._open[instance.id] -= 1
            if not call.done():
                call.cancel()
        context.set_trailing_metadata(_kept(await call.trailing_metadata()))
        context.set_code(await call.code())
        context.set_details(await call.details())

    def _chosen(self) -> Instance | None:
        able = [each for each in self._table.usable() if each.grpc]
        return min(able, key=self._rank, default=None)

    def _rank(self, each: Instance) -> tuple[int, int, int]:
        return ORDER.get(each.role, 4), self._open.get(each.id, 0) + each.tasks, each.id

    def _channel(self, instance: Instance) -> grpc.aio.Channel:
        if instance.grpc not in self._channels:
            unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
            self._channels[instance.grpc] = grpc.aio.insecure_channel(instance.grpc, options=unlimited)
        return self._channels[instance.grpc]


class _Every(grpc.GenericRpcHandler):
    """Has every method there may be."""

    def __init__(self, work: Callable[..., Any]):
        self._work = work

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._work, details.method))


def _kept(metadata: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((key, value) for key, value in metadata or () if not key.startswith("grpc-"))
