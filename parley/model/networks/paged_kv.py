"""The KV cache of one model: its pages, and the attention plans for a batch's rows.

This module does not know which sequences own a page: the block pool in ``core`` allocates pages, and the runner clears
and copies them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from parley import native
from parley.model.networks.network import PackedBatch
from parley.native import memory
from parley.native.device_copy import copy_to_device
from parley.native.layout import LayerKV, RowSpan
from parley.types import LayerRegion

FORMAT_ALIGNMENT = 4096  # bytes; pages of each format begin at a multiple of this

FormatLayers = dict[native.PageFormat, list[int]]  # indices of the layers that use a format


class PagedKV:
    """Keys and values of all layers in ``page_count`` pages, for a model of ``dtype``.

    ``int8``: store them as int8 with one scale per key and per value, in about half the space of bfloat16.
    Memory is only reserved: a page uses physical memory once it is first cleared. One extra page always stays zero.
    ``shared``, on the CPU only: use the memory of descriptor ``file``, with each layer's pages in one of ``regions``.
    That file has ``spare_bytes`` more, which ``spare`` holds, from ``spare_offset`` on.
    ``one_layer_at_once``: layers of one format share their pages, which hold what the last of them wrote.
    """

    def __init__(
        self,
        kv_layers: list[LayerKV],
        page_count: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        int8: bool = False,
        shared: bool = False,
        spare_bytes: int = 0,
        one_layer_at_once: bool = False,
    ):
        self.kv_layers = kv_layers
        self.page_count = page_count
        self.dtype = dtype
        self.int8 = int8
        self.device = torch.device(device)
        self.formats = [native.choose_page_format(layer, dtype, self.device, int8=int8) for layer in kv_layers]
        self.format_layers: FormatLayers = defaultdict(list)
        for i, kv_format in enumerate(self.formats):
            self.format_layers[kv_format].append(i)
        self.file = -1
        self.regions = layer_regions(self.format_layers, page_count + 1)
        self.spare: torch.Tensor | None = None
        self.spare_offset = 0
        if shared:
            page_end = max((region.offset + (page_count + 1) * region.stride for region in self.regions), default=0)
            self.spare_offset = -(-page_end // FORMAT_ALIGNMENT) * FORMAT_ALIGNMENT
            buffer, self.file = memory.create_shared_memory(max(page_end, self.spare_offset + spare_bytes))
            self.spare = buffer[self.spare_offset : self.spare_offset + spare_bytes]
            arenas = carve_arenas(buffer, self.format_layers, self.regions, page_count + 1)
        else:
            shapes = [
                (kv_format, (1 if one_layer_at_once else len(numbers), page_count + 1, *kv_format.shape))
                for kv_format, numbers in self.format_layers.items()
            ]
            arenas = [torch.empty(shape, dtype=kv_format.dtype, device=self.device) for kv_format, shape in shapes]
        self.arenas = arenas  # [layers of one format, pages, ...], by owners: one clear serves them all
        pools: dict[int, native.LayerPages] = {}
        for (kv_format, numbers), arena in zip(self.format_layers.items(), arenas, strict=True):
            layer_pages = arena.expand(len(numbers), *arena.shape[1:]).unbind(0)
            pools.update(
                (i, native.LayerPages(pages, kv_format)) for i, pages in zip(numbers, layer_pages, strict=True)
            )
        self._pools = [pools[i] for i in range(len(kv_layers))]
        self._batch: PackedBatch | None = None
        self._plans: dict[tuple[object, ...], native.AttentionPlan] = {}
        self._indices_by_format: dict[native.PageFormat, torch.Tensor] = {}
        self._parts: dict[bool, tuple[torch.Tensor, PackedBatch]] = {}
        self.clear_pages([page_count])

    @staticmethod
    def page_bytes(
        kv_layers: Sequence[LayerKV], dtype: torch.dtype, device: torch.device | str = "cpu", *, int8: bool = False
    ) -> int:
        """Return the bytes of one page over all layers."""
        return sum(
            native.choose_page_format(layer, dtype, torch.device(device), int8=int8).page_bytes for layer in kv_layers
        )

    def layer_pool(self, layer: int) -> native.LayerPages:
        """Return the pages of one layer."""
        return self._pools[layer]

    def clear_pages(self, pages: list[int]) -> None:
        """Zero pages that change owners: leftovers of another request (a NaN, say) must not reach the next one."""
        for arena in self.arenas if pages else ():
            if self.device.type == "cpu":  # index_fill_ takes eight times as long there
                for page in pages:
                    arena[:, page].zero_()
            else:
                arena.index_fill_(1, copy_to_device(np.array(pages, np.int64), self.device), 0)

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy pages (source, target), in order: a page may be the target of one copy and the source of a later one."""
        for source, target in copies:
            for arena in self.arenas:
                arena[:, target].copy_(arena[:, source])

    def clear_tokens(self, slot_mapping: torch.Tensor) -> None:
        """Zero single tokens at ``slot_mapping`` (page * PAGE_SIZE + offset, int64 [T])."""
        for layer, pool in zip(self.kv_layers, self._pools, strict=True):
            keys, values = (
                torch.zeros(len(slot_mapping), layer.heads, dim, dtype=self.dtype, device=self.device)
                for dim in (layer.dim, layer.value_dim)
            )
            native.write_kv(keys, values, pool, native.write_indices(slot_mapping, pool.page_format))

    def write_indices(self, layer: int, batch: PackedBatch) -> torch.Tensor:
        """Return ``batch.slot_mapping`` as the indices that ``native.write_kv`` takes for the pages of one layer."""
        self._enter_batch(batch)
        kv_format = self._pools[layer].page_format
        if kv_format not in self._indices_by_format:
            self._indices_by_format[kv_format] = native.write_indices(batch.slot_mapping, kv_format)
        return self._indices_by_format[kv_format]

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch) -> None:
        """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim] at ``batch.slot_mapping``."""
        native.write_kv(keys, values, self._pools[layer], self.write_indices(layer, batch))

    def attend_pages(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        sees_later: bool = True,
        max_seen: int | None = None,
    ) -> torch.Tensor:
        """Compute attention of queries [T, heads, dim]: [T, heads, value_dim] (see ``network.KVPages``)."""
        self._enter_batch(batch)
        how: dict[str, Any] = {"scale": scale, "chunk": chunk, "softcap": softcap, "sinks": sinks, "slopes": slopes}
        how |= {"sees_later": sees_later, "max_seen": max_seen}
        if window is None or batch.whole_prompts is None:
            return self._attend_spans(layer, queries, batch, window=window, **how)
        parts = self._split_batch(batch)
        outputs = [
            self._attend_spans(
                layer, queries[rows], part, window=None if is_whole else window, is_whole=is_whole, **how
            )
            for is_whole, (rows, part) in parts.items()
        ]
        output = outputs[0].new_empty(len(queries), *outputs[0].shape[1:])
        for (rows, _), part_output in zip(parts.values(), outputs, strict=True):
            output[rows] = part_output
        return output

    def _attend_spans(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None,
        chunk: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        sees_later: bool,
        max_seen: int | None,
        is_whole: bool | None = None,
    ) -> torch.Tensor:
        """Compute attention of the current batch. ``is_whole``: ``batch`` is this part of it (``_split_batch``)."""
        pool = self._pools[layer]
        key = (queries.shape[1], pool.page_format, window, chunk, slopes is None, sees_later, max_seen, is_whole)
        if key not in self._plans:
            visible_ends = batch.limit_ends(window) if sees_later else None
            spans = batch.spans if max_seen is None else limit_spans(batch.spans, max_seen)
            has_own_ends = visible_ends is not batch.visible_ends or spans is not batch.spans
            plan = self._plans[key] = native.plan_attention(
                spans,
                heads=queries.shape[1],
                page_format=pool.page_format,
                window=window,
                chunk=chunk,
                visible_ends=visible_ends,
                zero_page=self.page_count,
                device=self.device,
                dtype=queries.dtype,
                has_slopes=slopes is not None,
                is_window_ahead=visible_ends is not batch.visible_ends and sees_later,
                tables=None if has_own_ends else batch.tables,
            )
            if isinstance(plan, native.TablePlan) and not has_own_ends:
                batch.tables = plan.tables
        plan = self._plans[key]
        return native.attend(queries, pool, plan, scale=scale, softcap=softcap, sinks=sinks, slopes=slopes)

    def _split_batch(self, batch: PackedBatch) -> dict[bool, tuple[torch.Tensor, PackedBatch]]:
        """Divide a batch into rows of prompts whose tokens all attend to each other, which windows do not limit (True),
        and other rows (False). Return the row indices and a batch of each; an empty one is left out."""
        if not self._parts:
            for is_whole in (True, False):
                numbers = [number for number, flag in enumerate(batch.whole_prompts or ()) if flag == is_whole]
                if numbers:
                    self._parts[is_whole] = _select_spans(batch, numbers)
        return self._parts

    def _enter_batch(self, batch: PackedBatch) -> None:
        """Drop the plans of the previous batch. A batch object belongs to one step and does not change."""
        if batch is not self._batch:
            self._batch, self._plans, self._indices_by_format, self._parts = batch, {}, {}, {}


def limit_spans(spans: list[RowSpan], max_seen: int) -> list[RowSpan]:
    """Return spans of the same rows where only rows that attend to at most ``max_seen`` tokens keep their attention.
    Each other row becomes a span of its own that attends to one token, since its result is not used. Returns ``spans``
    itself if there are no other rows."""
    if all(span.length <= max_seen for span in spans):
        return spans
    limited: list[RowSpan] = []
    for span in spans:
        excess = min(span.count, max(0, span.length - max_seen))  # rows that attend to more tokens
        if span.count > excess:
            limited.append(RowSpan(span.first, span.count - excess, span.length - excess, span.table))
        excess_rows = range(span.first + span.count - excess, span.first + span.count)
        limited += [RowSpan(row, 1, 1, span.table[:1]) for row in excess_rows]
    return limited


def _select_spans(batch: PackedBatch, numbers: list[int]) -> tuple[torch.Tensor, PackedBatch]:
    """Return the tokens of some of a batch's spans, int64 [T], and a batch of these alone, for their attention."""
    spans: list[RowSpan] = []
    rows: list[int] = []
    for span in map(batch.spans.__getitem__, numbers):
        spans.append(replace(span, first=len(rows)))
        rows += range(span.first, span.first + span.count)
    index = torch.tensor(rows, device=batch.positions.device)
    visible_ends = None if batch.visible_ends is None else batch.visible_ends[index]
    positions = batch.positions[index]
    return index, replace(
        batch, positions=positions, visible_ends=visible_ends, spans=spans, whole_prompts=None, tables=None
    )


def carve_arenas(
    buffer: torch.Tensor, format_layers: FormatLayers, page_regions: list[LayerRegion], pages: int
) -> list[torch.Tensor]:
    """Split shared memory by ``page_regions`` into tensors [layers of one format, pages, ...], by ``format_layers``."""
    arenas: list[torch.Tensor] = []
    for kv_format, numbers in format_layers.items():
        start, size = page_regions[numbers[0]].offset, len(numbers) * pages * kv_format.page_bytes
        arenas.append(buffer[start : start + size].view(kv_format.dtype).view(len(numbers), pages, *kv_format.shape))
    return arenas


def layer_regions(format_layers: FormatLayers, pages: int) -> list[LayerRegion]:
    """Return the region of each layer's pages in one block of memory, grouped by format, then by layer."""
    by_layer: dict[int, LayerRegion] = {}
    offset = 0
    for kv_format, numbers in format_layers.items():
        size = kv_format.page_bytes
        for index, number in enumerate(numbers):
            by_layer[number] = LayerRegion(offset + index * pages * size, size, size)
        offset = -(-(offset + len(numbers) * pages * size) // FORMAT_ALIGNMENT) * FORMAT_ALIGNMENT
    return [by_layer[number] for number in range(len(by_layer))]
