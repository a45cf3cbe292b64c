"""Positions of tokens in and around images of MiniCPM-V 4.7 are those of Transformers' ``get_rope_index``."""

from __future__ import annotations

import functools
import itertools
from math import prod
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import parley.model.load  # noqa: F401  (before Transformers, so that torchvision can be imported)
from parley.core.media.placeholders import placement_fault
from parley.core.rope_positions import RopePositions, hashed_items, largest_position
from parley.text.media_canvas import spread_patches
from parley.text.media_prompt import find_media_items
from parley.types import CanvasMarks, ProcessedMedia

SLICE_START, SLICE_END, IMAGE_START, IMAGE_END, NEWLINE, IMAGE, VIDEO, WORD = range(1, 9)
MARKS = CanvasMarks(SLICE_START, [SLICE_END, IMAGE_START, IMAGE_END, NEWLINE])
MERGE = 4  # patches per embedding in rows and columns
TOKENS = {"image": IMAGE, "video": VIDEO}
SIDE = st.integers(1, 6)
# The grid of the whole, how many slices there are in columns and rows, and the grid of a slice
FRAME = st.tuples(st.tuples(SIDE, SIDE), st.tuples(st.integers(0, 3), st.integers(1, 3)), st.tuples(SIDE, SIDE))
ITEM = st.one_of(
    st.tuples(st.just("image"), st.tuples(FRAME)),
    st.tuples(st.just("video"), st.lists(FRAME, min_size=1, max_size=3).map(tuple)),
)
TEXT = st.lists(st.sampled_from([WORD, NEWLINE]), max_size=3)


@functools.cache
def reference_model() -> Any:
    from support.multimodal_models import FAMILIES
    from transformers import AutoConfig, AutoModel

    ids = {
        "slice_start_id": SLICE_START, "slice_end_id": SLICE_END, "image_start_id": IMAGE_START,
        "image_end_id": IMAGE_END, "newline_id": NEWLINE, "image_token_id": IMAGE, "video_token_id": VIDEO,
    }  # fmt: skip
    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.for_model("minicpmv4_7", **FAMILIES["minicpmv4_7"].config | ids))


def frame_tokens(frame: Any, mark: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return the tokens of an image, or of a frame, and its grids."""
    whole, (columns, rows), part = frame
    slices = [*[SLICE_START], *[mark] * prod(part), SLICE_END] * columns
    lines = [token for row in range(rows) for token in [*[NEWLINE] * (row > 0), *slices]] if columns else []
    grids = [(1, *whole), *[(1, *part)] * (columns * rows)]
    return [IMAGE_START, *[mark] * prod(whole), IMAGE_END, *lines], grids


@given(st.lists(st.tuples(TEXT, ITEM), min_size=1, max_size=3), TEXT)
@settings(deadline=None, max_examples=60)
def test_positions_are_those_of_transformers(parts, end):
    token_ids: list[int] = []
    items: list[ProcessedMedia] = []
    for text, (kind, frames) in parts:
        token_ids += text
        grids: list[tuple[int, int, int]] = []
        for frame in frames:
            tokens, frame_grids = frame_tokens(frame, TOKENS[kind])
            token_ids += tokens
            grids += frame_grids
        count = sum(map(prod, grids))
        items.append(ProcessedMedia(kind, b"", "", kind, count, grids=grids, canvas_marks=MARKS))
    token_ids += end
    sizes = {
        kind: [[MERGE * side for side in grid[1:]] for item in items if item.kind == kind for grid in item.grids]
        for kind in TOKENS
    }
    types = [{IMAGE: 1, VIDEO: 2}.get(token_id, 0) for token_id in token_ids]
    expected, delta = reference_model().get_rope_index(
        torch.tensor([token_ids]),
        mm_token_type_ids=torch.tensor([types]),
        target_sizes=torch.tensor(sizes["image"]) if sizes["image"] else None,
        target_sizes_videos=torch.tensor(sizes["video"]) if sizes["video"] else None,
    )
    media = find_media_items(token_ids, items, TOKENS.__getitem__)
    assert placement_fault(media, len(token_ids)) is None
    positions = RopePositions.of_prompt(media, len(token_ids))
    assert positions is not None
    assert list(positions.axes(0, len(token_ids))) == expected[:, 0].tolist()
    pieces = [positions.axes(start, min(start + 5, len(token_ids))) for start in range(0, len(token_ids), 5)]
    assert [list(itertools.chain(*axis)) for axis in zip(*pieces, strict=True)] == expected[:, 0].tolist()
    assert positions.output_delta == int(delta)
    assert largest_position(media, len(token_ids)) == int(expected.max())
    covered = [item for item in hashed_items(media, token_ids) if item.positions is not None]
    assert all(token_ids[item.start] == IMAGE_START for item in covered)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 3},
        {"start": -1},
        {"times": [0] * 4, "rows": [0] * 4, "columns": [0] * 4},
        {"times": [0] * 9, "rows": [0] * 9, "columns": [0] * 9},
        {"rows": [0] * 5},
        {"rows": []},
        {"columns": [0, 0, -2, 0, 0, 0]},
        {"advance": 0},
    ],
)
def test_impossible_positions_are_refused(changes):
    token_ids = [WORD, IMAGE_START, *[IMAGE] * 4, IMAGE_END, WORD]
    item = ProcessedMedia("image", b"", "", "image", 4, grids=[(1, 2, 2)], canvas_marks=MARKS)
    (placed,) = find_media_items(token_ids, [item], TOKENS.__getitem__)
    assert placed.positions is not None and placement_fault([placed], len(token_ids)) is None
    positions = msgspec.structs.replace(placed.positions, **changes)
    fault = placement_fault([msgspec.structs.replace(placed, positions=positions)], len(token_ids))
    assert fault == "The positions of the image at token 2 are not those of its tokens."


def test_equal_distances_are_rounded_as_by_torch():
    for size in range(1, 130):
        for count in range(1, 40):
            assert spread_patches(size, count) == torch.linspace(0, size - 1, count).round().long().tolist(), (
                size,
                count,
            )
