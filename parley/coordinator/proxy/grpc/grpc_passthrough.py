"""Passes gRPC calls through to one instance unchanged, messages as bytes, and returns its answers.

Used for servers other than parley, whose calls this process cannot parse. Needs the extra ``grpc``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from parley.coordinator import refusals
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_table import InstanceTable
from parley.disagg.wire.headers import NATIVE_PREFIX

GrpcContext = Any  # grpc.aio.ServicerContext, which has no types
NO_GRPC_ADDRESS = "No ready instance has a gRPC address. Set the key grpc of the instance in the coordinator's file."
CONNECTION_METADATA = frozenset(("user-agent", "te", "content-type"))  # metadata of one connection only
ROLE_PREFERENCE = {"mixed": 0, "decode": 1, "flex": 2, "prefill": 3}  # preference by role for running a whole request


class GrpcPassthrough:
    """The gRPC channels to instances, and the choice of an instance for each call."""

    def __init__(self, table: InstanceTable):
        self._table = table
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._open_calls: dict[int, int] = {}  # open calls by instance id

    async def pass_through(self, method: str, requests: AsyncIterator[bytes], context: GrpcContext) -> None:
        """Pass one call of any kind through to an instance; a unary call is a stream of one message."""
        instance = min(
            (instance for instance in self._table.usable_instances() if instance.grpc),
            key=self._instance_rank,
            default=None,
        )
        if instance is None:
            no_address = bool(self._table.usable_instances())
            code = grpc.StatusCode.UNIMPLEMENTED if no_address else grpc.StatusCode.UNAVAILABLE
            not_ready = refusals.plain_sentence(refusals.TEXTS.cluster_not_ready)
            await context.abort(code, NO_GRPC_ADDRESS if no_address else not_ready)
            raise AssertionError  # abort has raised
        metadata = [
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if key not in CONNECTION_METADATA and not key.startswith(("grpc-", NATIVE_PREFIX.decode()))
        ]
        self._open_calls[instance.id] = self._open_calls.get(instance.id, 0) + 1
        upstream_call = self._channel_to(instance).stream_stream(method)(
            requests, metadata=metadata, timeout=context.time_remaining()
        )
        try:
            await context.send_initial_metadata(_forwardable_metadata(await upstream_call.initial_metadata()))
            async for message in upstream_call:
                await context.write(message)
        except grpc.aio.AioRpcError:
            pass  # the status is reported below
        finally:
            self._open_calls[instance.id] -= 1
            if not upstream_call.done():
                upstream_call.cancel()
        context.set_trailing_metadata(_forwardable_metadata(await upstream_call.trailing_metadata()))
        context.set_code(await upstream_call.code())
        context.set_details(await upstream_call.details())

    async def close_channels(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()

    def _instance_rank(self, instance: ClusterInstance) -> tuple[int, int, int]:
        return ROLE_PREFERENCE.get(instance.role, 4), self._open_calls.get(instance.id, 0) + instance.tasks, instance.id

    def _channel_to(self, instance: ClusterInstance) -> grpc.aio.Channel:
        if instance.grpc not in self._channels:
            unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
            self._channels[instance.grpc] = grpc.aio.insecure_channel(instance.grpc, options=unlimited)
        return self._channels[instance.grpc]


def _forwardable_metadata(metadata: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((key, value) for key, value in metadata or () if not key.startswith("grpc-"))
