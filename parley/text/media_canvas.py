"""The positions of tokens around and in the images of MiniCPM-V 4.7 (Canvas M-RoPE).

An image is a small view of the whole, then detailed slices of it in rows. All of them lie on one canvas: a slice at its
place, the whole stretched over all slices. The marks around them stand at corners of the canvas and of the slices. This
is ``get_rope_index`` of MiniCPMV4_7 in Transformers, as a function of the prompt's tokens and of the sizes of the
slices.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from parley.types import CanvasMarks, MediaItem, ProcessedMedia, TokenPositions

_FLOAT = struct.Struct("f")


@dataclass
class _Slice:
    """Embeddings ``start .. end`` in a grid."""

    start: int
    end: int
    rows: int
    columns: int


@dataclass
class _Frame:
    """The view of a whole image, or of a video's frame, and its slices. ``item``: the number of its item."""

    item: int
    whole: _Slice
    slices: list[_Slice] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The position after the last embedding."""
        return self.slices[-1].end if self.slices else self.whole.end


def place_on_canvas(
    token_ids: Sequence[int], items: Sequence[ProcessedMedia], placed: Sequence[MediaItem], marks: CanvasMarks
) -> list[MediaItem]:
    """Return the items of a prompt with the positions of their tokens; the first item of a group has them for all."""
    groups = _group_frames(token_ids, items, placed, marks)
    positions = {group[0].item: _group_positions(token_ids, group, marks.all) for group in groups}
    return [msgspec.structs.replace(item, positions=positions.get(number)) for number, item in enumerate(placed)]


def _group_frames(
    token_ids: Sequence[int], items: Sequence[ProcessedMedia], placed: Sequence[MediaItem], marks: CanvasMarks
) -> list[list[_Frame]]:
    """Return the frames of a prompt. Those with nothing but marks between them are a group."""
    groups: list[list[_Frame]] = []
    last = 0
    for number, (item, place) in enumerate(zip(items, placed, strict=True)):
        for run, (_, rows, columns) in zip(place.runs, item.grids, strict=True):
            start = place.start + run.offset
            part = _Slice(start, start + run.count, rows, columns)
            if groups and token_ids[start - 1] == marks.slice_start:
                groups[-1][-1].slices.append(part)
            elif groups and all(token_id in marks.all for token_id in token_ids[last : start - 1]):
                groups[-1].append(_Frame(number, part))
            else:
                groups.append([_Frame(number, part)])
            last = part.end
    return groups


def _group_positions(token_ids: Sequence[int], frames: Sequence[_Frame], marks: frozenset[int]) -> TokenPositions:
    """Return the positions of a group's tokens, with the marks around them."""
    start, end = frames[0].whole.start - 1, frames[-1].last
    while end < len(token_ids) and token_ids[end] in marks:
        end += 1
    axes = [[0] * (end - start) for _ in range(3)]
    origin = 0
    for frame in frames:
        first = frame.whole.start - 1
        cursor = frame.last
        while cursor < end and token_ids[cursor] in marks:
            cursor += 1
        for axis in axes:
            axis[first - start : cursor - start] = [origin] * (cursor - first)
        _, rows, columns = axes
        height, width = _lay_out(frame, rows, columns, start, origin)
        rows[first - start] = columns[first - start] = origin - 1
        if frame.whole.end < cursor:
            rows[frame.whole.end - start], columns[frame.whole.end - start] = origin + height, origin + width
        if frame.slices:
            _lay_out_marks(frame, rows, columns, start, origin, cursor)
        origin += max(height, width) + 1
    return TokenPositions(start, axes[0], axes[1], axes[2], origin)


def _lay_out(frame: _Frame, rows: list[int], columns: list[int], start: int, origin: int) -> tuple[int, int]:
    """Set the rows and columns of a frame's embeddings. Return the size of its canvas: height and width."""
    whole, (row_count, per_row) = frame.whole, _slice_rows(frame.slices)
    height, width = whole.rows, whole.columns
    for number, part in enumerate(frame.slices):
        first = frame.slices[0]
        height, width = row_count * first.rows, per_row * first.columns
        row, column = number // per_row * first.rows, number % per_row * first.columns
        for cell in range(part.end - part.start):
            rows[part.start + cell - start] = origin + row + cell // part.columns
            columns[part.start + cell - start] = origin + column + cell % part.columns
    row_places, column_places = spread_patches(height, whole.rows), spread_patches(width, whole.columns)
    for cell in range(whole.end - whole.start):
        rows[whole.start + cell - start] = origin + row_places[cell // whole.columns]
        columns[whole.start + cell - start] = origin + column_places[cell % whole.columns]
    return height, width


def _lay_out_marks(frame: _Frame, rows: list[int], columns: list[int], start: int, origin: int, end: int) -> None:
    """Set the rows and columns of the marks around slices, and of the line breaks between rows of them."""
    slices, first = frame.slices, frame.slices[0]
    _, per_row = _slice_rows(slices)
    for number, part in enumerate(slices):
        row, column = origin + number // per_row * first.rows, origin + number % per_row * first.columns
        rows[part.start - 1 - start], columns[part.start - 1 - start] = row, column
        if part.end < end:
            rows[part.end - start], columns[part.end - start] = row + part.rows - 1, column + part.columns - 1
    for number, (part, following) in enumerate(pairwise(slices)):
        for place in range(part.end + 1, following.start - 1):
            rows[place - start] = origin + (number // per_row + 1) * first.rows - 1
            columns[place - start] = origin + per_row * first.columns


def _slice_rows(slices: Sequence[_Slice]) -> tuple[int, int]:
    """Return the number of rows of slices, and that of slices in a row: more than two marks stand between rows."""
    gaps = [following.start - part.end for part, following in pairwise(slices)]
    per_row = next((number + 1 for number, gap in enumerate(gaps) if gap > 2), max(len(slices), 1))
    row_count, remainder = divmod(len(slices), per_row)
    return (1, len(slices)) if remainder else (row_count, per_row)


def spread_patches(size: int, count: int) -> list[int]:
    """Return ``count`` whole numbers at equal distances from 0 to ``size`` - 1, as ``torch.linspace`` rounds them."""
    if count == 1:
        return [0]
    step = _round_to_float32((size - 1) / (count - 1))
    rising = [_round_to_float32(step * place) for place in range(count // 2)]
    falling = [
        _round_to_float32(size - 1 - _round_to_float32(step * (count - 1 - i))) for i in range(count // 2, count)
    ]
    return [round(place) for place in rising + falling]


def _round_to_float32(number: float) -> float:
    result: float = _FLOAT.unpack(_FLOAT.pack(number))[0]
    return result
