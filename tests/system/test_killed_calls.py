"""gRPC calls to a cluster of real processes while one is killed: streams must equal undisturbed ones exactly."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.cluster_processes import Cluster
from support.free_ports import free_port

from parley.dialects.triton.calls import STREAM_PATH
from parley.dialects.triton.rpc import infer

pytestmark = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes a minute: PARLEY_NIGHTLY=1")

TEXT = "Tell me about the river and the town. "


def encode_request(number: int) -> bytes:
    message = infer.INFER_REQUEST(model_name="parley-demo", id=f"{number}")
    text, stream = TEXT * (1 + 6 * (number % 3)), number % 4 != 3
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1], contents={"bytes_contents": [text.encode()]})
    message.inputs.add(name="stream", datatype="BOOL", shape=[1], contents={"bool_contents": [stream]})
    message.parameters["max_tokens"].int64_param = 150
    message.parameters["ignore_eos"].bool_param = True
    message.parameters["seed"].int64_param = number
    message.parameters["temperature"].double_param = 0.9
    return message.SerializeToString()


async def stream_requests(
    address: str, seen: Callable[[int], Any] = lambda count: None
) -> dict[str, tuple[bytes, bool, str]]:
    """Returns each request's text, end and errors. ``seen`` is called with the number of answers received so far."""
    results: dict[str, tuple[bytes, bool, str]] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(STREAM_PATH, response_deserializer=infer.STREAM_RESPONSE.FromString)()
        for number in range(8):
            await stream.write(encode_request(number))
        await stream.done_writing()
        count = 0
        async for answer in stream:
            inner, count = answer.infer_response, count + 1
            text, ended, error = results.get(inner.id, (b"", False, ""))
            assert not ended, "something follows the end"
            text += b"".join(inner.raw_output_contents)[4:]
            results[inner.id] = text, inner.parameters[infer.FINAL_PARAMETER].bool_param, error + answer.error_message
            seen(count)
    return results


@pytest.mark.parametrize("number", [0, 2], ids=["prefill", "decode"])
async def test_grpc_streams_survive_a_killed_instance(tmp_path: Path, number: int) -> None:
    port = free_port()
    cluster = Cluster(tmp_path, *("prefill", "prefill", "decode", "decode"), grpc_port=port, separate="always")
    try:
        address = f"127.0.0.1:{port}"
        expected = await stream_requests(address)
        assert len(expected) == 8 and all(ended and not error for _, ended, error in expected.values())
        for victim in (number, number + 1):
            for moment in (1, 40, 300):
                killed = cluster.instances[victim]

                def seen(count: int, moment: int = moment, killed: Any = killed) -> None:
                    if count == moment:
                        killed.signal(signal.SIGKILL)

                assert await stream_requests(address, seen) == expected, moment
                killed.restart()
                await asyncio.to_thread(cluster.ready)
        await asyncio.to_thread(cluster.wait_until_idle)
    finally:
        cluster.close()
