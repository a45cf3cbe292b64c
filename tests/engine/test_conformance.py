"""One suite for all engines: each keeps every guarantee in the docstring of ``engine.protocol.Engine``.

A test is named after its guarantee. To test a further engine, add a row to ``ENGINE_KINDS``.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from support.tiny_models import write_model

from parley.engine.output_stream import OutputStream
from parley.engine.protocol import Engine, EngineFailed
from parley.engine.remote_engine import RemoteEngine
from parley.engine.scripted_engine import SCRIPTED_MODEL, ScriptedEngine, ScriptedFailure, echo_prompt
from parley.engine.vllm_engine import VLLMEngine
from parley.types import (
    ALL_ENGINE_FEATURES,
    BeamOptions,
    EngineBound,
    EngineFeature,
    EngineOutput,
    EngineRequest,
    ParleySettings,
    ReasoningLimit,
    SamplingOptions,
    VLLMSettings,
)
from parley.worker.thread_engine import ThreadEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingOptions(temperature=0.0)
PROMPT = [5, 6, 7, 8]
SLOTS = 4
LONG = 4000  # output tokens of a request that runs until it is cancelled
WAIT_SECONDS = 30.0  # no test waits longer for anything; a passing one does not come near it
COSTS = "rows = [[1, 0.001], [256, 0.002]]\nblocks = 4096\nlength = 8192\n"


@dataclass(frozen=True)
class EngineKind:
    """How to make an engine of one kind.

    ``make_light``: makes one that starts sooner and has the same life cycle. ``bad_request``: the options of a request
    that the engine accepts and cannot answer.
    """

    make: Callable[[Path], Engine]
    make_light: Callable[[Path], Engine]
    bad_request: dict[str, Any] = field(default_factory=lambda: {"adapter": "unknown"})


def model_settings(folder: Path) -> ParleySettings:
    return ParleySettings(model=str(folder), kv_memory=8 << 20, threads=1, max_batch=SLOTS)


def simulated_settings(folder: Path) -> ParleySettings:
    return ParleySettings(model="", costs=str(folder / "costs.toml"), max_batch=SLOTS)


SCRIPTED_BOUNDS: dict[EngineBound, tuple[float, float]] = {"logprobs": (0, 3), "n": (1, 6), "stop_ids": (-math.inf, 2)}
CONFORMING_MODEL = msgspec.structs.replace(
    SCRIPTED_MODEL, features=ALL_ENGINE_FEATURES - {"watermark", "beam_search", "beam_edits"}, bounds=SCRIPTED_BOUNDS
)


def reply_or_fail(request: EngineRequest, index: int) -> list[int]:
    if request.adapter:
        raise ScriptedFailure("There is no adapter of this name.")
    if request.sampling.watermark or request.beam or request.logprobs > 3 or request.n > 6 or len(request.stop_ids) > 2:
        raise ScriptedFailure("The script does not do this.")
    return echo_prompt(request, index)


def make_scripted(folder: Path) -> Engine:
    return ScriptedEngine(reply_or_fail, info=CONFORMING_MODEL, max_batch=SLOTS, step_seconds=0.001, load_seconds=0.01)


def make_simulated(folder: Path) -> Engine:
    return ThreadEngine(simulated_settings(folder))


ENGINE_KINDS = {
    "scripted": EngineKind(make_scripted, make_scripted),
    "thread": EngineKind(lambda folder: ThreadEngine(model_settings(folder)), make_simulated),
    "process": EngineKind(
        lambda folder: RemoteEngine(model_settings(folder)), lambda folder: RemoteEngine(simulated_settings(folder))
    ),
    "simulated": EngineKind(make_simulated, make_simulated, {"logprobs": 1}),
}


VLLM_PYTHON = os.environ.get("PARLEY_VLLM_PYTHON")  # set by `make test-engines`
if VLLM_PYTHON:
    ENGINE_KINDS["vllm"] = EngineKind(
        lambda folder: VLLMEngine(
            VLLMSettings(
                model=str(folder),
                python=VLLM_PYTHON,
                kv_memory=256 << 20,
                max_batch=SLOTS,
                arguments=["--enforce-eager"],
            )
        ),
        make_simulated,
        {"adapter": "unknown"},
    )


# for each feature, a request that uses it; adapters and page transfer have tests of their own
FEATURE_OPTIONS: dict[EngineFeature, dict[str, Any]] = {
    "top_k": {"sampling": SamplingOptions(top_k=2)},
    "min_p": {"sampling": SamplingOptions(min_p=0.1)},
    "typical_p": {"sampling": SamplingOptions(typical_p=0.5)},
    "repetition_penalty": {"sampling": SamplingOptions(repetition_penalty=1.1)},
    "presence_penalty": {"sampling": SamplingOptions(presence_penalty=0.1)},
    "frequency_penalty": {"sampling": SamplingOptions(frequency_penalty=0.1)},
    "penalty_window": {"sampling": SamplingOptions(repetition_penalty=1.1, frequency_penalty=0.1, penalty_window=3)},
    "logit_bias": {"sampling": SamplingOptions(logit_bias={7: 1.0})},
    "allowed_tokens": {"sampling": SamplingOptions(allowed=[7, 8])},
    "banned_tokens": {"sampling": SamplingOptions(banned=[[7], [7, 8]])},
    "no_repeat_ngram": {"sampling": SamplingOptions(no_repeat_ngram=2)},
    "watermark": {"sampling": SamplingOptions(watermark=True)},
    "min_tokens": {"min_tokens": 3, "stop_ids": [5, 6]},
    "beam_search": {"beam": BeamOptions(2), "n": 2},
    "beam_edits": {"beam": BeamOptions(2), "sampling": SamplingOptions(logit_bias={7: 1.0})},
    "logprobs": {"logprobs": 2},
    "named_logprobs": {"logprobs": 0, "logprob_ids": [7, 8]},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "grammar": {"grammar": '{"grammars": [{"lark_grammar": "start: /[a-z ]+/"}]}'},
    "limited_grammar": {
        "grammar": '{"grammars": [{"lark_grammar": "start: /[a-z ]+/"}]}',
        "sampling": SamplingOptions(allowed=[7, 8]),
    },
    "thinking_budget": {"reasoning_limit": ReasoningLimit("<think>", "</think>", True, 2, [9])},
    "cache_salt": {"cache_salt": "a"},
}
BOUND_OPTIONS: dict[EngineBound, Callable[[int], dict[str, Any]]] = {
    "logprobs": lambda value: {"logprobs": value},
    "n": lambda value: {"n": value},
    "stop_ids": lambda value: {"stop_ids": list(range(100, 100 + value))},
    "temperature": lambda value: {"sampling": SamplingOptions(temperature=value)},
    "presence_penalty": lambda value: {"sampling": SamplingOptions(presence_penalty=value)},
    "frequency_penalty": lambda value: {"sampling": SamplingOptions(frequency_penalty=value)},
    "logit_bias": lambda value: {"sampling": SamplingOptions(logit_bias={token % 200: 1.0 for token in range(value)})},
    "allowed_tokens": lambda value: {"sampling": SamplingOptions(allowed=[token % 200 for token in range(value)])},
    "banned_tokens": lambda value: {
        "sampling": SamplingOptions(banned=[[5, 100 + token % 90] for token in range(value)])
    },
    "named_logprobs": lambda value: {"logprobs": 0, "logprob_ids": list(range(value))},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and a cost model."""
    path = tmp_path_factory.mktemp("model")
    write_model(path, "qwen3")
    (path / "costs.toml").write_text(COSTS)
    return path


@pytest.fixture(scope="module", params=ENGINE_KINDS)
def kind(request: pytest.FixtureRequest) -> EngineKind:
    return ENGINE_KINDS[request.param]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(kind: EngineKind, folder: Path):
    """A ready engine that all tests of its kind share."""
    shared_engine = kind.make(folder)
    await shared_engine.start()
    await asyncio.wait_for(shared_engine.wait_until_ready(), 12 * WAIT_SECONDS)
    yield shared_engine
    await shared_engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def fresh_engine(kind: EngineKind, folder: Path):
    """An engine for one test, not started."""
    light_engine = kind.make_light(folder)
    yield light_engine
    await light_engine.close()


def make_request(request_id: str, max_tokens: int = 8, **options: Any) -> EngineRequest:
    return EngineRequest(
        **{"id": request_id, "token_ids": PROMPT, "max_tokens": max_tokens, "sampling": GREEDY, **options}
    )


async def read_outputs(stream: OutputStream) -> list[EngineOutput]:
    """Return all outputs of a stream up to its end."""
    collected: list[EngineOutput] = []
    async with asyncio.timeout(WAIT_SECONDS):
        while outputs := await stream.next_outputs():
            collected += outputs
    return collected


async def first_outputs(stream: OutputStream) -> list[EngineOutput]:
    return await asyncio.wait_for(stream.next_outputs(), WAIT_SECONDS)


async def run_request(engine: Engine, request_id: str, **options: Any) -> list[EngineOutput]:
    return await read_outputs(engine.submit_request(make_request(request_id, **options)))


def token_ids(outputs: list[EngineOutput], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.token_ids]


def choice_endings(outputs: list[EngineOutput], index: int = 0) -> list[str]:
    """Return how a choice ends: the finish reason of its last output, and of any other output that has one."""
    own_outputs = [output for output in outputs if output.index == index]
    assert own_outputs and own_outputs[-1].finish_reason is not None
    return [output.finish_reason for output in own_outputs if output.finish_reason is not None]


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def test_load_reports_readiness_and_then_describes_the_model(fresh_engine: Engine):
    assert fresh_engine.state == "idle" and fresh_engine.info is None
    await fresh_engine.start()
    assert fresh_engine.state == "loading"
    early = await run_request(fresh_engine, "early")
    assert choice_endings(early) == ["error"] and early[-1].error
    info = await asyncio.wait_for(fresh_engine.wait_until_ready(), WAIT_SECONDS)
    assert fresh_engine.state == "ready" and fresh_engine.info is info
    assert info.vocab_size > max(PROMPT) and info.max_model_len > len(PROMPT) and info.page_tokens > 0
    assert choice_endings(await run_request(fresh_engine, "early")) == ["length"]


async def test_submit_never_blocks_and_refuses_an_id_in_use(engine: Engine):
    stream = engine.submit_request(make_request("same", LONG))
    assert engine.open_stream_count == 1
    with pytest.raises(ValueError, match="same"):
        engine.submit_request(make_request("same"))
    await first_outputs(stream)
    stream.cancel_choice()
    assert engine.open_stream_count == 0
    assert choice_endings(await run_request(engine, "again")) == ["length"]
    assert choice_endings(await run_request(engine, "again")) == ["length"]


async def test_capability_that_is_declared_never_fails_a_request(engine: Engine):
    assert FEATURE_OPTIONS.keys() == ALL_ENGINE_FEATURES - {
        "adapters",
        "page_transfer",
    }
    assert engine.info is not None
    for feature in sorted(engine.info.features & FEATURE_OPTIONS.keys()):
        outputs = await run_request(engine, feature, **FEATURE_OPTIONS[feature])
        assert "error" not in choice_endings(outputs), (feature, outputs[-1].error)


async def test_both_limits_of_each_bound_are_accepted(engine: Engine):
    assert engine.info is not None
    for bound, (least, most) in engine.info.bounds.items():
        for value in (max(0, least), most):
            outputs = await run_request(engine, f"{bound} {value}", **BOUND_OPTIONS[bound](int(value)))
            assert "error" not in choice_endings(outputs), (bound, value, outputs[-1].error)


async def test_greedy_answers_are_equal_alone_and_in_a_batch(engine: Engine):
    alone = token_ids(await run_request(engine, "alone"))
    assert len(alone) == 8
    others = [engine.submit_request(make_request(f"other {k}", 20, token_ids=[9, 10, 11 + k])) for k in range(2)]
    assert token_ids(await run_request(engine, "among others")) == alone
    for stream in others:
        assert choice_endings(await read_outputs(stream)) == ["length"]


async def test_choice_draws_as_a_single_request_with_its_seed(engine: Engine):
    options = {"sampling": SamplingOptions(temperature=1.0), "seed": 7}
    outputs = await run_request(engine, "three", n=3, **options)
    for index in range(3):
        single = await run_request(engine, f"single {index}", **{**options, "seed": 7 + index})
        assert token_ids(outputs, index) == token_ids(single)


@pytest.mark.parametrize("n", [1, 3, SLOTS + 2])
async def test_terminal_output_comes_once_per_choice(engine: Engine, n: int):
    outputs = await run_request(engine, f"{n} choices", n=n)
    assert {output.index for output in outputs} == set(range(n))
    for index in range(n):
        assert choice_endings(outputs, index) == ["length"]
        assert len(token_ids(outputs, index)) == 8
    assert engine.open_stream_count == 0


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_length_is_exact_even_for_few_tokens(engine: Engine, max_tokens: int):
    outputs = await run_request(engine, f"{max_tokens} tokens", max_tokens=max_tokens)
    assert choice_endings(outputs) == ["length"]
    assert len(token_ids(outputs)) == max_tokens


async def test_stop_token_ends_its_choice_and_is_reported(engine: Engine):
    tokens = token_ids(await run_request(engine, "unstopped"))
    stop_id = tokens[2]
    outputs = await run_request(engine, "stopped", stop_ids=[stop_id])
    assert choice_endings(outputs) == ["stop"] and outputs[-1].stop_id == stop_id
    assert token_ids(outputs) == tokens[: tokens.index(stop_id) + 1]
    assert len(token_ids(await run_request(engine, "stopped late", stop_ids=[stop_id], min_tokens=8))) == 8


async def test_cancel_ends_outputs_and_frees_the_slot(engine: Engine):
    streams = [engine.submit_request(make_request(f"long {k}", LONG)) for k in range(SLOTS)]
    for stream in streams:
        await first_outputs(stream)
    waiting = engine.submit_request(make_request("waiting", 2))
    doomed = streams[0]
    doomed.cancel_choice()
    assert not doomed.open_choices and await doomed.next_outputs() == []
    assert choice_endings(await read_outputs(waiting)) == ["length"]
    assert all(stream.open_choices for stream in streams[1:])
    assert await doomed.next_outputs() == []
    for stream in streams:
        stream.cancel_choice()
        stream.cancel_choice()
    await wait_until(lambda: engine.stats.running == 0 and engine.stats.waiting == 0)


async def test_cancel_of_one_choice_leaves_the_others(engine: Engine):
    stream = engine.submit_request(make_request("one of two", 40, n=2))
    outputs = await first_outputs(stream)
    stream.cancel_choice(0)
    later_outputs = await read_outputs(stream)
    assert all(output.index == 1 for output in later_outputs)
    assert choice_endings(outputs + later_outputs, 1) == ["length"]
    assert len(token_ids(outputs + later_outputs, 1)) == 40


async def test_error_of_one_request_leaves_the_others(engine: Engine, kind: EngineKind):
    stream = engine.submit_request(make_request("good", 40))
    bad_outputs = await run_request(engine, "bad", **kind.bad_request)
    assert choice_endings(bad_outputs) == ["error"] and bad_outputs[-1].error
    outputs = await read_outputs(stream)
    assert choice_endings(outputs) == ["length"] and len(token_ids(outputs)) == 40


async def test_statistics_count_tokens_and_return_to_zero(engine: Engine):
    await wait_until(lambda: engine.stats.running == engine.stats.waiting == engine.stats.used_pages == 0)
    before = engine.stats.prompt_tokens, engine.stats.generated_tokens, engine.stats.steps
    streams = [engine.submit_request(make_request(f"counted {k}")) for k in range(SLOTS + 1)]
    for stream in streams:
        await read_outputs(stream)
    await wait_until(lambda: engine.stats.running == engine.stats.waiting == engine.stats.used_pages == 0)
    assert engine.stats.prompt_tokens == before[0] + len(streams) * len(PROMPT)
    assert engine.stats.generated_tokens == before[1] + len(streams) * 8
    assert engine.stats.steps > before[2]
    assert engine.open_stream_count == 0


async def test_questions_have_answers_while_ready_and_after_it(engine: Engine, fresh_engine: Engine):
    assert await asyncio.wait_for(engine.reset_prefix_cache(), WAIT_SECONDS)
    assert await asyncio.wait_for(engine.load_adapter("missing", "/there/is/no/such/folder"), WAIT_SECONDS)
    assert choice_endings(await run_request(engine, "after an answer")) == ["length"]
    assert not await fresh_engine.reset_prefix_cache()
    assert await fresh_engine.load_adapter("missing", "/there/is/no/such/folder")


async def test_close_ends_all_streams_and_refuses_later_requests(fresh_engine: Engine):
    await fresh_engine.start()
    await asyncio.wait_for(fresh_engine.wait_until_ready(), WAIT_SECONDS)
    streams = [fresh_engine.submit_request(make_request(f"open {k}", LONG, n=2)) for k in range(SLOTS)]
    await first_outputs(streams[0])
    await asyncio.wait_for(fresh_engine.close(), WAIT_SECONDS)
    assert fresh_engine.state == "closed" and fresh_engine.open_stream_count == 0
    for number, stream in enumerate([*streams, fresh_engine.submit_request(make_request("late", n=2))]):
        outputs = await read_outputs(stream)
        for index in range(2):
            assert choice_endings(outputs, index) == ["error"], number
        assert outputs[-1].error
    await fresh_engine.close()
    assert not await fresh_engine.reset_prefix_cache()


async def test_close_is_allowed_at_any_time(kind: EngineKind, folder: Path):
    idle_engine, loading_engine = kind.make_light(folder), kind.make_light(folder)
    await idle_engine.close()
    await loading_engine.start()
    waiter = asyncio.create_task(loading_engine.wait_until_ready())
    await loading_engine.close()
    with pytest.raises(EngineFailed):
        await waiter


async def test_death_ends_all_streams_and_is_reported(folder: Path):
    dying_engine = RemoteEngine(simulated_settings(folder))
    await dying_engine.start()
    try:
        await asyncio.wait_for(dying_engine.wait_until_ready(), WAIT_SECONDS)
        streams = [dying_engine.submit_request(make_request(f"open {k}", LONG, n=2)) for k in range(3)]
        await first_outputs(streams[0])
        assert dying_engine.process_id is not None
        os.kill(dying_engine.process_id, signal.SIGKILL)
        for stream in streams:
            outputs = await read_outputs(stream)
            for index in range(2):
                assert choice_endings(outputs, index) == ["error"]
            assert "SIGKILL" in (outputs[-1].error or "")
        assert dying_engine.state == "restarting" and dying_engine.open_stream_count == 0
        assert dying_engine.stats.running == dying_engine.stats.used_pages == 0
        assert choice_endings(await run_request(dying_engine, "meanwhile")) == ["error"]
    finally:
        await dying_engine.close()


async def test_load_failure_is_reported(tmp_path: Path):
    for failing_engine in (
        ScriptedEngine(load_failure="There is no model here."),
        ThreadEngine(ParleySettings(model="", costs=str(tmp_path / "missing.toml"))),
        RemoteEngine(ParleySettings(model="", costs=str(tmp_path / "missing.toml"))),
        RemoteEngine(ParleySettings(model=""), command=(sys.executable, "-c", "import sys; sys.exit(3)")),
    ):
        await failing_engine.start()
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(failing_engine.wait_until_ready(), WAIT_SECONDS)
        assert failing_engine.state == "failed" and failing_engine.failure
        assert choice_endings(await run_request(failing_engine, "late")) == ["error"]
        await failing_engine.close()


async def test_every_guarantee_in_the_docstring_has_a_test():
    guarantees = re.findall(r"^ *\* (\w+): ", Engine.__doc__ or "", re.MULTILINE)
    assert len(guarantees) == len(set(guarantees)) >= 10
    tests = [name for name in globals() if name.startswith("test_")]
    for guarantee in guarantees:
        assert any(name.startswith(f"test_{guarantee}_") for name in tests), guarantee
