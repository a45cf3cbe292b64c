"""One answer made of the prefill and the decode instance's parts: order, framing, failures, retries, cancellation.

The instances are scripted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import pytest
from support.scripted_instance import AnswerScript, ReceivedRequest, ScriptedInstance, part_record

from parley.coordinator import refusals
from parley.coordinator.coordinator import coordinator_id
from parley.coordinator.routing import admission
from parley.dialects.mounts import INSTANCE_PLANE
from parley.disagg.wire import headers as heads
from parley.disagg.wire import result_frames
from parley.errors import OrderRefused

CHAT_SCRIPT = AnswerScript([b'data: {"a":0}\n\n', b'data: {"a":1}\n\n', b'data: {"a":2}\n\n', b"data: [DONE]\n\n"])
LONG_SCRIPT = AnswerScript([b'data: {"n":%d}\n\n' % number for number in range(40)])
UNSTREAMED_SCRIPT = AnswerScript(
    [b'{"whole":', b"true}"], stream=False, headers=(("content-type", "application/json"), ("x-own", "1"))
)
CHAT_BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()
PLAIN = {"separate": "always"}


def raw_answer(status: int, body: bytes, *headers: bytes) -> bytes:
    """Return a complete HTTP answer of an instance."""
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), lines, body)


def prefill_answer(request: ReceivedRequest, **members: Any) -> bytes:
    """Return a prefill instance's answer; without ``headers`` it has the plain form."""
    return raw_answer(200, json.dumps({"reqId": request.headers["req-id"]} | members).encode())


# -- success


async def test_stream_joins_prefill_part_and_decode_parts(cluster):
    p, d = ScriptedInstance("prefill", script=CHAT_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d)
    answer = await running.post(body=CHAT_BODY)
    assert (answer.status, answer.body) == (200, b"".join(CHAT_SCRIPT.parts))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-own"] == "1"
    assert answer.headers["transfer-encoding"] == "chunked"
    (request,) = p.requests
    assert request.body == CHAT_BODY and request.target == "/v1/chat/completions"
    assert request.headers["req-type"] == "prefill" and request.headers["d-target"] == d.target


async def test_unstreamed_answer_comes_from_the_decode_instance(cluster):
    running = await cluster(ScriptedInstance("prefill", script=UNSTREAMED_SCRIPT), ScriptedInstance("decode"))
    answer = await running.post(body=CHAT_BODY)
    assert (answer.status, answer.body) == (200, b'{"whole":true}')
    assert answer.headers["content-length"] == "14" and answer.headers["x-own"] == "1"


@pytest.mark.parametrize("script", [AnswerScript([b"data: x\n\n"]), AnswerScript([b'{"a":1}'], stream=False)])
async def test_single_token_answer_never_reaches_the_decode_instance(cluster, script):
    p, d = ScriptedInstance("prefill", script=script), ScriptedInstance("decode")
    running = await cluster(p, d)
    answer = await running.post()
    assert (answer.status, answer.body) == (200, script.parts[0])
    assert not d.sent_frames


async def test_mixed_instance_runs_an_unseparated_request(cluster):
    mixed = ScriptedInstance("mixed", script=CHAT_SCRIPT)
    running = await cluster(mixed)
    assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert mixed.requests[0].headers["d-target"] == "self"


@pytest.mark.parametrize("cut", range(1, 12))
async def test_coordinator_reads_result_frames_cut_anywhere(cluster, cut):
    """Guards against readers that expect whole frames in one read."""
    nul = AnswerScript([b'{"a":0}\0', b'{"a":1}\0', b'{"a":2}\0'])
    for script in (CHAT_SCRIPT, nul):
        p, d = ScriptedInstance("prefill", script=script), ScriptedInstance("decode", cut=cut)
        running = await cluster(p, d)
        assert (await running.post(body=CHAT_BODY)).body == b"".join(script.parts)


async def test_early_decode_results_wait_for_the_prefill_answer(cluster):
    p, d = ScriptedInstance("prefill"), ScriptedInstance("decode")
    running = await cluster(p, d)

    async def late(request: ReceivedRequest) -> bytes:
        d.start_decode(request.headers["req-id"], CHAT_SCRIPT.parts, 1, CHAT_SCRIPT)
        await asyncio.sleep(0.05)
        return prefill_answer(
            request, isStream=True, isLastResp=False, output=CHAT_SCRIPT.parts[0].decode(), headers=[], records="kA=="
        )

    p.before_prefill = late
    assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)


async def test_forwards_client_headers_but_replaces_coordinator_headers(cluster):
    p = ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(p, ScriptedInstance("decode"), secret="hidden")
    await running.post(
        "/v1/chat/completions?a=b%20c",
        CHAT_BODY,
        "x-mine: 7",
        "authorization: Bearer k",
        "te: trailers",
        "req-id: 1",
        "parley-given: 5",
        "parley-secret: wrong",
        "x-hop: 1",
        "origin: http://localhost",
        "x-request-id: mine",
    )
    (request,) = p.requests
    assert request.target == "/v1/chat/completions?a=b%20c"
    assert request.headers["x-mine"] == "7" and request.headers["authorization"] == "Bearer k"
    assert request.headers["parley-secret"] == "hidden" and request.headers["req-id"] != "1"
    assert request.headers["x-request-id"] == "mine"
    assert not request.headers.keys() & {"te", "origin", "parley-given", "connection", "transfer-encoding"}


async def test_concurrent_cluster_streams_do_not_mix(cluster):
    scripts = {}

    class ScriptPerBody(ScriptedInstance):
        async def _run_prefill(self, request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
            name = request.body.decode()
            self.script = scripts.setdefault(
                name, AnswerScript([b"data: %b %d\n\n" % (request.body, k) for k in range(8)])
            )
            await super()._run_prefill(request, writer)

    running = await cluster(ScriptPerBody("prefill"), ScriptedInstance("decode"))
    answers = await asyncio.gather(*(running.post(body=b"%d" % number) for number in range(500)))
    for number, answer in enumerate(answers):
        assert answer.body == b"".join(scripts[str(number)].parts)
    assert running.coordinator.scheduler.open_requests == 0


# -- plain MindIE servers


@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_completes_answers_of_plain_mindie_servers(cluster, cut):
    opening = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    text = [b'data: {"choices":[{"index":0,"delta":{"content":"%d"},"finish_reason":null}]}\n\n' % k for k in range(3)]
    p, d = ScriptedInstance("prefill", plain=True), ScriptedInstance("decode", plain=True, cut=cut)
    running = await cluster(p, d)

    async def answer(request: ReceivedRequest) -> bytes:
        request_id = request.headers["req-id"]
        d.send_frames(
            [
                frame
                for part in (opening, *text[1:])
                for frame in result_frames.encode_result(request_id, part, last=part is text[2])
            ]
        )
        return prefill_answer(request, isStream=True, isLastResp=False, output=(opening + text[0]).decode())

    p.before_prefill = answer
    client_answer = await running.post(body=CHAT_BODY)
    assert client_answer.body == opening + b"".join(text) + b"data: [DONE]\n\n"
    assert client_answer.headers["content-type"] == "text/event-stream"
    p.before_prefill = None
    p.script = AnswerScript([b'{"a":', b"1}"], stream=False)
    client_answer = await running.post(body=CHAT_BODY)
    assert (client_answer.body, client_answer.headers["content-type"]) == (b'{"a":1}', "application/json")
    p.script = AnswerScript([b'{"a":0}\0', b'{"a":1}\0'])
    assert (await running.post("/generate", b"{}")).body == b'{"a":0}\0{"a":1}\0'


async def test_error_of_a_plain_decode_instance_ends_the_stream(cluster):
    p, d = ScriptedInstance("prefill", plain=True), ScriptedInstance("decode", plain=True)
    running = await cluster(p, d)

    async def fail(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.send_frames([result_frames.encode_error_frame(request_id, "Pull kv failed irreversibly.")])

    d.decode_hook = fail
    answer = await running.post("/mindie/v1/chat/completions", CHAT_BODY)
    assert answer.body == p.script.parts[0] + b"Pull kv failed irreversibly."
    answer = await running.post("/v1/chat/completions", CHAT_BODY)
    assert b'"message":"Pull kv failed irreversibly."' in answer.body and answer.body.endswith(b"data: [DONE]\n\n")


async def test_plain_decode_instance_can_request_recompute(cluster):
    p, d = ScriptedInstance("prefill", plain=True), ScriptedInstance("decode", plain=True)
    running = await cluster(p, d)
    refused = []

    async def retry(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.send_part(request_id, parts, first_part)
        d.send_frames([result_frames.encode_retry_frame(request_id, b'{"messages":"3,1,2,3"}')])
        d.decode_hook = None

    async def refuse_once(request: ReceivedRequest) -> bytes | None:
        if "is-recompute" not in request.headers:
            return None
        if not refused:
            refused.append(request)
            return raw_answer(400, b"not yet")
        d.start_decode(request.headers["req-id"], LONG_SCRIPT.parts, 3, LONG_SCRIPT)
        return prefill_answer(request, isStream=True, isLastResp=False, output=LONG_SCRIPT.parts[2].decode())

    p.script, p.before_prefill, d.decode_hook = LONG_SCRIPT, refuse_once, retry
    answer = await running.post("/generate_stream", CHAT_BODY)
    assert answer.body == b"".join(LONG_SCRIPT.parts)
    first_request, *later_requests = p.requests
    assert {each.body for each in later_requests} == {b'{"messages":"3,1,2,3"}'} and len(later_requests) == 2
    assert {each.headers["req-id"] for each in p.requests} == {first_request.headers["req-id"]}


# -- failures of the prefill instance


async def test_prefill_refusal_reaches_the_client_unchanged(cluster):
    p = ScriptedInstance("prefill")
    running = await cluster(p, ScriptedInstance("decode"))

    async def refuse(request: ReceivedRequest) -> bytes:
        return raw_answer(422, b'{"error":"x"}', b"content-type: application/json", b"x-why: y", b"date: never")

    p.before_prefill = refuse
    answer = await running.post(body=CHAT_BODY)
    assert (answer.status, answer.body) == (422, b'{"error":"x"}')
    assert answer.headers["x-why"] == "y" and answer.headers["date"] != "never"
    assert len(p.requests) == 1 and not p.stopped_ids


@pytest.mark.parametrize("status", [429, 503])
async def test_retries_another_prefill_instance_when_one_is_full(cluster, status):
    full, other = ScriptedInstance("prefill"), ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(full, other, ScriptedInstance("decode"), scheduler_type="default_scheduler")

    async def refuse(request: ReceivedRequest) -> bytes:
        return raw_answer(status, b"full")

    full.before_prefill = refuse
    for _ in range(3):
        assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert full.requests
    other.before_prefill = refuse
    answer = await running.post(body=CHAT_BODY)
    assert (answer.status, answer.body) == (status, b"full")


async def test_retries_another_prefill_instance_when_an_engine_is_lost(cluster):
    lost, other = ScriptedInstance("prefill"), ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(lost, other, ScriptedInstance("decode"), scheduler_type="default_scheduler")

    async def refuse(request: ReceivedRequest) -> bytes:
        return raw_answer(424, b"gone", b"parley-lost: engine")

    lost.before_prefill = refuse
    for _ in range(3):
        assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert lost.requests


async def test_long_prompt_is_retried_only_where_the_context_is_longer(cluster):
    """Instances with equally short contexts are skipped; with no longer one left, the refusal reaches the client."""
    short = [ScriptedInstance("prefill") for _ in range(6)]
    long = ScriptedInstance("prefill", script=CHAT_SCRIPT)
    for each in short:
        each.max_context = 512
    running = await cluster(*short, long, ScriptedInstance("decode"), scheduler_type="default_scheduler")

    async def refuse(request: ReceivedRequest) -> bytes:
        return raw_answer(400, b"too long", b"parley-short: context")

    for each in short:
        each.before_prefill = refuse
    for _ in range(3):
        assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert sum(len(each.requests) for each in short) == 3
    long.before_prefill = refuse
    answer = await running.post(body=CHAT_BODY)
    assert (answer.status, answer.body) == (400, b"too long") and "parley-short" not in answer.headers
    assert sum(len(each.requests) for each in short) <= 4 and len(long.requests) == 4


@pytest.mark.parametrize(("status", "text"), [(400, heads.NOT_A_PREFILL_INSTANCE), (503, heads.UNKNOWN_STATUS)])
async def test_retries_another_prefill_instance_after_a_role_change(cluster, status, text):
    """The table learns of the new role a little later; meanwhile no client may see the wrong-role error."""
    former, other = ScriptedInstance("prefill"), ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(former, other, ScriptedInstance("decode"), scheduler_type="default_scheduler", max_retry=1)

    async def refuse(request: ReceivedRequest) -> bytes:
        return raw_answer(status, INSTANCE_PLANE.render_order_refusal(OrderRefused(status, text)).body)

    former.before_prefill = refuse
    for _ in range(3):
        assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert former.requests
    other.before_prefill = refuse
    answer = await running.post(body=CHAT_BODY)
    assert answer.status == 503 and json.loads(answer.body)["error"]["type"] == "service_unavailable"


async def test_retries_another_decode_instance_when_one_has_no_room(cluster):
    p, full, other = (
        ScriptedInstance("prefill", script=CHAT_SCRIPT),
        ScriptedInstance("decode"),
        ScriptedInstance("decode"),
    )
    running = await cluster(p, full, other)

    async def refuse(request: ReceivedRequest) -> bytes | None:
        if request.headers["d-target"] == full.target:
            return raw_answer(503, b'{"error":"no capacity","refused":true}')
        return None

    p.before_prefill = refuse
    for _ in range(3):
        assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert {each.headers["d-target"] for each in p.requests} == {full.target, other.target}


async def test_retries_another_prefill_instance_when_one_dies(cluster):
    dying, other = ScriptedInstance("prefill"), ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(dying, other, ScriptedInstance("decode"))

    async def die(request: ReceivedRequest) -> None:
        raise ConnectionError

    dying.before_prefill = die
    assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    (before,), (after,) = dying.requests, other.requests
    assert before.headers["req-id"] != after.headers["req-id"]
    for name in ("parley-id", "parley-created"):
        assert before.headers[name] == after.headers[name]
    assert after.body == CHAT_BODY


PREFILL_FAILURES = [
    ("unread", b"Receive messages from p instance failed\r\n"),
    ("unsent", b"Send messges to p instance failed\r\n"),
    ("no HTTP", b"Receive messages from p instance failed\r\n"),
    ("half of it", b"Receive messages from p instance failed\r\n"),
    ("hanging", b"P instance error\r\n"),
]


@pytest.mark.parametrize(("how", "text"), PREFILL_FAILURES)
async def test_prefill_failure_uses_the_documented_error_text(cluster, how, text):
    p = ScriptedInstance("prefill")
    running = await cluster(p, ScriptedInstance("decode"), max_retry=0, heartbeat=60)
    table, body = running.coordinator.table, CHAT_BODY

    async def answer(request: ReceivedRequest) -> bytes:
        match how:
            case "no HTTP":
                return b"ICY 200 OK\r\n\r\n"
            case "half of it":
                p.before_prefill = answer_and_die
                return await answer_and_die(request)
            case "hanging":
                table.instances[1].lost = True
                table.notify_watchers(table.instances[1], "lost")
                await asyncio.sleep(5)
        raise ConnectionError

    async def answer_and_die(request: ReceivedRequest) -> bytes:
        writer = p.writers[-1]
        writer.write(raw_answer(200, b"{}" * 10)[:-5])
        await writer.drain()
        raise ConnectionError

    p.before_prefill = answer
    if how == "unsent":
        p.before_prefill, p.hangs_up, body = None, True, b" " * (8 << 20)
    client_answer = await running.post("/mindie/generate", body)
    assert (client_answer.status, client_answer.body) == (500, text)


async def test_unstreamed_answer_of_decode_does_not_wait_for_prefill(cluster):
    """Decode has sent all of it, so a prefill instance that hangs, dies or fails no longer matters."""
    p, d = ScriptedInstance("prefill"), ScriptedInstance("decode")
    running = await cluster(p, d, heartbeat=60)

    async def hang(request: ReceivedRequest) -> None:
        d.start_decode(request.headers["req-id"], UNSTREAMED_SCRIPT.parts, 1, UNSTREAMED_SCRIPT)
        await asyncio.sleep(60)

    async def die(request: ReceivedRequest) -> None:
        d.start_decode(request.headers["req-id"], UNSTREAMED_SCRIPT.parts, 1, UNSTREAMED_SCRIPT)
        raise ConnectionError

    async def late(request: ReceivedRequest) -> bytes:
        d.start_decode(request.headers["req-id"], UNSTREAMED_SCRIPT.parts, 1, UNSTREAMED_SCRIPT)
        return raw_answer(500, b"no")

    for p.before_prefill in (hang, die, late, hang):
        answer = await running.post(body=CHAT_BODY)
        if p.before_prefill is hang:
            assert (answer.status, answer.body) == (200, b'{"whole":true}')
            assert answer.headers["content-length"] == "14" and answer.headers["x-own"] == "1"
    assert running.coordinator.scheduler.open_requests == 0


async def test_retries_another_prefill_instance_when_one_is_unreachable(cluster):
    gone, other = ScriptedInstance("prefill"), ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(gone, other, ScriptedInstance("decode"), heartbeat=60)
    await gone.kill_instance()
    assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)


@pytest.mark.parametrize("hanging", [1, 2])
async def test_lost_instance_ends_the_attempt_that_waits_for_it(cluster, hanging):
    """Prefill does not answer because it or decode hangs; the remaining instance does both stages."""
    p, d = ScriptedInstance("prefill", script=CHAT_SCRIPT), ScriptedInstance("decode", script=CHAT_SCRIPT)
    running = await cluster(p, d, heartbeat=60)
    table = running.coordinator.table

    async def hang(request: ReceivedRequest) -> None:
        p.before_prefill, table.instances[hanging].lost = None, True
        table.notify_watchers(table.instances[hanging], "lost")
        await asyncio.sleep(10)

    p.before_prefill = hang
    assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert (p, d)[2 - hanging].requests[-1].headers["d-target"] == "self"


MALFORMED_ANSWERS = {
    "no JSON": b"data: x",
    "no object": b"[]",
    "no id": b'{"isStream":true,"isLastResp":true,"output":""}',
    "no output": b'{"reqId":"1","isStream":true,"isLastResp":true}',
    "no last": b'{"reqId":"1","isStream":true,"output":""}',
    "no base64": b'{"reqId":"1","isStream":true,"isLastResp":true,"output":"?","encoding":"base64"}',
    "no header": '{"reqId":"1","isStream":true,"isLastResp":true,"output":"","headers":[["x","…"]]}'.encode(),
}


@pytest.mark.parametrize("name", MALFORMED_ANSWERS)
async def test_malformed_prefill_answer_fails_the_attempt(cluster, name):
    p, d = ScriptedInstance("prefill"), ScriptedInstance("decode")
    running = await cluster(p, d, max_retry=1)

    async def answer(request: ReceivedRequest) -> bytes:
        return raw_answer(200, MALFORMED_ANSWERS[name])

    p.before_prefill = d.before_prefill = answer
    client_answer = await running.post("/mindie/generate", CHAT_BODY)
    assert (client_answer.status, client_answer.body) == (500, b"P instance error\r\n")
    assert client_answer.headers["content-type"] == "text/plain; charset=utf-8"
    client_answer = await running.post("/v1/chat/completions", CHAT_BODY)
    assert client_answer.status == 500 and json.loads(client_answer.body)["error"]["message"] == "P instance error"
    assert len(p.requests) + len(d.requests) == 4


# -- failures of the decode instance


def received_parts(request: ReceivedRequest) -> list[int]:
    """Return the numbers of the parts that the client already has, from a resuming request."""
    size = int(request.headers.get("parley-given", 0))
    records = msgspec.msgpack.decode(request.body[:size]) if size else []
    return [number for record in records for _, number in record]


@pytest.mark.parametrize("at", [1, 2, 17, 39])
async def test_stream_resumes_exactly_where_decode_was_lost(cluster, at):
    p, dying, other = (
        ScriptedInstance("prefill", script=LONG_SCRIPT),
        ScriptedInstance("decode"),
        ScriptedInstance("decode"),
    )
    running = await cluster(p, dying, other, scheduler_type="default_scheduler")

    async def die(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        for number in range(first_part, at):
            d.send_part(request_id, parts, number)
        await asyncio.sleep(0.02)
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(d.kill_instance()))
        await asyncio.sleep(10)

    dying.decode_hook = die
    for _ in range(2):
        answer = await running.post(body=CHAT_BODY)
        assert answer.is_complete and answer.body == b"".join(LONG_SCRIPT.parts)
    resumed = [request for request in p.requests if received_parts(request)]
    assert [received_parts(request) for request in resumed] == [list(range(at))]
    assert all(request.body.endswith(CHAT_BODY) for request in resumed)


async def test_unreadable_record_prevents_resuming_a_stream(cluster):
    dying = ScriptedInstance("decode")
    running = await cluster(ScriptedInstance("prefill", script=LONG_SCRIPT), dying, ScriptedInstance("decode"))

    async def die(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.send_frames(
            [
                b"reqId:%b\0record:?\0" % request_id.encode(),
                *result_frames.encode_result(request_id, parts[first_part], native=True),
            ]
        )
        d.send_frames([result_frames.encode_error_frame(request_id, "It is lost.")])

    dying.decode_hook = die
    answer = await running.post(body=CHAT_BODY)
    assert answer.body.startswith(b"".join(LONG_SCRIPT.parts[:2])) and answer.body.count(b'"error"') == 1
    assert LONG_SCRIPT.parts[2] not in answer.body


async def test_unstreamed_answer_restarts_when_decode_is_lost(cluster):
    p, dying, other = (
        ScriptedInstance("prefill", script=UNSTREAMED_SCRIPT),
        ScriptedInstance("decode"),
        ScriptedInstance("decode"),
    )
    running = await cluster(p, dying, other)

    async def die(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.break_result_connection()
        d.epoch += "+"
        d.sent_frames.clear()

    dying.decode_hook = die
    for _ in range(2):
        assert (await running.post(body=CHAT_BODY)).body == b'{"whole":true}'
    assert not any(received_parts(request) for request in p.requests)


async def test_result_connection_reconnects_without_loss_or_repetition(cluster):
    p, d = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode", tick=0.01)
    running = await cluster(p, d)

    async def break_repeatedly() -> None:
        for _ in range(4):
            await asyncio.sleep(0.08)
            d.break_result_connection()

    answer, _ = await asyncio.gather(running.post(body=CHAT_BODY), break_repeatedly())
    assert answer.body == b"".join(LONG_SCRIPT.parts)
    assert len(d.result_requests) >= 3 and len(p.requests) == 1


async def test_result_connection_sends_run_and_seat_of_the_coordinator(cluster):
    """Each run has a client name of its own; the seat identifies the address it runs at."""
    d = ScriptedInstance("decode")
    ports = [(await cluster(ScriptedInstance("prefill"), d)).port for _ in range(2)]
    queries = [dict(parse_qsl(request.target.partition("?")[2])) for request in d.result_requests]
    assert len({each["client"] for each in queries}) == 2
    for each, port in zip(queries, ports, strict=True):
        with socket.create_server(("127.0.0.1", 0)) as other:
            assert each["seat"] != coordinator_id("127.0.0.1", other)
        run = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert each["seat"] == sha256(f"{run} {socket.gethostname()} 127.0.0.1 {port}".encode()).hexdigest()[:32]


async def test_requests_of_a_restarted_decode_instance_resume(cluster):
    p, d = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d)

    async def restart(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.send_part(request_id, parts, first_part)
        await asyncio.sleep(0.02)
        d.decode_hook, d.epoch = None, "later"
        d.sent_frames.clear()
        d.break_result_connection()

    d.decode_hook = restart
    assert (await running.post(body=CHAT_BODY)).body == b"".join(LONG_SCRIPT.parts)
    assert [received_parts(request) for request in p.requests] == [[], [0, 1]]


@pytest.mark.parametrize(("prefill_weights", "stream_begun"), [("one", True), ("other", True), ("other", False)])
async def test_begun_stream_resumes_only_with_the_same_weights(cluster, prefill_weights, stream_begun):
    """Decode restarts with other weights; prefill still has the first ones, or the other ones as well."""
    script = LONG_SCRIPT if stream_begun else UNSTREAMED_SCRIPT
    p, d = ScriptedInstance("prefill", script=script), ScriptedInstance("decode")
    p.layout = d.layout = "model=one"
    running = await cluster(p, d)
    table = running.coordinator.table

    async def restart(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        if stream_begun:
            d.send_part(request_id, parts, first_part)
        p.layout, d.layout = f"model={prefill_weights}", "model=other"
        await running.wait_until(lambda: {each.layout for each in table} == {p.layout, d.layout})
        d.decode_hook, d.epoch = None, "later"
        d.sent_frames.clear()
        d.break_result_connection()

    d.decode_hook = restart
    answer = await running.post(body=CHAT_BODY)
    if stream_begun and prefill_weights == "other":
        assert answer.body.startswith(b"".join(LONG_SCRIPT.parts[:2]) + b'data: {"error":') and len(p.requests) == 1
    else:
        assert answer.body == b"".join(script.parts) and len(p.requests) == 2
    assert running.coordinator.scheduler.open_requests == 0


@pytest.mark.parametrize("other_count", [0, 1])
async def test_removed_decode_instance_leaves_no_request_hanging(cluster, other_count):
    """Its request resumes on another decode instance, or on the prefill instance alone."""
    p, removed = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, removed, *(ScriptedInstance("decode") for _ in range(other_count)))
    table = running.coordinator.table

    async def remove(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.send_part(request_id, parts, first_part)
        await asyncio.sleep(0.02)
        table.remove_instance(next(each.id for each in table if each.url == d.url))

    removed.decode_hook = remove
    answer = await running.post(body=CHAT_BODY)
    assert answer.body == b"".join(LONG_SCRIPT.parts) and len(table) == 1 + other_count
    assert [received_parts(request) for request in p.requests] == [[], [0, 1]]
    assert running.coordinator.scheduler.open_requests == 0


async def test_reports_a_decode_instance_that_refuses_to_send_results(cluster):
    class Deaf(ScriptedInstance):
        async def _serve_results(
            self, request: ReceivedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            writer.write(raw_answer(400, b"Only the Decode node supports dresult but you send to prefill"))
            await writer.drain()

    running = await cluster(ScriptedInstance("prefill"), Deaf("decode"), ready=False)
    alarms, table = running.coordinator.management.alarms, running.coordinator.table
    await running.wait_until(lambda: alarms)
    assert "Its results cannot be received. It refused to send results, with status 400." in alarms[0]["detail"]
    await running.wait_until(lambda: table.explain_lack())
    assert table.explain_lack() == "The results of instance 2 cannot be received."
    assert json.loads((await running.get("/health/ready")).body)["reason"] == table.explain_lack()
    answer = await running.post("/mindie/generate", CHAT_BODY)
    assert (answer.status, answer.body) == (503, refusals.plain_body(refusals.TEXTS.cluster_not_ready))


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/chat/completions", b'"message":"D instance error"'),
        ("/v1/completions", b'"message":"D instance error"'),
        ("/generate_stream", b'"error":"Request failed during generation: D instance error"'),
        ("/mindie/v1/chat/completions", b"D instance error"),
    ],
)
async def test_stream_ends_with_one_error_when_retries_fail(cluster, path, error):
    p, d = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d, max_retry=1)

    async def die(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.send_frames([result_frames.encode_error_frame(request_id, "D instance error")])

    p.decode_hook = d.decode_hook = die
    body: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}
    if path == "/generate_stream":
        body = {"inputs": "a"}
    elif path == "/v1/completions":
        body = {"model": "m", "prompt": "a", "stream": True}
    answer = await running.post(path, json.dumps(body).encode())
    assert answer.status == 200 and answer.is_complete
    assert answer.body.startswith(LONG_SCRIPT.parts[0] + LONG_SCRIPT.parts[1]) and answer.body.count(error) == 1
    assert [received_parts(request) for request in p.requests] == [[], [0]]


# -- clients that disconnect or do not read


@pytest.mark.parametrize("stage", ["queued", "asked", "first", "middle"])
async def test_client_disconnect_cancels_the_request_on_every_instance(cluster, stage):
    p, d = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d)
    reached = asyncio.Event()

    async def wait(request: ReceivedRequest) -> None:
        reached.set()
        await asyncio.sleep(10)

    async def decode_part(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        if stage == "middle":
            d.send_part(request_id, parts, first_part)
        reached.set()

    if stage == "queued":
        for each in running.coordinator.table:
            running.coordinator.table.set_attached(each, False)
        running.coordinator.options.__dict__["deploy_mode"] = "auto"
    p.before_prefill = wait if stage == "asked" else None
    d.decode_hook = decode_part
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    reader, writer = await running.send_raw(head)
    if stage == "queued":
        assert b"503" in await reader.readline()
        writer.close()
        return
    await asyncio.wait_for(reached.wait(), 5)
    if stage in ("first", "middle"):
        await reader.readuntil(LONG_SCRIPT.parts[0])
    writer.close()
    await running.wait_until(lambda: d.stopped_ids and (p.stopped_ids or stage != "asked"))
    request_id = p.requests[0].headers["req-id"]
    assert d.stopped_ids == [request_id] and p.stopped_ids == ([request_id] if stage == "asked" else [])
    await running.wait_until(lambda: running.coordinator.front.open_requests == 0)
    assert running.coordinator.scheduler.open_requests == 0


async def test_orphaned_results_cancel_their_request(cluster):
    d = ScriptedInstance("decode", script=LONG_SCRIPT)
    running = await cluster(ScriptedInstance("prefill"), d)
    d.start_decode("77", LONG_SCRIPT.parts, 0, LONG_SCRIPT)
    await running.wait_until(lambda: d.stopped_ids)
    await asyncio.sleep(0.02)
    assert d.stopped_ids == ["77"]


async def test_slow_client_delays_only_its_own_results(cluster):
    big = AnswerScript([b"data: %d %b\n\n" % (number, b"x" * 10_000) for number in range(1000)])
    p, d = ScriptedInstance("prefill", script=big), ScriptedInstance("decode", tick=0.001)
    running = await cluster(p, d)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 12)
    writer.write(head)
    await running.wait_until(lambda: d.flow_requests)
    assert d.flow_requests == [(p.requests[0].headers["req-id"], True)]
    sent = len(d.sent_frames)
    p.script = CHAT_SCRIPT
    assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert len(d.sent_frames) - sent < 100
    body = await reader.read(-1)
    assert [int(number) for number in re.findall(rb"data: (\d+) x", body)] == list(range(1000))
    assert d.flow_requests[-1][1] is False or len(d.flow_requests) % 2 == 1
    writer.close()


async def test_slow_client_of_a_plain_decode_instance_is_cancelled(cluster):
    big = AnswerScript([b"data: %d %b\n\n" % (number, b"x" * 10_000) for number in range(2000)])
    p, d = ScriptedInstance("prefill", script=big, plain=True), ScriptedInstance("decode", plain=True)
    running = await cluster(p, d)
    _, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 12)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
    await running.wait_until(lambda: d.stopped_ids)
    await running.wait_until(lambda: running.coordinator.front.open_requests == 0)
    writer.close()


# -- timeouts


async def test_first_token_and_inference_timeouts_end_the_request(cluster):
    p, d = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d, first_token_timeout=0.1, infer_timeout=0.4)

    async def wait(request: ReceivedRequest) -> None:
        await asyncio.sleep(5)

    async def silence(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        pass

    p.before_prefill = wait
    answer = await running.post("/mindie/generate", CHAT_BODY)
    assert (answer.status, answer.body) == (408, refusals.plain_body(refusals.TEXTS.first_token_timeout))
    await running.wait_until(lambda: p.stopped_ids)
    assert p.stopped_ids == d.stopped_ids == [p.requests[0].headers["req-id"]]
    p.before_prefill, d.decode_hook = None, silence
    answer = await running.post("/mindie/generate", CHAT_BODY)
    assert (answer.status, answer.body) == (200, LONG_SCRIPT.parts[0] + b"Request inference timeout")
    p.script = UNSTREAMED_SCRIPT
    answer = await running.post("/mindie/generate", CHAT_BODY)
    assert (answer.status, answer.body) == (408, refusals.plain_body(refusals.TEXTS.inference_timeout))


async def test_timeouts_span_all_attempts(cluster):
    """A retry gets the time spent in failed attempts, and the first-token deadline does not move."""
    p, d = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d, first_token_timeout=0.5)

    async def fail(request: ReceivedRequest) -> None:
        await asyncio.sleep(0.2)
        raise ConnectionError

    p.before_prefill = d.before_prefill = fail
    answer = await running.post("/mindie/generate", CHAT_BODY)
    assert (answer.status, answer.body) == (408, refusals.plain_body(refusals.TEXTS.first_token_timeout))
    spent = sorted(int(request.headers["parley-spent"]) for request in (*p.requests, *d.requests))
    assert len(spent) > 1 and all(after >= before + 199 for before, after in itertools.pairwise(spent)), spent


async def test_resumed_stream_has_no_first_token_timeout(cluster):
    p, dying = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, dying, first_token_timeout=0.2)

    async def late(request: ReceivedRequest) -> None:
        await asyncio.sleep(0.4)

    async def die(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.decode_hook = None
        d.send_part(request_id, parts, first_part)
        await asyncio.sleep(0.05)
        p.before_prefill = dying.before_prefill = late
        d.send_frames([result_frames.encode_error_frame(request_id, "lost")])

    dying.decode_hook = die
    assert (await running.post(body=CHAT_BODY)).body == b"".join(LONG_SCRIPT.parts)


async def test_recompute_is_never_refused_by_admission(cluster, monkeypatch):
    """The client already has part of the answer, so the objectives are not judged again."""
    p, d = ScriptedInstance("prefill", plain=True), ScriptedInstance("decode", plain=True)
    running = await cluster(p, d, slo_tpot=1.0)
    judged_pairs: list[Any] = []

    def predict_crowding_later(pair: Any, slo: float) -> tuple[bool, float]:
        judged_pairs.append(pair)
        return len(judged_pairs) > 1, 1.0

    monkeypatch.setattr(admission, "predict_crowding", predict_crowding_later)

    async def request_recompute(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.decode_hook = None
        d.send_frames([result_frames.encode_retry_frame(request_id, b'{"messages":"1,2,3"}')])

    d.decode_hook = request_recompute
    answer = await running.post(body=CHAT_BODY)
    assert answer.status == 200 and answer.is_complete and len(judged_pairs) == 1


def test_scripted_records_are_lists_of_outputs():
    assert msgspec.msgpack.decode(part_record(3)) == [[0, 3]]
