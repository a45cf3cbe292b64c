"""The watchdog tells an engine process that hangs from one that is slow, suspended or still loading."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.restarts import becomes_ready_again, quick_settings

from parley.engine.remote_engine import RemoteEngine
from parley.engine.watchdog import BUSY_FACTOR, TICK_SECONDS, Watchdog, read_processor_seconds
from parley.types import EngineOutput, EngineRequest

SLOW_ENGINE = Path(__file__).parents[1] / "support" / "slow_engine.py"
TIMEOUT = 4.0
TICKS = int(TIMEOUT / TICK_SECONDS)


def ticks_until_hang(watchdog: Watchdog, limit: int, *, computes: bool = False, is_serving: bool = True) -> int:
    """Returns the number of ticks without a message until a process counts as hung; 0 if none of ``limit`` do."""
    for tick in range(1, limit + 1):
        if watchdog.explain_hang(1, tick * 0.4 if computes else 0.0, is_serving=is_serving):
            return tick
    return 0


def test_silent_process_hangs_after_the_timeout():
    assert ticks_until_hang(Watchdog(TIMEOUT), 2 * TICKS) == TICKS + 1  # the first tick sees the first message


def test_computing_process_has_longer_but_not_for_ever():
    assert ticks_until_hang(Watchdog(TIMEOUT), 2 * BUSY_FACTOR * TICKS, computes=True) == BUSY_FACTOR * TICKS + 1


def test_loading_process_has_longer_and_may_compute_for_ever():
    assert ticks_until_hang(Watchdog(TIMEOUT), 2 * BUSY_FACTOR * TICKS, is_serving=False) == BUSY_FACTOR * TICKS + 1
    assert not ticks_until_hang(Watchdog(TIMEOUT), 2 * BUSY_FACTOR * TICKS, computes=True, is_serving=False)


def test_each_message_restarts_the_watchdog():
    watchdog = Watchdog(TIMEOUT)
    for message in range(10 * TICKS):
        assert not watchdog.explain_hang(message // (TICKS - 1), 0.0, is_serving=True)


def test_waiting_threads_do_not_count_as_work():
    watchdog = Watchdog(TIMEOUT)
    hangs = [watchdog.explain_hang(0, tick * 0.0001, is_serving=True) for tick in range(TICKS)]
    assert hangs[-1] and not any(hangs[:-1])


def test_processor_time_of_a_stopped_process_stands_still():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while read_processor_seconds(process.pid) < 0.05:
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(0.2)  # the last moments before the stop may be counted a little later
        stopped_at = read_processor_seconds(process.pid)
        time.sleep(0.2)
        assert read_processor_seconds(process.pid) == stopped_at
    finally:
        process.kill()
        process.wait()
    with pytest.raises(OSError):
        read_processor_seconds(process.pid)


async def run_request(engine: RemoteEngine, max_tokens: int = 2) -> list[EngineOutput]:
    """Returns the outputs of a request, whose first step computes the prompt and draws a token."""
    stream = engine.submit_request(EngineRequest(id="only", token_ids=[5, 6, 7, 8], max_tokens=max_tokens))
    outputs = []
    while new := await stream.next_outputs():
        outputs += new
    return outputs


async def outputs_of(engine: RemoteEngine, max_tokens: int = 2) -> list[EngineOutput]:
    await engine.start()
    try:
        await engine.wait_until_ready()
        return await asyncio.wait_for(run_request(engine, max_tokens), 30)
    finally:
        await engine.close()


def slow_command(way: str) -> list[str]:
    return [sys.executable, str(SLOW_ENGINE), way]


async def test_step_with_heartbeats_may_take_longer_than_the_timeout(tmp_path: Path):
    outputs = await outputs_of(RemoteEngine(quick_settings(tmp_path, step_seconds=3.5)), max_tokens=1)
    assert outputs[-1].finish_reason == "length", outputs[-1].error


async def test_step_that_computes_may_take_longer_than_the_timeout(tmp_path: Path):
    outputs = await outputs_of(RemoteEngine(quick_settings(tmp_path), command=slow_command("computes")))
    assert outputs[-1].finish_reason == "length", outputs[-1].error


async def test_deadlocked_engine_ends_its_streams(tmp_path: Path):
    outputs = await outputs_of(RemoteEngine(quick_settings(tmp_path), command=slow_command("deadlocks")))
    assert outputs[-1].finish_reason == "error" and "hung" in (outputs[-1].error or "")


async def test_stopped_engine_without_requests_is_replaced(tmp_path: Path):
    engine = RemoteEngine(quick_settings(tmp_path))
    await engine.start()
    try:
        await engine.wait_until_ready()
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGSTOP)
        await becomes_ready_again(engine)
        assert (await run_request(engine))[-1].finish_reason == "length"
    finally:
        await engine.close()


async def test_timeout_of_zero_lets_a_stopped_engine_resume(tmp_path: Path):
    settings = quick_settings(tmp_path)
    settings.engine_timeout = 0.0
    engine = RemoteEngine(settings)
    await engine.start()
    try:
        await engine.wait_until_ready()
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGSTOP)
        await asyncio.sleep(3.5)
        assert engine.state == "ready"
        os.kill(engine.process_id, signal.SIGCONT)
        assert (await asyncio.wait_for(run_request(engine), 30))[-1].finish_reason == "length"
    finally:
        await engine.close()
