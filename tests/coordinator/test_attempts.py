"""Failures of prefill and decode instances: retries, resumed streams, and the documented error texts.

The instances are scripted.
"""

from __future__ import annotations

import asyncio
import json
import socket
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import pytest
from support.answer_scripts import CHAT_BODY, CHAT_SCRIPT, LONG_SCRIPT, UNSTREAMED_SCRIPT, raw_answer
from support.scripted_instance import ReceivedRequest, ScriptedInstance

from parley.coordinator import refusals
from parley.coordinator.coordinator import coordinator_id
from parley.coordinator.proxy.upstream import result_stream
from parley.dialects.mounts import INSTANCE_PLANE
from parley.disagg.wire import headers as pd_headers
from parley.disagg.wire import result_frames
from parley.errors import CommandRefused

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
    page = running.coordinator.status.page_data()
    assert page["retries"] and not page["failed"]
    other.before_prefill = refuse
    assert (await running.post(body=CHAT_BODY)).status == 500
    assert running.coordinator.status.page_data()["failed"] == 1


async def test_long_prompt_is_retried_only_where_the_context_is_longer(cluster):
    """Instances with equally short contexts are skipped; with no longer one left, the refusal reaches the client."""
    short = [ScriptedInstance("prefill") for _ in range(6)]
    long = ScriptedInstance("prefill", script=CHAT_SCRIPT)
    for instance in short:
        instance.max_context = 512
    running = await cluster(*short, long, ScriptedInstance("decode"), scheduler_type="default_scheduler")

    async def refuse(request: ReceivedRequest) -> bytes:
        return raw_answer(400, b"too long", b"parley-short: context")

    for instance in short:
        instance.before_prefill = refuse
    for _ in range(3):
        assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert sum(len(instance.requests) for instance in short) == 3
    long.before_prefill = refuse
    answer = await running.post(body=CHAT_BODY)
    assert (answer.status, answer.body) == (400, b"too long") and "parley-short" not in answer.headers
    assert sum(len(instance.requests) for instance in short) <= 4 and len(long.requests) == 4


async def test_strict_coordinator_reports_the_loss_of_the_only_prefill_instance_at_once(cluster):
    p, d = ScriptedInstance("prefill"), ScriptedInstance("decode")
    running = await cluster(p, d, strict=True, heartbeat=30)
    await p.kill_instance()
    answer = await running.post("/v1/chat/completions", CHAT_BODY)
    assert (answer.status, answer.body) == (500, b"Connect to p instance failed\r\n")
    for path in ("/v1/chat/completions", "/v1/tokenizer"):
        answer = await running.post(path, CHAT_BODY)
        assert (answer.status, answer.body) == (503, b"MindIE-MS Coordinator is not ready\r\n"), path


async def test_strict_coordinator_with_prefill_alone_is_not_ready(cluster):
    running = await cluster(ScriptedInstance("prefill"), strict=True)
    for path in ("/v1/chat/completions", "/v1/tokenizer"):
        answer = await running.post(path, CHAT_BODY)
        assert (answer.status, answer.body) == (503, b"MindIE-MS Coordinator is not ready\r\n"), path


@pytest.mark.parametrize(
    ("status", "text"), [(400, pd_headers.NOT_A_PREFILL_INSTANCE), (503, pd_headers.UNKNOWN_STATUS)]
)
async def test_retries_another_prefill_instance_after_a_role_change(cluster, status, text):
    """The table learns of the new role a little later; meanwhile no client may see the wrong-role error."""
    former, other = ScriptedInstance("prefill"), ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(former, other, ScriptedInstance("decode"), scheduler_type="default_scheduler", max_retry=1)

    async def refuse(request: ReceivedRequest) -> bytes:
        return raw_answer(status, INSTANCE_PLANE.render_command_refusal(CommandRefused(status, text)).body)

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
    assert {request.headers["d-target"] for request in p.requests} == {full.target, other.target}


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
    assert (
        client_answer.status == 500
        and json.loads(client_answer.body)["error"]["message"] == "The prefill instance failed."
    )
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
            await running.wait_until(lambda: d.result_writers)
            d.break_result_connection()

    answer, _ = await asyncio.gather(running.post(body=CHAT_BODY), break_repeatedly())
    assert answer.body == b"".join(LONG_SCRIPT.parts)
    assert len(d.result_requests) >= 3 and len(p.requests) == 1


async def test_result_connection_sends_run_and_seat_of_the_coordinator(cluster):
    """Each run has a client name of its own; the seat identifies the address it runs at."""
    d = ScriptedInstance("decode")
    ports = [(await cluster(ScriptedInstance("prefill"), d)).port for _ in range(2)]
    queries = [dict(parse_qsl(request.target.partition("?")[2])) for request in d.result_requests]
    assert len({query["client"] for query in queries}) == 2
    for query, port in zip(queries, ports, strict=True):
        with socket.create_server(("127.0.0.1", 0)) as other:
            assert query["seat"] != coordinator_id("127.0.0.1", other)
        run = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert query["seat"] == sha256(f"{run} {socket.gethostname()} 127.0.0.1 {port}".encode()).hexdigest()[:32]


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
        await running.wait_until(lambda: {instance.layout for instance in table} == {p.layout, d.layout})
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
    """The requests of the removed instance resume on another decode instance, or on the prefill instance alone."""
    p, removed = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, removed, *(ScriptedInstance("decode") for _ in range(other_count)))
    table = running.coordinator.table

    async def remove(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.send_part(request_id, parts, first_part)
        await asyncio.sleep(0.02)
        table.remove_instance(next(instance.id for instance in table if instance.url == d.url))

    removed.decode_hook = remove
    answer = await running.post(body=CHAT_BODY)
    assert answer.body == b"".join(LONG_SCRIPT.parts) and len(table) == 1 + other_count
    assert [received_parts(request) for request in p.requests] == [[], [0, 1]]
    assert running.coordinator.scheduler.open_requests == 0


async def test_starting_instance_raises_no_alarm(cluster, monkeypatch):
    monkeypatch.setattr(result_stream, "RECONNECT_DELAYS", (0.001,))
    attempts = []
    report = result_stream.ResultStreamClient._run_connection
    monkeypatch.setattr(
        result_stream.ResultStreamClient, "_run_connection", lambda self: (attempts.append(0), report(self))[1]
    )
    p, d = ScriptedInstance("prefill"), ScriptedInstance("decode")
    await d.start_serving()
    await d.kill_instance()
    running = await cluster(p, d, ready=False)
    alarms = running.coordinator.management.alarms
    await running.wait_until(lambda: len(attempts) > 2 * result_stream.LASTING_FAILURES)
    assert not alarms
    await d.start_serving(d.port)
    await running.wait_until(lambda: running.coordinator.scheduler.can_serve())
    assert not alarms
    await d.kill_instance()
    await running.wait_until(lambda: alarms)
    assert "Its results cannot be received." in alarms[0]["detail"]


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
        ("/v1/chat/completions", b'"message":"The decode instance failed."'),
        ("/v1/completions", b'"message":"The decode instance failed."'),
        ("/generate_stream", b'"error":"Request failed during generation: The decode instance failed."'),
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
