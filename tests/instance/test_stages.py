"""Requests that start on one server and continue on another: the bytes of one server, and nothing left open."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from typing import Any

import pytest
from support.compare_answers import same
from support.http_client import Connection, request
from support.prefill_decode_pair import CLIENT, HEADERS, UNIQUE, Given, Line, Pair, compare, single
from support.random_requests import body, routes

from parley.instance import decode
from parley.instance.prefill import Prefill
from parley.types import Work


def scripted(work: Work, index: int) -> list[int]:
    """Random tokens that are the same for the same request; sometimes none."""
    rng = random.Random(f"{work.seed + index} {work.token_ids[-3:]}")
    return [rng.randrange(640) for _ in range(rng.choice((0, 1, 2, 9, 40)))]


CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 12}


NIGHTLY = bool(os.environ.get("PARLEY_NIGHTLY"))


@pytest.mark.parametrize("here", [True, False])
async def test_separated_stages_answer_every_route_like_one_server(alike, here: bool) -> None:
    one, pair = await alike(reply=scripted, here=here)
    rng = random.Random(f"routes {here}")
    for path, _ in routes():
        for _ in range(40 if NIGHTLY else 1):
            await compare(one, pair, path, body(path, rng))
    await pair.idle()


STREAMS: list[dict[str, Any]] = [
    CHAT | {"stream": True},
    CHAT | {"stream": True, "n": 2, "logprobs": True, "stop": ["a", "7"], "stream_options": {"include_usage": True}},
    CHAT | {"stream": True, "best_of": 3, "n": 2},
    CHAT | {"stream": True, "prompt_logprobs": 1, "stream_interval": 3, "max_tokens": 30},
    CHAT | {"stream": True, "use_beam_search": True, "best_of": 2, "n": 2},  # the scripted engine does not search
]


@pytest.mark.parametrize("here", [True, False])
async def test_stream_resumes_after_any_part_byte_for_byte(alike, here: bool) -> None:
    """A client that got some parts gets the rest, byte for byte, from servers that do not know the request."""
    _, pair = await alike(reply=scripted, here=here)
    for each in STREAMS[:-1]:
        asked = json.dumps(each).encode()
        whole = await pair.ask("/v1/chat/completions", asked, UNIQUE, HEADERS)
        for count in range(1, len(whole.parts)):
            records = [record for _, record in whole.parts[:count]]
            rest = await pair.ask("/v1/chat/completions", asked, UNIQUE, HEADERS, past=records)
            assert rest.status == 200, rest
            assert b"".join(data for data, _ in whole.parts[:count]) + rest.body == whole.body, (each, count)
    await pair.idle()


@pytest.mark.parametrize("here", [True, False])
async def test_dropping_a_separated_stream_leaves_nothing_open(alike, here: bool) -> None:
    """Guards against leaked requests, leases and reservations on either side."""
    _, pair = await alike(reply=lambda work, index: [70 + k % 90 for k in range(40)], here=here, tick=0.001)
    for each in STREAMS:
        for count in (1, 2, 3, 9):
            asked = json.dumps(each | {"max_tokens": 40}).encode()
            await pair.ask("/v1/chat/completions", asked, UNIQUE, HEADERS, stop=count)
            await pair.idle()


async def asked(pair: Pair, path: str = "/v1/chat/completions", **members: Any) -> Given:
    return await pair.ask(path, json.dumps(CHAT | members).encode(), UNIQUE, HEADERS)


def long(work: Work, index: int) -> list[int]:
    return [70 + k % 90 for k in range(60)]


async def test_refuses_separation_when_decode_has_no_room(alike) -> None:
    _, pair = await alike(reply=long)
    pair.decode.engine._pages.clear()
    given = await asked(pair, messages=[{"role": "user", "content": "many tokens " * 40}])
    told = json.loads(given.body)
    assert given.status == 503 and told["refused"] is True and told["isLastResp"] is False
    assert "no capacity" in told["reason"]
    await pair.idle()


async def test_refuses_separation_when_decode_is_unreachable(alike) -> None:
    _, pair = await alike(reply=long)
    pair.target = "127.0.0.1;1"
    given = await asked(pair, stream=True)
    assert given.status == 503 and json.loads(given.body)["refused"] is True
    await pair.idle()


@pytest.mark.parametrize("name,told", [("prefill", "prefill."), ("flex", "flex with 100 % for prompts.")])
async def test_refuses_separation_when_decode_has_another_role(alike, name: str, told: str) -> None:
    _, pair = await alike(reply=long)
    role = pair.members[1].node.role
    role.name, role.share = name, 100
    given = await asked(pair, stream=True)
    assert given.status == 503 and json.loads(given.body)["reason"].endswith(f"Its role is {told}")
    await pair.idle()


async def test_single_token_needs_no_decode_instance(alike) -> None:
    _, pair = await alike(reply=long)
    pair.target = "127.0.0.1;1"
    for stream in (True, False):
        given = await asked(pair, stream=stream, max_tokens=1)
        assert given.status == 200 and len(given.parts) == 1
    await pair.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_engine_crash_reports_its_requests_as_lost(alike, stream: bool) -> None:
    _, pair = await alike(reply=long, tick=0.01)
    asking = asyncio.create_task(asked(pair, stream=stream, max_tokens=50))
    await pair.decode.until(lambda: pair.decode.engine.stats.running > 0)
    pair.decode.engine.crash()
    given = await asking
    assert given.error and b'"error"' not in given.body  # no error for the client, so it can resume elsewhere
    await pair.prefill.until(lambda: not pair.prefill.service.open and not pair.prefill.engine._leases)
    assert not pair.decode.service.open


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/chat/completions", CHAT | {"stream": True}, 503), ("/generate_stream", {"inputs": "Hello"}, 424)],
)
async def test_prefill_answer_reports_a_lost_engine(alike, path: str, body: Any, status: int) -> None:
    _, pair = await alike(reply=long, tick=0.01)
    pair.prefill.engine.gate.clear()
    asking = asyncio.create_task(pair.ask(path, json.dumps(body).encode(), UNIQUE, HEADERS))
    await pair.decode.until(lambda: bool(pair.decode.engine._reservations))
    pair.prefill.engine.crash()
    given = await asking
    assert (given.status, given.headers["parley-lost"]) == (status, "engine")


async def test_prefill_answer_reports_a_context_that_is_too_short(alike) -> None:
    _, pair = await alike()
    body = json.dumps(CHAT | {"max_tokens": 10**6}).encode()
    given = await pair.ask("/v1/chat/completions", body, UNIQUE, HEADERS)
    assert (given.status, given.headers["parley-short"]) == (400, "context")


@pytest.mark.parametrize("when", ["prefill", "transfer", "decode"])
async def test_cancel_id_ends_a_separated_request_in_every_phase(alike, when: str) -> None:
    _, pair = await alike(reply=long, tick=0.01)
    gates = {"prefill": pair.prefill.engine.gate, "decode": pair.decode.engine.gate}
    if when in gates:
        gates[when].clear()
    pair.decode.engine.stats.running = 0
    asking = asyncio.create_task(asked(pair, stream=True, max_tokens=50))
    if when == "prefill":
        await pair.decode.until(lambda: bool(pair.decode.engine._reservations))
    else:
        await pair.decode.until(lambda: bool(pair.decode.service.open))
    await pair.cancel("r1")
    await pair.idle()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_separated_request_is_counted_once(alike) -> None:
    _, pair = await alike(reply=long)
    for stream in (True, False):
        await asked(pair, stream=stream, n=2)
    await pair.idle()
    first, then = (served.model.metrics for served in (pair.prefill, pair.decode))
    assert (first.totals.succeeded, then.totals.succeeded) == (0, 2)
    assert first.totals.cancelled == first.totals.failed == 0
    texts = [(await served.get("/metrics")).body for served in (pair.prefill, pair.decode)]

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
    one, pair = await alike(reply=long)
    line, orders = Line(pair.members[1], ""), {"req-type": "prefill", "d-target": pair.target}
    chat = json.dumps(CHAT | {"stream": True, "max_tokens": 5}).encode()
    expected = await single(one, "/v1/chat/completions", chat)
    told = (await pair.prefill.call("POST", "/v1/chat/completions", chat, HEADERS | orders | {"req-id": "17"})).json
    assert sorted(told) == ["isLastResp", "isStream", "output", "reqId"]
    assert (told["reqId"], told["isStream"], told["isLastResp"]) == ("17", True, False)
    frames = [await line.queue("17").get() for _ in range(4)]
    assert [frame.kind for frame in frames] == ["data", "data", "data", "lastData"]
    assert same(told["output"].encode() + b"".join(frame.payload for frame in frames), expected.body)

    whole = json.dumps(CHAT).encode()
    told = (await pair.prefill.call("POST", "/v1/chat/completions", whole, HEADERS | orders | {"req-id": "18"})).json
    assert told == {"reqId": "18", "isStream": False, "isLastResp": False}
    frame = await line.queue("18").get()
    assert frame.kind == "lastData"
    assert frame.payload == (await single(one, "/v1/chat/completions", whole)).body
    line.task.cancel()
    await pair.idle()


@pytest.mark.parametrize("client", ["", CLIENT])
async def test_kv_sender_lost_before_sending_fails_the_request(alike, client: str) -> None:
    """A plain coordinator gets an error frame; parley's own repeats the command, and gets no frame for this one."""
    _, pair = await alike(reply=long)
    pair.prefill.engine.gate.clear()
    line = Line(pair.members[1], client) if not client else pair.line
    extra = {"parley-results": client} if client else {}
    orders = {"req-id": "19", "req-type": "prefill", "d-target": pair.target} | extra
    asking = asyncio.create_task(pair.prefill.call("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), orders))
    await pair.decode.until(lambda: bool(pair.decode.service.open))
    for link in list(pair.members[1].peer._links):
        link.fail("cut by the test")
    await pair.decode.until(lambda: not pair.decode.service.open)
    pair.prefill.engine.gate.set()
    answer = await asking
    assert answer.status == (503 if client else 500), answer
    if not client:
        frame = await line.queue("19").get()
        assert (frame.kind, frame.payload) == ("error", b"Pull kv failed irreversibly.")
        line.task.cancel()
    assert not client or line.queue("19").empty()
    await pair.idle()


async def test_missing_handover_pages_are_recomputed(alike, monkeypatch: pytest.MonkeyPatch) -> None:
    one, pair = await alike(reply=long)
    monkeypatch.setattr(decode, "PATIENCE", 0.05)
    monkeypatch.setattr(Prefill, "_filled", lambda self, number, pages: None)
    monkeypatch.setattr(Prefill, "_settle", lambda self, giver: asyncio.sleep(0.3, self._release()))
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "many tokens " * 20}]}).encode()
    given = await pair.ask("/v1/chat/completions", body, UNIQUE, HEADERS)
    assert given.body == (await single(one, "/v1/chat/completions", body)).body


async def test_resumed_body_may_be_of_any_api(alike) -> None:
    """The body alone shows its API; the prior outputs sent before it must not be mistaken for it."""
    _, pair = await alike(reply=long)
    for path, members in (("/generate", {"prompt": "a"}), ("/mindie", {"inputs": "a"})):
        asked = json.dumps({"max_tokens": 6, "parameters": {"max_new_tokens": 6}, "stream": True} | members).encode()
        whole = await pair.ask(path, asked, UNIQUE, HEADERS)
        assert whole.status == 200 and len(whole.parts) > 3
        rest = await pair.ask(path, asked, UNIQUE, HEADERS, past=[record for _, record in whole.parts[:2]])
        assert same(b"".join(data for data, _ in whole.parts[:2]) + rest.body, whole.body)
    await pair.idle()


async def test_deadline_counts_from_arrival_across_the_handover(alike) -> None:
    """A request's time counts from its arrival, not from the handover."""
    _, pair = await alike(reply=long, tick=0.05)
    pair.prefill.engine.gate.clear()
    headers = HEADERS | {"x-request-timeout": "0.6"}
    body = json.dumps(CHAT | {"max_tokens": 50}).encode()
    asking = asyncio.create_task(pair.ask("/v1/chat/completions", body, UNIQUE, headers))
    await pair.decode.until(lambda: bool(pair.decode.service.open))
    (generation,) = pair.decode.model.open
    clock = generation._clock
    assert clock is not None and clock._end - asyncio.get_running_loop().time() < 0.6
    pair.prefill.engine.gate.set()
    given = await asking
    assert given.status == 408 and b"within the time" in given.body
    await pair.idle()


@pytest.mark.parametrize("resumed", [False, True])
async def test_deadline_includes_the_time_of_earlier_attempts(alike, resumed: bool) -> None:
    """Limits are the client's, for all attempts together, even if other instances computed part of the answer."""
    _, pair = await alike(reply=long)
    path, body = "/v1/chat/completions", json.dumps(CHAT | {"stream": True, "max_tokens": 50}).encode()
    whole = await pair.ask(path, body, UNIQUE, HEADERS | {"x-request-timeout": "60", "parley-spent": "20"})
    assert whole.status == 200 and whole.body.endswith(b"[DONE]\n\n")
    past = [record for _, record in whole.parts[:3]] if resumed else None
    late = HEADERS | {"x-request-timeout": "60", "parley-spent": "60001"}
    given = await pair.ask(path, body, UNIQUE, late, past=past)
    assert given.status == 408 and b"within the time" in given.body
    await pair.idle()


async def test_paused_separated_stream_does_not_stop_other_streams(alike) -> None:
    _, pair = await alike(reply=long)
    pair.decode.engine.gate.clear()
    first = asyncio.create_task(asked(pair, stream=True, max_tokens=50))
    await pair.decode.until(lambda: "r1" in pair.members[1].node.results.client(CLIENT).channels)
    assert pair.members[1].node.results.pause(CLIENT, "r1", True)
    pair.decode.engine.gate.set()
    other = await asked(pair, stream=True, max_tokens=50)
    assert other.body.endswith(b"[DONE]\n\n") and not first.done()
    pair.members[1].node.results.pause(CLIENT, "r1", False)
    assert (await first).body == other.body
    await pair.idle()


@pytest.mark.parametrize("here", [False, True])
async def test_restarted_coordinator_ends_requests_of_its_predecessor(alike, here: bool) -> None:
    """At once if it is the same coordinator restarted; not if it is another, or if the first just lost its line."""
    _, pair = await alike(reply=long, tick=0.01, here=here)
    served, member = (pair.prefill if here else pair.decode), pair.members[0 if here else 1]

    async def line(client: str, seat: str) -> Connection:
        connection = await served.connect()
        await connection.send(request("GET", f"/dresult?client={client}&seat={seat}"))
        assert (await connection.head())[0] == 200
        await served.until(lambda: client in member.node.results.clients)
        return connection

    async def leave(connection: Connection, client: str) -> None:
        connection.close()
        await served.until(lambda: not member.node.results.clients[client].connected)

    def running(client: str) -> bool:
        return bool(known := member.node.results.clients.get(client)) and bool(known.channels)

    first = await line("a", "here")
    orders = {"req-id": "1", "req-type": "prefill", "d-target": pair.target, "parley-results": "a"}
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 1000}).encode()
    assert (await pair.prefill.call("POST", "/v1/chat/completions", body, HEADERS | orders)).status == 200
    served.engine.gate.clear()
    assert running("a")
    others = [await line("b", "here"), await line("c", "there")]
    assert running("a")  # it still has its connection
    await leave(first, "a")
    first = await line("a", "here")
    assert running("a")
    await leave(first, "a")
    others.append(await line("d", "there"))
    assert running("a")
    others.append(await line("e", "here"))
    assert not running("a")
    served.engine.gate.set()
    for each in (first, *others):
        each.close()
    await pair.idle()


async def test_coordinators_sharing_a_seat_do_not_disturb_each_other(alike) -> None:
    """A coordinator that was there before is not a successor, however often its connection breaks."""
    _, pair = await alike(reply=long, tick=0.01)
    served, results = pair.decode, pair.members[1].node.results

    async def line(client: str, epoch: str = "") -> Connection:
        connection = await served.connect()
        known = f"&epoch={epoch}&from=0" if epoch else ""
        await connection.send(request("GET", f"/dresult?client={client}&seat=one{known}"))
        assert (await connection.head())[0] == 200
        await served.until(lambda: results.client(client).connected)
        return connection

    async def leave(connection: Connection, client: str) -> None:
        connection.close()
        await served.until(lambda: not results.clients[client].connected)

    lines = {name: await line(name) for name in "ab"}
    orders = {"req-id": "1", "req-type": "prefill", "d-target": pair.target, "parley-results": "a"}
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 1000}).encode()
    assert (await pair.prefill.call("POST", "/v1/chat/completions", body, HEADERS | orders)).status == 200
    served.engine.gate.clear()
    await leave(lines["a"], "a")
    await leave(lines["b"], "b")
    lines["b"] = await line("b")
    assert results.clients["a"].channels
    await leave(lines["b"], "b")
    results.clients["b"].close()  # it was away for too long and is forgotten
    lines["b"] = await line("b", "before")
    assert results.clients["a"].channels
    lines["a"] = await line("a", results.clients["a"].epoch)
    assert results.clients["a"].channels
    served.engine.gate.set()
    for each in lines.values():
        each.close()
    await pair.idle()


async def test_lost_coordinator_ends_its_requests(alike) -> None:
    _, pair = await alike(reply=long, tick=0.01)
    asking = asyncio.create_task(asked(pair, stream=True, max_tokens=50))
    await pair.decode.until(lambda: pair.decode.engine.stats.running > 0)
    pair.members[1].node.results.client(CLIENT).lose()
    await pair.idle()
    asking.cancel()
