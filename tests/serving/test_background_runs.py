"""How long the events of requests in the background are kept after their end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from parley.serving.records import background
from parley.serving.records.background import BackgroundRunner, KeptEvents, tenant_records
from parley.serving.records.memory_records import MemoryRecordStore
from parley.serving.records.record_store import RecordStore


@pytest.fixture
def runs() -> BackgroundRunner:
    return BackgroundRunner(MemoryRecordStore(1 << 20, 60.0))


async def end_run(runs: BackgroundRunner, name: str, size: int) -> KeptEvents:
    """Run a request whose stream has ``size`` bytes to its end."""
    kept = KeptEvents()

    async def generate() -> None:
        for _ in range(size // 10):
            kept.add_bytes(b"data: x")
            kept.add_bytes(b"y\n\n")

    await runs.start_run("", name, kept, generate(), is_stream=True).task
    return kept


async def test_runs_that_ended_first_are_forgotten_first_and_running_ones_never(
    runs: BackgroundRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MAX_KEPT_BYTES", 3 * (1000 + background.RUN_BYTES))
    endless = asyncio.Event()
    kept = KeptEvents()
    kept.add_bytes(b"x\n\n" * 100_000)

    async def wait() -> None:
        await endless.wait()

    running = runs.start_run("", "endless", kept, wait(), is_stream=True)
    for name in "abcd":
        kept = await end_run(runs, name, 1000)
        assert kept.size == 1000 == sum(map(len, kept.events))
    assert [name for name in ("endless", *"abcd") if runs.find_run("", name)] == ["endless", "b", "c", "d"]
    endless.set()
    await running.task
    assert [name for name in ("endless", *"abcd") if runs.find_run("", name)] == []  # it alone is too large


async def test_a_request_that_runs_is_not_taken_for_lost_after_the_clock_was_set(tmp_path: Path) -> None:
    now = 1e9
    store = RecordStore(1 << 20, 1e6, str(tmp_path / "records.db"), clock=lambda: now)
    runs = BackgroundRunner(store)
    records = tenant_records(store, runs, "t")
    records.save_record("a", b"running")
    may_end = asyncio.Event()

    async def wait() -> None:
        await may_end.wait()

    run = runs.start_run("t", "a", KeptEvents(), wait(), is_stream=False)
    now += 36_000
    assert records.record_age("a") == 0
    may_end.set()
    await run.task
    assert records.record_age("a") == 36_000
    store.close()


async def test_runs_are_forgotten_after_their_time(runs: BackgroundRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "EVENTS_KEPT_SECONDS", 0.01)
    await asyncio.gather(*(end_run(runs, name, 100) for name in "ab"))
    async with asyncio.timeout(60):
        while runs.find_run("", "a") or runs.find_run("", "b"):
            await asyncio.sleep(0.01)
    monkeypatch.setattr(background, "EVENTS_KEPT_SECONDS", 60.0)
    monkeypatch.setattr(background, "MAX_KEPT_BYTES", 2 * (100 + background.RUN_BYTES))
    await asyncio.gather(*(end_run(runs, name, 100) for name in "cd"))
    assert runs.find_run("", "c") and runs.find_run("", "d")  # those before no longer count


async def test_time_of_an_ended_run_does_not_end_a_new_one_of_its_name(
    runs: BackgroundRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "EVENTS_KEPT_SECONDS", 0.02)
    await end_run(runs, "a", 100)
    endless = asyncio.Event()

    async def wait() -> None:
        await endless.wait()

    running = runs.start_run("", "a", KeptEvents(), wait(), is_stream=True)
    await asyncio.sleep(0.05)
    assert runs.find_run("", "a") is running
    endless.set()
    await running.task


async def test_a_run_that_is_stopped_before_its_first_step_still_ends_its_work(runs: BackgroundRunner) -> None:
    ended_names = []

    async def generate(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended_names.append(name)

    stopped = runs.start_run("", "stopped", KeptEvents(), generate("stopped"), is_stream=True)
    assert runs.stop_run("", "stopped")
    await asyncio.wait([stopped.task])
    assert stopped.kept_events.has_ended
    runs.start_run("", "closed", KeptEvents(), generate("closed"), is_stream=True)
    await runs.close()
    assert ended_names == ["stopped", "closed"]
