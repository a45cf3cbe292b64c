"""The step budget for prompt tokens: it stays within its bounds, and steps keep their target time on any machine.
Seconds are simulated, not measured: a machine is a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.core.step_budget import (
    INITIAL_CHUNK,
    MAX_CHUNK,
    MIN_CHUNK,
    SOLO_FACTOR,
    FixedBudget,
    StepBudget,
    TimedBudget,
)


@dataclass(frozen=True)
class SimulatedMachine:
    """Cost of a step in seconds: a fixed part, a part for each row, and one for each token that a prompt's row sees."""

    step_seconds: float
    row_seconds: float
    pair_seconds: float = 0.0

    def cost(self, decodes: int, chunks: list[tuple[int, int]]) -> float:
        rows = decodes + sum(count for _, count in chunks)
        pairs = sum(count * (start + (count - 1) / 2) for start, count in chunks)
        return self.step_seconds + rows * self.row_seconds + pairs * self.pair_seconds


def run_step(
    pace: StepBudget, machine: SimulatedMachine, decodes: int, start: int = 0, length: int = 1 << 20
) -> tuple[int, float]:
    """Run one step with as much of one prompt as fits; return its prompt tokens and its cost in seconds."""
    pace.begin_step(decodes)
    count = min(pace.tokens_left(start), length) if length else 0
    if count:
        pace.spend_tokens(start, count)
    seconds = machine.cost(decodes, [(start, count)])
    pace.observe_step(seconds)
    return count, seconds


def run_steps(pace: StepBudget, machine: SimulatedMachine, decodes: int, steps: int = 60) -> tuple[int, float]:
    """Run steps at the beginnings of prompts, every third without a prompt; return the last one."""
    last = 0, 0.0
    for number in range(steps):
        if decodes and number % 3 == 0:
            run_step(pace, machine, decodes, length=0)
        last = run_step(pace, machine, decodes)
    return last


def first_chunk(pace: StepBudget, decodes: int = 0, start: int = 0) -> int:
    pace.begin_step(decodes)
    return pace.tokens_left(start)


@pytest.mark.parametrize("decodes", [0, 1, 8])
@pytest.mark.parametrize(("fixed", "token_seconds"), [(0.001, 0.0001), (0.05, 0.0005), (0.02, 0.002), (0.0, 0.001)])
def test_step_time_converges_to_target(fixed: float, token_seconds: float, decodes: int) -> None:
    count, seconds = run_steps(TimedBudget(0.25), SimulatedMachine(fixed, token_seconds), decodes)
    alone = 1 if decodes else SOLO_FACTOR
    assert 0.16 * alone <= seconds <= 0.26 * alone
    assert count % 16 == 0


@settings(deadline=None, max_examples=60)
@given(
    st.floats(0, 0.05),
    st.floats(0.0002, 0.003),
    st.floats(0, 1 / 1000),
    st.integers(0, 32),
    st.integers(0, 10),
    st.integers(16, 12_000),
)
def test_steps_of_long_prompt_stay_within_time_target(
    fixed: float, token_seconds: float, depth: float, decodes: int, before: int, length: int
) -> None:
    """Holds on any machine and after any history, even none. The exception is progress: LEAST tokens always run."""
    pace, machine = TimedBudget(0.25), SimulatedMachine(fixed, token_seconds, token_seconds * depth)
    target_seconds = 0.25 if decodes else 0.25 * SOLO_FACTOR
    for _ in range(before):
        run_step(pace, machine, decodes, length=0)
    start = 0
    while start < length:
        count, seconds = run_step(pace, machine, decodes, start, length - start)
        least = machine.cost(decodes, [(start, min(count, MIN_CHUNK))])
        assert seconds <= max(1.1 * target_seconds, least), (start, count, seconds)
        assert count > 0
        start += count


@pytest.mark.parametrize("decodes", [0, 4])
def test_only_prompts_without_decodes_get_longer_steps(decodes: int) -> None:
    pace, machine = TimedBudget(0.25), SimulatedMachine(0.01, 0.001, 0.001 / 1000)
    run_steps(pace, machine, 1)
    run_steps(pace, machine, decodes)
    pace.begin_step(decodes)
    room = pace.tokens_left(0)
    assert 0.2 <= machine.cost(decodes, [(0, room)]) / (1 if decodes else SOLO_FACTOR) <= 0.26
    pace.spend_tokens(0, room)
    assert pace.tokens_left(0) == 0
    pace.begin_step(decodes)
    pace.spend_tokens(0, 48)  # a short prompt: the next one in the step fills the usual time
    assert 0.2 <= machine.cost(decodes, [(0, 48), (0, pace.tokens_left(0))]) <= 0.26


def test_chunks_shrink_with_prompt_depth() -> None:
    pace, machine = TimedBudget(0.25), SimulatedMachine(0.01, 0.0005, 0.0005 / 1000)
    start, counts = 0, []
    while start < 8000:
        count, seconds = run_step(pace, machine, 4, start)
        counts.append((count, seconds))
        start += count
    assert counts[-1][0] < max(count for count, _ in counts) / 3
    assert all(0.18 <= seconds <= 0.26 for _, seconds in counts[10:])  # small chunks are coarse: whole pages only


def test_taken_tokens_reduce_remaining_step_budget() -> None:
    pace, machine = TimedBudget(0.25), SimulatedMachine(0.01, 0.0005, 0.0005 / 4000)
    run_steps(pace, machine, 4)
    pace.begin_step(4)
    whole, chunks = pace.tokens_left(0), []
    while room := pace.tokens_left(1000):
        chunks.append((1000, min(room, 64)))
        pace.spend_tokens(*chunks[-1])
    assert 0 < sum(count for _, count in chunks) < whole
    assert 0.15 <= machine.cost(4, chunks) <= 0.26


@pytest.mark.parametrize(("token_seconds", "count"), [(1e-9, MAX_CHUNK), (1.0, MIN_CHUNK)])
def test_step_budget_stops_at_bounds_on_extreme_machines(token_seconds: float, count: int) -> None:
    assert run_steps(TimedBudget(0.25), SimulatedMachine(0.0, token_seconds), 1)[0] == count


def test_step_budget_shrinks_when_tokens_cost_more() -> None:
    pace = TimedBudget(0.25)
    before, _ = run_steps(pace, SimulatedMachine(0.02, 0.0005), 1)
    after, seconds = run_steps(pace, SimulatedMachine(0.02, 0.005), 1)
    assert after < before / 5 and seconds < 0.3


def test_step_budget_recovers_from_one_slow_step() -> None:
    pace, machine = TimedBudget(0.25), SimulatedMachine(0.02, 0.001)
    run_step(pace, SimulatedMachine(60.0, 0.0), 0)
    assert first_chunk(pace) == MIN_CHUNK
    run_step(pace, SimulatedMachine(0.0, 0.001), 0)
    assert first_chunk(pace) > MIN_CHUNK
    before, _ = run_steps(pace, machine, 1)
    run_step(pace, SimulatedMachine(60.0, 0.0), 1)
    assert first_chunk(pace, 1) >= before * 0.9


@pytest.mark.parametrize("slowdown", [1.3, 1.7, 2.5])
def test_step_budget_follows_a_slower_machine_after_one_step(slowdown: float) -> None:
    """Other programs slow the machine down for a second or two: fewer steps than the costs of rows are learnt from."""
    pace, machine = TimedBudget(0.25), SimulatedMachine(0.01, 0.001)
    before, _ = run_steps(pace, machine, 4)
    slow = SimulatedMachine(0.01 * slowdown, 0.001 * slowdown)
    run_step(pace, slow, 4)
    for _ in range(8):
        assert run_step(pace, slow, 4)[1] <= 0.28
    for _ in range(15):  # as many as are remembered
        run_step(pace, machine, 4)
    assert run_step(pace, machine, 4)[0] >= before * 0.8


def test_step_budget_at_most_doubles_per_step() -> None:
    """The cost of a small chunk says little about a large one, so the budget at most doubles."""
    pace = TimedBudget(0.25)
    assert first_chunk(pace) == INITIAL_CHUNK
    run_step(pace, SimulatedMachine(1e-6, 0.0), 0)
    assert first_chunk(pace) == 2 * INITIAL_CHUNK


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 9000), st.integers(0, 30_000), st.floats(0, 1e6)), max_size=40
    ),
    st.integers(0, 10_000),
    st.integers(0, 100_000),
    st.floats(0.001, 10),
    st.integers(1, 20_000),
)
@settings(deadline=None, max_examples=100)
def test_step_budget_bounds_hold_for_any_observations(
    observations: list[tuple[int, int, int, float]], decodes: int, start: int, seconds: float, tokens: int
) -> None:
    timed, fixed = TimedBudget(seconds), FixedBudget(tokens)
    for pace in (timed, fixed):
        for rows, count, position, cost in observations:
            pace.begin_step(rows)
            if min(count, pace.tokens_left(position)):
                pace.spend_tokens(position, min(count, pace.tokens_left(position)))
            pace.observe_step(cost)
        pace.begin_step(decodes)
    assert MIN_CHUNK <= timed.tokens_left(start) <= MAX_CHUNK and timed.tokens_left(start) % 16 == 0
    assert fixed.tokens_left(start) == max(MIN_CHUNK, (tokens - decodes) // 16 * 16)
