"""Triton's API over gRPC: calls, streams, keys, limits, and the cleanup after a client disconnects."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from ipaddress import ip_network
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzz_settings, run_in_loop
from support.grpc_client import BROKEN_MESSAGE, GrpcClient, answer_text, build_infer_request, grpc_error, is_final
from support.http_client import HELLO_CHAT, MODEL_INFO, RunningServer
from support.metrics_page import metric_value
from support.server_process import ScriptedServer

from parley.dialects.triton.rpc import infer
from parley.dialects.triton.rpc.messages import HEALTH_SCHEMA, INFERENCE_SCHEMA
from parley.engine.scripted_engine import ScriptedEngine
from parley.serving.grpc.grpc_port import TritonGrpcPort
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.settings.key_file import make_key
from parley.types import ParleySettings
from parley.web.auth import PortReach

KEY = "sk-right-key-0123456789"
INFER = "/v2/models/tiny/infer"


ServeGrpc = Callable[..., Awaitable[GrpcClient]]


@pytest.fixture
async def serve_grpc(serve) -> AsyncIterator[ServeGrpc]:
    """Start a server with a gRPC port of this reach; the other options are those of ``serve``."""
    clients: list[GrpcClient] = []

    async def start(reach: PortReach = "local", **options: Any) -> GrpcClient:
        server = await serve(**options)
        port = TritonGrpcPort(server.service, partial(server.instance_state.check_client, reach=reach))
        clients.append(GrpcClient(server, port, (await port.start_server([("127.0.0.1", 0)]))[0]))
        return clients[-1]

    yield start
    for calls in clients:
        await calls.channel.close()
        await calls.port.stop_server(0)


# -- calls


async def test_grpc_infer_gives_the_same_answer_as_http(serve_grpc):
    calls = await serve_grpc()
    answer = await calls.infer(request_id="7", max_tokens=5)
    entry = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a b c"]}
    flag = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]}
    other = await calls.server.post(INFER, {"id": "7", "inputs": [entry, flag], "parameters": {"max_tokens": 5}})
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "tiny", "1")
    assert [answer_text(answer)] == other.json["outputs"][0]["data"] and len(answer_text(answer)) > 3
    assert not answer.parameters
    await calls.server.wait_until_idle()


async def test_every_grpc_query_method_answers(serve_grpc):
    calls = await serve_grpc()
    _, methods = INFERENCE_SCHEMA.find_service("GRPCInferenceService")
    for name in (method.name for method in methods):
        members = {"name": "tiny"} if name in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics") else {}
        if name == "RepositoryModelLoad":
            members = {"model_name": "tiny"}
        if name.startswith("ModelInfer") or name == "ModelStreamInfer":
            continue
        if name in ("RepositoryModelUnload", "SystemSharedMemoryRegister", "CudaSharedMemoryRegister"):
            assert (await grpc_error(calls.call(name)))[0] in ("UNAVAILABLE", "UNIMPLEMENTED")
        else:
            assert (await calls.call(name, **members)) is not None
    assert (await calls.call("ModelMetadata", name="tiny")).inputs[0].name == "text_input"


@pytest.mark.parametrize(
    ("members", "code", "sentence"),
    [
        ({"model": "other"}, "NOT_FOUND", "Request for unknown model: 'other' is not found"),
        ({"model": ""}, "NOT_FOUND", "Request for unknown model: '' is not found"),
        ({"temperature": -1.0}, "INVALID_ARGUMENT", "'temperature'"),
        ({"text": "a" * 5000}, "INVALID_ARGUMENT", "maximum context length is 4096"),
        ({"text": ""}, "INVALID_ARGUMENT", "empty"),
    ],
)
async def test_grpc_infer_rejects_bad_requests_with_a_status(serve_grpc, members, code, sentence):
    calls = await serve_grpc()
    status = await grpc_error(calls.infer(**members))
    assert status[0] == code and sentence in status[1]
    await calls.server.wait_until_idle()


async def test_grpc_rejects_broken_messages_and_unknown_methods(serve_grpc):
    calls = await serve_grpc()
    for name in ("ModelInfer", "ModelConfig"):
        assert await grpc_error(calls.send(name, BROKEN_MESSAGE)) == ("INTERNAL", "The message could not be read.")
    stream = calls.stream()
    await stream.write(BROKEN_MESSAGE)
    assert await grpc_error(stream.read()) == ("INTERNAL", "The message could not be read.")
    method = calls.channel.unary_unary("/inference.GRPCInferenceService/Nothing")
    assert (await grpc_error(method(b"")))[0] == "UNIMPLEMENTED"
    assert answer_text(await calls.infer())


async def test_grpc_rejects_messages_over_the_limit_even_compressed(serve_grpc):
    calls = await serve_grpc(body_limit=4096)
    assert (await grpc_error(calls.infer(text="a" * 5000)))[0] == "RESOURCE_EXHAUSTED"
    zipped = calls.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    bomb = build_infer_request(text="a" * (8 << 20)).SerializeToString()
    assert (await grpc_error(zipped(bomb, compression=grpc.Compression.Gzip)))[0] == "RESOURCE_EXHAUSTED"
    assert answer_text(await calls.infer())


MANY_FIELDS = {
    "inputs": b"\x2a\x00" * 1_000_000,
    "raw contents": b"\x3a\x00" * 1_000_000,
    "strings in an input": b"\x2a\x88\x89\x7a\x2a\x84\x89\x7a" + b"\x42\x00" * 1_000_002,
    "parameters": b"\x22\x00" * 1_000_000,
    "numbers": b"\x2a\x88\xc6\xbb\x01\x2a\x84\xc6\xbb\x01\x1a\x80\xc6\xbb\x01" + b"\x01" * 3_072_768,
}


@pytest.mark.parametrize("kind", MANY_FIELDS)
async def test_grpc_refuses_messages_of_too_many_fields_before_it_builds_them(serve_grpc, kind):
    calls = await serve_grpc()
    message = infer.INFER_REQUEST(model_name="tiny").SerializeToString() + MANY_FIELDS[kind]
    code, sentence = await grpc_error(calls.send("ModelInfer", message))
    assert code == "INVALID_ARGUMENT"
    assert sentence.startswith("The message has more than")
    stream = calls.stream()
    await stream.write(message)
    assert (await grpc_error(stream.read()))[0] == "INVALID_ARGUMENT"
    assert answer_text(await calls.infer())
    await calls.server.until(lambda: calls.server.service.options.body_budget.held_bytes == 0)


async def test_grpc_carries_messages_larger_than_its_defaults(serve_grpc):
    text = "a b c " * 20_000
    calls = await serve_grpc(info=long_context_info())
    message = build_infer_request(text=text, max_tokens=4)
    message.inputs[2].contents.bool_contents[0] = False
    answer = await calls.send("ModelInfer", message.SerializeToString())
    assert answer_text(answer).startswith(text)


def long_context_info() -> Any:
    import msgspec
    from support.http_client import MODEL_INFO

    return msgspec.structs.replace(MODEL_INFO, max_model_len=1 << 20)


async def test_grpc_reads_compressed_calls(serve_grpc):
    calls = await serve_grpc()
    method = calls.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    plain = await method(build_infer_request(max_tokens=9).SerializeToString())
    for coding in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert await method(build_infer_request(max_tokens=9).SerializeToString(), compression=coding) == plain


# -- streams


async def test_grpc_stream_has_the_text_in_pieces(serve_grpc):
    calls = await serve_grpc(tick=0.002)
    stream = calls.stream()
    await stream.write(build_infer_request(request_id="7", stream=True, max_tokens=8).SerializeToString())
    await stream.done_writing()
    answers = [answer async for answer in stream]
    assert len(answers) > 2 and [is_final(answer) for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert {answer.infer_response.id for answer in answers} == {"7"}
    text = "".join(answer_text(answer.infer_response) for answer in answers)
    assert text == answer_text(await calls.infer(max_tokens=8))
    assert await stream.code() == grpc.StatusCode.OK


async def test_grpc_embedding_is_one_answer_streamed_or_not(serve_grpc):
    calls = await serve_grpc()
    message = build_infer_request(request_id="7", stream=True)
    embedding_request = json.dumps({"input": "a b c", "pooling_params": {"dimensions": [4]}}).encode()
    message.inputs.add(
        name="embedding_request", datatype="BYTES", shape=[1], contents={"bytes_contents": [embedding_request]}
    )
    stream = calls.stream()
    await stream.write(message.SerializeToString())
    await stream.done_writing()
    (answer,) = [answer async for answer in stream]
    assert is_final(answer) and answer.infer_response.id == "7"
    vector = json.loads(answer_text(answer.infer_response))
    openai = await calls.server.post("/v1/embeddings", {"model": "tiny", "input": "a b c", "dimensions": 4})
    assert vector == openai.json["data"][0]["embedding"] and len(vector) == 4
    assert json.loads(answer_text(await calls.send("ModelInfer", message.SerializeToString()))) == vector


async def test_requests_of_one_grpc_stream_run_concurrently(serve_grpc):
    calls = await serve_grpc(tick=0.002)
    stream = calls.stream()
    for own_id in "123":
        await stream.write(build_infer_request(request_id=own_id, stream=True, max_tokens=12).SerializeToString())
    await stream.write(build_infer_request(request_id="whole", max_tokens=12).SerializeToString())
    await stream.done_writing()
    order = [(answer.infer_response.id, is_final(answer)) async for answer in stream]
    for own_id in ("1", "2", "3"):
        own = [last for request_id, last in order if request_id == own_id]
        assert len(own) > 2 and own == [False] * (len(own) - 1) + [True]
    assert [last for request_id, last in order if request_id == "whole"] == [True]
    first = order.index(("1", True))
    assert {request_id for request_id, _ in order[:first]} >= {"1", "2", "3"}, "they came one after another"


async def test_grpc_stream_stays_open_after_a_failed_request(serve_grpc):
    calls = await serve_grpc()
    stream = calls.stream()
    for bad in (
        build_infer_request(request_id="x", model="other"),
        build_infer_request(request_id="x", temperature=-1.0),
        build_infer_request(request_id="x", text="a" * 5000),
    ):
        await stream.write(bad.SerializeToString())
        answer = await stream.read()
        assert answer.error_message and answer.infer_response.id == "x" and is_final(answer)
        assert not answer.infer_response.outputs
    await stream.write(build_infer_request(request_id="y").SerializeToString())
    answer = await stream.read()
    assert not answer.error_message and answer_text(answer.infer_response)
    await stream.done_writing()
    assert await stream.read() == grpc.aio.EOF and await stream.code() == grpc.StatusCode.OK


async def test_triton_grpc_error_metadata_ends_the_stream_on_first_error(serve_grpc):
    calls = await serve_grpc(tick=0.01)
    stream = calls.stream(metadata=(("triton_grpc_error", "true"),))
    await stream.write(build_infer_request(request_id="long", stream=True, max_tokens=1000).SerializeToString())
    assert not (await stream.read()).error_message
    await stream.write(build_infer_request(request_id="x", model="other").SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            assert not (await stream.read()).error_message
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    await calls.server.wait_until_idle()  # the other request of the stream ended too


async def test_grpc_calls_report_an_engine_crash(serve_grpc):
    calls = await serve_grpc(tick=0.01)
    stream = calls.stream()
    await stream.write(build_infer_request(request_id="7", stream=True, max_tokens=1000).SerializeToString())
    await stream.read()
    whole = asyncio.ensure_future(calls.infer(max_tokens=1000))
    await calls.server.until(lambda: len(calls.server.service.open_requests) == 2)
    calls.server.engine.crash_engine()
    while not (answer := await stream.read()).error_message:
        pass
    assert is_final(answer) and answer.infer_response.id == "7"
    assert (await grpc_error(whole))[0] in ("INTERNAL", "UNAVAILABLE")


# -- clients that disconnect


@pytest.mark.parametrize("stage", ["queue", "tokens"])
async def test_cancelled_grpc_call_cancels_its_generation(serve_grpc, stage):
    calls = await serve_grpc(tick=0.005)
    if stage == "queue":
        calls.server.engine.step_gate.clear()
    call = calls.infer(max_tokens=3000)
    stream = calls.stream()
    for _ in range(3):
        await stream.write(build_infer_request(stream=True, max_tokens=3000).SerializeToString())
    if stage == "tokens":
        await stream.read()
    await calls.server.until(lambda: len(calls.server.service.open_requests) == 4)
    call.cancel()
    stream.cancel()
    calls.server.engine.step_gate.set()
    await calls.server.wait_until_idle()
    assert answer_text(await calls.infer())


async def test_grpc_deadline_cancels_the_generation(serve_grpc):
    calls = await serve_grpc(tick=0.005)
    assert (await grpc_error(calls.infer(max_tokens=3000, timeout=0.2)))[0] == "DEADLINE_EXCEEDED"
    stream = calls.stream(timeout=3)  # the message has to be sent in it
    await stream.write(build_infer_request(stream=True, max_tokens=3000).SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await stream.read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await calls.server.wait_until_idle()


async def test_closed_grpc_connection_cancels_its_generations(serve_grpc):
    calls = await serve_grpc(tick=0.005)
    stream = calls.stream()
    await stream.write(build_infer_request(stream=True, max_tokens=3000).SerializeToString())
    await stream.read()
    await calls.channel.close()
    await calls.server.wait_until_idle()


async def test_grpc_cuts_off_a_client_that_does_not_read(serve_grpc):
    calls = await serve_grpc(write_timeout=0.3)
    narrow = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]  # keep the client's buffers small
    async with grpc.aio.insecure_channel(calls.address, options=narrow) as calls.channel:
        stream = calls.stream()
        calls.server.engine.step_gate.clear()  # all requests are sent before the first answer waits for the client
        for _ in range(200):
            await stream.write(build_infer_request(stream=True, max_tokens=4000).SerializeToString())
        calls.server.engine.step_gate.set()
        await calls.server.until(lambda: "ABORTED" in call_statuses(calls.server))
        await calls.server.wait_until_idle()


def call_statuses(server: RunningServer) -> str:
    return " ".join(server.service.grpc_responses.by_label)


# -- access, loading and shutdown


async def test_grpc_port_of_an_instance_answers_members_only(serve_grpc):
    for options, metadata in (
        ({"cluster_secret": "s"}, (("parley-secret", "s"),)),
        ({"cluster_networks": (ip_network("127.0.0.0/8"),)}, ()),
    ):
        calls = await serve_grpc("public", **options)
        assert (await calls.infer(metadata=metadata)).model_name == "tiny"
    for options in ({"cluster_secret": "s"}, {"cluster_networks": (ip_network("10.0.0.0/8"),)}):
        calls = await serve_grpc("public", **options)
        code, sentence = await grpc_error(calls.infer())
        assert code == "UNAUTHENTICATED" and "its cluster only" in sentence
        assert (await calls.call("ServerLive")).live


async def test_grpc_has_the_limits_and_scopes_of_keys(serve_grpc):
    (key, hashed), (other, hashed_other) = make_key("alice", requests_per_minute=1), make_key("bob", apis=("openai",))
    calls = await serve_grpc(hashed_keys=(hashed, hashed_other))
    metadata = (("authorization", f"Bearer {key}"),)
    assert await calls.infer(max_tokens=5, metadata=metadata)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await calls.infer(max_tokens=5, metadata=metadata)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "requests per minute: limit 1" in refusal.value.details()
    assert 0 < int(dict(refusal.value.trailing_metadata())["retry-after"]) <= 60
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await calls.infer(max_tokens=5, metadata=(("authorization", f"Bearer {other}"),))
    assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_grpc_requires_a_key_except_for_probes(serve_grpc):
    calls = await serve_grpc(api_keys=(KEY,))
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", KEY),)):
        for call in (calls.infer(metadata=metadata), calls.call("ModelConfig", name="tiny", metadata=metadata)):
            code, sentence = await grpc_error(call)
            assert code == "UNAUTHENTICATED" and "API key" in sentence
        stream = calls.stream(metadata=metadata)
        assert (await grpc_error(stream.read()))[0] == "UNAUTHENTICATED"
    for metadata in ((("authorization", f"Bearer {KEY}"),), (("api-key", KEY),)):
        assert answer_text(await calls.infer(metadata=metadata))
    assert (await calls.call("ServerLive")).live and (await calls.call("ServerReady")).ready
    assert (await calls.check()).status == 1
    await calls.server.wait_until_idle()


async def test_grpc_health_follows_loading_and_shutdown(serve_grpc):
    calls = await serve_grpc(load=0.3, wait=False)
    watched = calls.channel.unary_stream(
        "/grpc.health.v1.Health/Watch", response_deserializer=HEALTH_SCHEMA("HealthCheckResponse").FromString
    )(b"")
    assert (await watched.read()).status == 2
    assert (await calls.call("ServerLive")).live and not (await calls.call("ServerReady")).ready
    assert not (await calls.call("ModelReady", name="tiny")).ready
    code, sentence = await grpc_error(calls.infer())
    assert code == "UNAVAILABLE" and "loading" in sentence
    await calls.server.until(lambda: calls.server.service.unready_error() is None)
    assert (await watched.read()).status == 1
    assert (await calls.call("ModelReady", name="tiny")).ready
    calls.server.model.ending_reason = "It ends."
    assert (await watched.read()).status == 2
    assert (await calls.check("inference.GRPCInferenceService")).status == 2
    assert (await grpc_error(calls.infer()))[0] == "UNAVAILABLE"
    watched.cancel()
    assert (await grpc_error(calls.check("other")))[0] == "NOT_FOUND"
    unknown = calls.channel.unary_stream(
        "/grpc.health.v1.Health/Watch", response_deserializer=HEALTH_SCHEMA("HealthCheckResponse").FromString
    )(HEALTH_SCHEMA("HealthCheckRequest")(service="other").SerializeToString())
    assert (await unknown.read()).status == 3
    unknown.cancel()


@pytest.mark.parametrize("patience", [20.0, 0.05])
async def test_grpc_streams_drain_at_shutdown(serve_grpc, patience):
    calls = await serve_grpc(tick=0.005, drain=patience)
    stream = calls.stream()
    await stream.write(build_infer_request(request_id="7", stream=True, max_tokens=100).SerializeToString())
    await stream.read()
    draining = asyncio.create_task(calls.server.service.drain_models())
    await calls.server.until(lambda: calls.server.service.shutting_down)
    assert (await grpc_error(calls.infer()))[0] == "UNAVAILABLE"
    while not is_final(answer := await stream.read()):
        assert not answer.error_message
    assert ("shutting down" in answer.error_message) is (patience < 1)
    await stream.done_writing()
    await draining
    await calls.port.stop_server(5)
    assert await stream.code() == grpc.StatusCode.OK


async def test_grpc_rejects_calls_while_the_queue_is_full(serve_grpc):
    calls = await serve_grpc(max_batch=1, max_queue=1)
    calls.server.engine.step_gate.clear()
    stream = calls.stream()
    for _ in range(2):
        await stream.write(build_infer_request(stream=True).SerializeToString())
    await calls.server.until(lambda: len(calls.server.service.open_requests) == 2)
    code, sentence = await grpc_error(calls.infer())
    assert code == "UNAVAILABLE" and "Try again later" in sentence
    calls.server.engine.step_gate.set()
    await stream.done_writing()
    assert sum([is_final(answer) async for answer in stream]) == 2
    await calls.server.wait_until_idle()


async def test_requests_of_one_grpc_stream_wait_instead_of_being_rejected(serve_grpc):
    """A stream is read no faster than its requests end, so none of them meets a full queue."""
    calls = await serve_grpc(max_batch=2, max_queue=2)
    stream = calls.stream()

    async def write() -> None:
        for number in range(60):
            await stream.write(build_infer_request(request_id=str(number), max_tokens=3).SerializeToString())
        await stream.done_writing()

    writing = asyncio.create_task(write())
    answers = [answer async for answer in stream]
    await writing
    assert not [answer.error_message for answer in answers if answer.error_message]
    assert sorted(int(answer.infer_response.id) for answer in answers) == list(range(60))


async def test_grpc_requests_count_in_statistics_and_metrics(serve_grpc):
    calls = await serve_grpc()
    await calls.infer()
    await grpc_error(calls.infer(model="other"))
    await grpc_error(calls.infer(temperature=-1.0))
    stream = calls.stream()
    await stream.write(build_infer_request(stream=True).SerializeToString())
    await stream.done_writing()
    assert [answer async for answer in stream]
    await calls.server.post("/v1/chat/completions", HELLO_CHAT)
    (counts,) = (await calls.call("ModelStatistics", name="tiny")).model_stats
    http = (await calls.server.get("/v2/models/tiny/stats")).json["model_stats"][0]
    assert counts.inference_count == http["inference_count"] == 3
    assert counts.inference_stats.success.ns == http["inference_stats"]["success"]["ns"] > 0
    page = (await calls.server.get("/metrics")).body.decode()
    assert metric_value(page, 'parley:grpc_responses_total{status="NOT_FOUND"}') == 1
    assert metric_value(page, 'nv_inference_request_success{model="tiny",version="1"}') == 3
    assert metric_value(page, 'tgi_request_failure{err="validation"}') == 1


async def test_grpc_calls_appear_in_the_access_log(serve_grpc, caplog):
    calls = await serve_grpc(access_log=True)
    caplog.set_level("INFO", "parley.access")
    await calls.call("ServerReady")
    await calls.infer(metadata=(("x-request-id", "mine"),), max_tokens=4)
    stream = calls.stream()
    for request_id in "12":
        await stream.write(build_infer_request(request_id=request_id, max_tokens=4).SerializeToString())
    await stream.done_writing()
    assert [answer async for answer in stream]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[1:3] for line in lines] == [
        ["gRPC", "/inference.GRPCInferenceService/ModelInfer"],
        *[["gRPC", "/inference.GRPCInferenceService/ModelStreamInfer"]] * 2,
    ]
    assert lines[0].startswith("mine ") and "status=OK" in lines[0] and "out=4" in lines[0]


async def test_grpc_port_start_fails_on_a_taken_address(serve_grpc):
    calls = await serve_grpc()
    with pytest.raises(OSError, match="is taken"):
        await TritonGrpcPort(calls.server.service).start_server([("127.0.0.1", int(calls.address.rpartition(":")[2]))])


async def test_serve_opens_http_and_grpc_ports_and_exits_cleanly(folder):
    async with contextlib.AsyncExitStack() as stack:
        process = stack.enter_context(ScriptedServer(folder, "--grpc-port", "0")).wait_until_ready()
        address = process.wait_for_line(r"gRPC +(127\.0\.0\.1:\d+)")[1]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = infer.INFER_RESPONSE.FromString(
            await method(build_infer_request(model=folder.name, max_tokens=4).SerializeToString())
        )
        assert answer_text(answer)
        path = "/inference.GRPCInferenceService/ModelStreamInfer"
        idle = channel.stream_stream(path)()
        await idle.write(build_infer_request(model=folder.name).SerializeToString())
        await idle.read()
        taken = stack.enter_context(ScriptedServer(folder, "--grpc-port", address.rpartition(":")[2]))
        assert await asyncio.to_thread(taken.wait_for_end) == 1
        assert "".join(taken.lines).startswith("parley: cannot listen on 127.0.0.1 port")
        process.process.terminate()
        assert await asyncio.to_thread(process.wait_for_end) == 0  # an idle stream does not delay the shutdown
        assert (await grpc_error(idle.read()))[0] in ("UNAVAILABLE", "CANCELLED")


CLIENT_ERRORS = "INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL"
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
MESSAGE_PIECES = [  # concatenated serialized messages parse as one message with the members of all
    infer.INFER_REQUEST(**members).SerializeToString()
    for members in (
        {"model_name": "tiny"},
        {"id": "7"},
        {"model_version": "1"},
        {"inputs": [TENSOR]},
        {"inputs": [TENSOR | {"contents": {"bytes_contents": [b"a"]}}]},
        {"inputs": [{"name": "stream", "datatype": "BOOL", "shape": [1]}]},
        {"raw_input_contents": [b"\x01\x00\x00\x00a"]},
        {"raw_input_contents": [b"\x01"]},
        {"outputs": [{"name": "text_output"}]},
        {"parameters": {"max_tokens": {}}},
        {"parameters": {"top_k": {"int64_param": -1}}},
        {"parameters": {"n": {"bool_param": True}}},
    )
]


async def test_grpc_odd_message_bytes_get_a_client_error_status(serve_grpc):
    calls = await serve_grpc(reply=lambda work, index: [70] * min(work.max_tokens, 3))
    before = await calls.server.control()

    @fuzz_settings(5)
    @given(parts=st.lists(st.sampled_from(MESSAGE_PIECES) | st.binary(max_size=6), max_size=7))
    async def send(parts):
        try:
            await calls.send("ModelInfer", b"".join(parts))
        except grpc.aio.AioRpcError as error:
            assert error.code().name in CLIENT_ERRORS, (parts, error)
            assert error.details() and "server had an error" not in error.details(), parts

    await run_in_loop(send)
    await calls.server.wait_until_idle()
    assert await calls.server.control() == before


async def test_grpc_rejects_huge_inputs_at_once(serve_grpc):
    calls = await serve_grpc()
    long = "\u9ad4" * 100_000
    messages = [
        build_infer_request(request_id=long, temperature=-1.0),
        build_infer_request(model=long),
        build_infer_request(**{long: 1, "temperature": -1.0}),
    ]
    for name, shape in ((long, [1]), ("text_input", [2**40, 2**40]), ("text_input", [1] * 100_000)):
        messages.append(infer.INFER_REQUEST(model_name="tiny"))
        contents = {"bytes_contents": [b"a"]}
        messages[-1].inputs.add(name=name, datatype="BYTES", shape=shape, contents=contents)
    messages.append(build_infer_request(stop="x" * 100_000))
    messages.append(build_infer_request())
    messages[-1].model_version = "9" * 100_000
    for message in messages:
        code, sentence = await grpc_error(calls.send("ModelInfer", message.SerializeToString()))
        assert code in ("INVALID_ARGUMENT", "NOT_FOUND") and len(sentence) < 1000
    assert answer_text(await calls.infer())


async def test_cancelled_grpc_streams_leave_later_answers_unchanged(serve_grpc):
    calls = await serve_grpc()
    before = await calls.server.control()
    for _ in range(30):
        stream = calls.stream()
        await stream.write(build_infer_request(stream=True, max_tokens=500).SerializeToString())
        await stream.read()
        stream.cancel()
    await calls.server.wait_until_idle()
    assert await calls.server.control() == before


async def test_grpc_reaches_each_of_several_models(serve_grpc, folder):
    options = ServerOptions()
    engines = [
        ScriptedEngine(lambda work, index: [301] * work.max_tokens, info=MODEL_INFO, load_seconds=load)
        for load in (0.0, 0.4)
    ]
    other, late = (
        ServedModel((name,), ParleySettings(model=str(folder)), engine, options)
        for name, engine in zip(("other", "late"), engines, strict=True)
    )
    calls = await serve_grpc(beside=[other, late], wait=False)
    await calls.server.until(lambda: calls.server.model.unready_error() is None and other.unready_error() is None)
    expected = calls.server.model.text_pipeline.tokenizer.decode([301] * 3)
    assert answer_text(await calls.infer(model="other", max_tokens=3)) == expected
    assert answer_text(await calls.infer(model="tiny", max_tokens=3)) != expected
    assert (await grpc_error(calls.infer(model="late", max_tokens=3)))[0] == "UNAVAILABLE"
    assert [(await calls.call("ModelReady", name=name)).ready for name in ("tiny", "other", "late")] == [1, 1, 0]
    assert not (await calls.call("ServerReady")).ready
    assert (await grpc_error(calls.infer(model="nope")))[0] == "NOT_FOUND"
    await calls.server.until(lambda: late.unready_error() is None)
    assert answer_text(await calls.infer(model="late", max_tokens=3)) == expected
    models = (await calls.call("RepositoryIndex")).models
    assert [(model.name, model.state) for model in models] == [(name, "READY") for name in ("tiny", "other", "late")]
    (counts,) = (await calls.call("ModelStatistics", name="other")).model_stats
    assert (counts.name, counts.inference_count) == ("other", 1)
