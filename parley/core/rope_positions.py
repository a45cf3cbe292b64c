"""The rotary positions of a prompt with images and videos, for models whose positions have three axes (M-RoPE) or
four.

A text token has the same position on all axes: time, height and width. The tokens of an image, and of a video's
frames, lie in a grid that begins at the position after the text; the text after it continues at a distance of the
larger of rows and columns. This is ``get_rope_index`` of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4V in Transformers
(paper: arXiv 2409.12191, section 2.1), as a function of the prompt alone, so all instances agree. In Qwen-Omni the text
also continues after the last frame.

Those of MiniCPM-V 4.7 are computed with the prompt, as they depend on its tokens (``TokenPositions``).

HunyuanOCR has a fourth axis (``get_rope_index`` of HunYuanVL): a token's index, its column, its row and the number of
its image. Text has its index on all axes there, also after an image.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import msgspec

from parley.types import EmbeddingRun, MediaItem, TokenPositions

OUTPUT_DIGEST = b"output after a jump of positions"
MAX_FRAME_STEP = 1e9  # positions between frames; no context is as long, so such prompts are refused
_FLOAT = struct.Struct("f")


class _Piece(NamedTuple):
    """Tokens from ``start`` up to the next piece. ``position``: of the first token, on all axes. ``run``: None for
    text. ``number``: number of numbered grids before the piece. ``listed``: the positions of the tokens, relative to
    ``position``, if they are listed."""

    start: int
    position: int
    run: EmbeddingRun | None
    number: int = 0
    listed: TokenPositions | None = None


class RopePositions:
    """The positions of one sequence's tokens on three axes, or four; ``axis_count`` says how many.

    ``output_delta``: the position of an output token is its index plus this number. ``has_jump``: the same token would
    have another position as part of the prompt, because a video reaches further than the text after it.
    """

    def __init__(self, media: Sequence[MediaItem], prompt_len: int):
        """``media``: the prompt's items, in order. Their runs with a grid have as many tokens as the grid."""
        pieces = [_Piece(0, 0, None)]
        largest, number = -1, 0
        for item in media:
            if (listed := item.positions) is not None:
                position = _text_position(pieces[-1], listed.start)
                pieces.append(_Piece(listed.start, position, None, listed=listed))
                pieces.append(_Piece(listed.end, position + listed.advance, None))
                furthest = max(map(max, (listed.times, listed.rows, listed.columns)))
                largest = max(largest, position - 1, position + furthest)
            for run in item.runs:
                if run.grid is None:
                    continue
                start = item.start + run.offset
                position = _text_position(pieces[-1], start)
                if run.is_numbered:
                    pieces.append(_Piece(start, position, run, number))
                    pieces.append(_Piece(start + run.count, position + run.count, None))
                    largest = max(largest, position + run.count - 1)
                    number += 1
                    continue
                frames, rows, columns = run.grid
                furthest = max(_frame_time(frames - 1, run.frame_step), rows - 1, columns - 1)
                largest = max(largest, position - 1, position + furthest)
                pieces.append(_Piece(start, position, run))
                size = furthest + 1 if run.text_follows_time else max(rows, columns)
                pieces.append(_Piece(start + run.count, position + size, None))
        text_end = _text_position(pieces[-1], prompt_len)
        if pieces[-1].start < prompt_len:
            largest = max(largest, text_end - 1)
        self.has_jump = text_end != largest + 1
        pieces.append(_Piece(prompt_len, largest + 1, None))
        self.axis_count = 4 if number else 3
        self._pieces = pieces
        self._starts = [piece.start for piece in pieces]
        self.output_delta = largest + 1 - prompt_len

    @classmethod
    def of_prompt(cls, media: Sequence[MediaItem], prompt_len: int) -> RopePositions | None:
        """Return the positions; None if each token's is its index on all axes, because no item has a grid."""
        has_grid = any(item.positions or any(run.grid is not None for run in item.runs) for item in media)
        return cls(media, prompt_len) if has_grid else None

    def axes(self, start: int, end: int) -> tuple[list[int], ...]:
        """Return times, heights and widths of tokens ``start .. end``; or indexes, columns, rows and numbers."""
        axes: tuple[list[int], ...] = tuple([] for _ in range(self.axis_count))
        index = bisect_right(self._starts, start) - 1
        while start < end:
            piece = self._pieces[index]
            index += 1
            piece_end = min(end, self._starts[index]) if index < len(self._starts) else end
            _extend_axes(axes, piece, start, piece_end)
            start = piece_end
        return axes


def largest_position(media: Sequence[MediaItem], prompt_len: int) -> int:
    """Return the largest position of a prompt's tokens on any axis; without grids that is ``prompt_len - 1``.

    It may exceed the number of tokens, because frames far apart in time have positions far apart. Output tokens
    continue after it, so it and their number must fit into the model's context together.
    """
    positions = RopePositions.of_prompt(media, prompt_len)
    return prompt_len - 1 + (0 if positions is None else positions.output_delta)


def hashed_items(media: list[MediaItem], token_ids: Sequence[int]) -> list[MediaItem]:
    """Return the items that the hashes of a sequence's pages cover: its own, and its output if positions jump there.

    In the next turn of a conversation the output is part of the prompt and has other positions, so it must not find the
    pages of this turn. If all tokens of the prompt ``token_ids`` attend to each other, its pages depend on all of it:
    then one item stands for the prompt with its items.
    """
    prompt_len = len(token_ids)
    if any(item.prompt_sees_both_ways for item in media):
        return [MediaItem("image", _digest_prompt(media, token_ids), 0, prompt_len, [])]
    positions = RopePositions.of_prompt(media, prompt_len)
    # The marks around an item have positions of their own
    media = [
        item
        if item.positions is None
        else msgspec.structs.replace(item, start=item.positions.start, count=len(item.positions.times))
        for item in media
    ]
    if positions is None or not positions.has_jump:
        return media
    return [*media, MediaItem("video", OUTPUT_DIGEST, prompt_len, 1, [])]


def _digest_prompt(media: Sequence[MediaItem], token_ids: Sequence[int]) -> bytes:
    state = sha256(array("Q", token_ids).tobytes())
    for item in media:
        state.update(item.start.to_bytes(8, "little") + item.digest)
    return state.digest()


def _text_position(piece: _Piece, token: int) -> int:
    """Return the position of a token of text."""
    return piece.position + token - piece.start


def _frame_time(frame: int, step: float) -> int:
    """Return the time of a frame in positions. The product is rounded to float32 first, as in Transformers.

    ``step`` is limited to 0 .. MAX_FRAME_STEP; NaN counts as 0.
    """
    step = min(max(0.0, step), MAX_FRAME_STEP)
    return int(_round_to_float32(frame * _round_to_float32(step)))


def _round_to_float32(number: float) -> float:
    result: float = _FLOAT.unpack(_FLOAT.pack(number))[0]
    return result


def _extend_axes(axes: tuple[list[int], ...], piece: _Piece, start: int, end: int) -> None:
    """Append the positions of tokens ``start .. end`` of one piece."""
    if piece.listed is not None:
        first, last = start - piece.start, end - piece.start
        for axis, offsets in zip(axes, (piece.listed.times, piece.listed.rows, piece.listed.columns), strict=True):
            axis += [max(0, piece.position + offset) for offset in offsets[first:last]]
        return
    if piece.run is None or piece.run.grid is None:
        for axis in axes:
            axis += range(_text_position(piece, start), _text_position(piece, end))
        return
    _, rows, columns = piece.run.grid
    for cell in range(start - piece.start, end - piece.start):
        if piece.run.is_numbered:
            row, column = divmod(cell, columns)
            for axis, position in zip(axes, (piece.position + cell, column, row, piece.number), strict=True):
                axis.append(position)
            continue
        frame, frame_cell = divmod(cell, rows * columns)
        row, column = divmod(frame_cell, columns)
        for axis, offset in zip(axes, (_frame_time(frame, piece.run.frame_step), row, column), strict=True):
            axis.append(piece.position + offset)
