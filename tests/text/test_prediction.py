"""The accepted part of a prediction: equal for equal texts, each token counted once, runs found again after changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.text.tokens.prediction import PredictedTokens, PredictionFollower

TEXT = list(range(100, 140))


def accepted_count(prediction: list[int], answer: list[int]) -> int:
    follower = PredictionFollower(PredictedTokens(prediction))
    for token_id in answer:
        follower.follow_token(token_id)
    assert follower.accepted_count + follower.rejected_count == len(prediction)
    return follower.accepted_count


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        (TEXT, 40),
        ([], 0),
        (TEXT[:7], 7),
        ([1, 2, 3, *TEXT], 40),  # reasoning before it
        ([*TEXT[:10], 1, *TEXT[11:]], 39),  # a token replaced
        ([*TEXT[:10], 1, 2, 3, *TEXT[10:]], 40),  # tokens inserted
        (TEXT[:10] + TEXT[20:], 30),  # tokens left out
        (TEXT[20:] + TEXT[:20], 40),  # in another order
        (TEXT + TEXT, 40),  # twice
        ([*TEXT[:10], 1, *TEXT[11:14], 1], 10),  # shorter than a run
        ([1, 2, TEXT[0], 3], 0),
    ],
)
def test_follower_accepts_runs_of_prediction(answer: list[int], accepted: int) -> None:
    assert accepted_count(TEXT, answer) == accepted


def test_follower_counts_short_predictions() -> None:
    assert accepted_count([], [1, 2]) == 0
    assert (
        accepted_count([5], [1, 5, 5]) == 1
        and accepted_count([5, 6], [1, 5, 6]) == 2
        and accepted_count([5, 6], [6, 5]) == 0
    )


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_accepted_tokens_never_exceed_prediction_or_answer(prediction: list[int], answer: list[int]) -> None:
    assert accepted_count(prediction, answer) <= min(len(prediction), len(answer))
    assert accepted_count(prediction, prediction) == len(prediction)
