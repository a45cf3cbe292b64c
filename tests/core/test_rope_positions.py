"""Positions on three axes are those of Transformers' ``get_rope_index``, for whole prompts and in pieces."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import parley.model.load  # noqa: F401  (before Transformers, so that torchvision can be imported)
from parley.core.rope_positions import RopePositions, hashed_items, largest_position
from parley.types import EmbeddingRun, MediaItem

TEXT, IMAGE, VIDEO = 0, 1, 2  # token types of Transformers
MERGE = 2  # patches per embedding in rows and columns


@functools.cache
def family_model(family: str) -> Any:
    from support.multimodal_models import FAMILIES
    from transformers import AutoConfig, AutoModel

    shape = FAMILIES[family].config
    vision = shape["vision_config"] | {"tokens_per_second": 3, "spatial_merge_size": MERGE}
    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.for_model(family, **shape | {"vision_config": vision}))


GRID = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
PART = st.one_of(
    st.tuples(st.just(TEXT), st.integers(1, 9)),
    st.tuples(st.just(IMAGE), GRID),
    st.tuples(st.just(VIDEO), GRID, st.sampled_from([0.04, 0.5, 1.0, 1 / 3, 2.7, 60.0])),
)


def transformers_positions(family: str, parts: list, types: list[int]) -> tuple[torch.Tensor, int]:
    def grids(kind: int) -> torch.Tensor | None:
        sizes = [(frames, MERGE * rows, MERGE * columns) for _, (frames, rows, columns), *_ in of_kind(kind)]
        return torch.tensor(sizes) if sizes else None

    def of_kind(kind: int) -> list:
        return [part for part in parts if part[0] == kind]

    positions, delta = family_model(family).get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=grids(IMAGE),
        video_grid_thw=grids(VIDEO),
        second_per_grid_ts=torch.tensor([part[2] for part in of_kind(VIDEO)]),
    )
    return positions[:, 0], int(delta)


def build_prompt(family: str, parts: list) -> tuple[list[MediaItem], list[int]]:
    """The items of a prompt and the types of its tokens. A text token follows each item, as a mark does."""
    items: list[MediaItem] = []
    types: list[int] = []
    for kind, size, *seconds in parts:
        if kind == TEXT:
            types += [TEXT] * size
            continue
        frames, rows, columns = size
        step = float(torch.tensor(seconds[0]) * 3) if seconds and family == "qwen2_5_vl" else 1.0
        is_split = kind == VIDEO and family in ("qwen3_vl", "glm4v")  # a text with the time stands before each frame
        shapes = [(1, rows, columns)] * frames if is_split else [size]
        runs: list[EmbeddingRun] = []
        start = len(types)
        for grid in shapes:
            count = grid[0] * rows * columns
            runs.append(EmbeddingRun(len(types) - start, count, grid, step))
            types += [kind] * count + [TEXT]
        items.append(MediaItem("video", b"", start, len(types) - 1 - start, runs))
    return items, types


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(PART, min_size=1, max_size=6), cuts=st.lists(st.integers(0, 200), max_size=3))
def test_positions_equal_those_of_transformers(family, parts, cuts):
    # An image of several frames does not exist, and would have the time steps of a video.
    parts = [(IMAGE, (1, *part[1][1:])) if part[0] == IMAGE else part for part in parts]
    items, types = build_prompt(family, parts)
    expected, delta = transformers_positions(family, parts, types)
    positions = RopePositions(items, len(types))
    assert positions.output_delta == delta
    if items:
        assert largest_position(items, len(types)) == expected.max()
    borders = sorted({0, len(types), *(cut for cut in cuts if cut < len(types))})
    pieces = [positions.axes(start, end) for start, end in itertools.pairwise(borders)]
    assert torch.cat([torch.tensor(piece) for piece in pieces], 1).tolist() == expected.tolist()
    after = len(types) + 5
    assert positions.axes(after, after + 2) == ([after + delta, after + 1 + delta],) * 3


IMAGE_ID, VIDEO_ID, AUDIO_ID, VISION_START, AUDIO_START, END = range(1, 7)


@functools.cache
def omni_model(thinker: str) -> Any:
    from support.multimodal_models import FAMILIES
    from transformers import AutoConfig, AutoModelForMultimodalLM

    names = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "audio_start_token_id")
    ids = dict(zip(names, (IMAGE_ID, VIDEO_ID, AUDIO_ID, VISION_START, AUDIO_START), strict=True))
    config = AutoConfig.for_model(thinker, **FAMILIES[thinker].config, **ids, position_id_per_seconds=13)
    with torch.device("meta"):
        return AutoModelForMultimodalLM.from_config(config).model


@pytest.mark.parametrize("thinker", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just(IMAGE_ID), GRID),
            st.tuples(st.just(VIDEO_ID), GRID, st.sampled_from([1.0, 2.0, 8.0])),
            st.tuples(st.just(AUDIO_ID), st.integers(2, 12)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_text_of_omni_models_continues_behind_the_last_frame(thinker, parts):
    """Images, videos and clips, with a mark before and after each and a text behind it."""
    token_ids: list[int] = [0]
    items: list[MediaItem] = []
    grids: dict[int, list] = {IMAGE_ID: [], VIDEO_ID: []}
    mel_frames: list[int] = []
    for kind, size, *seconds in parts:
        if kind == AUDIO_ID:
            token_ids += [AUDIO_START, *[AUDIO_ID] * size, END, 0, 0]
            mel_frames.append((4 if thinker == "qwen2_5_omni_thinker" else 8) * size)
            continue
        grid = (1, *size[1:]) if kind == IMAGE_ID else size
        grids[kind].append((grid[0], MERGE * grid[1], MERGE * grid[2]))
        token_ids.append(VISION_START)
        step = 13 * seconds[0] if seconds else 1.0
        run = EmbeddingRun(0, math.prod(grid), grid, step, text_follows_time=True)
        items.append(MediaItem("video", b"", len(token_ids), run.count, [run]))
        token_ids += [*[kind] * run.count, END, 0, 0]
    ids = torch.tensor([token_ids])
    expected, delta = omni_model(thinker).get_rope_index(
        ids,
        image_grid_thw=torch.tensor(grids[IMAGE_ID]) if grids[IMAGE_ID] else None,
        video_grid_thw=torch.tensor(grids[VIDEO_ID]) if grids[VIDEO_ID] else None,
        attention_mask=torch.ones_like(ids),
        audio_seqlens=torch.tensor(mel_frames),
        second_per_grids=torch.tensor([part[2] for part in parts if part[0] == VIDEO_ID]),
    )
    positions = RopePositions(items, len(token_ids))
    assert positions.output_delta == int(delta)
    assert torch.equal(torch.tensor(positions.axes(0, len(token_ids))), expected[:, 0].long())
    assert hashed_items(items, token_ids) == items


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3), cut=st.integers(0, 60))
def test_positions_of_numbered_images_equal_those_of_transformers(sizes, cut):
    """HunyuanOCR has four axes. An image has a mark after each row, and one at both ends."""
    types: list[int] = [TEXT]
    items: list[MediaItem] = []
    for rows, columns in sizes:
        count = rows * (columns + 1)
        runs = [
            EmbeddingRun(0, 1),
            EmbeddingRun(1, count, (1, rows, columns + 1), is_numbered=True),
            EmbeddingRun(1 + count, 1),
        ]
        items.append(MediaItem("image", b"", len(types), count + 2, runs))
        types += [IMAGE] * (count + 2) + [TEXT]
    expected, delta = family_model("hunyuan_vl").get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=torch.tensor([(1, MERGE * rows, MERGE * columns) for rows, columns in sizes]),
    )
    positions = RopePositions(items, len(types))
    assert (positions.output_delta, positions.has_jump) == (int(delta), False) == (0, False)
    border = min(cut, len(types))
    pieces = [torch.tensor(positions.axes(start, end)) for start, end in ((0, border), (border, len(types)))]
    assert torch.equal(torch.cat(pieces, 1), expected[:, 0])
    assert positions.axes(len(types), len(types) + 2) == ([len(types), len(types) + 1],) * 4
    assert hashed_items(items, types) == items


def test_prompt_without_grids_needs_no_rope_positions():
    item = MediaItem("image", b"", 2, 4, [EmbeddingRun(0, 4)])
    assert RopePositions.of_prompt([item], 9) is None
    assert largest_position([item], 9) == 8


def test_page_hashes_cover_a_jump_of_positions_at_the_output():
    near, far = (MediaItem("video", b"", 1, 8, [EmbeddingRun(0, 8, (8, 1, 1), step)]) for step in (1.0, 120.0))
    assert hashed_items([near], range(20)) == [near]
    assert [(item.start, item.count) for item in hashed_items([far], range(20))] == [(1, 8), (20, 1)]


@pytest.mark.parametrize(("step", "expected"), [(1e300, 1 + 10**9), (math.inf, 1 + 10**9), (math.nan, 12)])
def test_steps_out_of_range_still_give_positions(step, expected):
    """Clients choose the frame rate, so no number may raise an error here."""
    item = MediaItem("video", b"", 1, 2, [EmbeddingRun(0, 2, (2, 1, 1), step)])
    assert largest_position([item], 14) == expected


def test_frames_far_apart_reach_beyond_the_number_of_tokens():
    item = MediaItem("video", b"", 1, 8, [EmbeddingRun(0, 8, (8, 1, 1), 120.0)])
    assert largest_position([item], 14) == 1 + 7 * 120
