"""The comparison of two commits: its intervals, its verdicts, and the processes that run the loads."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from compare_commits import (
    CONFIDENCE,
    MIN_PAIRS,
    REPOSITORY,
    GuardError,
    Worker,
    compare_pairs,
    interval_rank,
    unpack_commit,
)


@given(st.integers(MIN_PAIRS, 60))
def test_guard_interval_is_the_narrowest_that_holds_the_median_with_its_confidence(count):
    def probability_outside(rank):
        return 2 * sum(math.comb(count, k) for k in range(rank + 1)) / 2**count

    rank = interval_rank(count)
    assert probability_outside(rank) <= 1 - CONFIDENCE
    assert 2 * rank + 3 > count or probability_outside(rank + 1) > 1 - CONFIDENCE


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.05, 1.06, 1.07], "slower"),
        ([0.90, 0.91, 0.92], "faster"),
        ([0.90, 1.00, 1.02], "not slower"),
        ([1.00, 1.00, 1.00], "not slower"),
        ([0.95, 1.00, 1.20], "cannot tell: more pairs"),
    ],
)
def test_guard_verdict_needs_the_whole_interval(ratios, verdict):
    pairs = [(200.0, 200.0 * ratio) for ratio in ratios * 4]
    assert compare_pairs(pairs).verdict(0.03) == verdict


def test_guard_names_what_cannot_be_compared():
    with pytest.raises(GuardError, match="no commit no-such-commit"):
        unpack_commit("no-such-commit")
    worker = Worker(REPOSITORY)
    try:
        with pytest.raises(GuardError, match="no-such-load"):
            worker.run_load("no-such-load")
    finally:
        worker.stop()
