"""Attention to the tokens that an indexer chooses (``IndexerShape``), in one step of the decoder.

A row's position alone decides how it is computed. If it can attend to no more tokens than an indexer chooses, it
attends to all of them, as in other models, and the indexer only stores its key. Otherwise the indexer chooses, and the
row attends to copied pages that have only the chosen tokens. ``native/indexer.py`` says why both computations give the
same bits for a row with exactly as many tokens as are chosen.
"""

from __future__ import annotations

import numpy as np
import torch

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.network import KVPages, PackedBatch
from parley.native import indexer
from parley.native.device_copy import copy_to_device
from parley.native.layer import IndexerWeights
from parley.native.layer_shape import BlockIndexerShape, IndexerShape
from parley.native.layout import RowSpan
from parley.native.pool import LayerPages
from parley.native.torch_forms.torch_attention import TileGroup

COPIED_BYTES = 1 << 25  # most bytes of copied pages at once, or those of one row if it needs more


class IndexedStep:
    """Computes the indexers of one batch. Layers without an indexer attend to the tokens that were chosen last.

    ``cos`` and ``sin``, float32 [T, 1, rotary_dim]: of the rotation of index queries and keys.
    """

    def __init__(
        self, shape: IndexerShape | BlockIndexerShape, batch: PackedBatch, cos: torch.Tensor, sin: torch.Tensor
    ):
        self._shape, self._batch, self._cos, self._sin = shape, batch, cos, sin
        self._spans: list[RowSpan] = []  # of the rows that see more tokens than are chosen, without other rows
        numbers: list[int] = []
        for span in batch.spans:
            beyond = min(span.count, max(0, span.length - shape.max_unchosen))
            if beyond:
                self._spans.append(RowSpan(len(numbers), beyond, span.length, span.table))
                numbers += range(span.first + span.count - beyond, span.first + span.count)
        self.has_choice = bool(numbers)
        self._rows = copy_to_device(np.array(numbers, np.int64), batch.positions.device)
        self._groups: list[TileGroup] | None = None
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self._chosen_slots: torch.Tensor | None = None  # of the tokens chosen last, int64 [rows, chosen]
        self._plans: dict[int, native.AttentionPlan] = {}

    def run_indexer(
        self,
        x: torch.Tensor | native.QuantizedRows,
        latents: torch.Tensor | native.QuantizedRows | None,
        weights: IndexerWeights,
        pages: KVPages,
        kv_index: int,
    ) -> None:
        """Store the index keys of a layer, and choose the tokens that it attends to, for rows that need a choice.

        x [T, hidden]: the layer's input; latents [T, rank]: the normed latents of its queries, which indexers of blocks
        do not read. ``kv_index``: of its index keys in ``DecoderNetwork.kv_layers``.
        """
        assert isinstance(x, torch.Tensor), "indexers read rows as they are"
        keys = native.norm_rows(native.linear(x, weights.key), weights.key_norm)
        keys = self._rotate_rows(keys[:, None], self._cos, self._sin)
        pages.write_kv(kv_index, keys, keys[..., :0], self._batch)
        if self.has_choice:
            self._choose_attended(x, latents, weights, pages.layer_pool(kv_index))

    def _choose_attended(
        self,
        x: torch.Tensor,
        latents: torch.Tensor | native.QuantizedRows | None,
        weights: IndexerWeights,
        pool: LayerPages,
    ) -> None:
        """Score the index keys in ``pool`` and choose what rows attend to that see more than is chosen."""
        assert isinstance(latents, torch.Tensor), "indexers read rows as they are"
        shape = self._shape
        if self._groups is None:
            self._groups = indexer.plan_choice(self._spans, shape.heads, pool)
        x, latents, cos, sin = (part.index_select(0, self._rows) for part in (x, latents, self._cos, self._sin))
        queries = self._rotate_rows(native.linear(latents, weights.queries).view(-1, shape.heads, shape.dim), cos, sin)
        assert weights.head_weights is not None
        head_weights = native.lm_head_logits(x, weights.head_weights)
        positions = indexer.choose_tokens(queries, head_weights, pool, self._groups, shape.top_k)
        tables, spans = self._page_tables()
        self._chosen_slots = tables[spans, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def attend(
        self,
        queries: torch.Tensor,
        attended: torch.Tensor,
        pool: LayerPages,
        *,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attend to the tokens that were chosen last, with queries [T, heads, dim] over the latents in ``pool``; write
        the results to ``attended`` [T, heads, value_dim]. Rows without a choice stay as they are."""
        assert self._chosen_slots is not None, "no layer has chosen tokens"
        queries = queries.index_select(0, self._rows)
        row_bytes = -(-self._shape.top_k // PAGE_SIZE) * pool.page_format.page_bytes
        batch_rows, results = max(1, COPIED_BYTES // row_bytes), []
        for start in range(0, len(queries), batch_rows):
            batch_queries = queries[start : start + batch_rows]
            copies = indexer.gather_pages(pool, self._chosen_slots[start : start + batch_rows])
            plan = self._plan_rows(batch_queries, copies)
            results.append(native.attend(batch_queries, copies, plan, scale=scale, sinks=sinks))
        attended.index_copy_(0, self._rows, torch.cat(results))

    def _rotate_rows(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        is_last = isinstance(shape, IndexerShape) and shape.is_last_rotated
        return indexer.rotate_part(rows, cos, sin, is_interleaved=shape.is_interleaved, is_last=is_last)

    def _page_tables(self, zero_page: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages of each sequence, int64 [spans, pages], and the span of each row, [rows, 1]. Sequences that
        have fewer pages than others get ``zero_page``, and each has one more."""
        if self._tables is None:
            width = 1 + max(len(span.table) for span in self._spans)
            tables = np.full((len(self._spans), width), zero_page, np.int64)
            for row, span in zip(tables, self._spans, strict=True):
                row[: len(span.table)] = span.table
            numbers = np.arange(len(tables)).repeat([span.count for span in self._spans])[:, None]
            device = self._rows.device
            self._tables = copy_to_device(tables, device), copy_to_device(numbers, device)
        return self._tables

    def _plan_rows(self, queries: torch.Tensor, copies: LayerPages) -> native.AttentionPlan:
        """Return the plan of attention over ``copies``, where each row is a sequence of its own."""
        count = len(queries)
        if count not in self._plans:
            top_k, size = self._shape.top_k, -(-self._shape.top_k // PAGE_SIZE)
            spans = [RowSpan(row, 1, top_k, list(range(row * size, (row + 1) * size))) for row in range(count)]
            self._plans[count] = plan_rows(spans, queries, copies)
        return self._plans[count]


def plan_rows(spans: list[RowSpan], queries: torch.Tensor, pool: LayerPages) -> native.AttentionPlan:
    """Return the plan of queries [T, heads, dim] that attend to all tokens of their spans in ``pool``."""
    return native.plan_attention(
        spans,
        heads=queries.shape[1],
        page_format=pool.page_format,
        window=None,
        chunk=None,
        visible_ends=None,
        zero_page=len(pool.data) - 1,
        device=queries.device,
        dtype=queries.dtype,
    )
