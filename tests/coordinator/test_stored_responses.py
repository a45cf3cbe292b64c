"""Responses behind a coordinator: it stores them, finds what requests refer to, and runs them in the background."""

import asyncio
import json
from typing import Any

import pytest
from support.http_client import Answer

KEYS = ("sk-one-key-0123456789", "sk-two-key-0123456789")
OWNER, OTHER = ({"authorization": f"Bearer {key}"} for key in KEYS)
BODY = {"input": "Hello there", "max_output_tokens": 8, "temperature": 0}


def events_of(answer: Answer) -> list[dict[str, Any]]:
    data = [line for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    assert data.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in data]


async def create(front: Any, headers: dict[str, str] | None = None, **members: Any) -> dict[str, Any]:
    answer = await front.call("POST", "/v1/responses", BODY | members, headers)
    assert answer.status == 200, answer.body
    return answer.json


async def wait_for_end(front: Any, response_id: str) -> dict[str, Any]:
    while True:
        response = (await front.get(f"/v1/responses/{response_id}")).json
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.01)


async def test_coordinator_stores_responses_and_conversations_like_one_server(live_cluster, serve):
    cluster, single = await live_cluster("prefill", "decode"), await serve()
    front = cluster.front
    answers: list[list[Any]] = [[], []]
    for server, bodies in zip((front, single), answers, strict=True):
        stored = await create(server)
        path = f"/v1/responses/{stored['id']}"
        assert stored["store"] and (await server.get(path)).json == stored
        following = {"input": "More", "previous_response_id": stored["id"]}
        bodies.append((await server.post("/v1/responses", BODY | following | {"stream": True})).body)
        bodies.append((await server.post("/v1/responses/input_tokens", following)).body)
        reference = {"type": "item_reference", "id": stored["output"][0]["id"]}
        mixed = [{"role": "user", "content": "a"}, reference, {"role": "user", "content": "b"}]
        bodies.append((await create(server, input=mixed))["usage"])
        bodies.append((await server.get(f"{path}/input_items")).body)
        bodies.append((await server.post("/v1/responses", BODY | {"previous_response_id": "resp_x"})).body)
    assert answers[0] == answers[1]
    unknown = await front.post("/v1/responses/compact", {"model": "tiny", "previous_response_id": "resp_x"})
    assert unknown.error["code"] == "previous_response_not_found"

    items = [{"role": "user", "content": "I live in Rome."}]
    conversation = (await front.post("/v1/conversations", {"items": items})).json["id"]
    streams = (front.post("/v1/responses", BODY | {"conversation": conversation, "stream": True}) for _ in range(3))
    for answer in await asyncio.gather(*streams):
        assert events_of(answer)[-1]["response"]["conversation"] == {"id": conversation}
    listed = (await front.get(f"/v1/conversations/{conversation}/items?order=asc")).json["data"]
    assert [item["role"] for item in listed] == ["user", *["user", "assistant"] * 3]
    await cluster.wait_until_idle()


async def test_background_responses_run_behind_a_coordinator(live_cluster, serve):
    cluster, single = await live_cluster("prefill", "decode", tick=0.01), await serve()
    front = cluster.front
    queued = await create(front, background=True)
    assert (queued["status"], queued["output"], queued["usage"]) == ("queued", [], None)
    done = await wait_for_end(front, queued["id"])
    assert done["status"] in ("completed", "incomplete") and done["output"] and done["background"]
    path = f"/v1/responses/{queued['id']}"
    assert (await front.post(f"{path}/cancel")).status == 400
    assert "stream=true" in (await front.get(f"{path}?stream=true")).error["message"]

    streamed = BODY | {"background": True, "stream": True}
    whole = await front.post("/v1/responses", streamed)
    assert whole.body == (await single.post("/v1/responses", streamed)).body
    events = events_of(whole)
    path = f"/v1/responses/{events[0]['response']['id']}"
    for cursor in (0, 4, len(events) - 1):
        resumed = await front.get(f"{path}?stream=true&starting_after={cursor}")
        assert events_of(resumed) == events[cursor + 1 :]
    assert (await front.get(path)).json == events[-1]["response"]
    refused = await front.post("/v1/responses", streamed | {"model": "unknown"})
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")

    for method, suffix in (("POST", "/cancel"), ("DELETE", "")):
        response = await create(front, background=True, max_output_tokens=3000)
        assert cluster.coordinator.front.load.open_requests == 1
        path = f"/v1/responses/{response['id']}"
        assert (await front.call(method, path + suffix)).status == 200
        await cluster.wait_until_idle()
        left = await front.get(path)
        assert left.status == 404 if method == "DELETE" else left.json["status"] == "cancelled"

    body = BODY | {"background": True, "stream": True, "max_output_tokens": 3000}
    stream = asyncio.create_task(front.post("/v1/responses", body))
    await front.until(lambda: bool(cluster.instances[1].model.open_requests))
    await asyncio.sleep(0.1)
    cluster.coordinator.front.fail_open_requests()
    events = events_of(await stream)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert (await front.get(f"/v1/responses/{response['id']}")).json == response
    await cluster.wait_until_idle()


async def test_vllm_routes_behind_a_coordinator_answer_like_one_server(live_cluster, serve):
    cluster, single = await live_cluster("prefill", "decode", tick=0.01), await serve()
    question = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    answers: list[list[Any]] = [[], []]
    for server, bodies in zip((cluster.front, single), answers, strict=True):
        for path, body in (("messages", question), ("responses", BODY)):
            for members in ({}, {"stream": True}, {"model": "nope"}, {"temperature": 3}, {"model": 5}):
                answer = await server.post(f"/vllm/v1/{path}", body | members)
                bodies.append((answer.status, answer.body))
        bodies.append((await server.post("/vllm/v1/messages/count_tokens", question)).body)
        stored = (await server.post("/vllm/v1/responses", BODY)).json
        assert (await server.get(f"/vllm/v1/responses/{stored['id']}")).json == stored
        following = BODY | {"previous_response_id": stored["id"], "input": "More", "stream": True}
        bodies.append((await server.post("/vllm/v1/responses", following)).body)
        for body in ({"previous_response_id": "resp_x"}, {"background": True, "store": False}, {"prompt": {"id": "x"}}):
            bodies.append((await server.post("/vllm/v1/responses", BODY | body)).body)
        queued = (await server.post("/vllm/v1/responses", BODY | {"background": True})).json
        assert queued["status"] == "queued" and "phase" not in queued
        ended = await wait_for_end(server, queued["id"])
        assert ended["object"] == "response" and list(ended)[1] == "created_at" and ended["output"]
        bodies.append((await server.post("/vllm/v1/responses/resp_x/cancel")).body)
    assert answers[0] == answers[1]
    await cluster.wait_until_idle()


async def test_tenants_behind_a_coordinator_cannot_reach_each_others_responses(live_cluster):
    cluster = await live_cluster("prefill", "decode", tick=0.01, api_keys=KEYS, cluster_secret="s" * 20)
    front = cluster.front
    cluster.instances[1].engine.step_gate.clear()  # the response runs until it is cancelled
    response = await create(front, OWNER, background=True, max_output_tokens=3000)
    path = f"/v1/responses/{response['id']}"
    for method, place in (("GET", path), ("GET", f"{path}?stream=true"), ("DELETE", path), ("POST", f"{path}/cancel"),
                          ("GET", f"{path}/input_items")):  # fmt: skip
        assert (await front.call(method, place, None, OTHER)).status == 404
        assert (await front.call(method, place, None, {"authorization": "Bearer sk-none"})).status == 401
    following = BODY | {"previous_response_id": response["id"]}
    assert (await front.call("POST", "/v1/responses", following, OTHER)).error["code"] == "previous_response_not_found"
    assert (await front.call("POST", "/v1/responses", following)).status == 401
    assert (await front.call("POST", "/v1/conversations", {})).status == 401
    cancelled = await front.call("POST", f"{path}/cancel", None, OWNER)
    assert cancelled.json["status"] == "cancelled", cancelled.body
    cluster.instances[1].engine.step_gate.set()
    assert not (await create(front, {"authorization": "Bearer sk-none", "x-api-key": KEYS[0]}))["store"]
    await cluster.wait_until_idle()


async def test_background_response_continues_after_an_instance_is_lost(live_cluster):
    cluster = await live_cluster("prefill", "decode", "decode", tick=0.02, ping_interval=0.005)
    front, decoding = cluster.front, cluster.instances[1]
    body = BODY | {"background": True, "stream": True, "max_output_tokens": 30}
    streams = [asyncio.create_task(front.post("/v1/responses", body | {"input": f"Hi {n}"})) for n in range(4)]
    await decoding.until(lambda: decoding.engine.stats.running)
    await asyncio.sleep(0.1)
    decoding.engine.crash_engine()
    for answer in await asyncio.gather(*streams):
        events = events_of(answer)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"] for event in events]
        assert "keepalive" in kinds[: len(kinds) // 2] and kinds[-1] in ("response.completed", "response.incomplete")
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert text == events[-1]["response"]["output"][0]["content"][0]["text"]
    assert cluster.coordinator.scheduler.counters.retries
    await cluster.wait_until_idle()


@pytest.mark.parametrize("members", [{}, {"stream": True}, {"stream": True, "background": True}])
async def test_response_that_the_coordinator_cannot_keep_says_so(live_cluster, members: dict[str, Any]):
    front = (await live_cluster("prefill", "decode", client_keys={"response_store": 8000})).front
    metadata = {f"{number}": "x" * 500 for number in range(16)}  # a response with it is larger than the store
    answer = await front.post("/v1/responses", BODY | members | {"metadata": metadata})
    assert answer.status == 200, answer.body
    response = events_of(answer)[-1]["response"] if members else answer.json
    assert response["status"] == "incomplete" and response["output"] and response["store"] is False, response
    if members:
        numbers = [event["sequence_number"] for event in events_of(answer)]
        assert numbers == list(range(len(numbers)))
    short = await front.post("/v1/responses", BODY | members)
    assert (events_of(short)[-1]["response"] if members else short.json)["store"] is True


async def test_metrics_count_faults_of_the_coordinators_store(live_cluster, tmp_path):
    cluster = await live_cluster("prefill", "decode", client_keys={"response_store_file": tmp_path / "responses.db"})
    store = cluster.coordinator.front._record_keeper._store
    assert (await create(cluster.front))["store"]
    store._database.execute("DROP TABLE records")
    assert not (await create(cluster.front))["store"]
    page = (await cluster.front.get("/metrics")).body.decode()
    assert store.faults and page.count("# TYPE parley:record_faults_total counter") == 1
    assert f"\nparley:record_faults_total {store.faults}\n" in page
