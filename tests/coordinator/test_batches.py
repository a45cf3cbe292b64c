"""Batches of a coordinator go on after its end, as those of a server do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.openai_batches import CHAT, KEYS, OWNER, create_batch, read_results, request_line, wait_for_batch

from parley.coordinator.proxy.generation.record_keeper import RecordKeeper
from parley.serving.records import batch_runner
from parley.settings.key_file import make_key

LINES = [request_line("quick"), request_line("slow", CHAT | {"max_tokens": 30})]


async def stop_coordinator(cluster: Any) -> None:
    """Let a coordinator end its batches, as it does when it is stopped."""
    front = cluster.coordinator.front
    front.load.stopping = True
    front.fail_open_requests()
    keeper: RecordKeeper = front._record_keeper
    await keeper.runs.close()


@pytest.mark.parametrize("keys", ["no keys", "hashed keys", "keys of instances"])
async def test_batch_continues_on_the_next_coordinator_that_can_send_its_requests(
    live_cluster, tmp_path, monkeypatch, keys
):
    monkeypatch.setattr(batch_runner, "PROGRESS_SECONDS", 0.01)
    key, hashed_key = make_key("ann")
    coordinator_options: dict[str, Any] = {"response_store_file": tmp_path / "responses.db"}
    sent: list[int] = []  # tokens that instances were asked for
    options: dict[str, Any] = {"reply": lambda work, index: sent.append(work.max_tokens) or [5] * work.max_tokens}
    options["cluster_secret"] = "s"
    headers = None
    if keys == "hashed keys":
        coordinator_options["hashed_keys"], headers = (hashed_key,), {"authorization": f"Bearer {key}"}
    elif keys == "keys of instances":
        options["api_keys"], headers = KEYS, OWNER
    first = await live_cluster("mixed", client_keys=coordinator_options, tick=0.005, **options)
    batch = await create_batch(first.front, LINES, headers=headers)
    path = f"/v1/batches/{batch['id']}"
    async with asyncio.timeout(20):
        while (await first.front.call("GET", path, None, headers)).json["request_counts"]["completed"] < 1:
            await asyncio.sleep(0.005)
    first.instances[0].engine.step_gate.clear()
    await stop_coordinator(first)
    first.instances[0].engine.step_gate.set()
    sent.clear()
    second = await live_cluster("mixed", client_keys=coordinator_options, **options)
    batch = await wait_for_batch(second.front, batch, headers)
    results = await read_results(second.front, batch["output_file_id"], headers)
    if keys == "keys of instances":
        assert (batch["status"], set(results), sent) == ("failed", {"quick"}, [])
        return
    assert (batch["status"], set(results)) == ("completed", {"quick", "slow"})
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert sent == [30]
    assert results["slow"]["response"]["body"]["usage"]["completion_tokens"] == 30
