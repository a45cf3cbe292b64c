"""Packs steps whose prompts begin with images, for models that read images in layers with cross-attention.

An image's embeddings have pages at the beginning of the sequence, before the text (``types.media.lead_length``). The
batch holds only the text, with positions from 0 and with the pages after those of the images. A token of the text sees
an image if the image's mark is at or before it and no later image's mark follows other text, as in Transformers'
``get_cross_attention_token_mask``: images whose marks are next to each other are a group, which is seen until the next
group begins. The embeddings of a group are next to each other as well, and begin with a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from parley.core.sequence import PAGE_SIZE, Sequence, StepRow
from parley.model.media_embeddings import EncodedItem
from parley.model.networks.network import PackedBatch, SeenImages
from parley.native.layout import RowSpan
from parley.types import MediaItem


class _View(NamedTuple):
    """Text tokens from position ``text_start`` of the sequence on see its tokens ``start .. end``."""

    text_start: int
    start: int
    end: int


def text_part(row: StepRow, tokens: list[int]) -> tuple[list[int], int, list[int]]:
    """Return the tokens of a row's text, the position of the first one in the text, and the text's pages.

    ``tokens``: all of the row.
    """
    lead, table = row.sequence.lead, row.sequence.block_table
    if not lead:
        return tokens, row.start, table
    first = max(row.start, lead)
    return tokens[first - row.start :], first - lead, table[lead // PAGE_SIZE :]


def see_images(batch: PackedBatch, rows: list[StepRow]) -> SeenImages | None:
    """Return ``PackedBatch.images`` for a batch of the text of ``rows``."""
    written = list(_written_embeddings(rows))
    spans: list[RowSpan] = []
    seeing: list[int] = []
    ends: list[int] = []
    for row, span in zip(rows, batch.spans, strict=True):
        sequence = row.sequence
        first = sequence.lead + span.length - span.count  # of the sequence's tokens
        for view, start, count in _parts_of_views(image_views(sequence.request.media), first, first + span.count):
            length = view.end - view.start
            table = sequence.block_table[view.start // PAGE_SIZE : -(-view.end // PAGE_SIZE)]
            for done in range(0, count, length):  # a span has no more tokens than its pages
                part = min(length, count - done)
                spans.append(RowSpan(len(seeing), part, length, table))
                token = span.first + start - first + done
                seeing += range(token, token + part)
                ends += [length] * part
    if not seeing and not written:
        return None
    device, nothing = batch.positions.device, batch.positions[:0]
    visible_ends = torch.tensor(ends, dtype=torch.int64, device=device)
    slots = [slot for _, part_slots in written for slot in part_slots]
    return SeenImages(
        torch.tensor(seeing, dtype=torch.int64, device=device),
        PackedBatch(nothing, visible_ends - 1, nothing, spans, visible_ends=visible_ends),
        torch.cat([embeddings for embeddings, _ in written]) if written else None,
        PackedBatch(nothing, nothing, torch.tensor(slots, dtype=torch.int64, device=device), []),
    )


def unscored_positions(sequence: Sequence) -> set[int]:
    """Return the positions whose tokens nothing predicts: those that lead the text, its first one, and marks."""
    lead = sequence.lead
    marks = {item.seen_from for item in sequence.request.media}
    return {*range(lead + 1), *marks} if lead else set()


def image_views(media: list[MediaItem]) -> list[_View]:
    """Return the tokens that the text sees, from each mark on. Before the first mark it sees none."""
    views: list[_View] = []
    for item in media:
        if item.seen_from < 0:
            continue
        is_next = bool(views) and views[-1].text_start == item.seen_from - 1
        views.append(_View(item.seen_from, views[-1].start if is_next else item.start, item.end))
    return views


def _parts_of_views(views: list[_View], first: int, end: int) -> Iterator[tuple[_View, int, int]]:
    """Yield each view of the tokens ``first .. end`` with the first of these tokens that has it, and their number."""
    for number, view in enumerate(views):
        next_start = views[number + 1].text_start if number + 1 < len(views) else end
        start, stop = max(first, view.text_start), min(end, next_start)
        if start < stop:
            yield view, start, stop - start


def _written_embeddings(rows: list[StepRow]) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield the embeddings [n, hidden] that a step computes keys and values of, with their places in the pages."""
    for row in rows:
        sequence = row.sequence
        if row.start >= sequence.lead:
            continue
        for item in sequence.request.media:
            first = max(item.start, row.start)
            if first < item.end:
                encoded, table = sequence.item_embeddings[item.digest], sequence.block_table
                assert isinstance(encoded, EncodedItem)
                slots = [table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(first, item.end)]
                yield encoded.rows[first - item.start :], slots
