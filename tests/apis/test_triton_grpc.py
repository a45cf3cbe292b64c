"""Triton's API over gRPC: calls, streams, keys, limits, and the cleanup after a client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.grpc_client import BROKEN, Calls, final, refused, request, said
from support.http_client import HELLO, INFO, Served
from support.metrics_page import value
from support.server_process import Process
from test_fuzz import BODIES, run

from parley.dialects.triton.rpc import infer
from parley.dialects.triton.rpc.messages import HEALTH, INFERENCE
from parley.engine.fake import FakeEngine
from parley.serving.grpc_port import Port
from parley.serving.options import ServerOptions
from parley.serving.served_model import Model
from parley.types import Settings

KEY = "sk-right-key-0123456789"
INFER = "/v2/models/tiny/infer"


Dial = Callable[..., Awaitable[Calls]]


@pytest.fixture
async def dial(serve) -> AsyncIterator[Dial]:
    """Start a server with a gRPC port; the options are those of ``serve``."""
    begun: list[Calls] = []

    async def begin(**options: Any) -> Calls:
        served = await serve(**options)
        port = Port(served.service)
        begun.append(Calls(served, port, (await port.start([("127.0.0.1", 0)]))[0]))
        return begun[-1]

    yield begin
    for calls in begun:
        await calls.channel.close()
        await calls.port.stop(0)


# -- calls


async def test_grpc_infer_gives_the_same_answer_as_http(dial):
    calls = await dial()
    answer = await calls.infer(id="7", max_tokens=5)
    entry = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a b c"]}
    flag = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]}
    other = await calls.served.post(INFER, {"id": "7", "inputs": [entry, flag], "parameters": {"max_tokens": 5}})
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "tiny", "1")
    assert [said(answer)] == other.json["outputs"][0]["data"] and len(said(answer)) > 3
    assert not answer.parameters
    await calls.served.idle()


async def test_every_grpc_query_method_answers(dial):
    calls = await dial()
    _, methods = INFERENCE.service("GRPCInferenceService")
    for name in (method.name for method in methods):
        members = {"name": "tiny"} if name in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics") else {}
        if name == "RepositoryModelLoad":
            members = {"model_name": "tiny"}
        if name.startswith("ModelInfer") or name == "ModelStreamInfer":
            continue
        if name in ("RepositoryModelUnload", "SystemSharedMemoryRegister", "CudaSharedMemoryRegister"):
            assert (await refused(calls.call(name)))[0] in ("UNAVAILABLE", "UNIMPLEMENTED")
        else:
            assert (await calls.call(name, **members)) is not None
    assert (await calls.call("ModelMetadata", name="tiny")).inputs[0].name == "text_input"


@pytest.mark.parametrize(
    ("wish", "code", "sentence"),
    [
        ({"model": "other"}, "NOT_FOUND", "Request for unknown model: 'other' is not found"),
        ({"model": ""}, "NOT_FOUND", "Request for unknown model: '' is not found"),
        ({"temperature": -1.0}, "INVALID_ARGUMENT", "'temperature'"),
        ({"text": "a" * 5000}, "INVALID_ARGUMENT", "maximum context length is 4096"),
        ({"end_id": 600_000}, "INVALID_ARGUMENT", "not in the vocabulary"),
        ({"text": ""}, "INVALID_ARGUMENT", "empty"),
    ],
)
async def test_grpc_infer_rejects_bad_requests_with_a_status(dial, wish, code, sentence):
    calls = await dial()
    given = await refused(calls.infer(**wish))
    assert given[0] == code and sentence in given[1]
    await calls.served.idle()


async def test_grpc_rejects_broken_messages_and_unknown_methods(dial):
    calls = await dial()
    for name in ("ModelInfer", "ModelConfig"):
        assert await refused(calls.send(name, BROKEN)) == ("INTERNAL", "The message could not be read.")
    stream = calls.stream()
    await stream.write(BROKEN)
    assert await refused(stream.read()) == ("INTERNAL", "The message could not be read.")
    method = calls.channel.unary_unary("/inference.GRPCInferenceService/Nothing")
    assert (await refused(method(b"")))[0] == "UNIMPLEMENTED"
    assert said(await calls.infer())


async def test_grpc_rejects_messages_over_the_limit_even_compressed(dial):
    calls = await dial(body_limit=4096)
    assert (await refused(calls.infer(text="a" * 5000)))[0] == "RESOURCE_EXHAUSTED"
    zipped = calls.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    bomb = request(text="a" * (8 << 20)).SerializeToString()
    assert (await refused(zipped(bomb, compression=grpc.Compression.Gzip)))[0] == "RESOURCE_EXHAUSTED"
    assert said(await calls.infer())


async def test_grpc_carries_messages_larger_than_its_defaults(dial):
    text = "a b c " * 20_000
    calls = await dial(info=big())
    asked = request(text=text, max_tokens=4)
    asked.inputs[2].contents.bool_contents[0] = False
    answer = await calls.send("ModelInfer", asked.SerializeToString())
    assert said(answer).startswith(text)


def big() -> Any:
    import msgspec
    from support.http_client import INFO

    return msgspec.structs.replace(INFO, max_model_len=1 << 20)


async def test_grpc_reads_compressed_calls(dial):
    calls = await dial()
    method = calls.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    plain = await method(request(max_tokens=9).SerializeToString())
    for coding in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert await method(request(max_tokens=9).SerializeToString(), compression=coding) == plain


# -- streams


async def test_grpc_stream_has_the_text_in_pieces(dial):
    calls = await dial(tick=0.002)
    stream = calls.stream()
    await stream.write(request(id="7", stream=True, max_tokens=8).SerializeToString())
    await stream.done_writing()
    answers = [answer async for answer in stream]
    assert len(answers) > 2 and [final(answer) for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert {answer.infer_response.id for answer in answers} == {"7"}
    text = "".join(said(answer.infer_response) for answer in answers)
    assert text == said(await calls.infer(max_tokens=8))
    assert await stream.code() == grpc.StatusCode.OK


async def test_grpc_embedding_is_one_answer_streamed_or_not(dial):
    calls = await dial()
    message = request(id="7", stream=True)
    wish = json.dumps({"input": "a b c", "pooling_params": {"dimensions": [4]}}).encode()
    message.inputs.add(name="embedding_request", datatype="BYTES", shape=[1], contents={"bytes_contents": [wish]})
    stream = calls.stream()
    await stream.write(message.SerializeToString())
    await stream.done_writing()
    (answer,) = [answer async for answer in stream]
    assert final(answer) and answer.infer_response.id == "7"
    told = json.loads(said(answer.infer_response))
    openai = await calls.served.post("/v1/embeddings", {"model": "tiny", "input": "a b c", "dimensions": 4})
    assert told == openai.json["data"][0]["embedding"] and len(told) == 4
    assert json.loads(said(await calls.send("ModelInfer", message.SerializeToString()))) == told


async def test_requests_of_one_grpc_stream_run_concurrently(dial):
    calls = await dial(tick=0.002)
    stream = calls.stream()
    for id in "123":
        await stream.write(request(id=id, stream=True, max_tokens=12).SerializeToString())
    await stream.write(request(id="whole", max_tokens=12).SerializeToString())
    await stream.done_writing()
    order = [(answer.infer_response.id, final(answer)) async for answer in stream]
    for id in ("1", "2", "3"):
        own = [last for given, last in order if given == id]
        assert len(own) > 2 and own == [False] * (len(own) - 1) + [True]
    assert [last for given, last in order if given == "whole"] == [True]
    first = order.index(("1", True))
    assert {given for given, _ in order[:first]} >= {"1", "2", "3"}, "they came one after another"


async def test_grpc_stream_stays_open_after_a_failed_request(dial):
    calls = await dial()
    stream = calls.stream()
    for bad in (request(id="x", model="other"), request(id="x", temperature=-1.0), request(id="x", text="a" * 5000)):
        await stream.write(bad.SerializeToString())
        answer = await stream.read()
        assert answer.error_message and answer.infer_response.id == "x" and final(answer)
        assert not answer.infer_response.outputs
    await stream.write(request(id="y").SerializeToString())
    answer = await stream.read()
    assert not answer.error_message and said(answer.infer_response)
    await stream.done_writing()
    assert await stream.read() == grpc.aio.EOF and await stream.code() == grpc.StatusCode.OK


async def test_triton_grpc_error_metadata_ends_the_stream_on_first_error(dial):
    calls = await dial(tick=0.01)
    stream = calls.stream(metadata=(("triton_grpc_error", "true"),))
    await stream.write(request(id="long", stream=True, max_tokens=1000).SerializeToString())
    assert not (await stream.read()).error_message
    await stream.write(request(id="x", model="other").SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            assert not (await stream.read()).error_message
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    await calls.served.idle()  # the other request of the stream ended too


async def test_grpc_calls_report_an_engine_crash(dial):
    calls = await dial(tick=0.01)
    stream = calls.stream()
    await stream.write(request(id="7", stream=True, max_tokens=1000).SerializeToString())
    await stream.read()
    whole = asyncio.ensure_future(calls.infer(max_tokens=1000))
    await calls.served.until(lambda: len(calls.served.service.open) == 2)
    calls.served.engine.crash()
    while not (answer := await stream.read()).error_message:
        pass
    assert final(answer) and answer.infer_response.id == "7"
    assert (await refused(whole))[0] in ("INTERNAL", "UNAVAILABLE")


# -- clients that disconnect


@pytest.mark.parametrize("stage", ["queue", "tokens"])
async def test_cancelled_grpc_call_cancels_its_generation(dial, stage):
    calls = await dial(tick=0.005)
    if stage == "queue":
        calls.served.engine.gate.clear()
    call = calls.infer(max_tokens=3000)
    stream = calls.stream()
    for _ in range(3):
        await stream.write(request(stream=True, max_tokens=3000).SerializeToString())
    if stage == "tokens":
        await stream.read()
    await calls.served.until(lambda: len(calls.served.service.open) == 4)
    call.cancel()
    stream.cancel()
    calls.served.engine.gate.set()
    await calls.served.idle()
    assert said(await calls.infer())


async def test_grpc_deadline_cancels_the_generation(dial):
    calls = await dial(tick=0.005)
    assert (await refused(calls.infer(max_tokens=3000, timeout=0.2)))[0] == "DEADLINE_EXCEEDED"
    stream = calls.stream(timeout=0.2)
    await stream.write(request(stream=True, max_tokens=3000).SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await stream.read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await calls.served.idle()


async def test_closed_grpc_connection_cancels_its_generations(dial):
    calls = await dial(tick=0.005)
    stream = calls.stream()
    await stream.write(request(stream=True, max_tokens=3000).SerializeToString())
    await stream.read()
    await calls.channel.close()
    await calls.served.idle()


async def test_grpc_cuts_off_a_client_that_does_not_read(dial):
    calls = await dial(write_timeout=0.3)
    narrow = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]  # keep the client's buffers small
    async with grpc.aio.insecure_channel(calls.address, options=narrow) as calls.channel:
        stream = calls.stream()
        for _ in range(200):
            await stream.write(request(stream=True, max_tokens=4000).SerializeToString())
        await calls.served.until(lambda: "ABORTED" in statuses(calls.served))
        await calls.served.idle()


def statuses(served: Served) -> str:
    return " ".join(served.service.calls.counts)


# -- access, loading and shutdown


async def test_grpc_requires_a_key_except_for_probes(dial):
    calls = await dial(api_keys=(KEY,))
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", KEY),)):
        for call in (calls.infer(metadata=metadata), calls.call("ModelConfig", name="tiny", metadata=metadata)):
            code, sentence = await refused(call)
            assert code == "UNAUTHENTICATED" and "API key" in sentence
        stream = calls.stream(metadata=metadata)
        assert (await refused(stream.read()))[0] == "UNAUTHENTICATED"
    for metadata in ((("authorization", f"Bearer {KEY}"),), (("api-key", KEY),)):
        assert said(await calls.infer(metadata=metadata))
    assert (await calls.call("ServerLive")).live and (await calls.call("ServerReady")).ready
    assert (await calls.check()).status == 1
    await calls.served.idle()


async def test_grpc_health_follows_loading_and_shutdown(dial):
    calls = await dial(load=0.3, wait=False)
    watched = calls.channel.unary_stream(
        "/grpc.health.v1.Health/Watch", response_deserializer=HEALTH("HealthCheckResponse").FromString
    )(b"")
    assert (await watched.read()).status == 2
    assert (await calls.call("ServerLive")).live and not (await calls.call("ServerReady")).ready
    assert not (await calls.call("ModelReady", name="tiny")).ready
    code, sentence = await refused(calls.infer())
    assert code == "UNAVAILABLE" and "loading" in sentence
    await calls.served.until(lambda: calls.served.service.refusal() is None)
    assert (await watched.read()).status == 1
    assert (await calls.call("ModelReady", name="tiny")).ready
    calls.served.model.ending = "It ends."
    assert (await watched.read()).status == 2
    assert (await calls.check("inference.GRPCInferenceService")).status == 2
    assert (await refused(calls.infer()))[0] == "UNAVAILABLE"
    watched.cancel()
    assert (await refused(calls.check("other")))[0] == "NOT_FOUND"
    unknown = calls.channel.unary_stream(
        "/grpc.health.v1.Health/Watch", response_deserializer=HEALTH("HealthCheckResponse").FromString
    )(HEALTH("HealthCheckRequest")(service="other").SerializeToString())
    assert (await unknown.read()).status == 3
    unknown.cancel()


@pytest.mark.parametrize("patience", [20.0, 0.05])
async def test_grpc_streams_drain_at_shutdown(dial, patience):
    calls = await dial(tick=0.005, drain=patience)
    stream = calls.stream()
    await stream.write(request(id="7", stream=True, max_tokens=100).SerializeToString())
    await stream.read()
    draining = asyncio.create_task(calls.served.service.drain())
    await calls.served.until(lambda: calls.served.service.draining)
    assert (await refused(calls.infer()))[0] == "UNAVAILABLE"
    while not final(answer := await stream.read()):
        assert not answer.error_message
    assert ("shutting down" in answer.error_message) is (patience < 1)
    await stream.done_writing()
    await draining
    await calls.port.stop(5)
    assert await stream.code() == grpc.StatusCode.OK


async def test_grpc_rejects_calls_while_the_queue_is_full(dial):
    calls = await dial(max_batch=1, max_queue=1)
    calls.served.engine.gate.clear()
    stream = calls.stream()
    for _ in range(2):
        await stream.write(request(stream=True).SerializeToString())
    await calls.served.until(lambda: len(calls.served.service.open) == 2)
    code, sentence = await refused(calls.infer())
    assert code == "UNAVAILABLE" and "Try again later" in sentence
    calls.served.engine.gate.set()
    await stream.done_writing()
    assert sum([final(answer) async for answer in stream]) == 2
    await calls.served.idle()


async def test_requests_of_one_grpc_stream_wait_instead_of_being_rejected(dial):
    """A stream is read no faster than its requests end, so none of them meets a full queue."""
    calls = await dial(max_batch=2, max_queue=2)
    stream = calls.stream()

    async def write() -> None:
        for number in range(60):
            await stream.write(request(id=str(number), max_tokens=3).SerializeToString())
        await stream.done_writing()

    writing = asyncio.create_task(write())
    answers = [answer async for answer in stream]
    await writing
    assert not [answer.error_message for answer in answers if answer.error_message]
    assert sorted(int(answer.infer_response.id) for answer in answers) == list(range(60))


async def test_grpc_requests_count_in_statistics_and_metrics(dial):
    calls = await dial()
    await calls.infer()
    await refused(calls.infer(model="other"))
    await refused(calls.infer(temperature=-1.0))
    stream = calls.stream()
    await stream.write(request(stream=True).SerializeToString())
    await stream.done_writing()
    assert [answer async for answer in stream]
    await calls.served.post("/v1/chat/completions", HELLO)
    (counts,) = (await calls.call("ModelStatistics", name="tiny")).model_stats
    http = (await calls.served.get("/v2/models/tiny/stats")).json["model_stats"][0]
    assert counts.inference_count == http["inference_count"] == 3
    assert counts.inference_stats.success.ns == http["inference_stats"]["success"]["ns"] > 0
    page = (await calls.served.get("/metrics")).body.decode()
    assert value(page, 'parley:grpc_responses_total{status="NOT_FOUND"}') == 1
    assert value(page, 'nv_inference_request_success{model="tiny",version="1"}') == 3
    assert value(page, 'tgi_request_failure{err="validation"}') == 1


async def test_grpc_calls_appear_in_the_access_log(dial, caplog):
    calls = await dial(access_log=True)
    caplog.set_level("INFO", "parley.access")
    await calls.call("ServerReady")
    await calls.infer(metadata=(("x-request-id", "mine"),), max_tokens=4)
    stream = calls.stream()
    for id in "12":
        await stream.write(request(id=id, max_tokens=4).SerializeToString())
    await stream.done_writing()
    assert [answer async for answer in stream]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[1:3] for line in lines] == [
        ["gRPC", "/inference.GRPCInferenceService/ModelInfer"],
        *[["gRPC", "/inference.GRPCInferenceService/ModelStreamInfer"]] * 2,
    ]
    assert lines[0].startswith("mine ") and "status=OK" in lines[0] and "out=4" in lines[0]


async def test_grpc_port_start_fails_on_a_taken_address(dial):
    calls = await dial()
    with pytest.raises(OSError, match="is taken"):
        await Port(calls.served.service).start([("127.0.0.1", int(calls.address.rpartition(":")[2]))])


async def test_serve_opens_http_and_grpc_ports_and_exits_cleanly(folder):
    process = Process(folder, "--grpc-port", "0").ready()
    address = process.see(r"gRPC +(127\.0\.0\.1:\d+)")[1]
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = infer.RESPONSE.FromString(await method(request(model=folder.name, max_tokens=4).SerializeToString()))
        assert said(answer)
        path = "/inference.GRPCInferenceService/ModelStreamInfer"
        idle = channel.stream_stream(path)()
        await idle.write(request(model=folder.name).SerializeToString())
        await idle.read()
        taken = Process(folder, "--grpc-port", address.rpartition(":")[2])
        assert await asyncio.to_thread(taken.end) == 1
        assert "".join(taken.lines).startswith("parley: cannot listen on 127.0.0.1 port")
        process.process.terminate()
        assert await asyncio.to_thread(process.end) == 0  # an idle stream does not delay the shutdown
        assert (await refused(idle.read()))[0] in ("UNAVAILABLE", "CANCELLED")


ODD = "INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL"
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
PIECES = [  # concatenated serialized messages parse as one message with the members of all
    infer.REQUEST(**members).SerializeToString()
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


async def test_grpc_odd_message_bytes_get_a_client_error_status(dial):
    calls = await dial(reply=lambda work, index: [70] * min(work.max_tokens, 3))
    before = await calls.served.control()

    @settings(max_examples=BODIES // 5, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(parts=st.lists(st.sampled_from(PIECES) | st.binary(max_size=6), max_size=7))
    async def send(parts):
        try:
            await calls.send("ModelInfer", b"".join(parts))
        except grpc.aio.AioRpcError as error:
            assert error.code().name in ODD, (parts, error)
            assert error.details() and "server had an error" not in error.details(), parts

    await run(send)
    await calls.served.idle()
    assert await calls.served.control() == before


async def test_grpc_rejects_huge_inputs_at_once(dial):
    calls = await dial()
    long = "\u9ad4" * 100_000
    asked = [request(id=long, temperature=-1.0), request(model=long), request(**{long: 1, "temperature": -1.0})]
    for name, shape in ((long, [1]), ("text_input", [2**40, 2**40]), ("text_input", [1] * 100_000)):
        asked.append(infer.REQUEST(model_name="tiny"))
        contents = {"bytes_contents": [b"a"]}
        asked[-1].inputs.add(name=name, datatype="BYTES", shape=shape, contents=contents)
    asked.append(request(stop="x" * 100_000))
    asked.append(request())
    asked[-1].model_version = "9" * 100_000
    for message in asked:
        code, sentence = await refused(calls.send("ModelInfer", message.SerializeToString()))
        assert code in ("INVALID_ARGUMENT", "NOT_FOUND") and len(sentence) < 1000
    assert said(await calls.infer())


async def test_cancelled_grpc_streams_leave_later_answers_unchanged(dial):
    calls = await dial()
    before = await calls.served.control()
    for _ in range(30):
        stream = calls.stream()
        await stream.write(request(stream=True, max_tokens=500).SerializeToString())
        await stream.read()
        stream.cancel()
    await calls.served.idle()
    assert await calls.served.control() == before


async def test_grpc_reaches_each_of_several_models(dial, folder):
    options = ServerOptions()
    engines = [FakeEngine(lambda work, index: [301] * work.max_tokens, info=INFO, load=load) for load in (0.0, 0.4)]
    other, late = (
        Model((name,), Settings(model=str(folder)), engine, options)
        for name, engine in zip(("other", "late"), engines, strict=True)
    )
    calls = await dial(beside=[other, late], wait=False)
    await calls.served.until(lambda: calls.served.model.refusal() is None and other.refusal() is None)
    wanted = calls.served.model.language.tokenizer.decode([301] * 3)
    assert said(await calls.infer(model="other", max_tokens=3)) == wanted
    assert said(await calls.infer(model="tiny", max_tokens=3)) != wanted
    assert (await refused(calls.infer(model="late", max_tokens=3)))[0] == "UNAVAILABLE"
    assert [(await calls.call("ModelReady", name=name)).ready for name in ("tiny", "other", "late")] == [1, 1, 0]
    assert not (await calls.call("ServerReady")).ready
    assert (await refused(calls.infer(model="nope")))[0] == "NOT_FOUND"
    await calls.served.until(lambda: late.refusal() is None)
    assert said(await calls.infer(model="late", max_tokens=3)) == wanted
    models = (await calls.call("RepositoryIndex")).models
    assert [(model.name, model.state) for model in models] == [(name, "READY") for name in ("tiny", "other", "late")]
    (counts,) = (await calls.call("ModelStatistics", name="other")).model_stats
    assert (counts.name, counts.inference_count) == ("other", 1)
