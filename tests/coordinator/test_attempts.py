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
from support.scripted_instance import Asked, Script, Scripted, record

from parley.coordinator import refusals
from parley.coordinator.coordinator import seat
from parley.dialects.mounts import INSTANCE_PLANE
from parley.disagg.wire import headers as heads
from parley.disagg.wire import result_frames
from parley.errors import OrderRefused

CHAT = Script([b'data: {"a":0}\n\n', b'data: {"a":1}\n\n', b'data: {"a":2}\n\n', b"data: [DONE]\n\n"])
LONG = Script([b'data: {"n":%d}\n\n' % number for number in range(40)])
WHOLE = Script([b'{"whole":', b"true}"], stream=False, headers=(("content-type", "application/json"), ("x-own", "1")))
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}).encode()
PLAIN = {"separate": "always"}


def raw(status: int, body: bytes, *headers: bytes) -> bytes:
    """Return a complete HTTP answer of an instance."""
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), lines, body)


def first(asked: Asked, **members: Any) -> bytes:
    """Return a prefill instance's answer; without ``headers`` it has the plain form."""
    return raw(200, json.dumps({"reqId": asked.headers["req-id"]} | members).encode())


# -- success


async def test_stream_joins_prefill_part_and_decode_parts(cluster):
    p, d = Scripted("prefill", script=CHAT), Scripted("decode")
    running = await cluster(p, d)
    answer = await running.post(body=BODY)
    assert (answer.status, answer.body) == (200, b"".join(CHAT.parts))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-own"] == "1"
    assert answer.headers["transfer-encoding"] == "chunked"
    (asked,) = p.asked
    assert asked.body == BODY and asked.target == "/v1/chat/completions"
    assert asked.headers["req-type"] == "prefill" and asked.headers["d-target"] == d.target


async def test_unstreamed_answer_comes_from_the_decode_instance(cluster):
    running = await cluster(Scripted("prefill", script=WHOLE), Scripted("decode"))
    answer = await running.post(body=BODY)
    assert (answer.status, answer.body) == (200, b'{"whole":true}')
    assert answer.headers["content-length"] == "14" and answer.headers["x-own"] == "1"


@pytest.mark.parametrize("script", [Script([b"data: x\n\n"]), Script([b'{"a":1}'], stream=False)])
async def test_single_token_answer_never_reaches_the_decode_instance(cluster, script):
    p, d = Scripted("prefill", script=script), Scripted("decode")
    running = await cluster(p, d)
    answer = await running.post()
    assert (answer.status, answer.body) == (200, script.parts[0])
    assert not d.sent


async def test_mixed_instance_runs_an_unseparated_request(cluster):
    mixed = Scripted("mixed", script=CHAT)
    running = await cluster(mixed)
    assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)
    assert mixed.asked[0].headers["d-target"] == "self"


@pytest.mark.parametrize("cut", range(1, 12))
async def test_coordinator_reads_result_frames_cut_anywhere(cluster, cut):
    """Guards against readers that expect whole frames in one read."""
    nul = Script([b'{"a":0}\0', b'{"a":1}\0', b'{"a":2}\0'])
    for script in (CHAT, nul):
        p, d = Scripted("prefill", script=script), Scripted("decode", cut=cut)
        running = await cluster(p, d)
        assert (await running.post(body=BODY)).body == b"".join(script.parts)


async def test_early_decode_results_wait_for_the_prefill_answer(cluster):
    p, d = Scripted("prefill"), Scripted("decode")
    running = await cluster(p, d)

    async def late(asked: Asked) -> bytes:
        d.begin(asked.headers["req-id"], CHAT.parts, 1, CHAT)
        await asyncio.sleep(0.05)
        return first(asked, isStream=True, isLastResp=False, output=CHAT.parts[0].decode(), headers=[], records="kA==")

    p.before = late
    assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)


async def test_forwards_client_headers_but_replaces_coordinator_headers(cluster):
    p = Scripted("prefill", script=CHAT)
    running = await cluster(p, Scripted("decode"), secret="hidden")
    await running.post("/v1/chat/completions?a=b%20c", BODY, "x-mine: 7", "authorization: Bearer k", "te: trailers",
                       "req-id: 1", "parley-given: 5", "parley-secret: wrong", "x-hop: 1", "origin: http://localhost",
                       "x-request-id: mine")  # fmt: skip
    (asked,) = p.asked
    assert asked.target == "/v1/chat/completions?a=b%20c"
    assert asked.headers["x-mine"] == "7" and asked.headers["authorization"] == "Bearer k"
    assert asked.headers["parley-secret"] == "hidden" and asked.headers["req-id"] != "1"
    assert asked.headers["x-request-id"] == "mine"
    assert not asked.headers.keys() & {"te", "origin", "parley-given", "connection", "transfer-encoding"}


async def test_concurrent_cluster_streams_do_not_mix(cluster):
    scripts = {}

    class Each(Scripted):
        async def _prefill(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
            name = asked.body.decode()
            self.script = scripts.setdefault(name, Script([b"data: %b %d\n\n" % (asked.body, k) for k in range(8)]))
            await super()._prefill(asked, writer)

    running = await cluster(Each("prefill"), Scripted("decode"))
    answers = await asyncio.gather(*(running.post(body=b"%d" % number) for number in range(500)))
    for number, answer in enumerate(answers):
        assert answer.body == b"".join(scripts[str(number)].parts)
    assert running.coordinator.choice.open == 0


# -- plain MindIE servers


@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_completes_answers_of_plain_mindie_servers(cluster, cut):
    opening = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    text = [b'data: {"choices":[{"index":0,"delta":{"content":"%d"},"finish_reason":null}]}\n\n' % k for k in range(3)]
    p, d = Scripted("prefill", plain=True), Scripted("decode", plain=True, cut=cut)
    running = await cluster(p, d)

    async def answer(asked: Asked) -> bytes:
        id = asked.headers["req-id"]
        d.put([made for part in (opening, *text[1:]) for made in result_frames.results(id, part, last=part is text[2])])
        return first(asked, isStream=True, isLastResp=False, output=(opening + text[0]).decode())

    p.before = answer
    answered = await running.post(body=BODY)
    assert answered.body == opening + b"".join(text) + b"data: [DONE]\n\n"
    assert answered.headers["content-type"] == "text/event-stream"
    p.before = None
    p.script = Script([b'{"a":', b"1}"], stream=False)
    answered = await running.post(body=BODY)
    assert (answered.body, answered.headers["content-type"]) == (b'{"a":1}', "application/json")
    p.script = Script([b'{"a":0}\0', b'{"a":1}\0'])
    assert (await running.post("/generate", b"{}")).body == b'{"a":0}\0{"a":1}\0'


async def test_error_of_a_plain_decode_instance_ends_the_stream(cluster):
    p, d = Scripted("prefill", plain=True), Scripted("decode", plain=True)
    running = await cluster(p, d)

    async def fail(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        d.put([result_frames.error(id, "Pull kv failed irreversibly.")])

    d.decode = fail
    answer = await running.post("/mindie/v1/chat/completions", BODY)
    assert answer.body == p.script.parts[0] + b"Pull kv failed irreversibly."
    answer = await running.post("/v1/chat/completions", BODY)
    assert b'"message":"Pull kv failed irreversibly."' in answer.body and answer.body.endswith(b"data: [DONE]\n\n")


async def test_plain_decode_instance_can_request_recompute(cluster):
    p, d = Scripted("prefill", plain=True), Scripted("decode", plain=True)
    running = await cluster(p, d)
    refused = []

    async def retry(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        d.part(id, parts, past)
        d.put([result_frames.retry(id, b'{"messages":"3,1,2,3"}')])
        d.decode = None

    async def again(asked: Asked) -> bytes | None:
        if "is-recompute" not in asked.headers:
            return None
        if not refused:
            refused.append(asked)
            return raw(400, b"not yet")
        d.begin(asked.headers["req-id"], LONG.parts, 3, LONG)
        return first(asked, isStream=True, isLastResp=False, output=LONG.parts[2].decode())

    p.script, p.before, d.decode = LONG, again, retry
    answer = await running.post("/generate_stream", BODY)
    assert answer.body == b"".join(LONG.parts)
    one, *others = p.asked
    assert {each.body for each in others} == {b'{"messages":"3,1,2,3"}'} and len(others) == 2
    assert {each.headers["req-id"] for each in p.asked} == {one.headers["req-id"]}


# -- failures of the prefill instance


async def test_prefill_refusal_reaches_the_client_unchanged(cluster):
    p = Scripted("prefill")
    running = await cluster(p, Scripted("decode"))

    async def refuse(asked: Asked) -> bytes:
        return raw(422, b'{"error":"x"}', b"content-type: application/json", b"x-why: y", b"date: never")

    p.before = refuse
    answer = await running.post(body=BODY)
    assert (answer.status, answer.body) == (422, b'{"error":"x"}')
    assert answer.headers["x-why"] == "y" and answer.headers["date"] != "never"
    assert len(p.asked) == 1 and not p.halted


@pytest.mark.parametrize("status", [429, 503])
async def test_retries_another_prefill_instance_when_one_is_full(cluster, status):
    full, other = Scripted("prefill"), Scripted("prefill", script=CHAT)
    running = await cluster(full, other, Scripted("decode"), scheduler_type="default_scheduler")

    async def refuse(asked: Asked) -> bytes:
        return raw(status, b"full")

    full.before = refuse
    for _ in range(3):
        assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)
    assert full.asked
    other.before = refuse
    answer = await running.post(body=BODY)
    assert (answer.status, answer.body) == (status, b"full")


async def test_retries_another_prefill_instance_when_an_engine_is_lost(cluster):
    lost, other = Scripted("prefill"), Scripted("prefill", script=CHAT)
    running = await cluster(lost, other, Scripted("decode"), scheduler_type="default_scheduler")

    async def refuse(asked: Asked) -> bytes:
        return raw(424, b"gone", b"parley-lost: engine")

    lost.before = refuse
    for _ in range(3):
        assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)
    assert lost.asked


async def test_long_prompt_is_retried_only_where_the_context_is_longer(cluster):
    """Instances with equally short contexts are skipped; with no longer one left, the refusal reaches the client."""
    short = [Scripted("prefill") for _ in range(6)]
    long = Scripted("prefill", script=CHAT)
    for each in short:
        each.longest = 512
    running = await cluster(*short, long, Scripted("decode"), scheduler_type="default_scheduler")

    async def refuse(asked: Asked) -> bytes:
        return raw(400, b"too long", b"parley-short: context")

    for each in short:
        each.before = refuse
    for _ in range(3):
        assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)
    assert sum(len(each.asked) for each in short) == 3
    long.before = refuse
    answer = await running.post(body=BODY)
    assert (answer.status, answer.body) == (400, b"too long") and "parley-short" not in answer.headers
    assert sum(len(each.asked) for each in short) <= 4 and len(long.asked) == 4


@pytest.mark.parametrize("status, text", [(400, heads.MISPLACED), (503, heads.UNKNOWN)])
async def test_retries_another_prefill_instance_after_a_role_change(cluster, status, text):
    """The table learns of the new role a little later; meanwhile no client may see the wrong-role error."""
    former, other = Scripted("prefill"), Scripted("prefill", script=CHAT)
    running = await cluster(former, other, Scripted("decode"), scheduler_type="default_scheduler", max_retry=1)

    async def refuse(asked: Asked) -> bytes:
        return raw(status, INSTANCE_PLANE.refusal(OrderRefused(status, text)).body)

    former.before = refuse
    for _ in range(3):
        assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)
    assert former.asked
    other.before = refuse
    answer = await running.post(body=BODY)
    assert answer.status == 503 and json.loads(answer.body)["error"]["type"] == "service_unavailable"


async def test_retries_another_decode_instance_when_one_has_no_room(cluster):
    p, full, other = Scripted("prefill", script=CHAT), Scripted("decode"), Scripted("decode")
    running = await cluster(p, full, other)

    async def refuse(asked: Asked) -> bytes | None:
        if asked.headers["d-target"] == full.target:
            return raw(503, b'{"error":"no capacity","refused":true}')
        return None

    p.before = refuse
    for _ in range(3):
        assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)
    assert {each.headers["d-target"] for each in p.asked} == {full.target, other.target}


async def test_retries_another_prefill_instance_when_one_dies(cluster):
    dying, other = Scripted("prefill"), Scripted("prefill", script=CHAT)
    running = await cluster(dying, other, Scripted("decode"))

    async def die(asked: Asked) -> None:
        raise ConnectionError

    dying.before = die
    assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)
    (before,), (after,) = dying.asked, other.asked
    assert before.headers["req-id"] != after.headers["req-id"]
    for same in ("parley-id", "parley-created"):
        assert before.headers[same] == after.headers[same]
    assert after.body == BODY


FAILED = [
    ("unread", b"Receive messages from p instance failed\r\n"),
    ("unsent", b"Send messges to p instance failed\r\n"),
    ("no HTTP", b"Receive messages from p instance failed\r\n"),
    ("half of it", b"Receive messages from p instance failed\r\n"),
    ("hanging", b"P instance error\r\n"),
]


@pytest.mark.parametrize(("how", "text"), FAILED)
async def test_prefill_failure_uses_the_documented_error_text(cluster, how, text):
    p = Scripted("prefill")
    running = await cluster(p, Scripted("decode"), max_retry=0, heartbeat=60)
    table, body = running.coordinator.table, BODY

    async def answer(asked: Asked) -> bytes:
        match how:
            case "no HTTP":
                return b"ICY 200 OK\r\n\r\n"
            case "half of it":
                p.before = answer_and_die
                return await answer_and_die(asked)
            case "hanging":
                table.instances[1].lost = True
                table.tell(table.instances[1], "lost")
                await asyncio.sleep(5)
        raise ConnectionError

    async def answer_and_die(asked: Asked) -> bytes:
        writer = p.writers[-1]
        writer.write(raw(200, b"{}" * 10)[:-5])
        await writer.drain()
        raise ConnectionError

    p.before = answer
    if how == "unsent":
        p.before, p.hangs_up, body = None, True, b" " * (8 << 20)
    told = await running.post("/mindie/generate", body)
    assert (told.status, told.body) == (500, text)


async def test_unstreamed_answer_of_decode_does_not_wait_for_prefill(cluster):
    """Decode has sent all of it, so a prefill instance that hangs, dies or fails no longer matters."""
    p, d = Scripted("prefill"), Scripted("decode")
    running = await cluster(p, d, heartbeat=60)

    async def hang(asked: Asked) -> None:
        d.begin(asked.headers["req-id"], WHOLE.parts, 1, WHOLE)
        await asyncio.sleep(60)

    async def die(asked: Asked) -> None:
        d.begin(asked.headers["req-id"], WHOLE.parts, 1, WHOLE)
        raise ConnectionError

    async def late(asked: Asked) -> bytes:
        d.begin(asked.headers["req-id"], WHOLE.parts, 1, WHOLE)
        return raw(500, b"no")

    for p.before in (hang, die, late, hang):
        answer = await running.post(body=BODY)
        if p.before is hang:
            assert (answer.status, answer.body) == (200, b'{"whole":true}')
            assert answer.headers["content-length"] == "14" and answer.headers["x-own"] == "1"
    assert running.coordinator.choice.open == 0


async def test_retries_another_prefill_instance_when_one_is_unreachable(cluster):
    gone, other = Scripted("prefill"), Scripted("prefill", script=CHAT)
    running = await cluster(gone, other, Scripted("decode"), heartbeat=60)
    await gone.stop()
    assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)


@pytest.mark.parametrize("hanging", [1, 2])
async def test_lost_instance_ends_the_attempt_that_waits_for_it(cluster, hanging):
    """Prefill does not answer because it or decode hangs; the remaining instance does both stages."""
    p, d = Scripted("prefill", script=CHAT), Scripted("decode", script=CHAT)
    running = await cluster(p, d, heartbeat=60)
    table = running.coordinator.table

    async def hang(asked: Asked) -> None:
        p.before, table.instances[hanging].lost = None, True
        table.tell(table.instances[hanging], "lost")
        await asyncio.sleep(10)

    p.before = hang
    assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)
    assert (p, d)[2 - hanging].asked[-1].headers["d-target"] == "self"


ANSWERS = {
    "no JSON": b"data: x",
    "no object": b"[]",
    "no id": b'{"isStream":true,"isLastResp":true,"output":""}',
    "no output": b'{"reqId":"1","isStream":true,"isLastResp":true}',
    "no last": b'{"reqId":"1","isStream":true,"output":""}',
    "no base64": b'{"reqId":"1","isStream":true,"isLastResp":true,"output":"?","encoding":"base64"}',
    "no header": '{"reqId":"1","isStream":true,"isLastResp":true,"output":"","headers":[["x","…"]]}'.encode(),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_malformed_prefill_answer_fails_the_attempt(cluster, name):
    p, d = Scripted("prefill"), Scripted("decode")
    running = await cluster(p, d, max_retry=1)

    async def answer(asked: Asked) -> bytes:
        return raw(200, ANSWERS[name])

    p.before = d.before = answer
    told = await running.post("/mindie/generate", BODY)
    assert (told.status, told.body) == (500, b"P instance error\r\n")
    assert told.headers["content-type"] == "text/plain; charset=utf-8"
    told = await running.post("/v1/chat/completions", BODY)
    assert told.status == 500 and json.loads(told.body)["error"]["message"] == "P instance error"
    assert len(p.asked) + len(d.asked) == 4


# -- failures of the decode instance


def given(asked: Asked) -> list[int]:
    """Return the numbers of the parts that the client already has, from a resuming request."""
    size = int(asked.headers.get("parley-given", 0))
    records = msgspec.msgpack.decode(asked.body[:size]) if size else []
    return [number for record in records for _, number in record]


@pytest.mark.parametrize("at", [1, 2, 17, 39])
async def test_stream_resumes_exactly_where_decode_was_lost(cluster, at):
    p, dying, other = Scripted("prefill", script=LONG), Scripted("decode"), Scripted("decode")
    running = await cluster(p, dying, other, scheduler_type="default_scheduler")

    async def die(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        for number in range(past, at):
            d.part(id, parts, number)
        await asyncio.sleep(0.02)
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(d.stop()))
        await asyncio.sleep(10)

    dying.decode = die
    for _ in range(2):
        answer = await running.post(body=BODY)
        assert answer.whole and answer.body == b"".join(LONG.parts)
    resumed = [asked for asked in p.asked if given(asked)]
    assert [given(asked) for asked in resumed] == [list(range(at))]
    assert all(asked.body.endswith(BODY) for asked in resumed)


async def test_unreadable_record_prevents_resuming_a_stream(cluster):
    dying = Scripted("decode")
    running = await cluster(Scripted("prefill", script=LONG), dying, Scripted("decode"))

    async def die(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        d.put([b"reqId:%b\0record:?\0" % id.encode(), *result_frames.results(id, parts[past], exact=True)])
        d.put([result_frames.error(id, "It is lost.")])

    dying.decode = die
    answer = await running.post(body=BODY)
    assert answer.body.startswith(b"".join(LONG.parts[:2])) and answer.body.count(b'"error"') == 1
    assert LONG.parts[2] not in answer.body


async def test_unstreamed_answer_restarts_when_decode_is_lost(cluster):
    p, dying, other = Scripted("prefill", script=WHOLE), Scripted("decode"), Scripted("decode")
    running = await cluster(p, dying, other)

    async def die(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        d.break_line()
        d.epoch += "+"
        d.sent.clear()

    dying.decode = die
    for _ in range(2):
        assert (await running.post(body=BODY)).body == b'{"whole":true}'
    assert not any(given(asked) for asked in p.asked)


async def test_result_connection_reconnects_without_loss_or_repetition(cluster):
    p, d = Scripted("prefill", script=LONG), Scripted("decode", tick=0.01)
    running = await cluster(p, d)

    async def breaking() -> None:
        for _ in range(4):
            await asyncio.sleep(0.08)
            d.break_line()

    answer, _ = await asyncio.gather(running.post(body=BODY), breaking())
    assert answer.body == b"".join(LONG.parts)
    assert len(d.connected) >= 3 and len(p.asked) == 1


async def test_result_connection_sends_run_and_seat_of_the_coordinator(cluster):
    """Each run has a client name of its own; the seat identifies the address it runs at."""
    d = Scripted("decode")
    ports = [(await cluster(Scripted("prefill"), d)).port for _ in range(2)]
    told = [dict(parse_qsl(asked.target.partition("?")[2])) for asked in d.connected]
    assert len({each["client"] for each in told}) == 2
    for each, port in zip(told, ports, strict=True):
        with socket.create_server(("127.0.0.1", 0)) as other:
            assert each["seat"] != seat("127.0.0.1", other)
        run = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert each["seat"] == sha256(f"{run} {socket.gethostname()} 127.0.0.1 {port}".encode()).hexdigest()[:32]


async def test_requests_of_a_restarted_decode_instance_resume(cluster):
    p, d = Scripted("prefill", script=LONG), Scripted("decode")
    running = await cluster(p, d)

    async def restart(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        d.part(id, parts, past)
        await asyncio.sleep(0.02)
        d.decode, d.epoch = None, "later"
        d.sent.clear()
        d.break_line()

    d.decode = restart
    assert (await running.post(body=BODY)).body == b"".join(LONG.parts)
    assert [given(asked) for asked in p.asked] == [[], [0, 1]]


@pytest.mark.parametrize(("after", "begun"), [("one", True), ("other", True), ("other", False)])
async def test_begun_stream_resumes_only_with_the_same_weights(cluster, after, begun):
    """Decode restarts with other weights; prefill still has the first ones, or the other ones as well."""
    script = LONG if begun else WHOLE
    p, d = Scripted("prefill", script=script), Scripted("decode")
    p.layout = d.layout = "model=one"
    running = await cluster(p, d)
    table = running.coordinator.table

    async def restart(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        if begun:
            d.part(id, parts, past)
        p.layout, d.layout = f"model={after}", "model=other"
        await running.until(lambda: {each.layout for each in table} == {p.layout, d.layout})
        d.decode, d.epoch = None, "later"
        d.sent.clear()
        d.break_line()

    d.decode = restart
    answer = await running.post(body=BODY)
    if begun and after == "other":
        assert answer.body.startswith(b"".join(LONG.parts[:2]) + b'data: {"error":') and len(p.asked) == 1
    else:
        assert answer.body == b"".join(script.parts) and len(p.asked) == 2
    assert running.coordinator.choice.open == 0


@pytest.mark.parametrize("others", [0, 1])
async def test_removed_decode_instance_leaves_no_request_hanging(cluster, others):
    """Its request resumes on another decode instance, or on the prefill instance alone."""
    p, gone = Scripted("prefill", script=LONG), Scripted("decode")
    running = await cluster(p, gone, *(Scripted("decode") for _ in range(others)))
    table = running.coordinator.table

    async def remove(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        d.part(id, parts, past)
        await asyncio.sleep(0.02)
        table.remove(next(each.id for each in table if each.url == d.url))

    gone.decode = remove
    answer = await running.post(body=BODY)
    assert answer.body == b"".join(LONG.parts) and len(table) == 1 + others
    assert [given(asked) for asked in p.asked] == [[], [0, 1]]
    assert running.coordinator.choice.open == 0


async def test_reports_a_decode_instance_that_refuses_to_send_results(cluster):
    class Deaf(Scripted):
        async def _results(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(raw(400, b"Only the Decode node supports dresult but you send to prefill"))
            await writer.drain()

    running = await cluster(Scripted("prefill"), Deaf("decode"), ready=False)
    alarms, table = running.coordinator.management.alarms, running.coordinator.table
    await running.until(lambda: alarms)
    assert "Its results cannot be received. It refused to send results, with status 400." in alarms[0]["detail"]
    await running.until(lambda: table.lack())
    assert table.lack() == "The results of instance 2 cannot be received."
    assert json.loads((await running.get("/health/ready")).body)["reason"] == table.lack()
    answer = await running.post("/mindie/generate", BODY)
    assert (answer.status, answer.body) == (503, refusals.plain(refusals.NOT_READY))


@pytest.mark.parametrize(
    "path,error",
    [
        ("/v1/chat/completions", b'"message":"D instance error"'),
        ("/v1/completions", b'"message":"D instance error"'),
        ("/generate_stream", b'"error":"Request failed during generation: D instance error"'),
        ("/mindie/v1/chat/completions", b"D instance error"),
    ],
)
async def test_stream_ends_with_one_error_when_retries_fail(cluster, path, error):
    p, d = Scripted("prefill", script=LONG), Scripted("decode")
    running = await cluster(p, d, max_retry=1)

    async def die(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        d.put([result_frames.error(id, "D instance error")])

    p.decode = d.decode = die
    body: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}
    if path == "/generate_stream":
        body = {"inputs": "a"}
    elif path == "/v1/completions":
        body = {"model": "m", "prompt": "a", "stream": True}
    answer = await running.post(path, json.dumps(body).encode())
    assert answer.status == 200 and answer.whole
    assert answer.body.startswith(LONG.parts[0] + LONG.parts[1]) and answer.body.count(error) == 1
    assert [given(asked) for asked in p.asked] == [[], [0]]


# -- clients that disconnect or do not read


@pytest.mark.parametrize("stage", ["queued", "asked", "first", "middle"])
async def test_client_disconnect_cancels_the_request_on_every_instance(cluster, stage):
    p, d = Scripted("prefill", script=LONG), Scripted("decode")
    running = await cluster(p, d)
    reached = asyncio.Event()

    async def wait(asked: Asked) -> None:
        reached.set()
        await asyncio.sleep(10)

    async def go(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        if stage == "middle":
            d.part(id, parts, past)
        reached.set()

    if stage == "queued":
        for each in running.coordinator.table:
            running.coordinator.table.attach(each, False)
        running.coordinator.options.__dict__["deploy_mode"] = "auto"
    p.before = wait if stage == "asked" else None
    d.decode = go
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    reader, writer = await running.send(head)
    if stage == "queued":
        assert b"503" in await reader.readline()
        writer.close()
        return
    await asyncio.wait_for(reached.wait(), 5)
    if stage in ("first", "middle"):
        await reader.readuntil(LONG.parts[0])
    writer.close()
    await running.until(lambda: d.halted and (p.halted or stage != "asked"))
    id = p.asked[0].headers["req-id"]
    assert d.halted == [id] and p.halted == ([id] if stage == "asked" else [])
    await running.until(lambda: running.coordinator.front.open == 0)
    assert running.coordinator.choice.open == 0


async def test_orphaned_results_cancel_their_request(cluster):
    d = Scripted("decode", script=LONG)
    running = await cluster(Scripted("prefill"), d)
    d.begin("77", LONG.parts, 0, LONG)
    await running.until(lambda: d.halted)
    await asyncio.sleep(0.02)
    assert d.halted == ["77"]


async def test_slow_client_delays_only_its_own_results(cluster):
    big = Script([b"data: %d %b\n\n" % (number, b"x" * 10_000) for number in range(1000)])
    p, d = Scripted("prefill", script=big), Scripted("decode", tick=0.001)
    running = await cluster(p, d)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 12)
    writer.write(head)
    await running.until(lambda: d.flows)
    assert d.flows == [(p.asked[0].headers["req-id"], True)]
    sent = len(d.sent)
    p.script = CHAT
    assert (await running.post(body=BODY)).body == b"".join(CHAT.parts)
    assert len(d.sent) - sent < 100
    body = await reader.read(-1)
    assert [int(number) for number in re.findall(rb"data: (\d+) x", body)] == list(range(1000))
    assert d.flows[-1][1] is False or len(d.flows) % 2 == 1
    writer.close()


async def test_slow_client_of_a_plain_decode_instance_is_cancelled(cluster):
    big = Script([b"data: %d %b\n\n" % (number, b"x" * 10_000) for number in range(2000)])
    p, d = Scripted("prefill", script=big, plain=True), Scripted("decode", plain=True)
    running = await cluster(p, d)
    _, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1 << 12)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
    await running.until(lambda: d.halted)
    await running.until(lambda: running.coordinator.front.open == 0)
    writer.close()


# -- timeouts


async def test_first_token_and_inference_timeouts_end_the_request(cluster):
    p, d = Scripted("prefill", script=LONG), Scripted("decode")
    running = await cluster(p, d, first_token_timeout=0.1, infer_timeout=0.4)

    async def wait(asked: Asked) -> None:
        await asyncio.sleep(5)

    async def silence(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        pass

    p.before = wait
    told = await running.post("/mindie/generate", BODY)
    assert (told.status, told.body) == (408, refusals.plain(refusals.LATE_FIRST))
    await running.until(lambda: p.halted)
    assert p.halted == d.halted == [p.asked[0].headers["req-id"]]
    p.before, d.decode = None, silence
    told = await running.post("/mindie/generate", BODY)
    assert (told.status, told.body) == (200, LONG.parts[0] + b"Request inference timeout")
    p.script = WHOLE
    told = await running.post("/mindie/generate", BODY)
    assert (told.status, told.body) == (408, refusals.plain(refusals.LATE_END))


async def test_timeouts_span_all_attempts(cluster):
    """A retry gets the time spent in failed attempts, and the first-token deadline does not move."""
    p, d = Scripted("prefill", script=LONG), Scripted("decode")
    running = await cluster(p, d, first_token_timeout=0.5)

    async def fail(asked: Asked) -> None:
        await asyncio.sleep(0.2)
        raise ConnectionError

    p.before = d.before = fail
    told = await running.post("/mindie/generate", BODY)
    assert (told.status, told.body) == (408, refusals.plain(refusals.LATE_FIRST))
    spent = sorted(int(asked.headers["parley-spent"]) for asked in (*p.asked, *d.asked))
    assert len(spent) > 1 and all(after >= before + 199 for before, after in itertools.pairwise(spent)), spent


async def test_resumed_stream_has_no_first_token_timeout(cluster):
    p, dying = Scripted("prefill", script=LONG), Scripted("decode")
    running = await cluster(p, dying, first_token_timeout=0.2)

    async def late(asked: Asked) -> None:
        await asyncio.sleep(0.4)

    async def die(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        d.decode = None
        d.part(id, parts, past)
        await asyncio.sleep(0.05)
        p.before = dying.before = late
        d.put([result_frames.error(id, "lost")])

    dying.decode = die
    assert (await running.post(body=BODY)).body == b"".join(LONG.parts)


async def test_recompute_is_never_refused_by_admission(cluster):
    """The client already has part of the answer, so its predicted first-token time is not judged again."""
    p, d = Scripted("prefill", plain=True), Scripted("decode", plain=True)
    running = await cluster(p, d, slo_ttft=1.0)
    choice, tried = running.coordinator.choice, list[int]()
    admit = choice._admit

    def refuse(wanted: Any, pair: Any) -> None:
        tried.append(wanted.attempt)
        if len(tried) > 1:
            raise choice._refused(429, refusals.TOO_MANY)
        admit(wanted, pair)

    choice._admit = refuse

    async def wish(d: Scripted, id: str, parts: list[bytes], past: int) -> None:
        d.decode = None
        d.put([result_frames.retry(id, b'{"messages":"1,2,3"}')])

    d.decode = wish
    answer = await running.post(body=BODY)
    assert answer.status == 200 and answer.whole and tried == [0]


def test_scripted_records_are_lists_of_outputs():
    assert msgspec.msgpack.decode(record(3)) == [[0, 3]]
