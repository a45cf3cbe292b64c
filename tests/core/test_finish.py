"""The output limit and the finish reason of a choice."""

from __future__ import annotations

import pytest

from parley.core.finish_reason import finish_reason, output_limit
from parley.core.sequence import Sequence
from parley.types import EmbeddingRun, EngineFinishReason, EngineRequest, MediaItem


@pytest.mark.parametrize(
    ("max_tokens", "context", "expected"), [(5, 100, 5), (5, 13, 3), (0, 100, 0), (5, 10, 0), (5, 7, 0), (-1, 100, 0)]
)
def test_output_limit_fits_max_tokens_and_context(max_tokens: int, context: int, expected: int) -> None:
    assert output_limit(EngineRequest("w", list(range(10)), max_tokens), context) == expected


def test_output_limit_counts_positions_of_frames_far_apart() -> None:
    video = MediaItem("video", b"", 1, 4, [EmbeddingRun(0, 4, (4, 1, 1), 10.0)])
    assert output_limit(EngineRequest("w", list(range(10)), 100, media=[video]), 50) == 50 - 32


@pytest.mark.parametrize(
    ("output", "min_tokens", "expected"),
    [
        ([1], 0, None),
        ([9], 0, "stop"),
        ([1, 9], 0, "stop"),
        ([9, 1], 0, None),
        ([1, 2, 3], 0, "length"),
        ([1, 2, 9], 0, "stop"),
        ([1, 9], 2, None),
        ([1, 2, 9], 2, "stop"),
        ([1, 2, 9], 3, "length"),
    ],
)
def test_finish_reason_of_last_token(output: list[int], min_tokens: int, expected: EngineFinishReason | None) -> None:
    request = EngineRequest("w", [9], max_tokens=3, min_tokens=min_tokens, stop_ids=[9])
    sequence = Sequence(
        "w",
        0,
        request,
        [9, *output],
        prompt_len=1,
        seed=0,
        arrival_number=0,
        output_limit=3,
        stop_token_ids=frozenset([9]),
    )
    assert finish_reason(sequence) == expected
