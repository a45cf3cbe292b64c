"""Decode steps as CUDA graphs: one call starts all kernels of a step, instead of one call of the host for each kernel.

A graph repeats the kernels that were recorded, with the same addresses and sizes. So it reads its batch from tensors at
fixed addresses, and there are graphs for certain numbers of rows and certain context lengths. A batch is padded to the
next number of rows; padding rows attend to nothing and store nothing. The result of a row depends on that row alone, so
a step has the same bits with and without a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard

import torch

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.network import DecoderNetwork, PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import RowSpan

log = logging.getLogger("parley.engine")

MAX_ROWS = 256  # most rows of a graph
FIRST_LENGTH = 4096  # context length in tokens of the shortest graphs; each next length is four times as long
NOT_STORED = -PAGE_SIZE  # the slot of a token whose key and value are not stored


class StepGraph(Protocol):
    """Recorded kernels."""

    def replay(self) -> None:
        """Start them all."""


class CudaGraphRecorder:
    """Records CUDA graphs that share the memory of their temporary tensors, so only one of them may run at a time."""

    def __init__(self) -> None:
        self._memory_pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> StepGraph:
        """Record the kernels that ``launch`` starts. ``launch`` is first called once without recording, because kernels
        are compiled when they first run. Raises RuntimeError if it waits for the GPU."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool):
            launch()
        return graph


def graph_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows that have graphs, ascending. From 32 rows on, each is at most a quarter more than the
    one before."""
    sizes = [1, 2, 4]
    step = 8
    while sizes[-1] < min(max_rows, MAX_ROWS):
        sizes.append(sizes[-1] + (4 if sizes[-1] < 8 else step))
        if sizes[-1] >= 8 * step:
            step *= 2
    return sizes


def can_record(network: DecoderNetwork, pages: PagedKV) -> TypeGuard[FusedDecoder]:
    """Whether a decode step of this network starts only kernels that read its batch from the device."""
    if not isinstance(network, FusedDecoder) or network.stack is not None or network.state_sizes:
        return False
    # The host decides by context lengths which rows choose tokens, and which entries rows see
    if network.config.indexer is not None or network.config.compression is not None:
        return False
    plain_layers = all(
        shape.chunk is None
        and not shape.slopes
        and (layer.mixture is None or native.has_gpu_experts(layer.mixture.experts))
        and native.has_gpu_rope_write(
            layer.head_norm, is_norm_late=shape.is_qk_norm_late, has_scaled_queries=shape.has_scaled_queries
        )
        for shape, layer in zip(network.config.layers, network.layer_weights, strict=True)
    )
    return plain_layers and all(
        native.has_table_attention(page_format, pages.device, network.dtype) for page_format in pages.formats
    )


class DecodeGraphs:
    """Graphs of the decode steps of a network that ``can_record``, for at most ``max_rows`` rows.

    Each is recorded when it is first needed, by ``record(launch)``. ``launch`` starts the kernels of a step, and may be
    called several times.
    """

    def __init__(
        self,
        network: FusedDecoder,
        pages: PagedKV,
        *,
        max_model_len: int,
        max_rows: int,
        record: Callable[[Callable[[], None]], StepGraph],
    ):
        self._network = network
        self._pages = pages
        self._record = record
        self._sizes = graph_sizes(max_rows)
        self._lengths = [min(FIRST_LENGTH, max_model_len)]
        while self._lengths[-1] < max_model_len:
            self._lengths.append(min(4 * self._lengths[-1], max_model_len))
        rows, device = self._sizes[-1], pages.device
        self._columns = torch.zeros(3, rows, dtype=torch.int64, device=device)  # token ids, positions, slot mapping
        self._visible_ends = torch.zeros(rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows, -(-max_model_len // PAGE_SIZE), dtype=torch.int32, device=device)
        self._hidden = torch.zeros(rows, network.config.hidden_size, dtype=network.dtype, device=device)
        self._graphs: dict[tuple[int, int], StepGraph] = {}
        self._kept_tables: list[native.BatchTables] = []  # graphs read their memory, so they must not be freed
        self._failed = False
        self.replays = 0

    def compute_hidden(self, batch: PackedBatch) -> torch.Tensor | None:
        """Return the result of the network's ``compute_hidden``, or None if no graph computes this batch.

        The result is overwritten by the next call.
        """
        rows = len(batch.spans)
        if self._failed or rows > self._sizes[-1] or not _is_plain_decode(batch):
            return None
        longest = max(span.length for span in batch.spans)
        size = next(graph_rows for graph_rows in self._sizes if graph_rows >= rows)
        length = next(graph_length for graph_length in self._lengths if graph_length >= longest)
        self._fill_inputs(batch, size)
        if (size, length) not in self._graphs:
            try:
                self._graphs[size, length] = self._record_step(size, length)
            except RuntimeError as error:
                log.warning("Steps run without CUDA graphs, which is slower: %s", str(error).partition("\n")[0])
                self._failed = True
                return None
        self._graphs[size, length].replay()
        self.replays += 1
        return self._hidden[:rows]

    def _fill_inputs(self, batch: PackedBatch, size: int) -> None:
        """Copy a batch into the tensors that graphs read, on the device and without waiting for it."""
        rows = len(batch.spans)
        if batch.tables is None:
            batch.tables = native.BatchTables.of_spans(batch.spans, None, self._pages.device)
        tables = batch.tables
        for column, values in zip(self._columns, (batch.token_ids, batch.positions, batch.slot_mapping), strict=True):
            column[:rows].copy_(values)
        self._visible_ends[:rows].copy_(tables.visible_ends)
        self._positions[:rows].copy_(tables.positions)
        self._tables[:rows, : tables.pages.shape[1]].copy_(tables.pages)
        if rows < size:
            self._columns[:2, rows:size].zero_()
            self._columns[2, rows:size].fill_(NOT_STORED)
            self._visible_ends[rows:size].zero_()
            self._positions[rows:size].zero_()

    def _record_step(self, size: int, length: int) -> StepGraph:
        """Record a step of ``size`` rows that see at most ``length`` tokens."""
        spans = [RowSpan(row, 1, length, []) for row in range(size)]
        visible_ends, positions, pages = (
            buffer[:size] for buffer in (self._visible_ends, self._positions, self._tables)
        )
        # Copies from the host must not be recorded: the first launch makes the tiles, and later ones reuse them.
        tables = native.BatchTables(spans, pages, positions, visible_ends, length, 1)
        self._kept_tables.append(tables)

        def launch() -> None:
            token_ids, positions, slot_mapping = self._columns[:, :size]
            batch = PackedBatch(token_ids, positions, slot_mapping, spans, tables=tables)
            self._hidden[:size].copy_(self._network.compute_hidden(batch, self._pages))

        return self._record(launch)


def _is_plain_decode(batch: PackedBatch) -> bool:
    """Whether each row is one token of a sequence, with causal attention and without adapters or media."""
    extras: Sequence[object | None] = (
        batch.lora_rows, batch.long_rope, batch.media, batch.rope_positions, batch.visible_ends, batch.states,
        batch.images,
    )  # fmt: skip
    return len(batch.spans) == len(batch.token_ids) and all(extra is None for extra in extras)
