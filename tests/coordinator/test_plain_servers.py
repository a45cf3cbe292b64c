"""Plain servers of any make, each answering whole requests: the coordinator balances their load."""

import asyncio
import json

from support.answer_scripts import CHAT_BODY, raw_answer
from support.coordinator_client import RunningCoordinator
from support.scripted_instance import ScriptedInstance

CHUNKED_HEAD = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_plain_servers_get_requests_and_return_answers_unchanged(cluster):
    one, two = (ScriptedInstance("mixed", plain=True, label=label) for label in "ab")
    running: RunningCoordinator = await cluster(one, two, algorithm_type="load_balance")

    async def slow(request):
        await asyncio.sleep(0.2)
        return CHUNKED_HEAD + b"9\r\ndata: 1\n\n\r\n" + b"0\r\n\r\n"

    one.before_prefill = two.before_prefill = slow
    answers = await asyncio.gather(*(running.post(body=CHAT_BODY) for _ in range(6)))
    assert {(answer.status, answer.body) for answer in answers} == {(200, b"data: 1\n\n")}
    assert len(one.requests) == len(two.requests) == 3
    (request, *_) = one.requests
    assert request.body == CHAT_BODY and not {"req-id", "d-target", "req-type", "parley-id"} & set(request.headers)
    await running.wait_until(lambda: running.coordinator.scheduler.open_requests == 0)
    assert [instance.tasks for instance in running.coordinator.table] == [0, 0]


async def test_refusals_of_plain_servers_reach_the_client(cluster):
    plain = ScriptedInstance("mixed", plain=True)
    running: RunningCoordinator = await cluster(plain)

    async def refuse(request):
        return raw_answer(422, b'{"error":"no"}', b"content-type: application/json")

    plain.before_prefill = refuse
    answer = await running.post(body=CHAT_BODY)
    assert (answer.status, json.loads(answer.body)) == (422, {"error": "no"})


async def test_dead_plain_server_answers_500(cluster):
    plain = ScriptedInstance("mixed", plain=True)
    running: RunningCoordinator = await cluster(plain, heartbeat=60)
    await plain.kill_instance()
    answer = await running.post("/mindie/v1/chat/completions", CHAT_BODY)
    assert (answer.status, answer.body) == (500, b"Send message to instance failed\r\n")
    await running.wait_until(lambda: running.coordinator.scheduler.open_requests == 0)
