"""The sequences of a batch as tensors on the device, for kernels that look up pages and positions on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from parley.native.device_copy import copy_to_device
from parley.native.layout import RowSpan

CHUNK_KEYS = 512  # keys that ``triton_attention`` reduces to one partial result
TILE_ROWS = 32  # most rows of a tile: from 64 on, Triton uses other multiplication instructions
FEW_ROWS = 16  # rows of a tile if no sequence has more: the fewest that the instruction multiplies


@dataclass
class BatchTables:
    """``pages`` int32 [sequences, most pages of a sequence]: row i has the page table of ``spans[i]``. ``longest``:
    tokens of the longest sequence. ``max_rows``: the most tokens of one sequence in the batch.

    ``positions`` int32 [T]: of each token. ``visible_ends`` int32 [T]: the position after the last one that it attends
    to, 0 for padding rows.
    """

    spans: list[RowSpan]
    pages: torch.Tensor
    positions: torch.Tensor
    visible_ends: torch.Tensor
    longest: int
    max_rows: int
    _tiles: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of_spans(cls, spans: list[RowSpan], visible_ends: torch.Tensor | None, device: torch.device) -> BatchTables:
        """Make the tables of a batch. ``visible_ends`` int64 [T]; None: attention is causal."""
        pages = np.zeros((len(spans), max(len(span.table) for span in spans)), np.int32)
        for row, span in zip(pages, spans, strict=True):
            row[: len(span.table)] = span.table
        positions = np.concatenate([np.arange(span.length - span.count, span.length, dtype=np.int32) for span in spans])
        columns = copy_to_device(positions, device)
        row_ends = columns + 1
        if visible_ends is not None:
            lengths = np.repeat([span.length for span in spans], [span.count for span in spans])
            row_ends = torch.maximum(visible_ends.to(torch.int32), row_ends)
            row_ends = torch.minimum(row_ends, copy_to_device(lengths.astype(np.int32), device))
        longest, max_rows = max(span.length for span in spans), max(span.count for span in spans)
        return cls(spans, copy_to_device(pages, device), columns, row_ends, longest, max_rows)

    def tiles(self, fold: int, rows: int) -> torch.Tensor:
        """Return tiles of ``rows`` rows, int32 [tiles, 4]. A row is one of the ``fold`` query heads of a token that
        share a KV head.

        The columns: the batch index of the sequence's first token, the index of the tile's first row among the rows of
        the sequence, the number of rows of the sequence, and the index of the sequence.
        """
        if (fold, rows) not in self._tiles:
            tiles = [
                (span.first, first, span.count * fold, number)
                for number, span in enumerate(self.spans)
                for first in range(0, span.count * fold, rows)
            ]
            self._tiles[fold, rows] = copy_to_device(np.array(tiles, np.int32), self.pages.device)
        return self._tiles[fold, rows]


@dataclass(frozen=True)
class TablePlan:
    """The attention of a batch as tiles over its tables; ``window``: 0 if there is none. ``is_ahead``: the window
    also reaches as far ahead."""

    tables: BatchTables
    window: int
    is_ahead: bool = False

    def choose_tiles(self, fold: int, *, is_wide: bool = False) -> tuple[torch.Tensor, int]:
        """Return the tiles, as ``BatchTables.tiles`` does, and the rows of each. ``is_wide``: use few rows, because
        each needs many registers."""
        rows = FEW_ROWS if is_wide or self.tables.max_rows * fold <= FEW_ROWS else TILE_ROWS
        return self.tables.tiles(fold, rows), rows

    @property
    def chunks(self) -> int:
        """The largest number of chunks that a tile attends to."""
        chunks = -(-self.tables.longest // CHUNK_KEYS)
        if self.window:  # it may begin anywhere within a chunk, and at another position for each row
            width = self.window * (1 + self.is_ahead)
            chunks = min(chunks, -(-(width + TILE_ROWS) // CHUNK_KEYS) + 1)
        return chunks
