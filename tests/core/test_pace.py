"""The prefill budget: bounds always, convergence on machines of any speed. Seconds here are made up, not measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.core.pace import FIRST, LEAST, MOST, Fixed, Timed


def serve(pace: Timed, fixed: float, each: float, decodes: int, steps: int = 60) -> tuple[int, float]:
    """Steps on a machine of that speed, every third without prompts; the last budget and what its step costs."""
    budget = seconds = 0.0
    for step in range(steps):
        if decodes and step % 3 == 0:
            pace.observe(decodes, 0, fixed + decodes * each)
        budget = pace.budget(decodes)
        seconds = fixed + (decodes + budget) * each
        pace.observe(decodes, int(budget), seconds)
    return int(budget), seconds


@pytest.mark.parametrize("decodes", [0, 1, 8])
@pytest.mark.parametrize(("fixed", "each"), [(0.001, 0.0001), (0.05, 0.0005), (0.02, 0.002), (0.0, 0.001)])
def test_steps_come_to_last_what_was_asked(fixed: float, each: float, decodes: int) -> None:
    budget, seconds = serve(Timed(0.25), fixed, each, decodes)
    assert 0.18 <= seconds <= 0.27
    assert budget % 16 == 0


@pytest.mark.parametrize(("each", "budget"), [(1e-9, MOST), (1.0, LEAST)])
def test_no_machine_is_too_fast_or_too_slow(each: float, budget: int) -> None:
    assert serve(Timed(0.25), 0.0, each, 1)[0] == budget


def test_it_follows_when_tokens_become_dearer() -> None:
    pace = Timed(0.25)
    before, _ = serve(pace, 0.02, 0.0005, 1)
    after, seconds = serve(pace, 0.02, 0.005, 1)
    assert after < before / 5 and seconds < 0.3


def test_one_slow_step_is_forgiven() -> None:
    pace = Timed(0.25)
    pace.observe(0, FIRST, 60.0)
    assert pace.budget(0) == LEAST
    pace.observe(0, LEAST, LEAST * 0.001)
    assert pace.budget(0) > LEAST
    before, _ = serve(pace, 0.02, 0.001, 1)
    pace.observe(1, before, 60.0)
    assert pace.budget(1) >= before * 0.9


def test_it_never_leaps() -> None:
    """What a small chunk cost says little of a large one: at most twice what was tried."""
    pace = Timed(0.25)
    assert pace.budget(0) == FIRST
    pace.observe(0, FIRST, 1e-6)
    assert pace.budget(0) == 2 * FIRST


def test_one_dear_decode_does_not_make_prompts_free() -> None:
    pace = Timed(0.25)
    pace.observe(1, 0, 10.0)
    pace.observe(1, 512, 0.8)
    assert pace.budget(0) == 640  # 0.25 s at a quarter of 0.8 s for 512 tokens


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9000), st.floats(0, 1e6)), max_size=40),
    st.integers(0, 10_000),
    st.floats(0.001, 10),
    st.integers(1, 20_000),
)
@settings(deadline=None, max_examples=100)
def test_bounds_hold_whatever_is_seen(
    seen: list[tuple[int, int, float]], decodes: int, seconds: float, tokens: int
) -> None:
    timed, fixed = Timed(seconds), Fixed(tokens)
    for observation in seen:
        timed.observe(*observation)
        fixed.observe(*observation)
    assert LEAST <= timed.budget(decodes) <= MOST and timed.budget(decodes) % 16 == 0
    assert fixed.budget(decodes) == max(LEAST, (tokens - decodes) // 16 * 16)
