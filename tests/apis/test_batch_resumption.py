"""Batches continue after the end of their server, and take turns."""

import asyncio
import threading
from typing import Any

import pytest
from support.batch_resumption import end_server, resume_batches
from support.openai_batches import (
    CHAT,
    KEYS,
    OTHER,
    OWNER,
    create_batch,
    read_results,
    request_line,
    wait_for_batch,
)

from parley.dialects.openai.batches.batch import BATCHES
from parley.errors import NotReady
from parley.serving.records import batch_runner
from parley.serving.records.batch_log import BatchLog
from parley.settings.key_file import make_key
from parley.web.auth import ApiKeys, TenantReference

EXPIRY = {"anchor": "created_at", "seconds": 5000}


@pytest.mark.parametrize("keys", ["no keys", "plain keys", "hashed keys"])
async def test_batch_continues_on_the_next_server_and_keeps_its_answers(serve, tmp_path, monkeypatch, keys):
    monkeypatch.setattr(batch_runner, "PROGRESS_SECONDS", 0.01)
    key, hashed_key = make_key("ann")
    options: dict[str, Any] = {"response_store_file": str(tmp_path / "responses.db")}
    headers = None
    if keys == "plain keys":
        options, headers = options | {"api_keys": KEYS}, OWNER
    elif keys == "hashed keys":
        options, headers = options | {"hashed_keys": (hashed_key,)}, {"authorization": f"Bearer {key}"}
    first = await serve(tick=0.01, **options)
    lines = [request_line("quick"), request_line("slow", CHAT | {"max_tokens": 3000})]
    batch = await create_batch(first, lines, headers=headers, output_expires_after=EXPIRY)
    path = f"/v1/batches/{batch['id']}"
    async with asyncio.timeout(20):
        while (await first.call("GET", path, None, headers)).json["request_counts"]["completed"] < 1:
            await asyncio.sleep(0.01)
    await end_server(first)
    seen: list[int] = []
    second = await serve(lambda request, index: seen.append(request.max_tokens) or [5], **options)
    assert (await second.call("GET", path, None, headers)).json["status"] == "in_progress"
    if headers is not None:
        kept = b"".join(file.read_bytes() for file in tmp_path.glob("responses.db*"))  # with the log of SQLite
        assert batch["id"].encode() in kept
        assert headers["authorization"].removeprefix("Bearer ").encode() not in kept
    resuming = resume_batches(second)
    batch = await wait_for_batch(second, batch, headers)
    resuming.cancel()
    assert (batch["status"], seen) == ("completed", [3000])
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert set(await read_results(second, batch["output_file_id"], headers)) == {"quick", "slow"}
    output = (await second.call("GET", f"/v1/files/{batch['output_file_id']}", None, headers)).json
    assert output["expires_at"] == output["created_at"] + EXPIRY["seconds"]
    assert second.service.record_store.list_all("batch-") == []


async def test_batch_goes_on_only_where_its_key_is_accepted_and_only_once(serve, tmp_path):
    file = str(tmp_path / "responses.db")
    first = await serve(tick=0.01, api_keys=KEYS, response_store_file=file)
    batch = await create_batch(first, [request_line("a", CHAT | {"max_tokens": 3000})], headers=OWNER)
    path = f"/v1/batches/{batch['id']}"
    await end_server(first)
    other = await serve(api_keys=KEYS[1:], response_store_file=file)
    keyless = await serve(response_store_file=file)
    servers = [await serve(api_keys=KEYS, response_store_file=file) for _ in range(2)]
    resuming = [resume_batches(server) for server in (other, keyless)]
    await asyncio.sleep(0.1)
    assert (await servers[0].call("GET", path, None, OWNER)).json["status"] in ("validating", "in_progress")
    resuming += [resume_batches(server) for server in servers]
    assert (await wait_for_batch(servers[0], batch, OWNER))["status"] == "completed"
    assert sum(bool(server.service.background_runs._runs) for server in (other, keyless, *servers)) == 1
    for task in resuming:
        task.cancel()


async def test_server_takes_no_batch_that_it_runs(serve, tmp_path):
    seen: list[int] = []
    server = await serve(
        lambda request, index: seen.append(index) or [5] * 3000,
        tick=0.01,
        response_store_file=str(tmp_path / "file.db"),
    )
    batch = await create_batch(server, [request_line("a", CHAT | {"max_tokens": 3000})])
    await wait_for_batch(server, batch, wanted=("in_progress",))
    pretend_silence(server, batch)
    batch_log = server.service.batch_runner.batch_log
    assert batch_log.list_orphaned_batches() == [("", record_name(batch))]
    resuming = resume_batches(server)
    await asyncio.sleep(0.1)
    resuming.cancel()
    assert batch_log.list_orphaned_batches() == [("", record_name(batch))]  # it was not claimed
    assert (await server.post(f"/v1/batches/{batch['id']}/cancel")).status == 200
    assert (await wait_for_batch(server, batch))["status"] == "cancelled"
    assert len(seen) == 1


async def test_server_that_was_silent_leaves_its_batch_to_the_server_that_claimed_it(serve, tmp_path):
    options = {"response_store_file": str(tmp_path / "responses.db")}
    first = await serve(lambda request, index: [5], **options)
    second = await serve(lambda request, index: [6] * 3, **options)
    first_may_end, second_may_end = hold_answers(first), hold_answers(second)
    batch = await create_batch(first, [request_line("a")])
    await wait_for_batch(first, batch, wanted=("in_progress",))
    pretend_silence(first, batch)
    resuming = resume_batches(second)
    async with asyncio.timeout(20):
        while second.service.background_runs.find_run("", record_name(batch)) is None:
            await asyncio.sleep(0.01)
    resuming.cancel()
    run = first.service.background_runs.find_run("", record_name(batch))
    first_may_end.set()
    async with asyncio.timeout(20):
        await run.task
    assert (await first.get(f"/v1/batches/{batch['id']}")).json["status"] == "in_progress"
    second_may_end.set()
    batch = await wait_for_batch(first, batch)
    answer = (await read_results(first, batch["output_file_id"]))["a"]["response"]["body"]
    assert (batch["status"], answer["usage"]["completion_tokens"]) == ("completed", 3)


async def test_batch_whose_input_was_deleted_keeps_its_results(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_runner, "PROGRESS_SECONDS", 0.01)
    options = {"response_store_file": str(tmp_path / "responses.db")}
    first = await serve(tick=0.01, **options)
    batch = await create_batch(first, [request_line("quick"), request_line("slow", CHAT | {"max_tokens": 3000})])
    async with asyncio.timeout(20):
        while (await first.get(f"/v1/batches/{batch['id']}")).json["request_counts"]["completed"] < 1:
            await asyncio.sleep(0.01)
    await end_server(first)
    second = await serve(**options)
    assert (await second.call("DELETE", f"/v1/files/{batch['input_file_id']}")).status == 200
    resuming = resume_batches(second)
    batch = await wait_for_batch(second, batch)
    resuming.cancel()
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "invalid_input_file")
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
    assert set(await read_results(second, batch["output_file_id"])) == {"quick"}


async def test_batch_that_waits_for_a_server_can_be_cancelled(serve, tmp_path):
    options = {"response_store_file": str(tmp_path / "responses.db")}
    first = await serve(tick=0.01, **options)
    batch = await create_batch(first, [request_line("a", CHAT | {"max_tokens": 3000})])
    await end_server(first)
    second = await serve(**options)
    assert (await second.post(f"/v1/batches/{batch['id']}/cancel")).json["status"] == "cancelling"
    pretend_silence(second, batch)
    resuming = resume_batches(second)
    assert (await wait_for_batch(second, batch))["status"] == "cancelled"
    resuming.cancel()


async def test_error_of_the_store_takes_no_cancellations_place():
    has_begun, may_end = threading.Event(), threading.Event()

    def fail() -> None:
        has_begun.set()
        may_end.wait(10)
        raise NotReady("The store cannot be used.")

    task = asyncio.create_task(batch_runner._to_end_in_thread(fail))
    await asyncio.to_thread(has_begun.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait([task])
    assert task.cancelled()


def record_name(batch: Any) -> str:
    return BATCHES.record_name(batch["id"], batch["created_at"])


def hold_answers(server: Any) -> asyncio.Event:
    """Let the answers to requests of batches wait for the event that is returned."""
    may_end = asyncio.Event()
    send_request = server.service.batch_runner._send_request

    async def send_and_wait(*arguments: Any) -> Any:
        answer = await send_request(*arguments)
        await may_end.wait()
        return answer

    server.service.batch_runner._send_request = send_and_wait
    return may_end


def pretend_silence(server: Any, batch: Any) -> None:
    """Let a batch look as if its server had ended."""
    server.service.batch_runner.batch_log.release_batch("", record_name(batch))


@pytest.mark.parametrize("store_fails", [False, True])
async def test_batches_of_many_keys_take_turns(serve, monkeypatch, store_fails):
    if store_fails:
        save_answers = BatchLog.save_answers
        failures = iter([NotReady("The store cannot be used.")])

        def fail_once(*arguments: Any) -> None:
            for failure in failures:
                raise failure
            save_answers(*arguments)

        monkeypatch.setattr(BatchLog, "save_answers", fail_once)
    monkeypatch.setattr(batch_runner, "RUNNING_BATCHES", 1)
    monkeypatch.setattr(batch_runner, "REQUESTS_AT_ONCE", 1)
    monkeypatch.setattr(batch_runner, "TURN_SECONDS", 0.0)
    seen: list[int] = []
    server = await serve(lambda request, index: seen.append(request.max_tokens) or [5], tick=0.002, api_keys=KEYS)
    long = await create_batch(server, [request_line(str(number)) for number in range(40)], headers=OWNER)
    short = await create_batch(server, [request_line("b", CHAT | {"max_tokens": 9})], headers=OTHER)
    assert (await wait_for_batch(server, short, OTHER))["status"] == "completed"
    assert (await server.call("GET", f"/v1/batches/{long['id']}", None, OWNER)).json["status"] == "in_progress"
    assert (await server.call("DELETE", f"/v1/files/{long['input_file_id']}", None, OWNER)).status == 200
    long = await wait_for_batch(server, long, OWNER)
    assert long["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert set(await read_results(server, long["output_file_id"], OWNER)) == {str(number) for number in range(40)}
    assert sorted(seen) == [4] * 40 + [9]  # no request was sent twice


def test_tenant_from_a_file_does_not_count_for_requests_with_the_key():
    key, hashed_key = make_key("ann")
    keys = ApiKeys((), hashed_keys=(hashed_key,))
    kept_tenant = keys.find_tenant(TenantReference("other", hashed_key.id))
    sent_tenant = keys.check_key({b"authorization": f"Bearer {key}".encode()})
    assert kept_tenant is not None and kept_tenant.id == "other" != sent_tenant.id
