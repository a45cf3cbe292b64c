"""One answer made of the prefill and the decode instance's parts: order, framing, headers, servers other than parley.

The instances are scripted.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.answer_scripts import CHAT_BODY, CHAT_SCRIPT, LONG_SCRIPT, UNSTREAMED_SCRIPT, prefill_answer, raw_answer
from support.scripted_instance import AnswerScript, ReceivedRequest, ScriptedInstance, part_record

from parley.coordinator.proxy.upstream.merge_answers import merge_activity
from parley.disagg.wire import result_frames

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


async def test_tokens_of_a_stream_are_counted_and_timed(cluster):
    running = await cluster(ScriptedInstance("prefill", script=LONG_SCRIPT), ScriptedInstance("decode"))
    await running.post(body=CHAT_BODY)
    counters = running.coordinator.scheduler.counters
    await running.wait_until(lambda: counters.output_tokens == len(LONG_SCRIPT.parts))
    assert counters.transfer.observed_count == counters.tpot.observed_count == 1
    decode_side = list(running.coordinator.table)[1].decode
    assert decode_side.token_seconds == counters.tpot.observed_sum > 0


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


CHAT_EVENTS = [b'data: {"n":%d}\n\n' % number for number in range(6)]
RECORDS = [b'{"text":["%d"]}\0' % number for number in range(6)]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("joined", [False, True], ids=["a frame each", "one frame"])
@pytest.mark.parametrize(("path", "parts"), [("v1/chat/completions", CHAT_EVENTS), ("generate", RECORDS)])
async def test_frames_that_arrive_together_are_sent_in_a_chunk_per_event(
    cluster, plain: bool, joined: bool, path: str, parts: list[bytes]
) -> None:
    first, *rest = parts
    script = AnswerScript([first, b"".join(rest)] if joined else parts, headers=(("content-type", "x/y"),))
    p, d = ScriptedInstance("prefill", script=script, plain=plain), ScriptedInstance("decode", plain=plain)
    running = await cluster(p, d)
    head = f"POST /mindie/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(CHAT_BODY)}\r\n\r\n".encode()
    reader, writer = await running.send_raw(head + CHAT_BODY)
    chunks = []
    async with asyncio.timeout(20):
        await reader.readuntil(b"\r\n\r\n")
        while size := int(await reader.readline(), 16):
            chunks.append((await reader.readexactly(size + 2))[:-2])
    writer.close()
    assert [chunk for chunk in chunks if chunk != b"data: [DONE]\n\n"] == parts


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
    assert {later_request.body for later_request in later_requests} == {b'{"messages":"3,1,2,3"}'} and len(
        later_requests
    ) == 2
    assert {request.headers["req-id"] for request in p.requests} == {first_request.headers["req-id"]}


def test_scripted_records_are_lists_of_outputs():
    assert msgspec.msgpack.decode(part_record(3)) == [[0, 3]]


def test_activity_of_all_instances_becomes_one_page_and_other_pages_are_refused():
    state = {"version": "1", "phase": "ready", "models": [{"name": "m"}], "request_count": 1, "requests": [{"id": "a"}]}
    loading = state | {"phase": "loading", "requests": [{"id": "b"}]}
    merged = msgspec.json.decode(merge_activity(map(msgspec.json.encode, (state, loading))))
    assert (merged["version"], merged["phase"], merged["request_count"]) == ("1", "loading", 2)
    assert merged["models"] == [{"name": "m", "instance": 1}, {"name": "m", "instance": 2}]
    assert merged["requests"] == [{"id": "a"}, {"id": "b"}]
    for name in ("phase", "models", "request_count", "requests"):
        for other in ({key: state[key] for key in state if key != name}, state | {name: None}):
            with pytest.raises(msgspec.ValidationError):
                merge_activity(map(msgspec.json.encode, (state, other)))
