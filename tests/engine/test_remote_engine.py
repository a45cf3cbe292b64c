"""The engine process: it serves, reports its death, restarts once, and never outlives the API process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.tiny_models import write_model

from parley.engine import remote
from parley.engine.messages import Outputs
from parley.engine.protocol import EngineFailed
from parley.engine.remote import RemoteEngine
from parley.types import Output, Sampling, Settings, Work

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, "qwen3")
    return path


@asynccontextmanager
async def engine(folder: Path):
    engine = RemoteEngine(Settings(model=str(folder), kv_memory=8 << 20, threads=1))
    await engine.start()
    try:
        await engine.ready()
        yield engine
    finally:
        await engine.close()


def work(id: str, tokens: int = 8) -> Work:
    return Work(id=id, token_ids=[5, 6, 7, 8], max_tokens=tokens, sampling=GREEDY)


async def read(stream) -> list[Output]:
    got = []
    while outputs := await stream.next():
        got += outputs
    return got


async def tokens(engine: RemoteEngine, id: str) -> list[int]:
    return [token for output in await read(engine.submit(work(id))) for token in output.token_ids]


async def waits(engine: RemoteEngine) -> bool:
    """Whether a prompt waits for the end of a running answer."""
    answer = engine.submit(work("answer", 300))
    await answer.next()
    await read(engine.submit(work("prompt", 1)))
    ended = not answer.open
    answer.cancel()
    return ended


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid: int) -> bool:
    for _ in range(100):
        if not alive(pid):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_killed_engine_ends_its_streams_and_restarts_once(folder):
    async with engine(folder) as e:
        before = await tokens(e, "before")
        assert len(before) == 8
        e.divide(0)
        assert await waits(e)
        streams = [e.submit(work(str(i), 4000)) for i in range(5)]
        await streams[0].next()
        assert e.pid is not None
        os.kill(e.pid, signal.SIGKILL)
        for stream in streams:
            last = (await asyncio.wait_for(read(stream), 2.0))[-1]
            assert last.finish == "error" and "SIGKILL" in (last.error or "")
        assert e.in_flight == 0
        while e.state == "restarting":
            await asyncio.sleep(0.05)
        assert e.state == "ready"
        assert await tokens(e, "after") == before
        assert await waits(e)  # the restarted engine keeps the prefill share
        # A second death right after the restart is no accident: the engine stays down.
        os.kill(e.pid, signal.SIGKILL)
        last = (await asyncio.wait_for(read(e.submit(work("last", 4000))), 5.0))[-1]
        assert last.finish == "error"
        while e.state not in ("failed", "restarting"):
            await asyncio.sleep(0.01)
        assert e.state == "failed" and "SIGKILL" in e.failure


async def test_cancel_frees_blocks_while_other_requests_continue(folder):
    async with engine(folder) as e:
        doomed, spared = e.submit(work("doomed", 4000)), e.submit(work("spared", 40))
        await doomed.next()
        doomed.cancel()
        assert len([t for o in await read(spared) for t in o.token_ids]) == 40
        for _ in range(100):
            if e.stats.blocks_used == 0:
                break
            await asyncio.sleep(0.02)
        assert (e.stats.blocks_used, e.stats.running, e.stats.waiting) == (0, 0, 0)


async def test_engine_reset_empties_the_prefix_cache(folder):
    async with engine(folder) as running:
        long = [Work(id=f"w{k}", token_ids=[5, 6, 7, 8] * 20, max_tokens=1, sampling=GREEDY) for k in range(3)]
        outputs = [(await read(running.submit(one)))[-1] for one in long[:2]]
        assert await running.reset()
        outputs.append((await read(running.submit(long[2])))[-1])
        assert [output.cached_tokens for output in outputs] == [0, 64, 0]
        assert len({tuple(output.token_ids) for output in outputs}) == 1
        assert await asyncio.gather(running.reset(), running.reset(running=True)) == [True, True]
    assert not await running.reset()


async def test_engine_ignores_group_signals_and_ends_on_close(folder):
    async with engine(folder) as e:
        pid = e.pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert len(await tokens(e, "a")) == 8
    assert await gone(pid)


async def test_engine_reports_a_load_failure_in_one_sentence(tmp_path):
    e = RemoteEngine(Settings(model=str(tmp_path / "nothing")))
    await e.start()
    with pytest.raises(EngineFailed) as error:
        await e.ready()
    assert "nothing" in str(error.value) and "\n" not in str(error.value)
    assert e.state == "failed"
    await e.close()


def test_engine_exits_when_its_parent_is_killed(folder):
    script = (
        "import asyncio, sys\n"
        "from parley.engine.remote import RemoteEngine\n"
        "from parley.types import Settings\n"
        "async def main():\n"
        f"    e = RemoteEngine(Settings(model={str(folder)!r}, kv_memory=8 << 20, threads=1))\n"
        "    await e.start()\n"
        "    print(e.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(200):
        if not alive(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the engine process is an orphan")


async def test_restarts_again_an_engine_that_was_healthy_long_enough(folder, monkeypatch):
    monkeypatch.setattr(remote, "HEALTHY_S", 0.0)
    async with engine(folder) as e:
        for _ in range(2):
            assert e.pid is not None
            os.kill(e.pid, signal.SIGKILL)
            while e.state != "restarting":
                await asyncio.sleep(0.01)
            while e.state == "restarting":
                await asyncio.sleep(0.05)
            assert e.state == "ready"
        assert len(await tokens(e, "a")) == 8


async def test_token_costs_equal_the_measured_step_times(folder):
    """Mixed load: prompts of several lengths, shared prefixes, several choices, and requests that ask for no costs."""
    async with engine(folder) as e:
        steps: list[Outputs] = []
        deliver = e._deliver

        def log(message: Outputs) -> None:
            steps.append(message)
            deliver(message)

        e._deliver = log
        streams = []
        for number in range(12):
            prompt = [5 + number % 3] * (40 * (number % 4)) + [7, 8, number]
            wish = Work(str(number), prompt, 20 + number, n=1 + number % 2, seed=number, costs=number % 5 != 4)
            streams.append(e.submit(wish))
            await asyncio.sleep(0)  # later requests arrive while earlier ones run
        await asyncio.gather(*map(read, streams))
        told = 0
        since: dict[tuple[str, int], int] = {}  # for each choice, the step of its last token
        for place, step in enumerate(steps):
            for output in step.outputs:
                choice = output.id, output.index
                if int(output.id) % 5 == 4:
                    assert output.costs is None
                    continue
                assert output.costs is not None and len(output.costs) == len(output.token_ids) == 1
                (cost,), stats = output.costs, step.stats
                assert cost.rows == stats.step_rows >= len(step.outputs)
                if choice in since:  # a decode has a row in every step
                    assert since[choice] == place - 1
                    assert cost.computed == pytest.approx(stats.step_seconds, abs=1e-9)
                else:
                    whole = sum(each.stats.step_seconds for each in steps[: place + 1])
                    assert stats.step_seconds - 1e-9 <= cost.computed <= whole + 1e-9
                assert cost.waited >= 0
                since[choice] = place
                told += 1
        assert told > 300 and max(step.stats.step_rows for step in steps) > 3
