"""Requests that start on one server and continue on another: the bytes of one server, and nothing left open."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from typing import Any

import pytest
from support.compare_answers import same_answer
from support.http_client import Connection, build_request
from support.prefill_decode_pair import (
    COORDINATOR_NAME,
    HEADERS,
    REQUEST_UUID,
    ClientAnswer,
    ResultConnection,
    ServerPair,
    assert_same_answer,
    post_json,
)
from support.random_requests import generating_routes, random_body

from parley.core.media.encode_queue import FEATURES_ELSEWHERE
from parley.disagg.kv.sender import KVSender
from parley.instance import decode_stage
from parley.serving import generation
from parley.serving.engine_requests import prepare_answer
from parley.serving.request_deadline import RequestDeadline
from parley.serving.served_model import ServedModel
from parley.types import EngineRequest, KVPrefix


def scripted_reply(work: EngineRequest, index: int) -> list[int]:
    """Random tokens that are the same for the same request; sometimes none."""
    rng = random.Random(f"{work.seed + index} {work.token_ids[-3:]}")
    return [rng.randrange(640) for _ in range(rng.choice((0, 1, 2, 9, 40)))]


CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 12}


NIGHTLY = bool(os.environ.get("PARLEY_NIGHTLY"))


@pytest.mark.parametrize("same_server", [True, False])
async def test_separated_stages_answer_every_route_like_one_server(alike, same_server: bool) -> None:
    single_server, pair = await alike(reply=scripted_reply, here=same_server)
    rng = random.Random(f"routes {same_server}")
    for path, _ in generating_routes():
        for _ in range(40 if NIGHTLY else 1):
            await assert_same_answer(single_server, pair, path, random_body(path, rng))
    await pair.wait_until_idle()


async def test_separated_stages_agree_whether_to_summarize(alike) -> None:
    single_server, pair = await alike(reply=lambda work, index: [70, *scripted_reply(work, index)])
    ask = {"model": "tiny", "max_tokens": 12, "messages": CHAT["messages"]}
    for threshold in (1, 2000):
        trigger = {"type": "input_tokens", "value": threshold}
        edit = {"type": "compact_20260112", "trigger": trigger, "pause_after_compaction": True}
        for stream in (False, True):
            body = ask | {"context_management": {"edits": [edit]}, "stream": stream}
            await assert_same_answer(single_server, pair, "/v1/messages", json.dumps(body).encode())
    items = [*CHAT["messages"], {"type": "compaction_trigger"}]
    for path, body in (
        ("/v1/messages", ask | {"compaction": {"type": "summarize"}}),
        ("/v1/responses", {"input": items, "store": False}),
    ):
        for stream in (False, True):
            sent = json.dumps(body | {"stream": stream}).encode()
            await assert_same_answer(single_server, pair, path, sent)
            assert b'"type":"compaction"' in (await post_json(single_server, path, sent)).body
    await pair.wait_until_idle()


SUMMARY_EDIT = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50}}
SUMMARY_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"messages": [{"role": "user", "content": "apple " * 90}], "max_tokens": 12, "model": "tiny",
                      "context_management": {"edits": [SUMMARY_EDIT]}}),
    ("/v1/responses", {"input": "apple " * 600, "store": False,
                       "context_management": [{"type": "compaction", "compact_threshold": 1000}]}),
]  # fmt: skip


@pytest.mark.parametrize("same_server", [True, False])
@pytest.mark.parametrize(("path", "body"), SUMMARY_BODIES)
async def test_summary_and_answer_continue_anywhere_byte_for_byte(alike, path: str, body: Any, same_server: bool):
    single_server, pair = await alike(reply=lambda work, index: [70 + work.seed % 90] * 3, here=same_server)
    for stream in (False, True):
        sent = json.dumps(body | {"stream": stream}).encode()
        await assert_same_answer(single_server, pair, path, sent)
        assert b'"type":"compaction"' in (await post_json(single_server, path, sent)).body
    whole = await pair.ask(path, sent, REQUEST_UUID, HEADERS)
    for count in range(1, len(whole.parts)):
        records = [record for _, record in whole.parts[:count]]
        rest = await pair.ask(path, sent, REQUEST_UUID, HEADERS, past=records)
        assert rest.status == 200, rest
        assert b"".join(data for data, _ in whole.parts[:count]) + rest.body == whole.body, count
    await pair.wait_until_idle()


@pytest.mark.parametrize("same_server", [True, False])
async def test_engine_that_dies_between_summary_and_answer_leaves_the_request_to_others(
    alike, same_server: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pair = await alike(reply=lambda work, index: [70] * 3, here=same_server)

    async def crash_before(model: ServedModel, *rest: Any) -> Any:
        model.engine.crash_engine()
        return await prepare_answer(model, *rest)

    monkeypatch.setattr(generation, "prepare_answer", crash_before)
    path, body = SUMMARY_BODIES[1]
    answer = await pair.ask(path, json.dumps(body | {"stream": True}).encode(), REQUEST_UUID, HEADERS)
    assert answer.error and b"response.failed" not in answer.body


STREAM_BODIES: list[dict[str, Any]] = [
    CHAT | {"stream": True},
    CHAT | {"stream": True, "n": 2, "logprobs": True, "stop": ["a", "7"], "stream_options": {"include_usage": True}},
    CHAT | {"stream": True, "best_of": 3, "n": 2},
    CHAT | {"stream": True, "prompt_logprobs": 1, "stream_interval": 3, "max_tokens": 30},
    CHAT | {"stream": True, "use_beam_search": True, "best_of": 2, "n": 2},  # the scripted engine does not search
]


@pytest.mark.parametrize("same_server", [True, False])
async def test_stream_resumes_after_any_part_byte_for_byte(alike, same_server: bool) -> None:
    """A client that got some parts gets the rest, byte for byte, from servers that do not know the request."""
    _, pair = await alike(reply=scripted_reply, here=same_server)
    for members in STREAM_BODIES[:-1]:
        chat_body = json.dumps(members).encode()
        whole = await pair.ask("/v1/chat/completions", chat_body, REQUEST_UUID, HEADERS)
        for count in range(1, len(whole.parts)):
            records = [record for _, record in whole.parts[:count]]
            rest = await pair.ask("/v1/chat/completions", chat_body, REQUEST_UUID, HEADERS, past=records)
            assert rest.status == 200, rest
            assert b"".join(data for data, _ in whole.parts[:count]) + rest.body == whole.body, (members, count)
    await pair.wait_until_idle()


@pytest.mark.parametrize("same_server", [True, False])
async def test_dropping_a_separated_stream_leaves_nothing_open(alike, same_server: bool) -> None:
    """Guards against leaked requests, leases and reservations on either side."""
    _, pair = await alike(reply=lambda work, index: [70 + k % 90 for k in range(40)], here=same_server, tick=0.001)
    for members in STREAM_BODIES:
        for count in (1, 2, 3, 9):
            chat_body = json.dumps(members | {"max_tokens": 40}).encode()
            await pair.ask("/v1/chat/completions", chat_body, REQUEST_UUID, HEADERS, stop=count)
            await pair.wait_until_idle()


async def ask_chat(pair: ServerPair, path: str = "/v1/chat/completions", **members: Any) -> ClientAnswer:
    return await pair.ask(path, json.dumps(CHAT | members).encode(), REQUEST_UUID, HEADERS)


def long_reply(work: EngineRequest, index: int) -> list[int]:
    return [70 + k % 90 for k in range(60)]


async def test_refuses_separation_when_decode_has_no_room(alike) -> None:
    _, pair = await alike(reply=long_reply)
    info = pair.decode.engine.info
    assert not (await pair.decode.engine.reserve_pages("all", KVPrefix([0] * (info.kv_pages * info.page_tokens)))).error
    answer = await ask_chat(pair, messages=[{"role": "user", "content": "many tokens " * 40}])
    pair.decode.engine.free_reservation("all")
    refusal = json.loads(answer.body)
    assert answer.status == 503 and refusal["refused"] is True and refusal["isLastResp"] is False
    assert "no capacity" in refusal["reason"]
    await pair.wait_until_idle()


async def test_refuses_separation_when_decode_is_unreachable(alike) -> None:
    _, pair = await alike(reply=long_reply)
    pair.target = "127.0.0.1;1"
    answer = await ask_chat(pair, stream=True)
    assert answer.status == 503 and json.loads(answer.body)["refused"] is True
    await pair.wait_until_idle()


@pytest.mark.parametrize(("name", "description"), [("prefill", "prefill."), ("flex", "flex with 100 % for prompts.")])
async def test_refuses_separation_when_decode_has_another_role(alike, name: str, description: str) -> None:
    _, pair = await alike(reply=long_reply)
    role = pair.members[1].instance_state.role
    role.name, role.prefill_share = name, 100
    answer = await ask_chat(pair, stream=True)
    assert answer.status == 503 and json.loads(answer.body)["reason"].endswith(f"Its role is {description}")
    await pair.wait_until_idle()


async def test_single_token_needs_no_decode_instance(alike) -> None:
    _, pair = await alike(reply=long_reply)
    pair.target = "127.0.0.1;1"
    for stream in (True, False):
        answer = await ask_chat(pair, stream=stream, max_tokens=1)
        assert answer.status == 200 and len(answer.parts) == 1
    await pair.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_engine_crash_reports_its_requests_as_lost(alike, stream: bool) -> None:
    _, pair = await alike(reply=long_reply, tick=0.01)
    chat_task = asyncio.create_task(ask_chat(pair, stream=stream, max_tokens=50))
    await pair.decode.until(lambda: pair.decode.engine.stats.running > 0)
    pair.decode.engine.crash_engine()
    answer = await chat_task
    assert answer.error and b'"error"' not in answer.body  # no error for the client, so it can resume elsewhere
    await pair.prefill.until(lambda: not pair.prefill.service.open_requests and not pair.prefill.engine.lease_count)
    assert not pair.decode.service.open_requests


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_that_lost_pages_of_an_image_leaves_the_request_to_others(alike, stream: bool) -> None:
    _, pair = await alike(reply=long_reply, tick=0.01)
    chat_task = asyncio.create_task(ask_chat(pair, stream=stream, max_tokens=50))
    await pair.decode.until(lambda: pair.decode.engine.stats.running > 0)
    pair.decode.engine.fail_choice(0, FEATURES_ELSEWHERE)
    answer = await chat_task
    assert answer.error and b'"error"' not in answer.body
    await pair.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/chat/completions", CHAT | {"stream": True}, 503), ("/generate_stream", {"inputs": "Hello"}, 424)],
)
async def test_prefill_answer_reports_a_lost_engine(alike, path: str, body: Any, status: int) -> None:
    _, pair = await alike(reply=long_reply, tick=0.01)
    pair.prefill.engine.step_gate.clear()
    request_task = asyncio.create_task(pair.ask(path, json.dumps(body).encode(), REQUEST_UUID, HEADERS))
    await pair.decode.until(lambda: pair.decode.engine.reservation_count > 0)
    pair.prefill.engine.crash_engine()
    answer = await request_task
    assert (answer.status, answer.headers["parley-lost"]) == (status, "engine")


async def test_prefill_answer_reports_a_context_that_is_too_short(alike) -> None:
    _, pair = await alike()
    body = json.dumps(CHAT | {"max_tokens": 10**6}).encode()
    answer = await pair.ask("/v1/chat/completions", body, REQUEST_UUID, HEADERS)
    assert (answer.status, answer.headers["parley-short"]) == (400, "context")


@pytest.mark.parametrize("phase", ["prefill", "transfer", "decode"])
async def test_cancel_id_ends_a_separated_request_in_every_phase(alike, phase: str) -> None:
    _, pair = await alike(reply=long_reply, tick=0.01)
    gates = {"prefill": pair.prefill.engine.step_gate, "decode": pair.decode.engine.step_gate}
    if phase in gates:
        gates[phase].clear()
    pair.decode.engine.stats.running = 0
    chat_task = asyncio.create_task(ask_chat(pair, stream=True, max_tokens=50))
    if phase == "prefill":
        await pair.decode.until(lambda: pair.decode.engine.reservation_count > 0)
    else:
        await pair.decode.until(lambda: bool(pair.decode.service.open_requests))
    await pair.cancel("r1")
    await pair.wait_until_idle()
    chat_task.cancel()
    await asyncio.gather(chat_task, return_exceptions=True)


async def test_separated_request_is_counted_once(alike) -> None:
    _, pair = await alike(reply=long_reply)
    for stream in (True, False):
        await ask_chat(pair, stream=stream, n=2)
    await pair.wait_until_idle()
    first, second = (server.model.metrics for server in (pair.prefill, pair.decode))
    assert (first.totals.succeeded, second.totals.succeeded) == (0, 2)
    assert first.totals.cancelled == first.totals.failed == 0
    texts = [(await server.get("/metrics")).body for server in (pair.prefill, pair.decode)]

    def numbers(name: bytes) -> list[float]:
        return [sum(map(float, re.findall(name + rb"{[^}]*} ([0-9.]+)", text))) for text in texts]

    assert numbers(b"vllm:request_success_total") == [0, 4]  # choices
    assert numbers(b"vllm:time_to_first_token_seconds_count") == [2, 0]
    assert numbers(b"vllm:request_prompt_tokens_count") == [2, 0]
    prompts, _ = numbers(b"vllm:request_prompt_tokens_sum")
    assert numbers(b"vllm:prompt_tokens_by_source_total") == [prompts, prompts]  # the scripted engine finds nothing
    assert numbers(b"vllm:external_prefix_cache_queries_total") == [0, prompts]
    assert numbers(b"vllm:e2e_request_latency_seconds_count") == [0, 2]


async def test_plain_coordinator_gets_plain_frames(alike) -> None:
    """The frames of MindIE's coordinators, byte for byte: no records, no header frames, one last frame."""
    single_server, pair = await alike(reply=long_reply)
    line, orders = ResultConnection(pair.members[1], ""), {"req-type": "prefill", "d-target": pair.target}
    streamed_body = json.dumps(CHAT | {"stream": True, "max_tokens": 5}).encode()
    expected = await post_json(single_server, "/v1/chat/completions", streamed_body)
    prefill_answer = (
        await pair.prefill.call("POST", "/v1/chat/completions", streamed_body, HEADERS | orders | {"req-id": "17"})
    ).json
    assert sorted(prefill_answer) == ["isLastResp", "isStream", "output", "reqId"]
    assert (prefill_answer["reqId"], prefill_answer["isStream"], prefill_answer["isLastResp"]) == ("17", True, False)
    frames = [await line.queue("17").get()]
    while frames[-1].kind == "data":
        frames.append(await line.queue("17").get())
    events = [frame.payload.count(b"\n\n") for frame in frames]
    assert frames[-1].kind == "lastData" and events == [1] * (len(frames) - 1) + [2]  # the last event, and the mark
    assert len(frames) >= 4
    assert same_answer(prefill_answer["output"].encode() + b"".join(frame.payload for frame in frames), expected.body)

    unstreamed_body = json.dumps(CHAT).encode()
    prefill_answer = (
        await pair.prefill.call("POST", "/v1/chat/completions", unstreamed_body, HEADERS | orders | {"req-id": "18"})
    ).json
    assert prefill_answer == {"reqId": "18", "isStream": False, "isLastResp": False}
    frame = await line.queue("18").get()
    assert frame.kind == "lastData"
    assert frame.payload == (await post_json(single_server, "/v1/chat/completions", unstreamed_body)).body
    line.task.cancel()
    await pair.wait_until_idle()


@pytest.mark.parametrize("client", ["", COORDINATOR_NAME])
async def test_kv_sender_lost_before_sending_fails_the_request(alike, client: str) -> None:
    """A plain coordinator gets an error frame; parley's own repeats the command, and gets no frame for this one."""
    _, pair = await alike(reply=long_reply)
    pair.prefill.engine.step_gate.clear()
    line = ResultConnection(pair.members[1], client) if not client else pair.line
    client_header = {"parley-results": client} if client else {}
    orders = {"req-id": "19", "req-type": "prefill", "d-target": pair.target} | client_header
    request_task = asyncio.create_task(
        pair.prefill.call("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), orders)
    )
    await pair.decode.until(lambda: bool(pair.decode.service.open_requests))
    for link in pair.members[1].peer.links:
        link.fail_link("cut by the test")
    await pair.decode.until(lambda: not pair.decode.service.open_requests)
    pair.prefill.engine.step_gate.set()
    answer = await request_task
    assert answer.status == (503 if client else 500), answer
    if not client:
        frame = await line.queue("19").get()
        assert (frame.kind, frame.payload) == ("error", b"Pull kv failed irreversibly.")
        line.task.cancel()
    assert not client or line.queue("19").empty()
    await pair.wait_until_idle()


async def test_missing_handover_pages_are_recomputed(alike, monkeypatch: pytest.MonkeyPatch) -> None:
    single_server, pair = await alike(reply=long_reply)
    monkeypatch.setattr(decode_stage, "PAGE_TIMEOUT", 0.05)
    monkeypatch.setattr(KVSender, "add_computed_pages", lambda self, part, pages: None)
    monkeypatch.setattr(KVSender, "finish_handover", lambda self: asyncio.sleep(0.3))
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "many tokens " * 20}]}).encode()
    answer = await pair.ask("/v1/chat/completions", body, REQUEST_UUID, HEADERS)
    assert answer.body == (await post_json(single_server, "/v1/chat/completions", body)).body


async def test_resumed_body_may_be_of_any_api(alike) -> None:
    """The body alone shows its API; the prior outputs sent before it must not be mistaken for it."""
    _, pair = await alike(reply=long_reply)
    for path, members in (("/generate", {"prompt": "a"}), ("/mindie", {"inputs": "a"})):
        request_body = json.dumps(
            {"max_tokens": 6, "parameters": {"max_new_tokens": 6}, "stream": True} | members
        ).encode()
        whole = await pair.ask(path, request_body, REQUEST_UUID, HEADERS)
        assert whole.status == 200 and len(whole.parts) > 3
        rest = await pair.ask(path, request_body, REQUEST_UUID, HEADERS, past=[record for _, record in whole.parts[:2]])
        assert same_answer(b"".join(data for data, _ in whole.parts[:2]) + rest.body, whole.body)
    await pair.wait_until_idle()


async def test_deadline_counts_from_arrival_across_the_handover(alike, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's time counts from its arrival, not from the handover."""
    _, pair = await alike(reply=long_reply, tick=0.05)
    elapsed: list[float] = []

    def start_deadline(*arguments: Any) -> RequestDeadline:
        elapsed.append(arguments[-1])
        return RequestDeadline(*arguments)

    monkeypatch.setattr("parley.serving.generation.RequestDeadline", start_deadline)
    pair.prefill.engine.step_gate.clear()
    headers = HEADERS | {"x-request-timeout": "0.6"}
    body = json.dumps(CHAT | {"max_tokens": 50}).encode()
    request_task = asyncio.create_task(pair.ask("/v1/chat/completions", body, REQUEST_UUID, headers))
    await pair.decode.until(lambda: bool(pair.decode.service.open_requests))
    at_prefill, at_decode = elapsed
    assert 0 <= at_prefill < at_decode
    pair.prefill.engine.step_gate.set()
    answer = await request_task
    assert answer.status == 408 and b"within the time" in answer.body
    await pair.wait_until_idle()


@pytest.mark.parametrize("resumed", [False, True])
async def test_deadline_includes_the_time_of_earlier_attempts(alike, resumed: bool) -> None:
    """Limits are the client's, for all attempts together, even if other instances computed part of the answer."""
    _, pair = await alike(reply=long_reply)
    path, body = "/v1/chat/completions", json.dumps(CHAT | {"stream": True, "max_tokens": 50}).encode()
    whole = await pair.ask(path, body, REQUEST_UUID, HEADERS | {"x-request-timeout": "60", "parley-spent": "20"})
    assert whole.status == 200 and whole.body.endswith(b"[DONE]\n\n")
    prior_outputs = [record for _, record in whole.parts[:3]] if resumed else None
    late_headers = HEADERS | {"x-request-timeout": "60", "parley-spent": "60001"}
    answer = await pair.ask(path, body, REQUEST_UUID, late_headers, past=prior_outputs)
    assert answer.status == 408 and b"within the time" in answer.body
    await pair.wait_until_idle()


async def test_paused_separated_stream_does_not_stop_other_streams(alike) -> None:
    _, pair = await alike(reply=long_reply)
    pair.decode.engine.step_gate.clear()
    first = asyncio.create_task(ask_chat(pair, stream=True, max_tokens=50))
    await pair.decode.until(
        lambda: "r1" in pair.members[1].instance_state.results.get_client(COORDINATOR_NAME).channels
    )
    assert pair.members[1].instance_state.results.set_results_paused(COORDINATOR_NAME, "r1", True)
    pair.decode.engine.step_gate.set()
    other = await ask_chat(pair, stream=True, max_tokens=50)
    assert other.body.endswith(b"[DONE]\n\n") and not first.done()
    pair.members[1].instance_state.results.set_results_paused(COORDINATOR_NAME, "r1", False)
    assert (await first).body == other.body
    await pair.wait_until_idle()


@pytest.mark.parametrize("same_server", [False, True])
async def test_restarted_coordinator_ends_requests_of_its_predecessor(alike, same_server: bool) -> None:
    """At once if it is the same coordinator restarted; not if it is another, or if the first just lost its line."""
    _, pair = await alike(reply=long_reply, tick=0.01, here=same_server)
    server, member = (pair.prefill if same_server else pair.decode), pair.members[0 if same_server else 1]

    async def connect_results(client: str, seat: str) -> Connection:
        connection = await server.connect()
        await connection.send(build_request("GET", f"/dresult?client={client}&seat={seat}"))
        assert (await connection.head())[0] == 200
        await server.until(lambda: client in member.instance_state.results.clients)
        return connection

    async def disconnect(connection: Connection, client: str) -> None:
        connection.close()
        await server.until(lambda: not member.instance_state.results.clients[client].is_connected)

    def has_channels(client: str) -> bool:
        return bool(result_client := member.instance_state.results.clients.get(client)) and bool(result_client.channels)

    first = await connect_results("a", "here")
    orders = {"req-id": "1", "req-type": "prefill", "d-target": pair.target, "parley-results": "a"}
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 1000}).encode()
    assert (await pair.prefill.call("POST", "/v1/chat/completions", body, HEADERS | orders)).status == 200
    server.engine.step_gate.clear()
    assert has_channels("a")
    others = [await connect_results("b", "here"), await connect_results("c", "there")]
    assert has_channels("a")  # it still has its connection
    await disconnect(first, "a")
    first = await connect_results("a", "here")
    assert has_channels("a")
    await disconnect(first, "a")
    others.append(await connect_results("d", "there"))
    assert has_channels("a")
    others.append(await connect_results("e", "here"))
    assert not has_channels("a")
    server.engine.step_gate.set()
    for open_connection in (first, *others):
        open_connection.close()
    await pair.wait_until_idle()


async def test_coordinators_sharing_a_seat_do_not_disturb_each_other(alike) -> None:
    """A coordinator that was there before is not a successor, however often its connection breaks."""
    _, pair = await alike(reply=long_reply, tick=0.01)
    server, results = pair.decode, pair.members[1].instance_state.results

    async def connect_results(client: str, epoch: str = "") -> Connection:
        connection = await server.connect()
        resume_query = f"&epoch={epoch}&from=0" if epoch else ""
        await connection.send(build_request("GET", f"/dresult?client={client}&seat=one{resume_query}"))
        assert (await connection.head())[0] == 200
        await server.until(lambda: results.get_client(client).is_connected)
        return connection

    async def disconnect(connection: Connection, client: str) -> None:
        connection.close()
        await server.until(lambda: not results.clients[client].is_connected)

    connections = {name: await connect_results(name) for name in "ab"}
    orders = {"req-id": "1", "req-type": "prefill", "d-target": pair.target, "parley-results": "a"}
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 1000}).encode()
    assert (await pair.prefill.call("POST", "/v1/chat/completions", body, HEADERS | orders)).status == 200
    server.engine.step_gate.clear()
    await disconnect(connections["a"], "a")
    await disconnect(connections["b"], "b")
    connections["b"] = await connect_results("b")
    assert results.clients["a"].channels
    await disconnect(connections["b"], "b")
    results.clients["b"].close_client()  # it was away for too long and is forgotten
    connections["b"] = await connect_results("b", "before")
    assert results.clients["a"].channels
    connections["a"] = await connect_results("a", results.clients["a"].epoch)
    assert results.clients["a"].channels
    server.engine.step_gate.set()
    for open_connection in connections.values():
        open_connection.close()
    await pair.wait_until_idle()


async def test_lost_coordinator_ends_its_requests(alike) -> None:
    _, pair = await alike(reply=long_reply, tick=0.01)
    chat_task = asyncio.create_task(ask_chat(pair, stream=True, max_tokens=50))
    await pair.decode.until(lambda: pair.decode.engine.stats.running > 0)
    pair.members[1].instance_state.results.get_client(COORDINATOR_NAME).lose_requests()
    await pair.wait_until_idle()
    chat_task.cancel()
