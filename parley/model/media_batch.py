"""Adds the data of media tokens to a packed batch: embeddings, rotary positions, and the positions that they attend to.

A chunk may begin and end within an item. For steps without media ``add_media`` is not called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from parley.core.sequence import Sequence, StepRow
from parley.model.media_embeddings import EncodedItem
from parley.model.networks.network import MediaRows, PackedBatch


class _RunInRow(NamedTuple):
    """Embeddings ``first .. first + length`` of an item, which replace the batch's tokens ``token .. token + length``.

    ``sees_until``: how far its tokens see, as a position of the sequence; None: each up to itself.
    """

    item: EncodedItem
    first: int
    token: int
    length: int
    sees_until: int | None


def has_media(rows: list[StepRow]) -> bool:
    """Whether any row belongs to a request with media. Then ``add_media`` must be called for the batch."""
    return any(row.sequence.request.media for row in rows)


def add_media(batch: PackedBatch, rows: list[StepRow]) -> None:
    """Set the fields of a batch that only media need."""
    runs = list(_runs_in_batch(batch, rows))
    batch.media = _gather_rows(runs, batch.positions.device) if runs else None
    batch.whole_prompts = _find_whole_prompts(rows)
    batch.visible_ends = _visible_ends(batch, rows, runs)
    batch.rope_positions = _rope_positions(batch, rows)


def placeholder_positions(sequence: Sequence, start: int, end: int) -> set[int]:
    """Return the positions in ``start .. end`` whose tokens are placeholders of embeddings."""
    return {
        position
        for item in sequence.request.media
        for run in item.runs
        for position in range(max(start, item.start + run.offset), min(end, item.start + run.offset + run.count))
    }


def _runs_in_batch(batch: PackedBatch, rows: list[StepRow]) -> Iterator[_RunInRow]:
    """Yield the parts of runs of embeddings that this step computes."""
    for row, span in zip(rows, batch.spans, strict=True):
        end = row.start + row.count
        for item in row.sequence.request.media:
            if item.end <= row.start or item.start >= end:
                continue
            earlier = 0  # embeddings of earlier runs
            for run in item.runs:
                begin = item.start + run.offset
                first, last = max(begin, row.start), min(begin + run.count, end)
                if first < last:
                    encoded = row.sequence.item_embeddings[item.digest]
                    assert isinstance(encoded, EncodedItem)
                    sees_until = begin + run.count if item.sees_both_ways else None
                    token = span.first + first - row.start
                    yield _RunInRow(encoded, earlier + first - begin, token, last - first, sees_until)
                earlier += run.count


def _gather_rows(runs: list[_RunInRow], device: torch.device) -> MediaRows:
    """Return the embeddings of all runs."""
    tokens = np.concatenate([np.arange(run.token, run.token + run.length) for run in runs])
    depth = max(len(run.item.deepstack) for run in runs)

    def layer_rows(run: _RunInRow, layer: int) -> torch.Tensor:
        if layer < len(run.item.deepstack):
            return run.item.deepstack[layer][run.first : run.first + run.length]
        return run.item.rows.new_zeros(run.length, run.item.rows.shape[1])  # an item of another kind has none

    return MediaRows(
        torch.from_numpy(tokens).to(device),
        torch.cat([run.item.rows[run.first : run.first + run.length] for run in runs]),
        [torch.cat([layer_rows(run, layer) for run in runs]) for layer in range(depth)],
    )


def _find_whole_prompts(rows: list[StepRow]) -> list[bool] | None:
    """Return ``PackedBatch.whole_prompts``; None if there is no such span. The scheduler never divides such a
    prompt."""
    is_whole = [row.start < row.sequence.prompt_len and row.sequence.prompt_sees_both_ways for row in rows]
    return is_whole if any(is_whole) else None


def _visible_ends(batch: PackedBatch, rows: list[StepRow], runs: list[_RunInRow]) -> torch.Tensor | None:
    """Return ``PackedBatch.visible_ends``; None if no token attends to later ones."""
    if batch.whole_prompts is None and all(run.sees_until is None for run in runs):
        return None
    visible_ends = batch.positions + 1
    for row, span, is_whole in zip(rows, batch.spans, batch.whole_prompts or [False] * len(rows), strict=True):
        if is_whole:
            visible_ends[span.first : span.first + span.count] = row.sequence.prompt_len
    for run in runs:
        if run.sees_until is not None:
            visible_ends[run.token : run.token + run.length] = run.sees_until
    return visible_ends


def _rope_positions(batch: PackedBatch, rows: list[StepRow]) -> torch.Tensor | None:
    """Return ``PackedBatch.rope_positions``; None if no row has positions on several axes."""
    counts = [row.sequence.rope_positions.axis_count for row in rows if row.sequence.rope_positions is not None]
    if not counts:
        return None
    axes: list[list[int]] = [[] for _ in range(counts[0])]
    for row in rows:
        end = row.start + row.token_count
        positions = row.sequence.rope_positions
        row_axes = [range(row.start, end)] * len(axes) if positions is None else positions.axes(row.start, end)
        for axis, part in zip(axes, row_axes, strict=True):
            axis += part
    return torch.from_numpy(np.array(axes, np.int64)).to(batch.positions.device)
