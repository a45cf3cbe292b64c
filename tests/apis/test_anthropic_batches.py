"""Batches of messages: their requests run without their client, and their results are kept for it."""

import asyncio
import json
from typing import Any

import pytest
from support.batch_resumption import end_server, resume_batches
from support.held_call import HeldCall

from parley.dialects.anthropic.batches import MessageBatch
from parley.serving.records import batch_runner
from parley.serving.records.background import RecordsOfTenant

PATH = "/v1/messages/batches"
VERSION = {"anthropic-version": "2023-06-01"}
PARAMS = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}


def batch_request(custom_id: str, **members: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": PARAMS | members}


async def create(server: Any, *requests: dict[str, Any], prefix: str = "") -> Any:
    answer = await server.post(prefix + PATH, {"requests": requests}, **VERSION)
    assert answer.status == 200, answer.body
    return answer.json


async def wait_for_end(server: Any, batch: Any) -> Any:
    async with asyncio.timeout(20):
        while batch["processing_status"] != "ended":
            await asyncio.sleep(0.01)
            batch = (await server.get(f"{PATH}/{batch['id']}")).json
    return batch


async def results(server: Any, batch: Any) -> dict[str, Any]:
    answer = await server.get(batch["results_url"])
    return {line["custom_id"]: line["result"] for line in map(json.loads, answer.body.splitlines())}


@pytest.mark.parametrize("prefix", ["", "/anthropic"])
async def test_batch_has_the_messages_of_single_requests(serve, prefix):
    server = await serve()
    batch = await create(server, batch_request("good"), batch_request("bad", max_tokens=0), prefix=prefix)
    assert batch["type"] == "message_batch" and batch["request_counts"]["processing"] == 2
    batch = await wait_for_end(server, batch)
    counts = {"processing": 0, "succeeded": 1, "errored": 1, "canceled": 0, "expired": 0}
    assert batch["request_counts"] == counts and batch["ended_at"]
    by_id = await results(server, batch)
    single = (await server.post(f"{prefix}/v1/messages", PARAMS, **VERSION)).json
    assert by_id["good"]["type"] == "succeeded"
    assert by_id["good"]["message"] | {"id": ""} == single | {"id": ""}
    assert (by_id["bad"]["type"], by_id["bad"]["error"]["error"]["type"]) == ("errored", "invalid_request_error")
    path = f"{PATH}/{batch['id']}"
    assert (await server.call("DELETE", path)).json == {"id": batch["id"], "type": "message_batch_deleted"}
    for left in (path, batch["results_url"]):
        assert (await server.get(left)).status == 404


async def test_cancelled_and_expired_batches_say_so_for_each_request(serve, monkeypatch):
    monkeypatch.setattr(batch_runner, "PROGRESS_SECONDS", 0.01)
    server = await serve(tick=0.01)
    batch = await create(server, batch_request("quick"), batch_request("slow", max_tokens=3000))
    path = f"{PATH}/{batch['id']}"
    async with asyncio.timeout(20):
        while (await server.get(path)).json["request_counts"]["succeeded"] < 1:
            await asyncio.sleep(0.01)
    assert (await server.call("DELETE", path)).status == 400
    assert (await server.get(path + "/results")).status == 400
    cancelling = (await server.post(path + "/cancel")).json
    assert cancelling["processing_status"] == "canceling" and cancelling["cancel_initiated_at"]
    by_id = await results(server, await wait_for_end(server, cancelling))
    assert {name: result["type"] for name, result in by_id.items()} == {"quick": "succeeded", "slow": "canceled"}
    running = await create(server, batch_request("slow", max_tokens=3000))
    waiting = await create(server, batch_request("late"))  # one batch of a tenant runs at a time
    for batch, cancelled_id in ((waiting, "late"), (running, "slow")):
        await server.post(f"{PATH}/{batch['id']}/cancel")
        assert await results(server, await wait_for_end(server, batch)) == {cancelled_id: {"type": "canceled"}}
    server.service.batch_runner._clock = lambda: 1e10  # the deadline has passed
    expired = await wait_for_end(server, await create(server, batch_request("late")))
    assert expired["request_counts"]["expired"] == 1
    assert await results(server, expired) == {"late": {"type": "expired"}}


async def test_batch_continues_on_the_next_server_and_keeps_its_results(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_runner, "PROGRESS_SECONDS", 0.01)
    first = await serve(tick=0.01, response_store_file=str(tmp_path / "responses.db"))
    batch = await create(first, batch_request("quick"), batch_request("slow", max_tokens=3000), prefix="/anthropic")
    async with asyncio.timeout(20):
        while (await first.get(f"{PATH}/{batch['id']}")).json["request_counts"]["succeeded"] < 1:
            await asyncio.sleep(0.01)
    await end_server(first)
    seen: list[int] = []
    second = await serve(
        lambda request, index: seen.append(request.max_tokens) or [5],
        response_store_file=str(tmp_path / "responses.db"),
    )
    resuming = resume_batches(second)
    batch = await wait_for_end(second, batch)
    resuming.cancel()
    counts = {"processing": 0, "succeeded": 2, "errored": 0, "canceled": 0, "expired": 0}
    assert (batch["request_counts"], seen) == (counts, [3000])
    assert set(await results(second, batch)) == {"quick", "slow"}


async def test_batch_that_waits_for_a_server_can_be_canceled(serve, tmp_path):
    options = {"response_store_file": str(tmp_path / "responses.db")}
    first = await serve(tick=0.01, **options)
    batch = await create(first, batch_request("slow", max_tokens=3000))
    name = first.service.record_store.list_names("", "message-batch")[0]
    await end_server(first)
    second = await serve(**options)
    assert (await second.post(f"{PATH}/{batch['id']}/cancel")).json["processing_status"] == "canceling"
    second.service.batch_runner.batch_log.release_batch("", name)
    resuming = resume_batches(second)
    by_id = await results(second, await wait_for_end(second, batch))
    resuming.cancel()
    assert by_id == {"slow": {"type": "canceled"}}


async def test_wrong_batches_are_refused_by_member(serve):
    server = await serve()
    for requests, sentence in (
        ([], "requests: List should have at least 1 item"),
        (None, "requests: Field required"),
        ([{"params": PARAMS}], "requests.0.custom_id: Field required"),
        ([{"custom_id": "a"}], "requests.0.params: Field required"),
        ([batch_request("a b")], "requests.0.custom_id: should be 1 to 64"),
        ([batch_request("a"), batch_request("a")], "requests.1.custom_id: 'a' is that of an earlier request"),
        ([batch_request("a", stream=True)], "requests.0.params.stream: a request of a batch"),
    ):
        answer = await server.post(PATH, {"requests": requests})
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert answer.error["message"].startswith(sentence), answer.body
    assert (await server.get(f"{PATH}/msgbatch_x")).error["type"] == "not_found_error"
    small = await serve(response_store=40_000)
    long_message = [{"role": "user", "content": "x" * 20_000}]
    assert (await small.post(PATH, {"requests": [batch_request("a", messages=long_message)]})).status == 413


async def test_batches_are_listed_by_pages(serve):
    server = await serve()
    for _ in range(3):
        await wait_for_end(server, await create(server, batch_request("a")))
    everything = (await server.get(PATH)).json
    ids = [batch["id"] for batch in everything["data"]]
    assert len(ids) == 3 and (everything["first_id"], everything["last_id"]) == (ids[0], ids[2])
    after = (await server.get(f"{PATH}?limit=1&after_id={ids[0]}")).json
    assert [batch["id"] for batch in after["data"]] == ids[1:2] and after["has_more"]
    before = (await server.get(f"{PATH}?limit=1&before_id={ids[2]}")).json
    assert [batch["id"] for batch in before["data"]] == ids[1:2] and before["has_more"]
    for query, name in (("limit=0", "limit"), ("after_id=x", "after_id"), ("before_id=x", "before_id")):
        refused = await server.get(f"{PATH}?{query}")
        assert (refused.status, refused.error["message"].split(":")[0]) == (400, name)


async def test_batch_that_ends_during_its_cancellation_has_ended(serve, monkeypatch):
    held_finish = HeldCall(monkeypatch, MessageBatch, "finish")
    held_finish.end_before(monkeypatch, RecordsOfTenant, "update_record")
    server = await serve()
    batch = await create(server, batch_request("a"))
    await asyncio.to_thread(held_finish.has_begun.wait, 10)
    assert (await server.post(f"{PATH}/{batch['id']}/cancel")).json["processing_status"] == "ended"
    batch = (await server.get(f"{PATH}/{batch['id']}")).json
    assert (batch["processing_status"], batch["request_counts"]["succeeded"]) == ("ended", 1)


async def test_batch_of_a_crashed_server_is_deleted_with_its_requests(serve, monkeypatch):
    monkeypatch.setattr(MessageBatch, "finish", lambda *arguments: None)
    server = await serve()
    batch = await create(server, batch_request("a"))
    store = server.service.record_store
    clock = store._clock
    store._clock = lambda: clock() + 100
    await wait_for_end(server, batch)
    assert store.list_names("", "content/")
    assert (await server.call("DELETE", f"{PATH}/{batch['id']}")).status == 200
    assert store.list_names("", "content/") == []
