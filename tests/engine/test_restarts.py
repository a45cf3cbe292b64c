"""An engine that has loaded its model once is restarted whenever it ends, after ever longer delays."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.restarts import becomes_ready_again, quick_settings

from parley.child_process import python_command
from parley.engine import remote_engine
from parley.engine.protocol import EngineFailed
from parley.engine.remote_engine import RemoteEngine
from parley.types import EngineRequest, SamplingOptions
from parley.worker import simulated_engine
from parley.worker.thread_engine import ThreadEngine

# Runs an engine whose thread dies: of a request that it cannot read, or of a message that it cannot deliver.
BROKEN_INBOX = """
import sys
from parley import wire
from parley.engine.messages import SubmitRequest
from parley.worker import process

receive_frame = wire.receive_frame

def fail_on_request(sock, decoder):
    message = receive_frame(sock, decoder)
    return len(message) if isinstance(message, SubmitRequest) else message

wire.receive_frame = fail_on_request
process.serve_engine_socket(int(sys.argv[1]))
"""
BROKEN_LINK = """
import sys
from parley.worker import process, simulated_engine

simulated_engine.SimulatedLink.delivery_time = None
process.serve_engine_socket(int(sys.argv[1]))
"""

# Runs an engine whose model has as many tokens as a file says.
OTHER_VOCABULARY = """
import sys
from pathlib import Path
from parley.worker import process, simulated_engine

simulated_engine.SimulatedRunner.vocab_size = int(Path(sys.argv[1]).read_text())
process.serve_engine_socket(int(sys.argv[2]))
"""


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RemoteEngine]:
    monkeypatch.setattr(remote_engine, "RESTART_DELAYS", (0.1, 0.3))
    running = RemoteEngine(quick_settings(tmp_path))
    await running.start()
    await running.wait_until_ready()
    yield running
    await running.close()


def kill_process(engine: RemoteEngine) -> None:
    assert engine.process_id is not None
    os.kill(engine.process_id, signal.SIGKILL)


async def test_delays_grow_while_processes_end_early(engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch):
    delays: list[float] = []
    pause = asyncio.sleep

    async def record_pause(seconds: float) -> None:
        if asyncio.current_task() is engine._supervisor:
            delays.append(seconds)
        await pause(seconds)

    monkeypatch.setattr(asyncio, "sleep", record_pause)
    for healthy_seconds in (60.0, 60.0, 60.0, 60.0, 0.0):
        monkeypatch.setattr(remote_engine, "HEALTHY_SECONDS", healthy_seconds)
        kill_process(engine)
        await becomes_ready_again(engine)
    assert delays == [0.0, 0.1, 0.2, 0.3, 0.0]


async def test_restart_that_fails_is_tried_again(engine: RemoteEngine):
    costs, elsewhere = Path(engine.settings.costs), Path(engine.settings.costs + ".moved")
    costs.rename(elsewhere)
    kill_process(engine)
    async with asyncio.timeout(120):
        while engine._ends_in_a_row < 2:  # the cost model cannot be read
            await asyncio.sleep(0.05)
    assert engine.state == "restarting"
    elsewhere.rename(costs)
    await becomes_ready_again(engine)


async def test_engine_that_finds_another_model_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_engine, "RESTART_DELAYS", (0.1, 0.1))
    size_file = tmp_path / "size"
    size_file.write_text("1000")
    engine = RemoteEngine(quick_settings(tmp_path), command=python_command("-c", OTHER_VOCABULARY, str(size_file)))
    await engine.start()
    try:
        info = await engine.wait_until_ready()
        size_file.write_text("640")
        kill_process(engine)
        async with asyncio.timeout(120):
            while engine._ends_in_a_row < 2:
                await asyncio.sleep(0.05)
        assert engine.state == "restarting" and engine.info == info
        assert remote_engine.REPLACED_MODEL in caplog.text
        size_file.write_text("1000")
        await becomes_ready_again(engine)
    finally:
        await engine.close()


async def test_closes_while_it_waits_for_a_restart(engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_engine, "RESTART_DELAYS", (60.0, 60.0))
    kill_process(engine)
    await becomes_ready_again(engine)
    kill_process(engine)
    async with asyncio.timeout(120):
        while engine.state != "restarting":
            await asyncio.sleep(0.01)
    await asyncio.wait_for(engine.close(), 60)
    assert engine.state == "closed" and engine.process_id is None


@pytest.mark.parametrize("script", [BROKEN_INBOX, BROKEN_LINK], ids=["inbox", "link"])
async def test_engine_ends_when_one_of_its_threads_dies(script: str, tmp_path: Path):
    engine = RemoteEngine(quick_settings(tmp_path), command=python_command("-c", script))
    await engine.start()
    try:
        await engine.wait_until_ready()
        stream = engine.submit_request(EngineRequest("one", [5, 6], 8, SamplingOptions()))
        async with asyncio.timeout(120):
            outputs = await stream.next_outputs()
        assert outputs[-1].error == "The engine process ended with exit code 1."
        assert engine.state == "restarting"
    finally:
        await engine.close()


async def test_engine_in_a_thread_fails_when_its_loop_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_engine, "EngineLoop", None)
    engine = ThreadEngine(quick_settings(tmp_path))
    await engine.start()
    with pytest.raises(EngineFailed, match="internal error: TypeError"):
        await asyncio.wait_for(engine.wait_until_ready(), 120)
    await engine.close()
