"""Files and batches: requests of a file run without their client, with its key, and their results become files."""

import asyncio
import json
import time
import tracemalloc
from typing import Any

import pytest
from support.held_call import HeldCall
from support.openai_batches import (
    CHAT,
    CHAT_URL,
    FORM_HEADERS,
    KEYS,
    OTHER,
    OWNER,
    create_batch,
    read_results,
    request_line,
    upload_file,
    wait_for_batch,
)
from support.sound_forms import encode_form

from parley.dialects.batch_job import BatchRequest
from parley.dialects.openai.batches.batch import OpenAIBatch
from parley.dialects.openai.batches.batch_input import read_batch_input
from parley.serving.records import batch_runner
from parley.serving.records.background import BackgroundRunner, RecordsOfTenant
from parley.serving.records.inner_sender import InnerSender


async def test_batches_of_every_endpoint_have_the_answers_of_single_requests(serve):
    await check_batches(await serve(), BODIES)


async def test_batches_run_behind_a_coordinator(live_cluster):
    cluster = await live_cluster("prefill", "decode")
    await check_batches(cluster.front, {CHAT_URL: CHAT, "/v1/embeddings": BODIES["/v1/embeddings"]})
    await cluster.wait_until_idle()


BODIES = {
    CHAT_URL: CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "Hello", "max_tokens": 4},
    "/v1/embeddings": {"model": "tiny", "input": "Hello"},
    "/v1/responses": {"model": "tiny", "input": "Hello", "max_output_tokens": 16, "store": False},
}


async def check_batches(server: Any, bodies: dict[str, Any]) -> None:
    for endpoint, body in bodies.items():
        wrong = {"model": "tiny"}
        lines = [request_line("good", body, endpoint), "", request_line("bad", wrong, endpoint)]
        batch = await create_batch(server, lines, endpoint, metadata={"a": "b"})
        assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"a": "b"})
        batch = await wait_for_batch(server, batch)
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        single = await server.post(endpoint, body)
        good = (await read_results(server, batch["output_file_id"]))["good"]
        assert (good["error"], good["response"]["status_code"]) == (None, 200)
        for member in ("choices", "usage", "data", "output"):
            assert without_ids(good["response"]["body"].get(member)) == without_ids(single.json.get(member))
        bad = (await read_results(server, batch["error_file_id"]))["bad"]
        single = await server.post(endpoint, wrong)
        assert (bad["response"]["status_code"], bad["response"]["body"]) == (single.status, single.json)
        await server.call("DELETE", f"/v1/files/{batch['input_file_id']}")


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {name: without_ids(item) for name, item in value.items() if name != "id"}
    return value


async def test_input_with_faults_fails_its_batch_and_names_their_lines(serve):
    server = await serve()
    lines = [
        request_line("a"),
        "{",
        request_line("a"),
        request_line("b", url="/v1/embeddings"),
        request_line("c", method="GET"),
        request_line("d", CHAT | {"stream": True}),
        request_line(""),
        json.dumps({"custom_id": "e"}),
        request_line("f", "text"),
    ]
    batch = await wait_for_batch(server, await create_batch(server, lines))
    assert (batch["status"], batch["request_counts"]["total"], batch["output_file_id"]) == ("failed", 0, None)
    assert [(fault["line"], fault["code"]) for fault in batch["errors"]["data"]] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_endpoint"),
        (5, "invalid_method"),
        (6, "invalid_request"),
        (7, "invalid_custom_id"),
        (8, "invalid_json_line"),
        (9, "invalid_json_line"),
    ]
    empty = await wait_for_batch(server, await create_batch(server, ["", ""]))
    assert empty["errors"]["data"][0]["code"] == "empty_file"
    for line in ("{", request_line("a")):
        many = await wait_for_batch(server, await create_batch(server, [line] * 100))
        assert len(many["errors"]["data"]) == 20


async def test_wrong_members_are_refused_by_name(serve):
    server = await serve()
    file_id = (await upload_file(server, request_line("a"))).json["id"]
    right = {"input_file_id": file_id, "endpoint": CHAT_URL, "completion_window": "24h"}
    for member, value in (
        ("input_file_id", "file-x"),
        ("input_file_id", None),
        ("endpoint", "/v1/models"),
        ("completion_window", "1h"),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
        ("metadata", {"a": 1}),
    ):
        answer = await server.post("/v1/batches", right | {member: value})
        assert answer.status == 400 and answer.error["param"].startswith(member), (member, answer.body)
    for members, param in (
        ({"purpose": ""}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": "5"}}, "expires_after.seconds"),
        ({"expires_after": {"seconds": "5000"}}, "expires_after.anchor"),
    ):
        answer = await upload_file(server, "x", **members)
        assert (answer.status, answer.error["param"]) == (400, param)
    form = encode_form([("purpose", "batch", None)])
    assert (await server.call("POST", "/v1/files", form, FORM_HEADERS)).error["param"] == "file"
    for path in ("/v1/files/file-x", "/v1/files/file-x/content", "/v1/batches/batch_x"):
        assert (await server.get(path)).status == 404
    assert (await server.post("/v1/batches/batch_x/cancel")).status == 404
    small = await serve(response_store=40_000)
    answer = await upload_file(small, "x" * 20_000)
    assert (answer.status, "10000" in answer.error["message"]) == (413, True)
    for path in ("/v1/files?limit=0", "/v1/batches?limit=101", "/v1/files?after=file-x", "/v1/batches?after=batch_x"):
        assert (await server.get(path)).status == 400
    nothing = await serve(response_store=0)
    assert "stores no files" in (await upload_file(nothing, "x")).error["message"]
    assert "runs no batches" in (await nothing.post("/v1/batches", right)).error["message"]


async def test_files_are_listed_read_and_deleted(serve):
    server = await serve()
    expiry = {"anchor": "created_at", "seconds": "3600"}
    made = [(await upload_file(server, "x" * number, expires_after=expiry)).json for number in (1, 2, 3)]
    assert (made[2]["bytes"], made[2]["filename"], made[2]["purpose"]) == (3, "in.jsonl", "batch")
    assert made[0]["expires_at"] == made[0]["created_at"] + 3600
    listed = (await server.get("/v1/files?order=asc")).json["data"]
    assert sorted(file["id"] for file in listed) == sorted(file["id"] for file in made)
    rest = (await server.get(f"/v1/files?order=asc&after={listed[0]['id']}&limit=1")).json
    assert [file["id"] for file in rest["data"]] == [listed[1]["id"]] and rest["has_more"]
    assert (await server.get("/v1/files?purpose=batch_output")).json["data"] == []
    path = f"/v1/files/{made[1]['id']}"
    assert (await server.get(path)).json == made[1] and (await server.get(path + "/content")).body == b"xx"
    assert (await server.call("DELETE", path)).json == {"id": made[1]["id"], "object": "file", "deleted": True}
    assert (await server.get(path)).status == 404 and (await server.get(path + "/content")).status == 404


async def test_cancelled_batch_keeps_the_results_that_it_has(serve, monkeypatch):
    monkeypatch.setattr(batch_runner, "PROGRESS_SECONDS", 0.01)
    server = await serve(tick=0.01)
    quick, slow = request_line("quick"), request_line("slow", CHAT | {"max_tokens": 3000})
    batch = await create_batch(server, [quick, slow])
    path = f"/v1/batches/{batch['id']}"
    async with asyncio.timeout(20):
        while (await server.get(path)).json["request_counts"]["completed"] < 1:
            await asyncio.sleep(0.01)
    waiting = await create_batch(server, [quick])  # one batch of a tenant runs at a time
    assert (await server.get(f"/v1/batches/{waiting['id']}")).json["status"] == "validating"
    cancelling = (await server.post(path + "/cancel")).json
    assert cancelling["status"] == "cancelling" and cancelling["cancelling_at"]
    batch = await wait_for_batch(server, batch)
    assert batch["status"] == "cancelled" and batch["cancelled_at"] and batch["errors"] is None
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
    assert set(await read_results(server, batch["output_file_id"])) == {"quick"}
    assert (await server.post(path + "/cancel")).status == 409
    assert (await wait_for_batch(server, waiting))["status"] == "completed"
    listed = (await server.get("/v1/batches")).json["data"]
    assert {item["id"] for item in listed} == {batch["id"], waiting["id"]}


async def test_batch_expires_with_the_results_that_it_has(serve, monkeypatch):
    server = await serve(tick=0.01)
    server.service.batch_runner._clock = lambda: 1e12  # its deadline has passed
    batch = await wait_for_batch(server, await create_batch(server, [request_line("a")]))
    assert batch["status"] == "expired" and batch["expired_at"] == 10**12


async def test_batch_belongs_to_a_tenant_and_runs_with_its_key(serve):
    server = await serve(api_keys=KEYS)
    batch = await create_batch(server, [request_line("a")], headers=OWNER)
    batch = await wait_for_batch(server, batch, OWNER)
    assert set(await read_results(server, batch["output_file_id"], OWNER)) == {"a"}
    for path in (f"/v1/batches/{batch['id']}", f"/v1/files/{batch['output_file_id']}/content"):
        assert (await server.call("GET", path, None, OTHER)).status == 404
    assert (await server.call("GET", "/v1/batches", None, OTHER)).json["data"] == []
    file_id = (await upload_file(server, request_line("a"), OTHER)).json["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT_URL, "completion_window": "24h"}
    assert (await server.call("POST", "/v1/batches", body, OWNER)).error["param"] == "input_file_id"


async def test_requests_that_are_put_off_run_later_and_behind_others(serve, monkeypatch):
    monkeypatch.setattr(batch_runner, "MIN_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(batch_runner, "MAX_RETRY_SECONDS", 0.01)
    seen: list[int] = []

    def note_priority(request: Any, index: int) -> list[int]:
        seen.append(request.priority)
        return [5]

    server = await serve(note_priority, tick=0.005, max_batch=2, max_queue=0)
    batch = await create_batch(server, [request_line(str(number), CHAT | {"priority": -9}) for number in range(12)])
    batch = await wait_for_batch(server, batch)
    assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert min(seen) >= 1 << 62
    await server.post(CHAT_URL, CHAT)
    assert seen[-1] == 0


async def test_results_that_are_too_large_end_the_batch(serve):
    server = await serve(response_store=60_000)
    lines = [request_line(str(number), CHAT | {"max_tokens": 60, "logprobs": True}) for number in range(40)]
    batch = await wait_for_batch(server, await create_batch(server, lines))
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "output_too_large")
    assert batch["request_counts"]["completed"] < 40


async def test_a_tenant_has_a_bounded_number_of_open_batches(serve, monkeypatch):
    monkeypatch.setattr(batch_runner, "OPEN_BATCHES", 1)
    server = await serve(tick=0.01)
    first = await create_batch(server, [request_line("a", CHAT | {"max_tokens": 3000})])
    body = {"input_file_id": first["input_file_id"], "endpoint": CHAT_URL, "completion_window": "24h"}
    refused = await server.post("/v1/batches", body)
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert (await server.post(f"/v1/batches/{first['id']}/cancel")).status == 200
    await wait_for_batch(server, first)
    assert (await server.post("/v1/batches", body)).status == 200


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [(408, [(b"retry-after", b"2")], 2), (408, [], None), (429, [(b"retry-after", b"900")], 60), (500, [], None)],
    ids=["no instance had room", "took too long", "limit", "error"],
)
async def test_only_requests_that_were_put_off_are_sent_again(status, headers, seconds):
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    scope = {"type": "http", "asgi": {}, "path": "/batches", "headers": [], "state": {}}
    cycle = await InnerSender(answer, scope, (), "").send_request(BatchRequest(CHAT_URL, b"{}", "a"))
    assert batch_runner.retry_seconds(cycle) == seconds


async def test_moderations_are_refused_by_name(serve):
    server = await serve()
    refused = await server.post("/v1/moderations", {"input": "a"})
    assert (refused.status, "oderation" in refused.error["message"]) == (400, True)


def test_input_of_empty_lines_takes_no_memory_of_its_own():
    content = b"\n" * 500_000  # so that what other threads take does not count
    tracemalloc.start()
    try:
        assert read_batch_input(content, CHAT_URL).faults[0].code == "empty_file"
        assert tracemalloc.get_traced_memory()[1] < len(content)
    finally:
        tracemalloc.stop()


async def test_batch_that_ends_during_its_cancellation_has_ended(serve, monkeypatch):
    held_finish = HeldCall(monkeypatch, OpenAIBatch, "finish")
    held_finish.end_before(monkeypatch, RecordsOfTenant, "update_record")
    server = await serve()
    batch = await create_batch(server, [request_line("a")])
    await asyncio.to_thread(held_finish.has_begun.wait, 10)
    assert (await server.post(f"/v1/batches/{batch['id']}/cancel")).status == 409
    assert (await server.get(f"/v1/batches/{batch['id']}")).json["status"] == "completed"


def delay_after_stop(monkeypatch):
    """Let the loop go on for a while between the stop of a run and the next step of the thread that stopped it."""
    stop_run = BackgroundRunner.stop_run

    def stop_slowly(*arguments: Any) -> bool:
        was_running = stop_run(*arguments)
        time.sleep(0.1)
        return was_running

    monkeypatch.setattr(BackgroundRunner, "stop_run", stop_slowly)


async def test_batch_that_stops_at_once_was_cancelled(serve, monkeypatch):
    delay_after_stop(monkeypatch)
    server = await serve(tick=0.01)
    batch = await create_batch(server, [request_line("slow", CHAT | {"max_tokens": 3000})])
    await wait_for_batch(server, batch, wanted=("in_progress",))
    padding = {"padding": "x" * 20_000}  # a body of this size is read in a thread
    cancelling = await server.post(f"/v1/batches/{batch['id']}/cancel", padding)
    assert (cancelling.status, cancelling.json["status"]) == (200, "cancelling"), cancelling.body
    batch = await wait_for_batch(server, batch)
    assert (batch["status"], batch["errors"]) == ("cancelled", None)


async def test_cancelled_batch_with_a_wrong_input_has_failed(serve, monkeypatch):
    held_begin = HeldCall(monkeypatch, OpenAIBatch, "begin")
    server = await serve()
    batch = await create_batch(server, ["{"])
    await asyncio.to_thread(held_begin.has_begun.wait, 10)
    padding = {"padding": "x" * 20_000}  # a body of this size is read in a thread
    cancelling = await server.post(f"/v1/batches/{batch['id']}/cancel", padding)
    assert (cancelling.status, cancelling.json["status"]) == (200, "cancelling"), cancelling.body
    held_begin.release.set()
    batch = await wait_for_batch(server, batch)
    assert (batch["status"], batch["errors"]["data"][0]["line"]) == ("failed", 1)


async def test_server_that_ends_waits_for_the_results_of_a_batch(serve, monkeypatch):
    held_finish = HeldCall(monkeypatch, OpenAIBatch, "finish")
    server = await serve()
    await create_batch(server, [request_line("a")])
    await asyncio.to_thread(held_finish.has_begun.wait, 10)
    closing = asyncio.create_task(server.service.background_runs.close())
    await asyncio.wait([closing], timeout=0.1)
    held_finish.release.set()
    await closing
    assert held_finish.has_ended.is_set()


async def test_items_of_conversations_are_no_files_and_files_are_no_items(serve):
    server = await serve()
    file_id = (await upload_file(server, "x")).json["id"]
    message = {"type": "message", "role": "user", "content": "Hello"}
    items = [message | {"id": item_id} for item_id in (file_id, "file-x", f"file/{file_id}", "batch_x", "chatcmpl-x")]
    conversation = await server.post("/v1/conversations", {"items": items})
    assert conversation.status == 200
    assert (await server.get(f"/v1/files/{file_id}/content")).body == b"x"
    for path in ("files/file-x", "batches/batch_x", "chat/completions/chatcmpl-x"):
        assert (await server.get(f"/v1/{path}")).status == 404
    other_id = (await upload_file(server, "x")).json["id"]
    for item_id in (other_id, f"file/{other_id}"):
        reference = {"type": "item_reference", "id": item_id}
        answer = await server.post("/v1/responses", {"model": "tiny", "input": [reference]})
        assert (answer.status, item_id in answer.error["message"]) == (404, True), answer.body
