"""The gRPC passthrough leaves messages, metadata, status and cancellation unchanged between client and instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from parley.coordinator.config import CoordinatorOptions, InstanceConfig
from parley.coordinator.proxy.grpc.grpc_port import CoordinatorGrpcPort
from parley.coordinator.routing.instance_table import InstanceTable
from parley.web.http_options import HttpOptions


class Echo(grpc.GenericRpcHandler):
    """An instance that echoes messages and records the metadata it gets."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.cancelled = asyncio.Event()

    def service(self, details: Any) -> Any:
        async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
            self.seen.append((details.method, dict(context.invocation_metadata())))
            context.set_trailing_metadata((("x-end", "1"),))
            try:
                async for message in requests:
                    if message == b"fail":
                        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")
                    if message == b"wait":
                        await asyncio.sleep(10)
                    await context.write(message + b"!")
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

        return grpc.stream_stream_rpc_method_handler(answer)


async def fail_if_called(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("it is no call for the coordinator")


@pytest.fixture
async def passthrough() -> AsyncIterator[tuple[Echo, grpc.aio.Channel, InstanceTable]]:
    echo, server = Echo(), grpc.aio.server()
    server.add_generic_rpc_handlers((echo,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    table = InstanceTable(CoordinatorOptions(instances=(InstanceConfig(id=1, url="http://127.0.0.1:1", grpc=address),)))
    table.record_answer(table.instances[1])
    port = CoordinatorGrpcPort(table, fail_if_called, table.options, HttpOptions())
    async with grpc.aio.insecure_channel(await port.start_server("127.0.0.1", 0)) as channel:
        yield echo, channel, table
    await port.stop_server(0)
    await server.stop(0)


async def test_grpc_passthrough_forwards_messages_and_metadata(passthrough):
    echo, channel, _ = passthrough
    metadata = (("x-mine", "1"), ("parley-secret", "no"))
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"a", metadata=metadata)
    assert await call == b"a!"
    assert ("x-end", "1") in tuple(await call.trailing_metadata())
    method, metadata_seen = echo.seen[0]
    assert method == "/inference.GRPCInferenceService/ModelInfer"
    assert metadata_seen["x-mine"] == "1" and "parley-secret" not in metadata_seen

    async def five_messages() -> AsyncIterator[bytes]:
        for number in range(5):
            yield b"%d" % number

    answers = [message async for message in channel.stream_stream("/a/b")(five_messages())]
    assert answers == [b"0!", b"1!", b"2!", b"3!", b"4!"]


async def test_grpc_passthrough_returns_the_status_of_the_instance(passthrough):
    _, channel, table = passthrough
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await channel.unary_unary("/a/b")(b"fail")
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such thing")
    address, table.instances[1].grpc = table.instances[1].grpc, ""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await channel.unary_unary("/a/b")(b"a")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED and "grpc" in refused.value.details()
    table.instances[1].grpc = address
    table.set_result_stream(table.instances[1], False)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await channel.unary_unary("/a/b")(b"a")
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_grpc_passthrough_forwards_cancellation(passthrough):
    echo, channel, _ = passthrough
    call = channel.unary_unary("/a/b")(b"wait")
    while not echo.seen:
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait_for(echo.cancelled.wait(), 60)
