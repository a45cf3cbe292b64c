"""The simulated engine: step and link times come from a cost model, and it answers like any engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.core.sequence import Sequence, StepRow
from parley.engine.messages import CancelRequest, FreeReservation, PagesReceived, SubmitRequest
from parley.engine.protocol import EngineFailed
from parley.errors import Unsupported
from parley.serving.engine_features import check_engine_features
from parley.types import EngineRequest, ParleySettings, Request, SamplingOptions, TextPrompt
from parley.worker.simulated_engine import SimulatedCosts, SimulatedLink, read_costs
from parley.worker.thread_engine import ThreadEngine

COSTS_FOLDER = Path(__file__).parents[2] / "bench" / "costs"
COSTS = SimulatedCosts([(1, 0.010), (64, 0.011), (256, 0.040)], blocks=64, length=1024, context=1e-6, pair=1e-8)


def make_row(start: int, count: int) -> StepRow:
    request = EngineRequest(id="w", token_ids=[1] * (start + count), max_tokens=9)
    sequence = Sequence("w", 0, request, list(request.token_ids), len(request.token_ids), 0, 0)
    return StepRow(sequence, start, count, sample=True)


@given(st.integers(1, 4096))
def test_step_cost_interpolates_and_extrapolates_the_measured_rows(tokens):
    for at, seconds in COSTS.rows:
        assert COSTS.batch_seconds(at) == pytest.approx(seconds)
    assert COSTS.batch_seconds(tokens) <= COSTS.batch_seconds(tokens + 1)
    assert COSTS.batch_seconds(448) == pytest.approx(0.040 + 192 * (0.029 / 192))


@given(st.integers(0, 900), st.integers(2, 100), st.integers(1, 99))
def test_chunked_prefill_costs_as_many_attention_pairs_as_one_chunk(start, count, cut):
    cut = 1 + cut % (count - 1) if count > 2 else 1
    whole = COSTS.step_seconds([make_row(start, count)]) - COSTS.batch_seconds(count)
    chunks = [make_row(start, cut), make_row(start + cut, count - cut)]
    if min(cut, count - cut) > 1:
        parts = sum(COSTS.step_seconds([chunk]) - COSTS.batch_seconds(chunk.count) for chunk in chunks)
        assert parts == pytest.approx(whole)
    decode = COSTS.step_seconds([make_row(start, 1)]) - COSTS.batch_seconds(1)
    assert decode == pytest.approx(1e-6 * (start + 1))


def test_simulated_link_delivers_pages_in_order_per_key():
    link = SimulatedLink(msgspec.structs.replace(COSTS, token_bytes=1000, bandwidth=16_000.0, latency=0.5))
    assert link.delivery_time(PagesReceived("a", 2), 10.0) == pytest.approx(12.5)
    assert link.delivery_time(PagesReceived("b", 1), 10.0) == pytest.approx(13.5)
    assert link.delivery_time(PagesReceived("a", 3), 11.0) == pytest.approx(14.5)  # one more page
    assert link.delivery_time(SubmitRequest(EngineRequest(id="a", token_ids=[1], max_tokens=1)), 11.0) == pytest.approx(
        14.5
    )
    assert link.delivery_time(CancelRequest("a"), 11.5) == pytest.approx(14.5)
    assert link.delivery_time(FreeReservation("a"), 12.0) == pytest.approx(14.5)
    assert (
        link.delivery_time(CancelRequest("a"), 12.0) == 12.0 and link.delivery_time(FreeReservation("c"), 12.0) == 12.0
    )
    quick = SimulatedLink(COSTS)
    assert quick.delivery_time(PagesReceived("a", 100), 1.0) == 1.0


@pytest.mark.parametrize(
    "text", ["", "rows = [[1, 1.0]]\nblocks = 1\nlength = 1", "rows = [[2, 1.0], [1, 2.0]]\nblocks = 1\nlength = 1",
             "rows = [[1, 2.0], [2, 1.0]]\nblocks = 1\nlength = 1",
             "rows = [[1, 1.0], [2, 2.0]]\nblocks = 1\nlength = 1\nspeed = 0", "rows = 1", "x = "],
)  # fmt: skip
async def test_invalid_cost_model_fails_the_start_with_a_sentence(text, tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text(text)
    engine = ThreadEngine(ParleySettings(model="m", costs=str(file)))
    await engine.start()
    with pytest.raises(EngineFailed, match=r"cost model .*costs\.toml cannot be read"):
        await engine.wait_until_ready()
    await engine.close()


@pytest.mark.parametrize("name", sorted(file.name for file in COSTS_FOLDER.glob("*.toml")))
def test_reads_every_cost_model_of_the_benchmarks(name):
    assert read_costs(str(COSTS_FOLDER / name)).blocks > 1000


async def test_simulated_engine_repeats_prompts_and_refuses_logprobs(tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text("rows = [[1, 0.0], [64, 0.001]]\nblocks = 64\nlength = 1024\n")
    engine = ThreadEngine(ParleySettings(model="m", costs=str(file)))
    await engine.start()
    info = await engine.wait_until_ready()
    assert info.kv_pages == 64 and info.arena is not None and not info.arena.regions
    prompt = list(range(5, 45))
    for cached in (0, 32):
        stream, tokens = engine.submit_request(EngineRequest(id=f"w{cached}", token_ids=prompt, max_tokens=50)), []
        while outputs := await stream.next_outputs():
            for output in outputs:
                tokens += output.token_ids
                assert output.cached_tokens == cached and output.error is None
        assert tokens == (prompt * 2)[:50]
    stream = engine.submit_request(EngineRequest(id="scores", token_ids=prompt, max_tokens=2, logprobs=1))
    assert [output.finish_reason for output in await stream.next_outputs()] == ["error"]
    await engine.close()


async def test_simulated_engine_declares_its_features_and_refuses_others_by_name(tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text("rows = [[1, 0.0], [64, 0.001]]\nblocks = 64\nlength = 1024\n")
    engine = ThreadEngine(ParleySettings(model="m", costs=str(file)))
    await engine.start()
    info = await engine.wait_until_ready()
    await engine.close()
    assert info.features == {"min_tokens", "cache_salt", "page_transfer"}
    request = Request(id="a", model="m", prompts=[TextPrompt("a")], sampling=SamplingOptions(temperature=0.5, top_k=3))
    with pytest.raises(Unsupported, match="'top_k' is not available with the engine simulated"):
        check_engine_features(request, info)
