"""The encoder scheduler: each sequence runs whole and gets its vector once, oldest first, within the step budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.invariant_ledger import Broken, Steady

from parley.core.loop import Loop
from parley.core.sequence import Sampled, Sequence, Step
from parley.types import Output, Pooling, Settings, Stats, Work


class Sums:
    """A runner whose vector is the sum of the tokens."""

    blocks, max_model_len, vocab_size, generates, dimensions, proposer = 0, 400, 500, False, 4, None

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.sizes: list[int] = []
        self.broken: set[str] = set()

    def admit(self, sequence: Sequence) -> None:
        if sequence.id in self.broken:
            raise Broken

    def release(self, sequence: Sequence) -> None:
        raise AssertionError("nobody has a slot")

    def run(self, step: Step) -> list[Sampled]:
        assert not step.fresh and not step.hashed
        assert all((row.start, row.count, row.pool) == (0, len(row.sequence), True) for row in step.rows)
        self.steps.append([row.sequence.id for row in step.rows])
        self.sizes.append(step.tokens)
        if self.broken.intersection(self.steps[-1]):
            raise Broken
        return [Sampled(vector=sum(row.sequence.tokens).to_bytes(4, "little")) for row in step.rows]


class Bench:
    def __init__(self, *budgets: int, most: int = 8):
        self.runner = Sums()
        self.outputs: list[Output] = []
        self.stats = Stats()
        self.loop = Loop(self.runner, Settings(model="m", max_batch=most), self._receive, Steady(*budgets))

    def _receive(self, outputs: list[Output], stats: Stats) -> None:
        self.outputs += outputs
        self.stats = stats

    def drain(self) -> None:
        while self.loop.step():
            self.loop.check()
        assert self.loop.idle and self.stats.running == self.stats.waiting == 0


def ask(number: int, length: int) -> Work:
    return Work(f"w{number}", [number % 500] * length, 0, pooling=Pooling())


@given(st.lists(st.integers(1, 400), max_size=30), st.lists(st.integers(1, 600), min_size=1), st.data())
@settings(deadline=None)
def test_encoder_scheduler_serves_each_sequence_once_in_order(lengths: list[int], budgets: list[int], data) -> None:
    bench = Bench(*budgets)
    cancelled = set()
    for number, length in enumerate(lengths):
        bench.loop.add(ask(number, length))
        if data.draw(st.booleans()):
            bench.loop.step()
        if data.draw(st.integers(0, 4)) == 0:
            bench.loop.cancel(f"w{number}")
            cancelled.add(f"w{number}")
    bench.drain()
    told = [output.id for output in bench.outputs]
    assert told == sorted(told, key=lambda id: int(id[1:])) and len(set(told)) == len(told)
    assert {f"w{number}" for number in range(len(lengths))} - cancelled <= set(told)
    assert all(
        len(ids) == 1 or size <= max(budgets) for ids, size in zip(bench.runner.steps, bench.runner.sizes, strict=True)
    )
    for output in bench.outputs:
        number = int(output.id[1:])
        assert output.finish == "stop" and output.vector == (number * lengths[number]).to_bytes(4, "little")


def test_encoder_step_respects_max_batch() -> None:
    bench = Bench(10_000, most=3)
    for number in range(8):
        bench.loop.add(ask(number, 5))
    bench.drain()
    assert [len(ids) for ids in bench.runner.steps] == [3, 3, 2]


def test_encoder_failure_ends_only_affected_sequences() -> None:
    bench = Bench(20)
    for number in range(6):
        bench.loop.add(ask(number, 10))
    bench.loop.step()
    bench.runner.broken = {"w3"}
    bench.drain()
    ends = {output.id: output.finish for output in bench.outputs}
    assert ends == {"w0": "stop", "w1": "stop", "w2": "stop", "w3": "error", "w4": "stop", "w5": "stop"}
    run = bench.runner.run
    bench.runner.run = lambda step: run(step)[1:]  # type: ignore[method-assign]
    bench.loop.add(ask(7, 3))
    bench.drain()
    assert bench.outputs[-1].finish == "error"


@pytest.mark.parametrize(
    "work", [Work("w", [1], 5), Work("w", [1] * 401, 0, pooling=Pooling()), Work("w", [1], 0, pooling=Pooling(5))]
)
def test_encoder_rejects_unsupported_work(work: Work) -> None:
    bench = Bench(100)
    bench.loop.add(work)
    bench.drain()
    assert [output.finish for output in bench.outputs] == ["error"] and not bench.runner.steps
    assert bench.loop.reset()
