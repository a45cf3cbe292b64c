"""The encoder scheduler: each sequence runs whole and gets its vector once, oldest first, within the step budget."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.invariant_ledger import CyclicBudget, InjectedFailure

from parley.core.engine_loop import EngineLoop
from parley.core.sequence import RowResult, Sequence, Step
from parley.types import EngineOutput, EngineRequest, EngineStats, ParleySettings, PoolingOptions


class SumRunner:
    """A runner whose vector is the sum of the tokens."""

    page_count, max_model_len, vocab_size, generates, dimensions, proposer = 0, 400, 500, False, 4, None
    pooling_tasks = frozenset({"embed"})
    long_rope_after = inf
    state_slots = None
    snapshot_slots = 0
    starter = None
    media_encoder = None

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.sizes: list[int] = []
        self.failing_requests: set[str] = set()

    def admit_sequence(self, sequence: Sequence) -> None:
        if sequence.request_id in self.failing_requests:
            raise InjectedFailure

    def release_slot(self, sequence: Sequence) -> None:
        raise AssertionError("no sequence has a slot")

    def run_step(self, step: Step) -> list[RowResult]:
        assert not step.fresh_pages and not step.published_pages
        assert all((row.start, row.count, row.make_vector) == (0, len(row.sequence), True) for row in step.rows)
        self.steps.append([row.sequence.request_id for row in step.rows])
        self.sizes.append(step.total_tokens)
        if self.failing_requests.intersection(self.steps[-1]):
            raise InjectedFailure
        return [RowResult(vector=sum(row.sequence.tokens).to_bytes(4, "little")) for row in step.rows]


class EncoderHarness:
    def __init__(self, *budgets: int, max_batch: int = 8):
        self.runner = SumRunner()
        self.outputs: list[EngineOutput] = []
        self.stats = EngineStats()
        self.loop = EngineLoop(
            self.runner, ParleySettings(model="m", max_batch=max_batch), self._receive, CyclicBudget(*budgets)
        )

    def _receive(self, outputs: list[EngineOutput], stats: EngineStats) -> None:
        self.outputs += outputs
        self.stats = stats

    def drain(self) -> None:
        while self.loop.step():
            self.loop.check_invariants()
        assert self.loop.is_idle and self.stats.running == self.stats.waiting == 0


def embedding_request(number: int, length: int) -> EngineRequest:
    return EngineRequest(f"w{number}", [number % 500] * length, 0, pooling=PoolingOptions())


@given(st.lists(st.integers(1, 400), max_size=30), st.lists(st.integers(1, 600), min_size=1), st.data())
@settings(deadline=None)
def test_encoder_scheduler_serves_each_sequence_once_in_order(lengths: list[int], budgets: list[int], data) -> None:
    bench = EncoderHarness(*budgets)
    cancelled = set()
    for number, length in enumerate(lengths):
        bench.loop.add_request(embedding_request(number, length))
        if data.draw(st.booleans()):
            bench.loop.step()
        if data.draw(st.integers(0, 4)) == 0:
            bench.loop.cancel_request(f"w{number}")
            cancelled.add(f"w{number}")
    bench.drain()
    finished_ids = [output.id for output in bench.outputs]
    assert finished_ids == sorted(finished_ids, key=lambda request_id: int(request_id[1:])) and len(
        set(finished_ids)
    ) == len(finished_ids)
    assert {f"w{number}" for number in range(len(lengths))} - cancelled <= set(finished_ids)
    assert all(
        len(ids) == 1 or size <= max(budgets) for ids, size in zip(bench.runner.steps, bench.runner.sizes, strict=True)
    )
    for output in bench.outputs:
        number = int(output.id[1:])
        assert output.finish_reason == "stop" and output.vector == (number * lengths[number]).to_bytes(4, "little")


def test_encoder_step_respects_max_batch() -> None:
    bench = EncoderHarness(10_000, max_batch=3)
    for number in range(8):
        bench.loop.add_request(embedding_request(number, 5))
    bench.drain()
    assert [len(ids) for ids in bench.runner.steps] == [3, 3, 2]


def test_encoder_failure_ends_only_affected_sequences() -> None:
    bench = EncoderHarness(20)
    for number in range(6):
        bench.loop.add_request(embedding_request(number, 10))
    bench.loop.step()
    bench.runner.failing_requests = {"w3"}
    bench.drain()
    ends = {output.id: output.finish_reason for output in bench.outputs}
    assert ends == {"w0": "stop", "w1": "stop", "w2": "stop", "w3": "error", "w4": "stop", "w5": "stop"}
    run = bench.runner.run_step
    bench.runner.run_step = lambda step: run(step)[1:]  # type: ignore[method-assign]
    bench.loop.add_request(embedding_request(7, 3))
    bench.drain()
    assert bench.outputs[-1].finish_reason == "error"


@pytest.mark.parametrize(
    "invalid_request",
    [
        EngineRequest("w", [1], 5),
        EngineRequest("w", [1] * 401, 0, pooling=PoolingOptions()),
        EngineRequest("w", [1], 0, pooling=PoolingOptions(5)),
    ],
)
def test_encoder_rejects_unsupported_requests(invalid_request: EngineRequest) -> None:
    bench = EncoderHarness(100)
    bench.loop.add_request(invalid_request)
    bench.drain()
    assert [output.finish_reason for output in bench.outputs] == ["error"] and not bench.runner.steps
    assert bench.loop.reset_prefix_cache()
