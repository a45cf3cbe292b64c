"""gRPC through a coordinator answers like one server, unary and streamed, also when instances fail."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.api_keys import make_keys
from support.certificates import make_authority, make_certificate
from support.cluster_of_servers import Cluster
from support.grpc_client import BROKEN_MESSAGE, GrpcClient, answer_text, build_infer_request, grpc_error, is_final
from support.http_client import RunningServer
from support.loop_clock import pass_time

from parley.coordinator import refusals
from parley.coordinator.proxy.grpc import grpc_call
from parley.coordinator.proxy.grpc import grpc_port as before
from parley.dialects.triton.calls import SERVICE_PATH
from parley.dialects.triton.rpc import control
from parley.disagg.kv.receiver import KVReceiver
from parley.serving.grpc import grpc_port as alone
from parley.types import EngineRequest
from parley.web.http_options import HttpOptions
from parley.web.tls.files import TlsFileError, TlsFiles
from parley.web.tls.grpc_certificate import GrpcCertificate

KEY = "sk-right-key-0123456789"


def seeded_reply(work: EngineRequest, index: int) -> list[int]:
    rng = random.Random(f"{work.seed + index} {work.token_ids[-3:]}")
    return [rng.randrange(640) for _ in range(40)]


def seeded_request(*args: Any, seed: int = 7, **members: Any) -> Any:
    return build_infer_request(*args, seed=seed, **members)


class ClusterAndServer:
    """Makes the same calls to a cluster and to one server."""

    def __init__(self, cluster: Cluster, cluster_calls: GrpcClient, server_calls: GrpcClient):
        self.cluster, self.cluster_calls, self.server_calls = cluster, cluster_calls, server_calls

    async def call_both(self, message: Any, *, method: str = "ModelInfer", metadata: Any = ()) -> Any:
        """Return the answer to a call, or its status code and message; both sides must give the same."""
        answers = []
        for side in (self.cluster_calls, self.server_calls):
            try:
                answers.append(await side.send(method, message.SerializeToString(), 120, metadata))
            except grpc.aio.AioRpcError as error:
                answers.append((error.code(), error.details()))
        assert answers[0] == answers[1]
        return answers[0]


@pytest.fixture
async def cluster_and_server(live_cluster, serve) -> AsyncIterator[Callable[..., Awaitable[ClusterAndServer]]]:
    """Start a cluster of these roles and a server with the same options; ``tls`` and ``port_options`` are the
    coordinator's, ``cluster_only`` the cluster's."""
    ending: list[Callable[[], Awaitable[Any]]] = []

    async def connect_calls(server: RunningServer, port: Any, address: str) -> GrpcClient:
        calls = GrpcClient(server, port, address)
        ending.extend((calls.channel.close, lambda: port.stop_server(0)))
        return calls

    async def start_both(
        *roles: str,
        tls: TlsFiles | None = None,
        port_options: dict[str, Any] | None = None,
        cluster_only: dict[str, Any] | None = None,
        **options: Any,
    ) -> ClusterAndServer:
        options = {"reply": seeded_reply} | options
        many, one = await live_cluster(*roles, **(cluster_only or {}), **options), await serve(**options)
        coordinator = many.coordinator
        port = before.CoordinatorGrpcPort(
            coordinator.table, coordinator.front, replace(coordinator.options, **(port_options or {})), HttpOptions()
        )
        server_port = alone.TritonGrpcPort(one.service)
        address = (await server_port.start_server([("127.0.0.1", 0)]))[0]
        return ClusterAndServer(
            many,
            await connect_calls(many.front, port, await port.start_server("127.0.0.1", 0, tls)),
            await connect_calls(one, server_port, address),
        )

    yield start_both
    for end in ending:
        await end()


async def stream_requests(side: GrpcClient, *requests: Any, metadata: Any = ()) -> list[Any]:
    """Return all answers to the requests of one stream."""
    stream = side.stream(metadata=metadata)
    for message in requests:
        await stream.write(message.SerializeToString())
    await stream.done_writing()
    return [answer async for answer in stream]


def join_answers(answers: list[Any]) -> dict[str, Any]:
    """Join the answers of each request: how the steps of an engine fall into answers is not guaranteed."""
    joined: dict[str, Any] = {}
    for answer in answers:
        inner = answer.infer_response
        text, last, sentence = joined.get(inner.id, ("", False, ""))
        assert not last
        part = answer_text(inner) if inner.raw_output_contents else ""
        joined[inner.id] = text + part, is_final(answer), sentence + answer.error_message
    return joined


REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 1}, {"max_tokens": 9}, {"seed": 5, "temperature": 0.8}, {"stop": "e"}, {"max_tokens": 0},
    {"model": "other"}, {"model": ""}, {"temperature": -1.0}, {"text": "a" * 5000}, {"text": ""}, {"bogus": 1},
    {"model": "other", "temperature": -1.0}, {"triton_enable_empty_final_response": True}, {"text": "a b c " * 300},
    {"triton_enable_empty_final_response": 1},
]  # fmt: skip


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
async def test_cluster_grpc_answers_equal_those_of_one_server(cluster_and_server, roles: tuple[str, ...]) -> None:
    sides = await cluster_and_server(*roles)
    for members in REQUESTS:
        await sides.call_both(seeded_request(request_id="7", **members))
        requests = [seeded_request(request_id="7", stream=True, **members), seeded_request(request_id="8", **members)]
        cluster_answers, server_answers = (
            await stream_requests(sides.cluster_calls, *requests),
            await stream_requests(sides.server_calls, *requests),
        )
        assert join_answers(cluster_answers) == join_answers(server_answers), members
    await sides.cluster.wait_until_idle()


async def test_grpc_stream_requests_are_separated_and_run_concurrently(cluster_and_server) -> None:
    sides = await cluster_and_server("prefill", "decode", tick=0.01)
    requests = [seeded_request(f"a {number}", request_id=f"{number}", stream=number % 2 > 0) for number in range(20)]
    requests.insert(3, seeded_request(request_id="x", model="other"))
    cluster_answers, server_answers = (
        await stream_requests(sides.cluster_calls, *requests),
        await stream_requests(sides.server_calls, *requests),
    )
    assert join_answers(cluster_answers) == join_answers(server_answers) and len(join_answers(cluster_answers)) == 21
    first = next(place for place, answer in enumerate(cluster_answers) if is_final(answer) and not answer.error_message)
    assert len({answer.infer_response.id for answer in cluster_answers[:first]}) > 3, "they came one after another"
    assert sides.cluster.coordinator.scheduler.counters.placements.by_label["separate"] == 21
    await sides.cluster.wait_until_idle()


@pytest.mark.parametrize("lost", ["p", "d"])
async def test_grpc_stream_resumes_identically_when_an_instance_ends(cluster_and_server, lost: str) -> None:
    sides = await cluster_and_server("prefill", "prefill", "decode", "decode", tick=0.01)
    requests = [
        seeded_request(f"a {number}", request_id=f"{number}", stream=number != 3, seed=number) for number in range(8)
    ]
    expected = join_answers(await stream_requests(sides.server_calls, *requests))
    streams = [
        asyncio.create_task(stream_requests(sides.cluster_calls, *requests)),
        asyncio.create_task(stream_requests(sides.cluster_calls, *requests)),
    ]
    message = seeded_request("a 3", request_id="3", seed=3).SerializeToString()
    unary_call = asyncio.ensure_future(sides.cluster_calls.send("ModelInfer", message))
    candidates = sides.cluster.instances[:2] if lost == "p" else sides.cluster.instances[2:]
    await sides.cluster.front.until(lambda: any(server.engine.open_stream_count for server in candidates))
    victim = next(server for server in candidates if server.engine.open_stream_count)
    if lost == "d":
        await asyncio.sleep(0.1)
    victim.engine.crash_engine()
    for answers in await asyncio.gather(*streams):
        assert join_answers(answers) == expected
    assert (answer_text(await unary_call), True, "") == expected["3"]
    assert sides.cluster.coordinator.scheduler.counters.retries
    await sides.cluster.wait_until_idle()


async def test_grpc_request_survives_an_engine_crash_during_handover(
    cluster_and_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = await cluster_and_server("prefill", "decode", "decode")
    wait_settled, crashed = KVReceiver.wait_settled, list[KVReceiver]()

    async def settle_and_crash_once(receiver: KVReceiver) -> None:
        await wait_settled(receiver)
        if not crashed:
            crashed.append(receiver)
            (decoding,) = [server for server in sides.cluster.instances if server.engine.reservation_count]
            decoding.engine.crash_engine()

    monkeypatch.setattr(KVReceiver, "wait_settled", settle_and_crash_once)
    requests = [seeded_request("a b c", request_id="7", stream=True)]
    assert (
        join_answers(await stream_requests(sides.cluster_calls, *requests))
        == join_answers(await stream_requests(sides.server_calls, *requests))
        and crashed
    )
    await sides.cluster.wait_until_idle()


async def test_cluster_grpc_stream_ends_at_the_first_error_if_requested(cluster_and_server) -> None:
    sides = await cluster_and_server("prefill", "decode", tick=0.01)
    for side in (sides.cluster_calls, sides.server_calls):
        stream = side.stream(metadata=(("triton_grpc_error", "true"),))
        await stream.write(seeded_request(request_id="long", stream=True).SerializeToString())
        assert not (await stream.read()).error_message
        await stream.write(seeded_request(request_id="x", model="other").SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                assert not (await stream.read()).error_message
        status = caught.value.code(), caught.value.details()
        assert status == (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'other' is not found")
    await sides.cluster.wait_until_idle()


async def test_cluster_rejects_malformed_grpc_messages(cluster_and_server) -> None:
    sides = await cluster_and_server("prefill", "decode")
    for side in (sides.cluster_calls, sides.server_calls):
        assert await grpc_error(side.send("ModelInfer", BROKEN_MESSAGE)) == (
            "INTERNAL",
            "The message could not be read.",
        )
        stream = side.stream()
        await stream.write(BROKEN_MESSAGE)
        assert await grpc_error(stream.read()) == ("INTERNAL", "The message could not be read.")


@pytest.mark.parametrize("ending", ["cancel", "deadline", "close"])
async def test_cluster_grpc_disconnect_leaves_nothing_open(cluster_and_server, ending: str) -> None:
    sides = await cluster_and_server("prefill", "decode", reply=lambda work, index: [70] * 3000, tick=0.005)
    timeout = 5 if ending == "deadline" else 120  # seconds; the first token has to come in them
    call = asyncio.ensure_future(sides.cluster_calls.infer(max_tokens=3000, timeout=timeout))
    stream = sides.cluster_calls.stream(timeout=timeout)
    for _ in range(3):
        await stream.write(seeded_request(stream=True, max_tokens=3000).SerializeToString())
    assert is_final(await stream.read()) is False
    if ending == "cancel":
        call.cancel()
        stream.cancel()
    elif ending == "close":
        await sides.cluster_calls.channel.close()
    await asyncio.gather(call, return_exceptions=True)
    await sides.cluster.wait_until_idle()


async def test_cluster_grpc_checks_the_keys_of_the_instances(cluster_and_server) -> None:
    sides = await cluster_and_server("prefill", "decode", api_keys=(KEY,), cluster_secret="s")
    for metadata in ((), (("authorization", "Bearer wrong"),), (("parley-secret", "s"),)):
        code, sentence = await sides.call_both(seeded_request(), metadata=metadata)
        assert code is grpc.StatusCode.UNAUTHENTICATED and "API key" in sentence
        stream = sides.cluster_calls.stream(metadata=metadata)
        await stream.write(seeded_request().SerializeToString())
        assert (await grpc_error(stream.read()))[0] == "UNAUTHENTICATED"


@pytest.mark.parametrize("where", ["coordinator", "instances"])
async def test_cluster_grpc_denies_what_a_key_may_not_use(cluster_and_server, where: str) -> None:
    headers, keys = make_keys(alice={}, apis={"apis": ("openai",)}, models={"models": ["other"]})
    at_coordinator = {"client_keys": {"hashed_keys": keys}} if where == "coordinator" else {}
    sides = await cluster_and_server("mixed", cluster_only=at_coordinator, hashed_keys=keys, cluster_secret="s")
    for name, expected in (("alice", None), ("apis", "PERMISSION_DENIED"), ("models", "PERMISSION_DENIED")):
        metadata = tuple(headers[name].items())
        answered = await sides.call_both(seeded_request(max_tokens=2), metadata=metadata)
        assert (answered[0].name if isinstance(answered, tuple) else None) == expected, name
        config = control.request_class("ModelConfig")(name="tiny")
        answered = await sides.call_both(config, method="ModelConfig", metadata=metadata)
        assert (answered[0].name if isinstance(answered, tuple) else None) == expected, name
        if name == "apis":  # which ends a stream; a model that may not be used fails its request alone
            for side in (sides.cluster_calls, sides.server_calls):
                stream = side.stream(metadata=metadata)
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended before
                    await stream.write(seeded_request().SerializeToString())
                assert (await grpc_error(stream.read()))[0] == expected


async def test_cluster_grpc_lists_the_models_of_all_instances(cluster_and_server) -> None:
    instance_options = [{"names": ("first",)}, {"names": ("second", "third")}, {"names": ("first",)}]
    sides = await cluster_and_server("mixed", "mixed", "mixed", cluster_only={"instance_options": instance_options})
    index = (await sides.cluster_calls.call("RepositoryIndex", ready=True)).models
    assert [(model.name, model.state) for model in index] == [
        ("first", "READY"),
        ("second", "READY"),
        ("third", "READY"),
    ]
    assert await grpc_error(sides.cluster_calls.call("RepositoryIndex", repository_name="x/y")) == (
        await grpc_error(sides.server_calls.call("RepositoryIndex", repository_name="x/y"))
    )


async def test_cluster_grpc_statistics_are_summed(cluster_and_server) -> None:
    sides = await cluster_and_server("prefill", "decode", "decode")
    for number in range(6):
        await sides.call_both(seeded_request(f"a {number}", max_tokens=4))
        await stream_requests(sides.cluster_calls, seeded_request(f"b {number}", max_tokens=4, stream=True))
    for name in ("", "tiny"):
        counts = (await sides.cluster_calls.call("ModelStatistics", name=name)).model_stats[0]
        assert counts.inference_count == counts.inference_stats.success.count == 12
    expected = [
        await grpc_error(side.call("ModelStatistics", name="other"))
        for side in (sides.cluster_calls, sides.server_calls)
    ]
    assert expected[0] == expected[1]
    expected = [
        await grpc_error(side.call("ModelStatistics", name="tiny", version="2"))
        for side in (sides.cluster_calls, sides.server_calls)
    ]
    assert expected[0] == expected[1]


SERVER_QUERIES: list[tuple[str, dict[str, Any]]] = [
    ("ServerLive", {}), ("ServerReady", {}), ("ServerMetadata", {}), ("ModelReady", {"name": "tiny"}),
    ("ModelReady", {"name": "other"}), ("ModelMetadata", {"name": "tiny", "version": "1"}),
    ("ModelMetadata", {"name": "tiny", "version": "2"}), ("ModelConfig", {"name": "tiny"}), ("ModelConfig", {}),
    ("RepositoryIndex", {"ready": True}), ("RepositoryIndex", {"repository_name": "x"}),
    ("RepositoryModelLoad", {"model_name": "tiny"}), ("RepositoryModelLoad", {"model_name": "other"}),
    ("RepositoryModelUnload", {"model_name": "tiny"}), ("TraceSetting", {"model_name": "tiny"}), ("LogSettings", {}),
    ("SystemSharedMemoryStatus", {}), ("CudaSharedMemoryRegister", {"name": "r"}),
]  # fmt: skip


async def test_grpc_server_queries_need_no_grpc_port_at_instances(cluster_and_server) -> None:
    sides = await cluster_and_server("prefill", "decode")
    assert {name.removeprefix(f"{SERVICE_PATH}/") for name in before.FORWARDED_METHODS} >= {
        name for name, _ in SERVER_QUERIES
    }
    for method, members in SERVER_QUERIES:
        await sides.call_both(control.request_class(method)(**members), method=method)
    for side in (sides.cluster_calls, sides.server_calls):
        assert await grpc_error(side.send("ModelMetadata", BROKEN_MESSAGE)) == (
            "INTERNAL",
            "The message could not be read.",
        )
        assert (await side.check(control.SERVICE_NAME)).status == 1
        assert (await grpc_error(side.check("other")))[0] == "NOT_FOUND"
        call = side.channel.unary_unary(f"{SERVICE_PATH}/Unknown")(b"")
        assert await grpc_error(call) == ("UNIMPLEMENTED", "Method not found!")


async def test_cluster_grpc_health_follows_instance_availability(cluster_and_server) -> None:
    sides = await cluster_and_server("prefill", "decode")
    watching = sides.cluster_calls.channel.unary_stream(
        "/grpc.health.v1.Health/Watch", None, control.HEALTH_RESPONSE.FromString
    )(b"")
    assert (await watching.read()).status == 1
    table = sides.cluster.coordinator.table
    for instance in table:
        table.set_instance_offline(instance, True)
    assert (await watching.read()).status == (await sides.cluster_calls.check()).status == 2
    watching.cancel()
    assert (await sides.cluster_calls.call("ServerLive")).live and not (
        await sides.cluster_calls.call("ServerReady")
    ).ready
    assert (await grpc_error(sides.cluster_calls.call("ServerMetadata")))[0] == "UNAVAILABLE"


async def test_grpc_metadata_needs_a_key_but_probes_do_not(cluster_and_server) -> None:
    sides = await cluster_and_server("mixed", api_keys=(KEY,), cluster_secret="s")
    message = control.request_class("ServerMetadata")()
    for metadata in ((), (("parley-secret", "s"),)):
        code, _ = await sides.call_both(message, method="ServerMetadata", metadata=metadata)
        assert code is grpc.StatusCode.UNAUTHENTICATED
    metadata_answer = await sides.call_both(
        message, method="ServerMetadata", metadata=(("authorization", f"Bearer {KEY}"),)
    )
    assert metadata_answer.name == "triton"
    assert (await sides.cluster_calls.call("ServerReady")).ready and (await sides.cluster_calls.check()).status == 1


async def test_cluster_grpc_rejects_a_message_over_the_limit(cluster_and_server) -> None:
    sides = await cluster_and_server("prefill", "decode")
    sides.cluster_calls.channel = grpc.aio.insecure_channel(sides.cluster_calls.address)
    assert (await grpc_error(sides.cluster_calls.infer(text="a" * (33 << 20))))[0] == "RESOURCE_EXHAUSTED"
    await sides.cluster_calls.channel.close()


def long_reply(work: EngineRequest, index: int) -> list[int]:
    return [70 + k % 90 for k in range(800)]


async def test_cluster_grpc_cuts_off_a_client_that_does_not_read(cluster_and_server) -> None:
    sides = await cluster_and_server("prefill", "decode", reply=long_reply, port_options={"http_timeout_seconds": 0.3})
    narrow = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]  # keep few bytes in transit
    async with grpc.aio.insecure_channel(sides.cluster_calls.address, options=narrow) as sides.cluster_calls.channel:
        stream = sides.cluster_calls.stream()
        for _ in range(12):
            await stream.write(seeded_request(stream=True, max_tokens=800).SerializeToString())
        await sides.cluster.front.until(lambda: bool(sides.cluster.coordinator.front.load.open_requests))
        await sides.cluster.wait_until_idle()


async def test_cluster_grpc_late_reader_receives_everything(
    cluster_and_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_call, "MAX_QUEUED_BYTES", 256)  # bytes; nearly every answer has to wait
    sides = await cluster_and_server("prefill", "decode", reply=long_reply)
    requests = [seeded_request("a b c", request_id=f"{number}", stream=True, max_tokens=200) for number in range(4)]
    stream = sides.cluster_calls.stream()
    for message in requests:
        await stream.write(message.SerializeToString())
    await stream.done_writing()
    await sides.cluster.front.until(lambda: bool(sides.cluster.coordinator.front.load.open_requests))
    await asyncio.sleep(0.1)
    answers = join_answers([answer async for answer in stream])
    assert answers == join_answers(await stream_requests(sides.server_calls, *requests))
    await sides.cluster.wait_until_idle()


async def test_cluster_grpc_uses_tls_and_client_certificates(cluster_and_server, tmp_path: Path) -> None:
    make_authority(tmp_path, "ca")
    for name in ("server", "client"):
        make_certificate(tmp_path, name, "ca")
    pem = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    tls = TlsFiles(tmp_path / "server.pem", tmp_path / "server.key", client_authorities=(tmp_path / "ca.pem",))
    sides = await cluster_and_server("prefill", "decode", tls=tls)
    known_client = grpc.ssl_channel_credentials(pem["ca.pem"], pem["client.key"], pem["client.pem"])
    for credentials in (known_client, grpc.ssl_channel_credentials(pem["ca.pem"]), None):
        if credentials is None:
            sides.cluster_calls.channel = grpc.aio.insecure_channel(sides.cluster_calls.address)
        else:
            sides.cluster_calls.channel = grpc.aio.secure_channel(sides.cluster_calls.address, credentials)
        if credentials is known_client:
            assert (await sides.call_both(seeded_request())).outputs
        else:
            assert (await grpc_error(sides.cluster_calls.infer()))[0] == "UNAVAILABLE"
        await sides.cluster_calls.channel.close()
    with pytest.raises(TlsFileError, match="password"):
        GrpcCertificate(tls._replace(password_file=tmp_path / "word"))


async def test_strict_coordinator_reports_timeouts_in_grpc_form(
    cluster_and_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = await cluster_and_server(
        "prefill", "decode", cluster_only={"strict": True}, reply=lambda work, index: [70] * 3000, tick=0.005
    )
    coordinator = sides.cluster.coordinator
    await sides.call_both(seeded_request(max_tokens=9))
    monkeypatch.setattr(coordinator.table, "options", replace(coordinator.options, infer_timeout=60))
    stream = sides.cluster_calls.stream()
    await stream.write(seeded_request(request_id="7", stream=True, max_tokens=3000).SerializeToString())
    await stream.done_writing()
    answers = [await stream.read()]
    await pass_time(60)
    while (answer := await stream.read()) is not grpc.aio.EOF:
        answers.append(answer)
    *parts, last = answers
    assert parts and not any(answer.error_message for answer in parts)
    assert (last.error_message, last.infer_response.id, is_final(last)) == (refusals.TEXTS.inference_timeout, "7", True)
    await sides.cluster.wait_until_idle()


async def test_cluster_grpc_reports_packages_missing_at_instances(
    cluster_and_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = await cluster_and_server("prefill", "decode")
    monkeypatch.setattr("parley.dialects.triton.calls.find_spec", lambda name: None)
    code, sentence = await grpc_error(sides.cluster_calls.infer())
    assert code == "UNIMPLEMENTED" and "parley-llm[grpc]" in sentence
    (answer,) = await stream_requests(sides.cluster_calls, seeded_request(request_id="7"))
    assert answer.error_message == sentence and is_final(answer) and answer.infer_response.id == "7"
