"""The step budget for prompt tokens: it stays within its bounds, and steps keep their target time on any machine.
Seconds are simulated, not measured: a machine is a formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.core.step_budget import ALONE, FIRST, LEAST, MOST, Fixed, Pace, Timed


@dataclass(frozen=True)
class Machine:
    """Cost of a step in seconds: a fixed part, a part for each row, and one for each token that a prompt's row sees."""

    fixed: float
    each: float
    pair: float = 0.0

    def cost(self, decodes: int, chunks: list[tuple[int, int]]) -> float:
        rows = decodes + sum(count for _, count in chunks)
        pairs = sum(count * (start + (count - 1) / 2) for start, count in chunks)
        return self.fixed + rows * self.each + pairs * self.pair


def step(pace: Pace, machine: Machine, decodes: int, start: int = 0, length: int = 1 << 20) -> tuple[int, float]:
    """Run one step with as much of one prompt as fits; return its prompt tokens and its cost in seconds."""
    pace.begin(decodes)
    count = min(pace.room(start), length) if length else 0
    if count:
        pace.take(start, count)
    seconds = machine.cost(decodes, [(start, count)])
    pace.observe(seconds)
    return count, seconds


def serve(pace: Pace, machine: Machine, decodes: int, steps: int = 60) -> tuple[int, float]:
    """Run steps at the beginnings of prompts, every third without a prompt; return the last one."""
    last = 0, 0.0
    for number in range(steps):
        if decodes and number % 3 == 0:
            step(pace, machine, decodes, length=0)
        last = step(pace, machine, decodes)
    return last


def budget(pace: Pace, decodes: int = 0, start: int = 0) -> int:
    pace.begin(decodes)
    return pace.room(start)


@pytest.mark.parametrize("decodes", [0, 1, 8])
@pytest.mark.parametrize(("fixed", "each"), [(0.001, 0.0001), (0.05, 0.0005), (0.02, 0.002), (0.0, 0.001)])
def test_step_time_converges_to_target(fixed: float, each: float, decodes: int) -> None:
    count, seconds = serve(Timed(0.25), Machine(fixed, each), decodes)
    alone = 1 if decodes else ALONE
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
    fixed: float, each: float, depth: float, decodes: int, before: int, length: int
) -> None:
    """Holds on any machine and after any history, even none. The exception is progress: LEAST tokens always run."""
    pace, machine = Timed(0.25), Machine(fixed, each, each * depth)
    asked = 0.25 if decodes else 0.25 * ALONE
    for _ in range(before):
        step(pace, machine, decodes, length=0)
    start = 0
    while start < length:
        count, seconds = step(pace, machine, decodes, start, length - start)
        least = machine.cost(decodes, [(start, min(count, LEAST))])
        assert seconds <= max(1.1 * asked, least), (start, count, seconds)
        assert count > 0
        start += count


@pytest.mark.parametrize("decodes", [0, 4])
def test_only_prompts_without_decodes_get_longer_steps(decodes: int) -> None:
    pace, machine = Timed(0.25), Machine(0.01, 0.001, 0.001 / 1000)
    serve(pace, machine, 1)
    serve(pace, machine, decodes)
    pace.begin(decodes)
    room = pace.room(0)
    assert 0.2 <= machine.cost(decodes, [(0, room)]) / (1 if decodes else ALONE) <= 0.26
    pace.take(0, room)
    assert pace.room(0) == 0
    pace.begin(decodes)
    pace.take(0, 48)  # a short prompt: the next one in the step fills the usual time
    assert 0.2 <= machine.cost(decodes, [(0, 48), (0, pace.room(0))]) <= 0.26


def test_chunks_shrink_with_prompt_depth() -> None:
    pace, machine = Timed(0.25), Machine(0.01, 0.0005, 0.0005 / 1000)
    start, counts = 0, []
    while start < 8000:
        count, seconds = step(pace, machine, 4, start)
        counts.append((count, seconds))
        start += count
    assert counts[-1][0] < max(count for count, _ in counts) / 3
    assert all(0.18 <= seconds <= 0.26 for _, seconds in counts[10:])  # small chunks are coarse: whole pages only


def test_taken_tokens_reduce_remaining_step_budget() -> None:
    pace, machine = Timed(0.25), Machine(0.01, 0.0005, 0.0005 / 4000)
    serve(pace, machine, 4)
    pace.begin(4)
    whole, chunks = pace.room(0), []
    while room := pace.room(1000):
        chunks.append((1000, min(room, 64)))
        pace.take(*chunks[-1])
    assert 0 < sum(count for _, count in chunks) < whole
    assert 0.15 <= machine.cost(4, chunks) <= 0.26


@pytest.mark.parametrize(("each", "count"), [(1e-9, MOST), (1.0, LEAST)])
def test_step_budget_stops_at_bounds_on_extreme_machines(each: float, count: int) -> None:
    assert serve(Timed(0.25), Machine(0.0, each), 1)[0] == count


def test_step_budget_shrinks_when_tokens_cost_more() -> None:
    pace = Timed(0.25)
    before, _ = serve(pace, Machine(0.02, 0.0005), 1)
    after, seconds = serve(pace, Machine(0.02, 0.005), 1)
    assert after < before / 5 and seconds < 0.3


def test_step_budget_recovers_from_one_slow_step() -> None:
    pace, machine = Timed(0.25), Machine(0.02, 0.001)
    step(pace, Machine(60.0, 0.0), 0)
    assert budget(pace) == LEAST
    step(pace, Machine(0.0, 0.001), 0)
    assert budget(pace) > LEAST
    before, _ = serve(pace, machine, 1)
    step(pace, Machine(60.0, 0.0), 1)
    assert budget(pace, 1) >= before * 0.9


def test_step_budget_at_most_doubles_per_step() -> None:
    """The cost of a small chunk says little about a large one, so the budget at most doubles."""
    pace = Timed(0.25)
    assert budget(pace) == FIRST
    step(pace, Machine(1e-6, 0.0), 0)
    assert budget(pace) == 2 * FIRST


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
    seen: list[tuple[int, int, int, float]], decodes: int, start: int, seconds: float, tokens: int
) -> None:
    timed, fixed = Timed(seconds), Fixed(tokens)
    for pace in (timed, fixed):
        for rows, count, position, cost in seen:
            pace.begin(rows)
            if min(count, pace.room(position)):
                pace.take(position, min(count, pace.room(position)))
            pace.observe(cost)
        pace.begin(decodes)
    assert LEAST <= timed.room(start) <= MOST and timed.room(start) % 16 == 0
    assert fixed.room(start) == max(LEAST, (tokens - decodes) // 16 * 16)
