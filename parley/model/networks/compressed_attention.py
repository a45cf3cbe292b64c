"""Attention to a window of tokens and to compressed entries (``CompressionShape``), in one step of the decoder.

A row's position alone decides how it is computed. In layers with entries, each row attends to copied pages that have
the entries that it sees, or those that its indexer chose, in the order of their positions, and then the tokens of its
window. So its bits do not depend on the batch, or on how a prompt was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.indexed_attention import COPIED_BYTES, plan_rows
from parley.model.networks.layer_linears import LayerLinears
from parley.model.networks.network import KVPages, PackedBatch
from parley.model.networks.position_tables import spread_angles
from parley.native import compressor, indexer
from parley.native.device_copy import copy_to_device
from parley.native.layer import CompressorWeights, DecoderLayer, EntryIndexerWeights
from parley.native.layer_shape import CompressionShape, EntryShape
from parley.native.layout import LayerKV, RowSpan
from parley.native.pool import LayerPages
from parley.native.torch_forms.torch_attention import TileGroup

Numbers = TypeVar("Numbers", torch.Tensor, np.ndarray)
PLANNED_ROWS = 256  # rows whose attention is planned at once, each with a list of its pages


class ClosedWindows(NamedTuple):
    """The entries whose last token is in a batch. All int64 but ``is_first``, bool [W].

    ``rows`` [W, tokens]: the slots of the tokens of each entry, page * PAGE_SIZE + offset; ``earlier`` [W, tokens]: of
    the entry before it, which the first of a sequence does not have. ``places`` [W]: the entries in
    ``compressor.view_entries``. ``positions`` [W]: of their first tokens.
    """

    rows: torch.Tensor
    earlier: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    is_first: torch.Tensor


class CopiedRows(NamedTuple):
    """What rows ``first`` to ``end`` of a batch attend to, in ``pages`` copied pages, without their zero page.

    int64: the slots in the layer's pages of the tokens in their windows ``window_sources``, and in the copied pages
    ``window_slots``; ``entry_slots`` there of the entries that the rows attend to, whose numbers begin at ``entry``.
    """

    first: int
    end: int
    pages: int
    spans: list[RowSpan]
    window_sources: torch.Tensor
    window_slots: torch.Tensor
    entry_slots: torch.Tensor
    entry: int


class EntryChoice(NamedTuple):
    """How rows of a batch choose entries. ``rows`` int64 [R]: those that see more than are chosen. ``keys`` [K], slots
    in the pages that ``groups`` read, of the entries ``sources`` [K]; ``pages``: how many there are, without their zero
    page. ``chosen`` [R, top_k]: where the chosen ones are in ``EntryReads.numbers``."""

    rows: torch.Tensor
    spans: list[RowSpan]
    visible_ends: torch.Tensor
    sources: torch.Tensor
    keys: torch.Tensor
    pages: int
    chosen: torch.Tensor


class EntryReads(NamedTuple):
    """The entries that the rows of a batch attend to, one row after another: their ``numbers`` in their sequences, and
    the number of the ``sequences``, int64 [E]. ``counts``: of each row. ``choice``: which are replaced in each layer;
    None: no row chooses."""

    numbers: torch.Tensor
    sequences: torch.Tensor
    counts: np.ndarray
    choice: EntryChoice | None


class CompressedStep:
    """What the layers of one step share. ``angles`` float32 [positions, 2, pairs]: of the rotary embedding of layers
    with entries."""

    def __init__(self, shape: CompressionShape, batch: PackedBatch, angles: torch.Tensor):
        self._shape, self._batch, self._angles = shape, batch, angles
        self._device = batch.positions.device
        spans = batch.spans
        self._sequences = np.arange(len(spans)).repeat([span.count for span in spans])  # of each row
        self._seen = np.concatenate(  # the tokens that each row sees
            [np.arange(span.length - span.count, span.length) + 1 for span in spans] or [np.empty(0, np.int64)]
        )
        width = 1 + max((len(span.table) for span in spans), default=0)
        self._tables = np.zeros((len(spans), width), np.int64)
        for row, span in zip(self._tables, spans, strict=True):
            row[: len(span.table)] = span.table
        self._device_tables = self._copy(self._tables)
        self._windows: dict[int, ClosedWindows] = {}
        self._reads: dict[EntryShape, EntryReads] = {}
        self._copies: dict[EntryShape, list[CopiedRows]] = {}
        self._plans: dict[tuple[EntryShape, int], native.AttentionPlan] = {}
        self._groups: list[TileGroup] | None = None

    def compress(
        self, x: torch.Tensor, shape: EntryShape, weights: CompressorWeights, pages: KVPages, kv_index: int
    ) -> LayerPages:
        """Store the rows of the batch's tokens, and make the entries whose last token is in it; return their pool.

        x [T, hidden]: the layer's input. ``kv_index``: of the entries in ``DecoderNetwork.kv_layers``; that of the rows
        is the next.
        """
        rows = native.linear(x, weights.rows)[:, None]
        pages.write_kv(kv_index + 1, rows, rows[..., :0], self._batch)
        pool, windows = pages.layer_pool(kv_index), self._closed_windows(shape)
        if len(windows.places):
            stored = compressor.view_rows(pages.layer_pool(kv_index + 1))
            earlier = stored[windows.earlier] if shape.is_chosen else None
            sums = compressor.sum_windows(stored[windows.rows], earlier, windows.is_first, weights)
            entries = native.norm_rows(sums.to(x.dtype), weights.norm)
            cos, sin = self._angles[windows.positions][:, None].unbind(2)
            cos, sin = spread_angles(cos, sin, is_interleaved=True)
            entries = indexer.rotate_part(entries[:, None], cos, sin, is_interleaved=True, is_last=True)[:, 0]
            compressor.view_entries(pool, entries.shape[1]).index_copy_(0, windows.places, entries)
        return pool

    def choose(
        self, x: torch.Tensor, queries: torch.Tensor, shape: EntryShape, weights: EntryIndexerWeights, pool: LayerPages
    ) -> torch.Tensor | None:
        """Return the numbers of the entries that rows attend to, as ``EntryReads.numbers``; None: those are right.

        x [T, hidden]: the layer's input; queries [T, heads, dim], rotated. ``pool``: the entries of the keys.
        """
        reads = self._entry_reads(shape)
        choice = reads.choice
        if choice is None:
            return None
        dim = queries.shape[-1]
        page_format = native.choose_page_format(LayerKV(1, dim, 0, has_latents=True), queries.dtype, queries.device)
        keys = LayerPages(pool.data.new_zeros(choice.pages + 1, *page_format.shape), page_format)
        compressor.view_rows(keys).index_copy_(0, choice.keys, compressor.view_entries(pool, dim)[choice.sources])
        if self._groups is None:
            self._groups = indexer.plan_choice(choice.spans, self._shape.index_heads, keys, choice.visible_ends)
        head_weights = native.lm_head_logits(x.index_select(0, choice.rows), weights.head_weights)
        best = indexer.choose_tokens(
            queries.index_select(0, choice.rows), head_weights, keys, self._groups, self._shape.top_k
        )
        return reads.numbers.index_copy(0, choice.chosen.flatten(), best.flatten())

    def attend(
        self,
        queries: torch.Tensor,
        shape: EntryShape,
        window: int,
        pool: LayerPages,
        entry_pool: LayerPages,
        numbers: torch.Tensor | None,
        *,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention of queries [T, heads, dim] to the windows of their rows in ``pool`` and to entries:
        [T, heads, dim]. ``numbers``: of ``choose``."""
        reads, results = self._entry_reads(shape), [queries[:0]]
        numbers = reads.numbers if numbers is None else numbers
        sources = self._places(shape, numbers, self._device_tables[reads.sequences, self._end_pages(shape, numbers)])
        entries, tokens = compressor.view_entries(entry_pool, queries.shape[-1]), indexer.view_tokens(pool)
        if shape not in self._copies:
            self._copies[shape] = self._plan_copies(reads.counts, window, pool)
        for number, part in enumerate(self._copies[shape]):
            copies = LayerPages(pool.data.new_zeros(part.pages + 1, *pool.data.shape[1:]), pool.page_format)
            copied = tokens[part.window_sources // PAGE_SIZE, part.window_sources % PAGE_SIZE]
            indexer.view_tokens(copies)[part.window_slots // PAGE_SIZE, part.window_slots % PAGE_SIZE] = copied
            rows = entries[sources[part.entry : part.entry + len(part.entry_slots)]][:, None]
            if len(rows):
                indices = native.write_indices(part.entry_slots, pool.page_format)
                native.write_kv(rows, rows[..., :0], copies, indices)
            own = queries[part.first : part.end].contiguous()
            if (shape, number) not in self._plans:
                self._plans[shape, number] = plan_rows(part.spans, own, copies)
            results.append(native.attend(own, copies, self._plans[shape, number], scale=scale, sinks=sinks))
        return torch.cat(results)

    # -- entries by their numbers in sequences, for numpy and for torch

    @staticmethod
    def _end_pages(shape: EntryShape, numbers: Numbers) -> Numbers:
        """Return the index in a sequence's table of the page with the last token of each entry."""
        pages: Numbers = ((numbers + 1) * shape.tokens - 1) // PAGE_SIZE
        return pages

    @staticmethod
    def _places(shape: EntryShape, numbers: Numbers, pages: Numbers) -> Numbers:
        """Return where entries are in ``compressor.view_entries``, by the pages with their last tokens."""
        count = shape.page_entries(PAGE_SIZE)
        places: Numbers = pages * count + numbers % count
        return places

    def _slots(self, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the slots of tokens: page * PAGE_SIZE + offset."""
        result: np.ndarray = self._tables[sequences, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        return result

    def _copy(self, numbers: np.ndarray) -> torch.Tensor:
        return copy_to_device(np.ascontiguousarray(numbers, np.int64), self._device)

    # -- the parts of a step

    def _closed_windows(self, shape: EntryShape) -> ClosedWindows:
        """Return the entries that a step makes in layers whose entries have as many tokens."""
        size = shape.tokens
        if size not in self._windows:
            ranges = [range((span.length - span.count) // size, span.length // size) for span in self._batch.spans]
            sequences = np.arange(len(ranges)).repeat([len(numbers) for numbers in ranges])
            entries = np.array([entry for numbers in ranges for entry in numbers], np.int64)
            places = self._places(shape, entries, self._tables[sequences, self._end_pages(shape, entries)])
            positions = entries[:, None] * size + np.arange(size)
            earlier = np.maximum(positions - size, 0)
            self._windows[size] = ClosedWindows(
                self._copy(self._slots(sequences[:, None], positions)),
                self._copy(self._slots(sequences[:, None], earlier)),
                self._copy(places),
                self._copy(entries * size),
                self._copy(entries) == 0,
            )
        return self._windows[size]

    def _entry_reads(self, shape: EntryShape) -> EntryReads:
        """Return the entries that rows attend to in layers of this shape."""
        if shape not in self._reads:
            visible = self._seen // shape.tokens
            counts = np.minimum(visible, self._shape.top_k) if shape.is_chosen else visible
            numbers = _count_each(counts)
            choice = self._plan_choice(shape, visible, counts) if shape.is_chosen else None
            sequences = self._copy(self._sequences.repeat(counts))
            self._reads[shape] = EntryReads(self._copy(numbers), sequences, counts, choice)
        return self._reads[shape]

    def _plan_choice(self, shape: EntryShape, visible: np.ndarray, counts: np.ndarray) -> EntryChoice | None:
        """Return how the rows choose that see more entries than are chosen; None: there are none.

        Adjacent rows of a sequence that see the same entries are a span.
        """
        rows, top_k = np.flatnonzero(visible > counts), self._shape.top_k
        if not len(rows):
            return None
        spans: list[RowSpan] = []
        sources, keys, tables, pages = list[np.ndarray](), list[np.ndarray](), dict[int, list[int]](), 0
        for sequence in np.unique(self._sequences[rows]).tolist():
            entries = np.arange(visible[self._sequences == sequence].max())
            end_pages = self._tables[sequence, self._end_pages(shape, entries)]
            sources.append(self._places(shape, entries, end_pages))
            keys.append(pages * PAGE_SIZE + entries)
            count = -(-len(entries) // PAGE_SIZE)
            tables[sequence] = list(range(pages, pages + count))
            pages += count
        starts = np.flatnonzero(np.diff(self._sequences[rows], prepend=-1) | np.diff(visible[rows], prepend=-1))
        ends = [*starts[1:].tolist(), len(rows)]
        for start, end in zip(starts.tolist(), ends, strict=True):
            length, table = int(visible[rows[start]]), tables[int(self._sequences[rows[start]])]
            for first in range(start, end, length):  # a span has no more rows than it sees
                spans.append(RowSpan(first, min(length, end - first), length, table))
        chosen = (np.cumsum(counts) - counts)[rows][:, None] + np.arange(top_k)
        parts = self._copy(np.concatenate(sources)), self._copy(np.concatenate(keys))
        ends_of_rows = torch.from_numpy(visible[rows])
        return EntryChoice(self._copy(rows), spans, ends_of_rows, *parts, pages, self._copy(chosen))

    def _plan_copies(self, counts: np.ndarray, window: int, pool: LayerPages) -> list[CopiedRows]:
        """Return the copied pages of all rows, which attend to ``counts`` entries."""
        window_counts = np.minimum(self._seen, window)
        lengths = counts + window_counts
        if not len(lengths):
            return []
        size = -(-int(lengths.max()) // PAGE_SIZE)
        batch_rows = max(1, min(PLANNED_ROWS, COPIED_BYTES // (size * pool.page_format.page_bytes)))
        parts, entry = list[CopiedRows](), 0
        for first in range(0, len(lengths), batch_rows):
            end = min(len(lengths), first + batch_rows)
            own_entries, own_tokens = counts[first:end], window_counts[first:end]
            starts = np.arange(end - first) * size * PAGE_SIZE
            entry_slots = starts.repeat(own_entries) + _count_each(own_entries)
            window_slots = (starts + own_entries).repeat(own_tokens) + _count_each(own_tokens)
            positions = (self._seen[first:end] - own_tokens).repeat(own_tokens) + _count_each(own_tokens)
            sources = self._slots(self._sequences[first:end].repeat(own_tokens), positions)
            spans = [
                RowSpan(row, 1, length, list(range(row * size, row * size - (-length // PAGE_SIZE))))
                for row, length in enumerate(lengths[first:end].tolist())
            ]
            slots = self._copy(sources), self._copy(window_slots), self._copy(entry_slots)
            parts.append(CopiedRows(first, end, (end - first) * size, spans, *slots, entry))
            entry += int(own_entries.sum())
        return parts


def _count_each(counts: np.ndarray) -> np.ndarray:
    """Return 0 .. count - 1 for each of ``counts``, one after another."""
    result: np.ndarray = np.arange(counts.sum()) - (np.cumsum(counts) - counts).repeat(counts)
    return result


class CompressedAttention:
    """The attention of each layer of one decoder with compressed entries."""

    def __init__(self, config: DecoderConfig, layer_weights: Sequence[DecoderLayer], linears: LayerLinears):
        self._config, self._layer_weights, self._linears = config, layer_weights, linears

    def attend_layer(
        self,
        layer: int,
        x: torch.Tensor | native.QuantizedRows,
        batch: PackedBatch,
        pages: KVPages,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: CompressedStep,
    ) -> torch.Tensor:
        """Return the attention of one layer before its output layer, [T, groups * rank]; write keys and entries.

        As in ``LayerAttention.attend_layer``.
        """
        config, shape, weights = self._config, self._config.layers[layer], self._layer_weights[layer]
        sizes = config.compression
        assert isinstance(x, torch.Tensor) and sizes is not None and weights.value_up is not None
        assert shape.window is not None
        latents, keys = self._linears.apply_linear(x, batch, layer, "qkv").split([sizes.query_rank, config.head_dim], 1)
        latents = native.norm_rows(latents.contiguous(), weights.query_latent_norm)
        queries = self._linears.apply_linear(latents, batch, layer, "query_up").view(-1, config.head_dim)
        ones = torch.ones(config.head_dim, device=queries.device)
        queries = native.norm_rows(queries, native.Norm(ones, config.eps)).view(-1, config.heads, config.head_dim)
        queries = _rotate(queries, cos, sin)
        keys = _rotate(native.norm_rows(keys.contiguous(), weights.latent_norm)[:, None], cos, sin)
        pages.write_kv(layer, keys, keys[..., :0], batch)
        if shape.entries is None:
            attended = pages.attend_pages(
                layer, queries, batch, scale=shape.score_scale, window=shape.window, sinks=weights.sinks
            )
        else:
            assert weights.compressor is not None
            index, numbers = config.entry_kv_index(layer), None
            entry_pool = step.compress(x, shape.entries, weights.compressor, pages, index)
            if (chooser := weights.entry_indexer) is not None:
                key_pool = step.compress(x, shape.entries, chooser.keys, pages, index + 2)
                own = native.linear(latents, chooser.queries).view(-1, sizes.index_heads, sizes.index_dim)
                numbers = step.choose(x, _rotate(own, cos, sin), shape.entries, chooser, key_pool)
            attended = step.attend(
                queries,
                shape.entries,
                shape.window,
                pages.layer_pool(layer),
                entry_pool,
                numbers,
                scale=shape.score_scale,
                sinks=weights.sinks,
            )
        attended = _rotate(attended, cos, -sin)
        groups = attended.reshape(len(attended), sizes.output_groups, -1)
        return native.linear_heads(groups, weights.value_up).flatten(1)


def _rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return rows [T, heads, dim] whose last numbers are rotated, in pairs of adjacent ones."""
    return indexer.rotate_part(rows, cos, sin, is_interleaved=True, is_last=True)
