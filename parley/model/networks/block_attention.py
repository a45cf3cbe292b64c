"""Attention to the blocks of tokens that an indexer chooses (``BlockIndexerShape``), in one step of the decoder.

A row's position alone decides how it is computed, as in ``indexed_attention.py``: if it can attend to no more blocks
than an indexer chooses, it attends to all of them, and the indexer only stores its key. Otherwise each key/value head
of the row is computed like a sequence of its own, whose pages are those of the blocks that the head chose. Blocks are
whole pages, and stay in the order of their positions. So a row for which all blocks are chosen has the bits of
attention over all pages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.indexed_attention import COPIED_BYTES, IndexedStep, plan_rows
from parley.model.networks.network import PackedBatch
from parley.native import indexer
from parley.native.layer import IndexerWeights
from parley.native.layer_shape import BlockIndexerShape
from parley.native.layout import RowSpan
from parley.native.pool import LayerPages

PLANNED_ROWS = 256  # rows whose attention is planned at once, each with a list of its pages


class BlockIndexedStep(IndexedStep):
    """Computes the indexers of one batch, whose layers without an indexer attend to all tokens."""

    def __init__(self, shape: BlockIndexerShape, batch: PackedBatch, cos: torch.Tensor, sin: torch.Tensor):
        super().__init__(shape, batch, cos, sin)
        self._blocks = shape
        self._block_pages = shape.block_size // PAGE_SIZE
        self._lengths = np.empty(0, np.int64)  # of rows, with a choice; without one, sizes of the config may be huge
        if self.has_choice:
            ends = [np.arange(span.length - span.count, span.length) for span in self._spans]
            # The last chosen block is that of the row itself, of which it sees a part.
            parts = np.concatenate(ends) % shape.block_size + 1
            self._lengths = (shape.top_k - 1) * shape.block_size + parts
        self._chosen_pages: torch.Tensor | None = None  # of each head, int64 [rows, heads, pages]

    def _choose_attended(
        self,
        x: torch.Tensor,
        latents: torch.Tensor | native.QuantizedRows | None,
        weights: IndexerWeights,
        pool: LayerPages,
    ) -> None:
        """Score the index keys in ``pool`` and choose blocks. ``latents`` are not read."""
        shape = self._blocks
        if self._groups is None:
            self._groups = indexer.plan_choice(self._spans, shape.heads, pool)
        x, cos, sin = (part.index_select(0, self._rows) for part in (x, self._cos, self._sin))
        queries = native.linear(x, weights.queries).reshape(-1, shape.dim)
        queries = native.norm_rows(queries, weights.query_norm).view(-1, shape.heads, shape.dim)
        queries = self._rotate_rows(queries, cos, sin)
        blocks = indexer.choose_blocks(queries, pool, self._groups, shape)
        places = blocks[..., None] * self._block_pages + torch.arange(self._block_pages, device=blocks.device)
        tables, spans = self._page_tables(zero_page=len(pool.data) - 1)
        self._chosen_pages = tables[spans[..., None], places.flatten(2).clamp_max(tables.shape[1] - 1)]

    def attend(
        self,
        queries: torch.Tensor,
        attended: torch.Tensor,
        pool: LayerPages,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend to the blocks that were chosen last, with queries [T, heads, dim] over the keys and values in
        ``pool``; write the results to ``attended`` [T, heads, value_dim]. Rows without a choice stay as they are."""
        assert self._chosen_pages is not None and sinks is None, "no layer has chosen blocks, or it has sinks"
        queries, results = queries.index_select(0, self._rows), []
        layer = replace(pool.page_format.layer, heads=1)
        is_int8 = pool.page_format.dtype == torch.int8
        head_format = native.choose_page_format(layer, queries.dtype, queries.device, int8=is_int8)
        row_bytes = self._chosen_pages[0].numel() * head_format.page_bytes
        batch_rows = PLANNED_ROWS if head_format.tiled else max(1, min(PLANNED_ROWS, COPIED_BYTES // row_bytes))
        for start in range(0, len(queries), batch_rows):
            batch_queries, chosen = queries[start : start + batch_rows], self._chosen_pages[start : start + batch_rows]
            head_pool, tables = indexer.split_heads(pool, head_format, chosen)
            count, kv_heads = chosen.shape[:2]
            split = batch_queries.reshape(count * kv_heads, -1, batch_queries.shape[-1])
            spans = self._row_spans(tables, self._lengths[start : start + count].repeat(kv_heads))
            plan = plan_rows(spans, split, head_pool)
            results.append(native.attend(split, head_pool, plan, scale=scale).view(count, -1, attended.shape[-1]))
        attended.index_copy_(0, self._rows, torch.cat(results))

    def _row_spans(self, tables: torch.Tensor, lengths: np.ndarray) -> list[RowSpan]:
        """Return a span for each row of ``tables`` [N, pages], which sees the first ``lengths`` [N] tokens there."""
        return [
            RowSpan(row, 1, length, table[: -(-length // PAGE_SIZE)])
            for row, (table, length) in enumerate(zip(tables.tolist(), lengths.tolist(), strict=True))
        ]
