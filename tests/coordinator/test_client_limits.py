"""Requests whose client disconnects, does not read, or runs into a timeout.

The instances are scripted.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest
from support.answer_scripts import CHAT_BODY, CHAT_SCRIPT, LONG_SCRIPT, UNSTREAMED_SCRIPT
from support.coordinator_client import read_client_answer
from support.loop_clock import pass_time
from support.scripted_instance import AnswerScript, ReceivedRequest, ScriptedInstance

from parley.coordinator import refusals
from parley.coordinator.routing import instance_scheduler
from parley.disagg.wire import result_frames

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
        for instance in running.coordinator.table:
            running.coordinator.table.set_result_stream(instance, False)
        running.coordinator.options.__dict__["deploy_mode"] = "auto"
    p.before_prefill = wait if stage == "asked" else None
    d.decode_hook = decode_part
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    reader, writer = await running.send_raw(head)
    if stage == "queued":
        assert b"503" in await reader.readline()
        writer.close()
        return
    await asyncio.wait_for(reached.wait(), 60)
    if stage in ("first", "middle"):
        await reader.readuntil(LONG_SCRIPT.parts[0])
    writer.close()
    await running.wait_until(lambda: d.stopped_ids and (p.stopped_ids or stage != "asked"))
    request_id = p.requests[0].headers["req-id"]
    assert d.stopped_ids == [request_id] and p.stopped_ids == ([request_id] if stage == "asked" else [])
    await running.wait_until(lambda: running.coordinator.front.load.open_requests == 0)
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
    await running.wait_until(lambda: running.coordinator.front.load.open_requests == 0)
    writer.close()


# -- timeouts

GENERATE = b"POST /mindie/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (
    len(CHAT_BODY),
    CHAT_BODY,
)


async def test_first_token_and_inference_timeouts_end_the_request(cluster):
    p, d = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d, first_token_timeout=40, infer_timeout=60)
    decoding = asyncio.Event()

    async def wait(request: ReceivedRequest) -> None:
        await asyncio.Event().wait()

    async def silence(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        decoding.set()

    p.before_prefill = wait
    reader, _ = await running.send_raw(GENERATE)
    await running.wait_until(lambda: p.requests)
    await pass_time(40)
    answer = await read_client_answer(reader)
    assert (answer.status, answer.body) == (408, refusals.plain_body(refusals.TEXTS.first_token_timeout))
    await running.wait_until(lambda: p.stopped_ids)
    assert p.stopped_ids == d.stopped_ids == [p.requests[0].headers["req-id"]]
    p.before_prefill, d.decode_hook = None, silence
    reader, _ = await running.send_raw(GENERATE)
    begin = await reader.readuntil(LONG_SCRIPT.parts[0] + b"\r\n")
    assert begin.startswith(b"HTTP/1.1 200 ")
    await pass_time(60)
    chunk = b"Request inference timeout"
    assert await reader.readuntil(b"0\r\n\r\n") == b"%x\r\n%b\r\n0\r\n\r\n" % (len(chunk), chunk)
    p.script = UNSTREAMED_SCRIPT
    decoding.clear()
    reader, _ = await running.send_raw(GENERATE)
    await decoding.wait()
    await pass_time(60)
    answer = await read_client_answer(reader)
    assert (answer.status, answer.body) == (408, refusals.plain_body(refusals.TEXTS.inference_timeout))


async def test_timeouts_span_all_attempts(cluster):
    """A retry gets the time spent in failed attempts, and the first-token deadline does not move."""
    p, d = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d, first_token_timeout=50)

    async def fail(request: ReceivedRequest) -> None:
        await asyncio.sleep(0.2)
        await pass_time(20)
        raise ConnectionError

    p.before_prefill = d.before_prefill = fail
    reader, _ = await running.send_raw(GENERATE)
    answer = await read_client_answer(reader)
    assert (answer.status, answer.body) == (408, refusals.plain_body(refusals.TEXTS.first_token_timeout))
    spent = sorted(int(request.headers["parley-spent"]) for request in (*p.requests, *d.requests))
    assert len(spent) > 1 and all(after >= before + 199 for before, after in itertools.pairwise(spent)), spent


async def test_resumed_stream_has_no_first_token_timeout(cluster):
    p, dying = ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, dying, first_token_timeout=60)

    async def late(request: ReceivedRequest) -> None:
        await pass_time(120)

    async def die(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.decode_hook = None
        d.send_part(request_id, parts, first_part)
        await asyncio.sleep(0.05)
        p.before_prefill = dying.before_prefill = late
        d.send_frames([result_frames.encode_error_frame(request_id, "lost")])

    dying.decode_hook = die
    reader, _ = await running.send_raw(GENERATE)
    assert (await read_client_answer(reader)).body == b"".join(LONG_SCRIPT.parts)


async def test_recompute_is_never_refused_by_admission(cluster, monkeypatch):
    """The client already has part of the answer, so the objectives are not judged again."""
    p, d = ScriptedInstance("prefill", plain=True), ScriptedInstance("decode", plain=True)
    running = await cluster(p, d, slo_tpot=1.0)
    judged_pairs: list[Any] = []

    def predict_crowding_later(pair: Any, slo: float) -> tuple[bool, float]:
        judged_pairs.append(pair)
        return len(judged_pairs) > 1, 1.0

    monkeypatch.setattr(instance_scheduler, "predict_crowding", predict_crowding_later)

    async def request_recompute(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.decode_hook = None
        d.send_frames([result_frames.encode_retry_frame(request_id, b'{"messages":"1,2,3"}')])

    d.decode_hook = request_recompute
    answer = await running.post(body=CHAT_BODY)
    assert answer.status == 200 and answer.is_complete and len(judged_pairs) == 1
