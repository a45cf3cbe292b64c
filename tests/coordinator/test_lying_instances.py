"""Instances whose answers are wrong or hostile: their own requests go elsewhere, and no other request notices."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.answer_scripts import CHAT_BODY, CHAT_SCRIPT, UNSTREAMED_SCRIPT, prefill_answer
from support.scripted_instance import ReceivedRequest, ScriptedInstance

from parley.coordinator import refusals
from parley.coordinator.proxy.generation import attempts, stream_merge
from parley.coordinator.proxy.upstream import connections
from parley.coordinator.routing.health import Unanswered
from parley.disagg.wire import result_frames
from parley.disagg.wire.vouched_client import read_reserved_tokens, read_used_tokens
from parley.web import http_client

BAD_HEADS: list[tuple[int, list[tuple[str, str]]]] = [
    (0, []),
    (-1, []),
    (100, []),
    (101, []),
    (204, []),
    (304, []),
    (600, []),
    (10**30, []),
    (200, [("x-a", "b\r\nset-cookie: c=d")]),
    (200, [("x-a\r\nb", "c")]),
    (200, [("x a", "b")]),
    (200, [("x-a:", "b")]),
    (200, [("", "b")]),
    (200, [("x-a", "b\0")]),
    (200, [("x-a", "b" * 100)] * 1000),
]


async def test_a_prefill_instance_with_an_impossible_head_is_replaced_by_another(cluster) -> None:
    liar, honest = ScriptedInstance("prefill"), ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(liar, honest, ScriptedInstance("decode"))
    for status, headers in BAD_HEADS:

        async def answer_falsely(request: ReceivedRequest, status: int = status, headers: Any = headers) -> bytes:
            members = {"status": status, "headers": headers, "isStream": True, "isLastResp": True, "output": "data: x"}
            return prefill_answer(request, **members)

        liar.before_prefill = answer_falsely
        liar.requests.clear()
        for breaker in (instance.breaker for instance in running.coordinator.table):
            breaker.close_breaker()
        answers = [await running.post(body=CHAT_BODY) for _ in range(2)]
        assert liar.requests and {answer.body for answer in answers} == {b"".join(CHAT_SCRIPT.parts)}, (status, headers)


async def test_a_decode_instance_with_an_impossible_head_fails_its_own_request_only(cluster) -> None:
    p, d = ScriptedInstance("prefill", script=UNSTREAMED_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d)
    for status, headers in BAD_HEADS:
        head = json.dumps({"status": status, "headers": headers}).encode()

        async def answer_falsely(
            d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int, head: bytes = head
        ) -> None:
            d.decode_hook = None
            frames = b"reqId:%b\0head:%b\0" % (request_id.encode(), head)
            d.send_frames([frames, *result_frames.encode_result(request_id, b"{}", last=True, native=True)])

        d.decode_hook = answer_falsely
        answer = await running.post(body=CHAT_BODY)
        assert (answer.status, answer.body) == (200, b'{"whole":true}'), (status, headers)
    assert len(d.result_requests) == 1  # the connection, which carries other requests too, did not break


async def test_a_decode_instance_that_only_asks_for_recomputes_is_given_up(cluster) -> None:
    p, d = ScriptedInstance("prefill"), ScriptedInstance("decode")
    running = await cluster(p, d)

    async def ask_again(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.send_frames([result_frames.encode_retry_frame(request_id, b"{}")])

    p.script, d.decode_hook = UNSTREAMED_SCRIPT, ask_again
    answer = await running.post("/mindie/v1/chat/completions", CHAT_BODY)
    assert (answer.status, answer.body) == (500, refusals.plain_body(refusals.TEXTS.retry_failed))
    assert len(p.requests) == attempts.MAX_FRUITLESS_RECOMPUTES + 1


async def test_a_decode_instance_that_computes_between_recomputes_may_ask_for_many(cluster) -> None:
    p, d = ScriptedInstance("prefill"), ScriptedInstance("decode")
    running = await cluster(p, d)
    asked = 0

    async def ask_again(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        nonlocal asked
        asked += 1
        if asked == 2 * attempts.MAX_FRUITLESS_RECOMPUTES:
            d.decode_hook = None
        d.send_frames([result_frames.encode_retry_frame(request_id, b'{"prompt":"2,1,2%b"}' % (b",3" * asked))])

    p.script, d.decode_hook = UNSTREAMED_SCRIPT, ask_again
    assert (await running.post("/mindie/v1/chat/completions", CHAT_BODY)).body == b'{"whole":true}'


async def test_the_kept_outputs_of_an_answer_are_bounded(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_merge, "MAX_COLLECTED_BYTES", 1000)
    p, d = ScriptedInstance("prefill", script=CHAT_SCRIPT), ScriptedInstance("decode")
    running = await cluster(p, d)

    async def send_records(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        d.send_frames([result_frames.encode_record_frame(request_id, b"x" * 100)
                       + result_frames.encode_result(request_id, b"", native=True)[0]] * 20)  # fmt: skip

    d.decode_hook = send_records
    answer = await running.post("/mindie/v1/chat/completions", CHAT_BODY)
    assert answer.body == CHAT_SCRIPT.parts[0] + refusals.TEXTS.decode_failed.encode()
    await running.wait_until(lambda: bool(d.stopped_ids))


LONG_HEADER = b"x-a: " + b"a" * 3000 + b"\r\n"
ENDLESS_HEADS = {
    "headers": b"HTTP/1.1 200 OK\r\n" + LONG_HEADER * 100,
    "value": b"HTTP/1.1 200 OK\r\nx-a: " + b"a" * 300_000,
    "informational": (b"HTTP/1.1 100 Continue\r\n" + LONG_HEADER + b"\r\n") * 100,
    "trailers": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + LONG_HEADER * 100,
}


@pytest.mark.parametrize("kind", ENDLESS_HEADS)
async def test_an_endless_head_is_cut_off(cluster, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(http_client, "MAX_HEAD_BYTES", 100_000)
    liar, honest = ScriptedInstance("prefill"), ScriptedInstance("prefill", script=CHAT_SCRIPT)
    running = await cluster(liar, honest, ScriptedInstance("decode"))

    async def answer_endlessly(request: ReceivedRequest) -> bytes:
        return ENDLESS_HEADS[kind]  # and then nothing

    liar.before_prefill = answer_endlessly
    for _ in range(2):
        assert (await running.post(body=CHAT_BODY)).body == b"".join(CHAT_SCRIPT.parts)
    assert liar.requests


async def test_a_huge_status_is_not_read(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_REPORT_BYTES", 3000)
    instance = ScriptedInstance()
    running = await cluster(instance, heartbeat=30)
    instance.models = ["m", "n" * 5000]
    with pytest.raises(Unanswered, match="too large"):
        await running.coordinator.connections.ask_instance(f"{instance.url}/v1/status")


@pytest.mark.parametrize("count", [-1, -(10**18), 1 << 41, 10**18, 10**40, 1.5, True, None])
def test_counts_that_no_request_can_have_are_not_charged(count: Any) -> None:
    for used in (["m", count, 0, 0], ["m", 0, count, 0], ["m", 0, 0, count]):
        assert read_used_tokens(json.dumps(used).encode()) is None
    assert read_reserved_tokens(json.dumps({"prompt_tokens": count, "output_tokens": 1}).encode()) is None
