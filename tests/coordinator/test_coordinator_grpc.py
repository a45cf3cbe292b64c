"""gRPC through a coordinator answers like one server, unary and streamed, also when instances fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.certificates import authority, certificate
from support.cluster_of_servers import Cluster
from support.grpc_client import BROKEN, Calls, final, refused, said
from support.grpc_client import request as unseeded
from support.http_client import Served

from parley.coordinator import refusals
from parley.coordinator.config import Tls
from parley.coordinator.proxy import grpc_call
from parley.coordinator.proxy import grpc_port as before
from parley.dialects.triton.calls import SERVICE
from parley.dialects.triton.rpc import control
from parley.instance.decode import Decode
from parley.serving import grpc_port as alone
from parley.types import Work
from parley.web.tls import BadTls

KEY = "sk-right-key-0123456789"


def reply(work: Work, index: int) -> list[int]:
    rng = random.Random(f"{work.seed + index} {work.token_ids[-3:]}")
    return [rng.randrange(640) for _ in range(40)]


def request(*given: Any, seed: int = 7, **wish: Any) -> Any:
    return unseeded(*given, seed=seed, **wish)


class Both:
    """Makes the same calls to a cluster and to one server."""

    def __init__(self, cluster: Cluster, many: Calls, one: Calls):
        self.cluster, self.many, self.one = cluster, many, one

    async def same(self, made: Any, *, method: str = "ModelInfer", metadata: Any = ()) -> Any:
        """Return the answer to a call, or its status code and message; both sides must give the same."""
        answers = []
        for side in (self.many, self.one):
            try:
                answers.append(await side.send(method, made.SerializeToString(), 20, metadata))
            except grpc.aio.AioRpcError as error:
                answers.append((error.code(), error.details()))
        assert answers[0] == answers[1]
        return answers[0]


@pytest.fixture
async def both(live_cluster, serve) -> AsyncIterator[Callable[..., Awaitable[Both]]]:
    """Start a cluster of these roles and a server with the same options; ``port_options`` are the coordinator's."""
    ending: list[Callable[[], Awaitable[Any]]] = []

    async def reach(served: Served, port: Any, address: str) -> Calls:
        made = Calls(served, port, address)
        ending.extend((made.channel.close, lambda: port.stop(0)))
        return made

    async def begin(*roles: str, told: dict[str, Any] | None = None, **options: Any) -> Both:
        options = {"reply": reply} | options
        many, one = await live_cluster(*roles, **options), await serve(**options)
        coordinator = many.coordinator
        port = before.Port(coordinator.table, coordinator.front, replace(coordinator.options, **(told or {})))
        other = alone.Port(one.service)
        address = (await other.start([("127.0.0.1", 0)]))[0]
        return Both(
            many,
            await reach(many.front, port, await port.start("127.0.0.1", 0)),
            await reach(one, other, address),
        )

    yield begin
    for end in ending:
        await end()


async def streamed(side: Calls, *asked: Any, metadata: Any = ()) -> list[Any]:
    """Return all answers to the requests of one stream."""
    stream = side.stream(metadata=metadata)
    for each in asked:
        await stream.write(each.SerializeToString())
    await stream.done_writing()
    return [answer async for answer in stream]


def folded(answers: list[Any]) -> dict[str, Any]:
    """Join the answers of each request: how the steps of an engine fall into answers is not guaranteed."""
    found: dict[str, Any] = {}
    for answer in answers:
        inner = answer.infer_response
        text, last, sentence = found.get(inner.id, ("", False, ""))
        assert not last
        told = said(inner) if inner.raw_output_contents else ""
        found[inner.id] = text + told, final(answer), sentence + answer.error_message
    return found


WISHES: list[dict[str, Any]] = [
    {"max_tokens": 1}, {"max_tokens": 9}, {"seed": 5, "temperature": 0.8}, {"stop": "e"}, {"max_tokens": 0},
    {"model": "other"}, {"model": ""}, {"temperature": -1.0}, {"text": "a" * 5000}, {"text": ""}, {"bogus": 1},
    {"model": "other", "temperature": -1.0}, {"triton_enable_empty_final_response": True}, {"text": "a b c " * 300},
    {"triton_enable_empty_final_response": 1},
]  # fmt: skip


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
async def test_cluster_grpc_answers_equal_those_of_one_server(both, roles: tuple[str, ...]) -> None:
    each = await both(*roles)
    for wish in WISHES:
        await each.same(request(id="7", **wish))
        asked = [request(id="7", stream=True, **wish), request(id="8", **wish)]
        many, one = await streamed(each.many, *asked), await streamed(each.one, *asked)
        assert folded(many) == folded(one), wish
    await each.cluster.idle()


async def test_grpc_stream_requests_are_separated_and_run_concurrently(both) -> None:
    each = await both("prefill", "decode", tick=0.002)
    asked = [request(f"a {number}", id=f"{number}", stream=number % 2 > 0) for number in range(20)]
    asked.insert(3, request(id="x", model="other"))
    many, one = await streamed(each.many, *asked), await streamed(each.one, *asked)
    assert folded(many) == folded(one) and len(folded(many)) == 21
    first = next(place for place, answer in enumerate(many) if final(answer) and not answer.error_message)
    assert len({answer.infer_response.id for answer in many[:first]}) > 3, "they came one after another"
    assert each.cluster.coordinator.choice.tally.choices.counts["separate"] == 21
    await each.cluster.idle()


@pytest.mark.parametrize("lost", ["p", "d"])
async def test_grpc_stream_resumes_identically_when_an_instance_ends(both, lost: str) -> None:
    each = await both("prefill", "prefill", "decode", "decode", tick=0.01)
    asked = [request(f"a {number}", id=f"{number}", stream=number != 3, seed=number) for number in range(8)]
    expected = folded(await streamed(each.one, *asked))
    running = [asyncio.create_task(streamed(each.many, *asked)), asyncio.create_task(streamed(each.many, *asked))]
    made = request("a 3", id="3", seed=3).SerializeToString()
    whole = asyncio.ensure_future(each.many.send("ModelInfer", made))
    candidates = each.cluster.instances[:2] if lost == "p" else each.cluster.instances[2:]
    await each.cluster.front.until(lambda: any(served.engine.in_flight for served in candidates))
    victim = next(served for served in candidates if served.engine.in_flight)
    if lost == "d":
        await asyncio.sleep(0.1)
    victim.engine.crash()
    for answers in await asyncio.gather(*running):
        assert folded(answers) == expected
    assert (said(await whole), True, "") == expected["3"]
    assert each.cluster.coordinator.choice.tally.retries
    await each.cluster.idle()


async def test_grpc_request_survives_an_engine_crash_during_handover(both, monkeypatch: pytest.MonkeyPatch) -> None:
    each = await both("prefill", "decode", "decode")
    fetch, lost = Decode._pages, list[Decode]()

    async def once(leg: Decode) -> None:
        await fetch(leg)
        if not lost:
            lost.append(leg)
            leg.generation.model.engine.crash()

    monkeypatch.setattr(Decode, "_pages", once)
    asked = [request("a b c", id="7", stream=True)]
    assert folded(await streamed(each.many, *asked)) == folded(await streamed(each.one, *asked)) and lost
    await each.cluster.idle()


async def test_cluster_grpc_stream_ends_at_the_first_error_if_requested(both) -> None:
    each = await both("prefill", "decode", tick=0.01)
    for side in (each.many, each.one):
        stream = side.stream(metadata=(("triton_grpc_error", "true"),))
        await stream.write(request(id="long", stream=True).SerializeToString())
        assert not (await stream.read()).error_message
        await stream.write(request(id="x", model="other").SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                assert not (await stream.read()).error_message
        told = caught.value.code(), caught.value.details()
        assert told == (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'other' is not found")
    await each.cluster.idle()


async def test_cluster_rejects_malformed_grpc_messages(both) -> None:
    each = await both("prefill", "decode")
    for side in (each.many, each.one):
        assert await refused(side.send("ModelInfer", BROKEN)) == ("INTERNAL", "The message could not be read.")
        stream = side.stream()
        await stream.write(BROKEN)
        assert await refused(stream.read()) == ("INTERNAL", "The message could not be read.")


@pytest.mark.parametrize("ending", ["cancel", "deadline", "close"])
async def test_cluster_grpc_disconnect_leaves_nothing_open(both, ending: str) -> None:
    each = await both("prefill", "decode", reply=lambda work, index: [70] * 3000, tick=0.005)
    timeout = 1 if ending == "deadline" else 20
    call = asyncio.ensure_future(each.many.infer(max_tokens=3000, timeout=timeout))
    stream = each.many.stream(timeout=timeout)
    for _ in range(3):
        await stream.write(request(stream=True, max_tokens=3000).SerializeToString())
    assert final(await stream.read()) is False
    if ending == "cancel":
        call.cancel()
        stream.cancel()
    elif ending == "close":
        await each.many.channel.close()
    await asyncio.gather(call, return_exceptions=True)
    await each.cluster.idle()


async def test_cluster_grpc_checks_the_keys_of_the_instances(both) -> None:
    each = await both("prefill", "decode", api_keys=(KEY,), cluster_secret="s")
    for metadata in ((), (("authorization", "Bearer wrong"),), (("parley-secret", "s"),)):
        code, sentence = await each.same(request(), metadata=metadata)
        assert code is grpc.StatusCode.UNAUTHENTICATED and "API key" in sentence
        stream = each.many.stream(metadata=metadata)
        await stream.write(request().SerializeToString())
        assert (await refused(stream.read()))[0] == "UNAUTHENTICATED"


async def test_cluster_grpc_statistics_are_summed(both) -> None:
    each = await both("prefill", "decode", "decode")
    for number in range(6):
        await each.same(request(f"a {number}", max_tokens=4))
        await streamed(each.many, request(f"b {number}", max_tokens=4, stream=True))
    for name in ("", "tiny"):
        counts = (await each.many.call("ModelStatistics", name=name)).model_stats[0]
        assert counts.inference_count == counts.inference_stats.success.count == 12
    expected = [await refused(side.call("ModelStatistics", name="other")) for side in (each.many, each.one)]
    assert expected[0] == expected[1]
    expected = [await refused(side.call("ModelStatistics", name="tiny", version="2")) for side in (each.many, each.one)]
    assert expected[0] == expected[1]


QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("ServerLive", {}), ("ServerReady", {}), ("ServerMetadata", {}), ("ModelReady", {"name": "tiny"}),
    ("ModelReady", {"name": "other"}), ("ModelMetadata", {"name": "tiny", "version": "1"}),
    ("ModelMetadata", {"name": "tiny", "version": "2"}), ("ModelConfig", {"name": "tiny"}), ("ModelConfig", {}),
    ("RepositoryIndex", {"ready": True}), ("RepositoryIndex", {"repository_name": "x"}),
    ("RepositoryModelLoad", {"model_name": "tiny"}), ("RepositoryModelLoad", {"model_name": "other"}),
    ("RepositoryModelUnload", {"model_name": "tiny"}), ("TraceSetting", {"model_name": "tiny"}), ("LogSettings", {}),
    ("SystemSharedMemoryStatus", {}), ("CudaSharedMemoryRegister", {"name": "r"}),
]  # fmt: skip


async def test_grpc_server_queries_need_no_grpc_port_at_instances(both) -> None:
    each = await both("prefill", "decode")
    assert {name.removeprefix(f"{SERVICE}/") for name in before.ASKED} >= {name for name, _ in QUESTIONS}
    for method, members in QUESTIONS:
        await each.same(control.question(method)(**members), method=method)
    for side in (each.many, each.one):
        assert await refused(side.send("ModelMetadata", BROKEN)) == ("INTERNAL", "The message could not be read.")
        assert (await side.check(control.SERVICE)).status == 1
        assert (await refused(side.check("other")))[0] == "NOT_FOUND"
        call = side.channel.unary_unary(f"{SERVICE}/Unknown")(b"")
        assert await refused(call) == ("UNIMPLEMENTED", "Method not found!")


async def test_cluster_grpc_health_follows_instance_availability(both) -> None:
    each = await both("prefill", "decode")
    watching = each.many.channel.unary_stream("/grpc.health.v1.Health/Watch", None, control.STATE.FromString)(b"")
    assert (await watching.read()).status == 1
    table = each.cluster.coordinator.table
    for instance in table:
        table.withhold(instance, True)
    assert (await watching.read()).status == (await each.many.check()).status == 2
    watching.cancel()
    assert (await each.many.call("ServerLive")).live and not (await each.many.call("ServerReady")).ready
    assert (await refused(each.many.call("ServerMetadata")))[0] == "UNAVAILABLE"


async def test_grpc_metadata_needs_a_key_but_probes_do_not(both) -> None:
    each = await both("mixed", api_keys=(KEY,), cluster_secret="s")
    made = control.question("ServerMetadata")()
    for metadata in ((), (("parley-secret", "s"),)):
        code, _ = await each.same(made, method="ServerMetadata", metadata=metadata)
        assert code is grpc.StatusCode.UNAUTHENTICATED
    told = await each.same(made, method="ServerMetadata", metadata=(("authorization", f"Bearer {KEY}"),))
    assert told.name == "triton"
    assert (await each.many.call("ServerReady")).ready and (await each.many.check()).status == 1


async def test_cluster_grpc_rejects_a_message_over_the_limit(both) -> None:
    each = await both("prefill", "decode")
    each.many.channel = grpc.aio.insecure_channel(each.many.address)
    assert (await refused(each.many.infer(text="a" * (33 << 20))))[0] == "RESOURCE_EXHAUSTED"
    await each.many.channel.close()


def long(work: Work, index: int) -> list[int]:
    return [70 + k % 90 for k in range(800)]


async def test_cluster_grpc_cuts_off_a_client_that_does_not_read(both) -> None:
    each = await both("prefill", "decode", reply=long, told={"http_timeout_seconds": 0.3})
    narrow = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]  # keep few bytes in transit
    async with grpc.aio.insecure_channel(each.many.address, options=narrow) as each.many.channel:
        stream = each.many.stream()
        for _ in range(12):
            await stream.write(request(stream=True, max_tokens=800).SerializeToString())
        await each.cluster.front.until(lambda: bool(each.cluster.coordinator.front.open))
        await each.cluster.idle()


async def test_cluster_grpc_late_reader_receives_everything(both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_call, "HOLD", 256)  # bytes; nearly every answer has to wait
    each = await both("prefill", "decode", reply=long)
    asked = [request("a b c", id=f"{number}", stream=True, max_tokens=200) for number in range(4)]
    stream = each.many.stream()
    for made in asked:
        await stream.write(made.SerializeToString())
    await stream.done_writing()
    await each.cluster.front.until(lambda: bool(each.cluster.coordinator.front.open))
    await asyncio.sleep(0.1)
    answers = folded([answer async for answer in stream])
    assert answers == folded(await streamed(each.one, *asked))
    await each.cluster.idle()


async def test_cluster_grpc_uses_tls_and_client_certificates(both, tmp_path: Path) -> None:
    authority(tmp_path, "ca")
    for name in ("server", "client"):
        certificate(tmp_path, name, "ca")
    pem = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    place = {name: str(tmp_path / file) for name, file in
             (("certificate", "server.pem"), ("key", "server.key"), ("clients", "ca.pem"))}  # fmt: skip
    each = await both("prefill", "decode", told={"tls": Tls(**place)})
    known = grpc.ssl_channel_credentials(pem["ca.pem"], pem["client.key"], pem["client.pem"])
    for credentials in (known, grpc.ssl_channel_credentials(pem["ca.pem"]), None):
        if credentials is None:
            each.many.channel = grpc.aio.insecure_channel(each.many.address)
        else:
            each.many.channel = grpc.aio.secure_channel(each.many.address, credentials)
        if credentials is known:
            assert (await each.same(request())).outputs
        else:
            assert (await refused(each.many.infer()))[0] == "UNAVAILABLE"
        await each.many.channel.close()
    with pytest.raises(BadTls, match="password"):
        before.encryption(Tls(**place, password=str(tmp_path / "word")))


async def test_strict_coordinator_reports_timeouts_in_grpc_form(both, monkeypatch: pytest.MonkeyPatch) -> None:
    each = await both("prefill", "decode", reply=lambda work, index: [70] * 3000, tick=0.005)
    coordinator = each.cluster.coordinator
    monkeypatch.setattr(coordinator.front, "_strict", True)
    await each.same(request(max_tokens=9))
    monkeypatch.setattr(coordinator.choice, "options", replace(coordinator.options, infer_timeout=0.3))
    stream = each.many.stream()
    await stream.write(request(id="7", stream=True, max_tokens=3000).SerializeToString())
    await stream.done_writing()
    *parts, last = [answer async for answer in stream]
    assert parts and not any(answer.error_message for answer in parts)
    assert (last.error_message, last.infer_response.id, final(last)) == (refusals.LATE_END, "7", True)
    await each.cluster.idle()


async def test_cluster_grpc_reports_packages_missing_at_instances(both, monkeypatch: pytest.MonkeyPatch) -> None:
    each = await both("prefill", "decode")
    monkeypatch.setattr("parley.dialects.triton.calls.find_spec", lambda name: None)
    code, sentence = await refused(each.many.infer())
    assert code == "UNIMPLEMENTED" and "parley[grpc]" in sentence
    (answer,) = await streamed(each.many, request(id="7"))
    assert answer.error_message == sentence and final(answer) and answer.infer_response.id == "7"
