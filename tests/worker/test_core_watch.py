"""The host notices that vLLM's processes hang. The processes are stand-ins."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from parley.worker.vllm import core_watch
from parley.worker.vllm.core_watch import CoreWatch, processes_below

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_watch, "TICK_SECONDS", 0.001)


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[bytes]]:
    """A process and its child, which wait for a line."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"1\n"
    yield process
    process.communicate(b"\n")


def test_finds_the_processes_below_one(tree):
    below = processes_below(os.getpid())
    assert tree.pid in below and set(processes_below(tree.pid)) <= set(below) and len(processes_below(tree.pid)) == 1


async def test_a_stopped_process_hangs_while_others_compute(tree, monkeypatch):
    (child,) = processes_below(tree.pid)
    os.kill(child, signal.SIGSTOP)
    try:
        computed = iter(range(10_000))
        monkeypatch.setattr(core_watch, "_processor_seconds", lambda process_id: next(computed))
        watch = CoreWatch(2.0, lambda: True)
        assert "did nothing for 2 s" in await asyncio.wait_for(watch.wait_for_hang(), 30)
    finally:
        os.kill(child, signal.SIGCONT)


async def test_processes_that_neither_answer_nor_compute_hang(tree):
    watch = CoreWatch(2.0, lambda: True)
    assert await watch.wait_for_hang() == "The engine process hung: it did nothing for 2 s, and is ended."


@pytest.mark.parametrize("sign", ["a step", "nothing to compute", "processor time", "no limit"])
async def test_core_with_any_sign_of_life_is_not_killed(monkeypatch, sign):
    computed = iter(range(10_000))
    monkeypatch.setattr(core_watch, "processes_below", lambda process_id: [1])
    monkeypatch.setattr(core_watch, "is_stopped", lambda process_id: False)
    monkeypatch.setattr(core_watch, "_processor_seconds", lambda pid: next(computed) if sign == "processor time" else 0)
    watch = CoreWatch(0 if sign == "no limit" else 2.0, lambda: sign != "nothing to compute")
    waiting = asyncio.create_task(watch.wait_for_hang())
    for _ in range(12):
        await asyncio.sleep(0.002)
        if sign == "a step":
            watch.note_step()
    assert not waiting.done()
    waiting.cancel()


async def test_compilers_that_come_and_go_below_a_worker_are_a_sign_of_life(monkeypatch):
    """Each of them has used less processor time than those before."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(core_watch, "processes_below", lambda process_id: [next(ticks)])
    monkeypatch.setattr(core_watch, "is_stopped", lambda process_id: False)
    monkeypatch.setattr(core_watch, "_processor_seconds", lambda process_id: 1000.0 - process_id)
    waiting = asyncio.create_task(CoreWatch(2.0, lambda: True).wait_for_hang())
    await asyncio.sleep(0.03)
    assert not waiting.done()
    waiting.cancel()


async def test_lost_worker_ends_vllm_even_if_its_processes_compute(monkeypatch):
    computed = iter(range(10_000))
    monkeypatch.setattr(core_watch, "processes_below", lambda process_id: [1])
    monkeypatch.setattr(core_watch, "is_stopped", lambda process_id: False)
    monkeypatch.setattr(core_watch, "_processor_seconds", lambda process_id: next(computed))
    watch = CoreWatch(0.01, lambda: False, lambda: True)
    assert await asyncio.wait_for(watch.wait_for_hang(), 30) == core_watch.WORKER_DIED


async def test_dead_worker_ends_vllm_even_without_a_limit_on_silence(monkeypatch):
    """No limit is for engines that may go on; an engine core that has lost a worker never does."""
    monkeypatch.setattr(core_watch, "LOSS_SECONDS", 0.01)
    watch = CoreWatch(0, lambda: False, lambda: True)
    assert await asyncio.wait_for(watch.wait_for_hang(), 30) == core_watch.WORKER_DIED
