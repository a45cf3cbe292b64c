"""Batches go on after the end of their server, and let each other run."""

import asyncio
import json
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
from parley.serving.records import batch_runner
from parley.settings.key_file import make_key
from parley.types import NO_TENANT

EXPIRY = {"anchor": "created_at", "seconds": 5000}


@pytest.mark.parametrize("keys", ["no keys", "plain keys", "hashed keys"])
async def test_batch_goes_on_at_the_next_server_with_the_answers_that_it_has(serve, tmp_path, monkeypatch, keys):
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
    assert key.encode() not in (tmp_path / "responses.db").read_bytes()
    assert OWNER["authorization"].encode() not in (tmp_path / "responses.db").read_bytes()
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


async def test_batch_that_was_being_cancelled_ends_so_at_the_next_server(serve, tmp_path):
    options = {"response_store_file": str(tmp_path / "responses.db")}
    first = await serve(tick=0.01, **options)
    batch = await create_batch(first, [request_line("a", CHAT | {"max_tokens": 3000})])
    await end_server(first)
    second = await serve(**options)
    name = BATCHES.record_name(batch["id"], batch["created_at"])
    stored = json.loads(second.service.record_store.find_record("", name))
    BATCHES.save(
        second.service.tenant_records(NO_TENANT), batch["id"], batch["created_at"],
        json.dumps(stored | {"status": "cancelling"}).encode(),
    )  # fmt: skip
    second.service.batch_runner.batch_log.release_batch("", name)
    resuming = resume_batches(second)
    assert (await wait_for_batch(second, batch))["status"] == "cancelled"
    resuming.cancel()


async def test_batches_of_many_keys_take_turns(serve, monkeypatch):
    monkeypatch.setattr(batch_runner, "RUNNING_BATCHES", 1)
    monkeypatch.setattr(batch_runner, "REQUESTS_AT_ONCE", 1)
    monkeypatch.setattr(batch_runner, "TURN_SECONDS", 0.0)
    seen: list[int] = []
    server = await serve(lambda request, index: seen.append(request.max_tokens) or [5], tick=0.002, api_keys=KEYS)
    long = await create_batch(server, [request_line(str(number)) for number in range(40)], headers=OWNER)
    short = await create_batch(server, [request_line("b", CHAT | {"max_tokens": 9})], headers=OTHER)
    assert (await wait_for_batch(server, short, OTHER))["status"] == "completed"
    assert (await server.call("GET", f"/v1/batches/{long['id']}", None, OWNER)).json["status"] == "in_progress"
    long = await wait_for_batch(server, long, OWNER)
    assert long["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert set(await read_results(server, long["output_file_id"], OWNER)) == {str(number) for number in range(40)}
    assert sorted(seen) == [4] * 40 + [9]  # no request was sent twice
