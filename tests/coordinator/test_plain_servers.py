"""Plain servers of any make, each answering whole requests: the coordinator balances their load."""

import asyncio
import json

from support.coordinator_client import Running
from support.scripted_instance import Scripted
from test_attempts import BODY, raw

CHUNKS = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_plain_servers_get_requests_and_return_answers_unchanged(cluster):
    one, two = (Scripted("mixed", plain=True, label=label) for label in "ab")
    running: Running = await cluster(one, two, algorithm_type="load_balance")

    async def slow(asked):
        await asyncio.sleep(0.2)
        return CHUNKS + b"9\r\ndata: 1\n\n\r\n" + b"0\r\n\r\n"

    one.before = two.before = slow
    told = await asyncio.gather(*(running.post(body=BODY) for _ in range(6)))
    assert {(each.status, each.body) for each in told} == {(200, b"data: 1\n\n")}
    assert len(one.asked) == len(two.asked) == 3
    (asked, *_) = one.asked
    assert asked.body == BODY and not {"req-id", "d-target", "req-type", "parley-id"} & set(asked.headers)
    await running.until(lambda: running.coordinator.choice.open == 0)
    assert [each.tasks for each in running.coordinator.table] == [0, 0]


async def test_refusals_of_plain_servers_reach_the_client(cluster):
    plain = Scripted("mixed", plain=True)
    running: Running = await cluster(plain)

    async def refuse(asked):
        return raw(422, b'{"error":"no"}', b"content-type: application/json")

    plain.before = refuse
    told = await running.post(body=BODY)
    assert (told.status, json.loads(told.body)) == (422, {"error": "no"})


async def test_dead_plain_server_answers_500(cluster):
    plain = Scripted("mixed", plain=True)
    running: Running = await cluster(plain, heartbeat=60)
    await plain.stop()
    told = await running.post("/mindie/v1/chat/completions", BODY)
    assert (told.status, told.body) == (500, b"Send message to instance failed\r\n")
    await running.until(lambda: running.coordinator.choice.open == 0)
