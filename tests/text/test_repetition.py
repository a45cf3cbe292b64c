"""Repetition detection against a brute-force search of every pattern size; a repetitive answer ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from test_choice import encode_plain, feed_choice

from parley.text.tokens.repetition import RepetitionDetector
from parley.types import RepetitionPattern, StopConditions

tokens = st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 2), min_size=1, max_size=5).map(
    lambda pattern: pattern * 12
)


@given(tokens, st.integers(1, 4), st.integers(0, 6), st.integers(2, 5))
@settings(max_examples=300, deadline=None)
def test_repetition_agrees_with_brute_force_search(ids: list[int], min_size: int, extra_size: int, count: int) -> None:
    repetition = RepetitionPattern(min_size, min_size + extra_size, count)
    repeats = RepetitionDetector(repetition)
    for end, token_id in enumerate(ids, 1):
        sizes = (
            size for size in range(repetition.min_pattern_size, repetition.max_pattern_size + 1) if size * count <= end
        )
        expected = any(ids[end - size * count : end] == ids[end - size : end] * count for size in sizes)
        assert repeats.add_token_id(token_id) == expected


def test_answer_ends_at_repetition_limit() -> None:
    ids = encode_plain("One. ") + encode_plain("ab") * 9
    pattern = len(encode_plain("ab"))
    conditions = StopConditions(repetition=RepetitionPattern(1, 8, 3))
    for sizes in ([1], [100]):
        result = feed_choice(ids, sizes, stop_conditions=conditions)
        assert result.done is not None and (result.done.reason, result.done.stop) == ("repetition", None)
        assert result.usage[1] == len(encode_plain("One. ")) + 3 * pattern
        assert result.text["content"] == "One. ababab"
    late = feed_choice(
        ids, stop_conditions=StopConditions(repetition=RepetitionPattern(1, 8, 3), min_tokens=len(ids) - pattern)
    )
    assert late.text["content"] == "One. " + "ab" * 8
