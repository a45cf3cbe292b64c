"""A vLLM server that runs already, as an engine. The server is parley's own, which has the same route."""

from __future__ import annotations

import os
import random
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.compare_answers import same_answer
from support.http_client import MODEL_INFO, RunningServer, build_request
from support.prefill_decode_pair import join_cluster
from support.random_requests import generating_routes, random_body
from support.server_fixtures import Serve, fix_identities

from parley import demo
from parley.core.shared_pages.reservations import ADAPTER_DIFFERS
from parley.disagg.kv.peer import KVPeer
from parley.types import Arena, EngineRequest, KVPrefix, ParleySettings
from parley.worker.attached import attached_engine, server_facts
from parley.worker.attached.server_calls import ServerCalls
from parley.worker.vllm.host_loop import UNKNOWN_ADAPTER

JSON = {"content-type": "application/json"}
LONG = {"prompt": "Hello there", "max_tokens": 3000, "ignore_eos": True, "stream": True}
NIGHTLY = bool(os.environ.get("PARLEY_NIGHTLY"))
FINGERPRINT = re.compile(rb"fp_\w{10}")  # of the engine
ENGINE_NAME = b"with the engine vllm 0.33.0"
CACHED = re.compile(rb'"cached_tokens":(\d+)')
AWAY = "The server that computes for this model is away."


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_engine, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(attached_engine, "RETRY_SECONDS", 0.02)


def scripted_reply(request: EngineRequest, index: int) -> list[int]:
    """Random tokens that are the same for the same request."""
    rng = random.Random(f"{request.seed + index} {request.token_ids[-3:]}")
    return [rng.randrange(640) for _ in range(rng.choice((0, 1, 2, 9, 40)))]


async def attach(serve: Serve, **options: Any) -> tuple[RunningServer, RunningServer]:
    """Start a server, and one that computes with it."""
    back = await serve(**options)
    return back, await serve(attached=back.url + "/vllm")


async def test_every_route_answers_like_the_server_itself(serve, monkeypatch):
    fix_identities(monkeypatch)
    back, front = await attach(serve, reply=scripted_reply)
    rng, refused = random.Random("attached to a server"), 0
    paths = [path for path, _ in generating_routes()]
    for path in paths if NIGHTLY else rng.sample(paths, 60):
        body = random_body(path, rng)
        if b"beam" in body:  # searched by the front, among candidates that scripted replies do not have
            continue
        answer, expected = await front.call("POST", path, body, JSON), await back.call("POST", path, body, JSON)
        if ENGINE_NAME in answer.body:
            refused += 1
            begins_as_error = answer.body.startswith((b"\0", b'data:{"error"', b'data: {"error"'))  # TGI's, binary
            assert answer.status in (400, 422) or begins_as_error, (path, body, answer)
            continue
        assert answer.status == expected.status, (path, body, answer.body, expected.body)
        one, other = (FINGERPRINT.sub(b"", response.body) for response in (answer, expected))
        assert same_answer(one, other), (path, body, one, other)
    assert 0 < refused < len(paths) / 8
    await front.wait_until_idle()
    await back.wait_until_idle()


async def test_a_client_that_leaves_ends_its_choices_on_the_server_and_here(serve):
    back = await serve(tick=0.001)
    front = await serve(attached=back.url + "/vllm", max_batch=2)
    connection = await front.connect()
    await connection.send(build_request("POST", "/v1/completions", LONG | {"n": 5}))
    await front.until(lambda: (front.engine.stats.running, front.engine.stats.waiting) == (2, 3))
    await back.until(lambda: back.engine.stats.running == 2)
    connection.close()
    await back.wait_until_idle()
    await front.wait_until_idle()


async def test_reports_the_use_of_the_servers_kv_cache(serve, quick_polls):
    back, front = await attach(serve, tick=0.001)
    assert front.model.model_info.kv_pages == MODEL_INFO.kv_pages
    connection = await back.connect()  # another client of that server
    await connection.send(build_request("POST", "/v1/completions", LONG))
    await front.until(lambda: front.engine.stats.used_pages > 0)
    connection.close()
    await front.until(lambda: front.engine.stats.used_pages == 0)


async def test_reports_how_many_tokens_of_a_prompt_the_server_had_cached(serve):
    settings = ParleySettings(model=str(demo.model_folder()), dtype="float32", kv_memory=8 << 20)
    back = await serve(settings=settings)
    front = await serve(attached=back.url + "/vllm", settings=settings)
    prompt = "Many words that fill pages of the cache. " * 8
    assert (await back.post("/vllm/v1/completions", {"prompt": prompt, "max_tokens": 1})).status == 200
    for body in ({}, {"stream": True, "stream_options": {"include_usage": True}}, {"prompt_logprobs": 0}):
        request = {"prompt": prompt, "max_tokens": 3, "temperature": 0} | body
        answers = [await server.post("/vllm/v1/completions", request) for server in (back, front)]
        cached_counts = [CACHED.findall(answer.body) for answer in answers]
        assert cached_counts[0] == cached_counts[1] and (int(cached_counts[0][-1]) > 0) == (
            "prompt_logprobs" not in body
        ), answers


async def test_adapters_that_the_server_lists_can_be_used_by_name(serve, quick_polls, tmp_path):
    used: list[str] = []
    back = await serve(lambda request, index: used.append(request.adapter) or [1], lora_root=str(tmp_path))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    await back.post("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": "one"})
    front = await serve(attached=back.url + "/vllm")
    used.clear()
    answer = await front.post("/v1/completions", {"model": "one", "prompt": "a"})
    assert answer.status == 200 and answer.json["model"] == "one" and used == ["one"]
    await back.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "two"})
    await front.until(lambda: "two" in front.model.adapters)
    await back.post("/v1/unload_lora_adapter", {"lora_name": "one"})
    await front.until(lambda: "one" not in front.model.adapters)
    assert (await front.post("/v1/completions", {"model": "one", "prompt": "a"})).status == 404
    assert (await front.post("/v1/completions", {"model": "two", "prompt": "a"})).status == 200


async def test_adapters_are_compared_by_their_source(serve, tmp_path):
    engines = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").write_text("{}")
        back = await serve(lora_root=str(tmp_path))
        await back.post("/v1/load_lora_adapter", {"lora_name": "same", "lora_path": folder})
        engines.append((await serve(attached=back.url + "/vllm")).engine)
    first = engines[0]
    digest = (await first.reserve_pages("k", KVPrefix([], adapter="same"))).digest
    answers = [await engine.reserve_pages("k", KVPrefix([], "", "same", digest)) for engine in engines]
    assert digest and [answer.error for answer in answers] == ["", ADAPTER_DIFFERS]
    assert answers[0].digest == digest != answers[1].digest
    assert (await first.reserve_pages("k", KVPrefix([], adapter="gone"))).error == UNKNOWN_ADAPTER
    assert (await first.reserve_pages("k", KVPrefix([]))).error == ""


async def test_handovers_survive_a_change_of_the_servers_adapters(serve, quick_polls, monkeypatch, tmp_path):
    describe, arena = attached_engine.describe_attached_model, Arena(0, -1, 8, [], "pages")
    monkeypatch.setattr(
        attached_engine,
        "describe_attached_model",
        lambda facts, settings: msgspec.structs.replace(
            info := describe(facts, settings), arena=arena, features=info.features | {"page_transfer"}
        ),
    )
    back = await serve(lora_root=str(tmp_path))
    front = await serve(attached=back.url + "/vllm")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "adapter_config.json").write_text("{}")
    receiving, stranger = (await join_cluster(front)).peer, KVPeer(secret=b"s")
    try:
        stranger.add_arena("tiny", arena)
        sender = await stranger.open_handover(f"127.0.0.1:{receiving.port}", "tiny")
        (link,) = receiving.links
        await back.post("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": "one"})
        await front.until(lambda: "one" in front.model.adapters)
        assert receiving.links == [link] and not link.end_reason
        sender.close_handover()
    finally:
        await stranger.close_peer()


async def test_vectors_are_those_of_the_server(serve):
    vectors_only = msgspec.structs.replace(MODEL_INFO, generates=False, dimensions=8)
    for info in (vectors_only, msgspec.structs.replace(vectors_only, generates=True)):
        back, front = await attach(serve, info=info)
        assert (front.model.model_info.generates, front.model.model_info.dimensions) == (info.generates, 8)
        body = {"input": ["One text", "and another"], "dimensions": 4}
        answers = [await server.post("/v1/embeddings", body) for server in (back, front)]
        vectors = [[entry["embedding"] for entry in answer.json["data"]] for answer in answers]
        assert vectors[0] == vectors[1] and len(vectors[1][1]) == 4
        refused = await front.post("/v1/completions", {"prompt": "a"})
        assert (refused.status == 200) == info.generates
        await front.wait_until_idle()


async def test_is_not_ready_while_the_server_is_away(serve, quick_polls):
    back, front = await attach(serve, tick=0.001)
    streams = [await front.connect() for _ in range(2)]
    for stream in streams:
        await stream.send(build_request("POST", "/v1/completions", LONG))
        assert (await stream.head())[0] == 200
    back.engine.crash_engine()
    for stream in streams:
        assert b'"error"' in (await stream.chunks())[-1]
    await front.until(lambda: front.engine.state == "restarting")
    health, refused = await front.get("/health/ready"), await front.post("/v1/completions", {"prompt": "a"})
    assert health.status == 503 and health.json["message"] == AWAY
    assert (refused.status, refused.error["message"]) == (503, AWAY)
    assert str(back.port).encode() not in health.body + refused.body
    await back.engine.start()
    await front.until(lambda: front.engine.state == "ready")
    assert await front.control() == await back.control()


async def test_waits_for_a_server_that_is_still_loading(serve, quick_polls):
    back = await serve(load=0.2, wait=False)
    front = await serve(attached=back.url + "/vllm")
    assert back.engine.state == front.engine.state == "ready"


@pytest.mark.parametrize(
    "body", [b"<html>busy</html>", b"[1]", b'{"count": 3}', b'{"tokens": null}', b'"\xff"', b"[" * 10**5]
)
async def test_an_answer_without_tokens_tells_nothing_about_the_tokenizer(serve, monkeypatch, body):
    back = await serve()
    post = ServerCalls.post

    async def answer_oddly(calls, path, *args):
        answer = await post(calls, path, *args)
        return answer._replace(status=200, body=body) if path == "/tokenize" else answer

    monkeypatch.setattr(ServerCalls, "post", answer_oddly)
    front = await serve(attached=back.url + "/vllm", wait=False)
    await front.until(lambda: front.engine.state in ("ready", "failed"))
    assert front.engine.state == "ready", front.engine.failure


async def test_refuses_another_kind_of_server_and_another_model(serve, monkeypatch):
    back = await serve()
    for path, message in (
        ("", "runs vLLM 0.1.0, but parley works with 0.32 to 0.33."),  # the shared path tells parley's own version
        ("/tgi", "is no vLLM server: GET /version gave status 404."),
    ):
        front = await serve(attached=back.url + path, wait=False)
        await front.until(lambda front=front: front.engine.state == "failed")
        assert front.engine.failure == f"{back.url}{path} {message}"
    other = SimpleNamespace(from_folder=lambda folder: SimpleNamespace(encode=lambda text, add_special_tokens: [1, 2]))
    monkeypatch.setattr(server_facts, "Tokenizer", other)
    front = await serve(attached=back.url + "/vllm", wait=False)
    await front.until(lambda: front.engine.state == "failed")
    assert "serves another model as tiny: its tokenizer is not that of" in front.engine.failure
