"""The engine process: it serves, reports its death, is restarted, and never outlives the API process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from support.restarts import becomes_ready_again
from support.tiny_models import write_model

from parley import control_groups
from parley.engine.engine_process import start_early_process
from parley.engine.messages import StepOutputs
from parley.engine.output_stream import OutputStream
from parley.engine.protocol import EngineFailed
from parley.engine.remote_engine import RemoteEngine
from parley.types import EngineOutput, EngineRequest, ParleySettings, SamplingOptions

GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, "qwen3")
    return path


@asynccontextmanager
async def running_engine(folder: Path, **settings):
    remote_engine = RemoteEngine(ParleySettings(model=str(folder), kv_memory=8 << 20, threads=1, **settings))
    await remote_engine.start()
    try:
        await remote_engine.wait_until_ready()
        yield remote_engine
    finally:
        await remote_engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(folder: Path) -> AsyncIterator[RemoteEngine]:
    """An engine for the tests after which it is idle and runs on. They need its event loop."""
    async with running_engine(folder) as engine:
        yield engine


def make_request(request_id: str, max_tokens: int = 8) -> EngineRequest:
    return EngineRequest(id=request_id, token_ids=[5, 6, 7, 8], max_tokens=max_tokens, sampling=GREEDY)


async def read_outputs(stream) -> list[EngineOutput]:
    collected = []
    while outputs := await stream.next_outputs():
        collected += outputs
    return collected


async def generate_tokens(engine: RemoteEngine, request_id: str) -> list[int]:
    return [
        token
        for output in await read_outputs(engine.submit_request(make_request(request_id)))
        for token in output.token_ids
    ]


async def prompt_waits_for_answer(engine: RemoteEngine) -> bool:
    """Whether a prompt waits for the end of a running answer."""
    answer = engine.submit_request(make_request("answer", 300))
    await answer.next_outputs()
    await read_outputs(engine.submit_request(make_request("prompt", 1)))
    ended = not answer.open_choices
    answer.cancel_choice()
    return ended


def process_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


async def process_ends(pid: int) -> bool:
    for _ in range(1200):
        if not process_alive(pid):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_killed_or_stopped_engine_ends_its_streams_and_is_replaced(folder):
    async with running_engine(folder, engine_timeout=2.0) as e:
        before = await generate_tokens(e, "before")
        assert len(before) == 8
        e.set_prefill_share(0)
        assert await prompt_waits_for_answer(e)
        for signal_number, reason in [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "it did nothing for 2 s")]:
            process_id = e.process_id
            assert process_id is not None
            streams = [e.submit_request(make_request(str(i), 4000)) for i in range(5)]
            await streams[0].next_outputs()
            os.kill(process_id, signal_number)
            for stream in streams:
                last = (await asyncio.wait_for(read_outputs(stream), 60.0))[-1]
                assert last.finish_reason == "error" and reason in (last.error or "")
            assert e.open_stream_count == 0 and e.state == "restarting"
            await becomes_ready_again(e)
            assert not process_alive(process_id)
            assert await generate_tokens(e, "after") == before
        assert await prompt_waits_for_answer(e)  # the restarted engine keeps the prefill share


async def test_early_process_is_used_first_and_replaced_when_it_dies(folder):
    early = start_early_process()
    assert early is not None
    engine = RemoteEngine(ParleySettings(model=str(folder), kv_memory=8 << 20, threads=1), early_process=early)
    try:
        await engine.start()
        await engine.wait_until_ready()
        assert engine.process_id == early.process.pid
        before = await generate_tokens(engine, "before")
        early.process.kill()
        await becomes_ready_again(engine)
        assert engine.process_id != early.process.pid
        assert await generate_tokens(engine, "after") == before
    finally:
        await engine.close()
    early.discard()  # it has ended long ago


async def test_end_of_an_early_process_before_its_settings_is_explained(folder, monkeypatch):
    """The kernel kills it while it imports libraries, if the control group allows too little memory for those."""
    kills = control_groups.count_memory_kills()
    early = start_early_process()
    assert early is not None
    if kills is None:
        pytest.skip("this system does not count kills for lack of memory")
    # As if the kill that follows were the kernel's, and none before it had ended an engine.
    monkeypatch.setattr(control_groups, "count_memory_kills", lambda root=None: kills + 1)
    monkeypatch.setattr("parley.engine.process_exit._explained_kills", {})
    early = replace(early, memory_kills=kills)
    early.process.kill()
    engine = RemoteEngine(ParleySettings(model=str(folder)), early_process=early)
    try:
        await engine.start()
        with pytest.raises(EngineFailed, match="was killed by the kernel because memory ran out"):
            await engine.wait_until_ready()
    finally:
        await engine.close()


async def test_process_that_was_started_early_ends_with_the_server(folder):
    early = start_early_process()
    assert early is not None
    early.own_end.close()  # as the kernel does if the server is killed
    assert await asyncio.to_thread(early.process.wait, 60) == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_cancel_frees_blocks_while_other_requests_continue(shared_engine):
    e = shared_engine
    doomed, spared = e.submit_request(make_request("doomed", 4000)), e.submit_request(make_request("spared", 40))
    await doomed.next_outputs()
    doomed.cancel_choice()
    assert len([t for o in await read_outputs(spared) for t in o.token_ids]) == 40
    for _ in range(3000):
        if e.stats.used_pages == 0:
            break
        await asyncio.sleep(0.02)
    assert (e.stats.used_pages, e.stats.running, e.stats.waiting) == (0, 0, 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_engine_reset_empties_the_prefix_cache(shared_engine):
    requests = [EngineRequest(id=f"w{k}", token_ids=[9, 6, 7, 8] * 20, max_tokens=1, sampling=GREEDY) for k in range(3)]
    outputs = [(await read_outputs(shared_engine.submit_request(request)))[-1] for request in requests[:2]]
    assert await shared_engine.reset_prefix_cache()
    outputs.append((await read_outputs(shared_engine.submit_request(requests[2])))[-1])
    assert [output.cached_tokens for output in outputs] == [0, 64, 0]
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert await asyncio.gather(shared_engine.reset_prefix_cache(), shared_engine.reset_prefix_cache(running=True)) == [
        True,
        True,
    ]


async def test_engine_ignores_group_signals_and_ends_on_close(folder):
    async with running_engine(folder) as e:
        pid = e.process_id
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGHUP)
        assert len(await generate_tokens(e, "a")) == 8
    assert await process_ends(pid)
    assert not await e.reset_prefix_cache()


async def test_engine_reports_a_load_failure_in_one_sentence(tmp_path):
    e = RemoteEngine(ParleySettings(model=str(tmp_path / "nothing")))
    await e.start()
    with pytest.raises(EngineFailed) as error:
        await e.wait_until_ready()
    assert "nothing" in str(error.value) and "\n" not in str(error.value)
    assert e.state == "failed"
    await e.close()


def test_engine_exits_when_its_parent_is_killed(folder):
    script = (
        "import asyncio, sys\n"
        "from parley.engine.remote_engine import RemoteEngine\n"
        "from parley.types import ParleySettings\n"
        "async def main():\n"
        f"    e = RemoteEngine(ParleySettings(model={str(folder)!r}, kv_memory=8 << 20, threads=1))\n"
        "    await e.start()\n"
        "    print(e.process_id, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    for _ in range(1200):
        if not process_alive(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the engine process is an orphan")


@pytest.mark.asyncio(loop_scope="module")
async def test_token_costs_equal_the_measured_step_times(shared_engine, monkeypatch):
    """Mixed load: prompts of several lengths, shared prefixes, several choices, and requests that ask for no costs."""
    e = shared_engine
    steps: list[StepOutputs] = []
    add_output = OutputStream.add_output

    def record_output(stream: OutputStream, output: EngineOutput) -> None:
        steps[-1].outputs.append(output)
        add_output(stream, output)

    e.step_observers.append(lambda stats: steps.append(StepOutputs([], stats)))
    monkeypatch.setattr(OutputStream, "add_output", record_output)
    streams = []
    for number in range(12):
        prompt = [5 + number % 3] * (40 * (number % 4)) + [7, 8, number]
        request = EngineRequest(
            str(number), prompt, 20 + number, n=1 + number % 2, seed=number, token_costs=number % 5 != 4
        )
        streams.append(e.submit_request(request))
        await asyncio.sleep(0)  # later requests arrive while earlier ones run
    await asyncio.gather(*map(read_outputs, streams))
    checked_tokens = 0
    last_step: dict[tuple[str, int], int] = {}  # for each choice, the step of its last token
    for step_number, step in enumerate(steps):
        for output in step.outputs:
            choice = output.id, output.index
            if int(output.id) % 5 == 4:
                assert output.token_costs is None
                continue
            assert output.token_costs is not None and len(output.token_costs) == len(output.token_ids) == 1
            (cost,), stats = output.token_costs, step.stats
            assert cost.batch_rows == stats.step_rows >= len(step.outputs)
            if choice in last_step:  # a decode has a row in every step
                assert last_step[choice] == step_number - 1
                assert cost.compute_seconds == pytest.approx(stats.step_seconds, abs=1e-9)
            else:
                whole = sum(earlier_step.stats.step_seconds for earlier_step in steps[: step_number + 1])
                assert stats.step_seconds - 1e-9 <= cost.compute_seconds <= whole + 1e-9
            assert cost.wait_seconds >= 0
            last_step[choice] = step_number
            checked_tokens += 1
    assert checked_tokens > 300 and max(step.stats.step_rows for step in steps) > 3
