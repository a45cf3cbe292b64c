"""The KV cache of one model: its pages, and the attention plans for a batch's rows.

This module must not know who owns a page: the block pool in ``core`` allocates pages, the runner clears them, kernels
use them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from parley import native
from parley.model.networks.network import Batch
from parley.native import memory
from parley.native.layout import LayerKV
from parley.types import Region

ALIGN = 4096  # bytes; pages of each format begin at a multiple of this

Owners = dict[native.Format, list[int]]  # indices of the layers that use a format


class PagedKV:
    """Keys and values of all layers in ``blocks`` pages, for a model of ``dtype``.

    ``int8``: store them as int8 with one scale per key and per value, which takes about half the space of bfloat16.
    Memory is only reserved: a page takes physical memory when it is first cleared. One extra page always stays zero.
    ``shared``, on the CPU only: use the memory of descriptor ``file``, with each layer's pages in one of ``regions``.
    """

    def __init__(
        self,
        layers: list[LayerKV],
        blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        int8: bool = False,
        shared: bool = False,
    ):
        self.layers = layers
        self.blocks = blocks
        self.dtype = dtype
        self.int8 = int8
        self.device = torch.device(device)
        self.formats = [native.format(layer, dtype, self.device, int8=int8) for layer in layers]
        self.owners: Owners = defaultdict(list)
        for i, format in enumerate(self.formats):
            self.owners[format].append(i)
        self.file = -1
        self.regions = regions(self.owners, blocks + 1)
        if shared:
            whole, self.file = memory.shared(max(each.offset + (blocks + 1) * each.stride for each in self.regions))
            arenas = carve(whole, self.owners, self.regions, blocks + 1)
        else:
            shapes = [(format, (len(numbers), blocks + 1, *format.shape)) for format, numbers in self.owners.items()]
            arenas = [torch.empty(shape, dtype=format.dtype, device=self.device) for format, shape in shapes]
        self.arenas = arenas  # [layers of one format, pages, ...], by owners: one clear serves them all
        pools: dict[int, native.Pool] = {}
        for (format, numbers), arena in zip(self.owners.items(), arenas, strict=True):
            pools.update((i, native.Pool(pages, format)) for i, pages in zip(numbers, arena.unbind(0), strict=True))
        self._pools = [pools[i] for i in range(len(layers))]
        self._batch: Batch | None = None
        self._plans: dict[tuple[int, native.Format, int | None], native.Plan] = {}
        self._places: dict[native.Format, torch.Tensor] = {}
        self.clear([blocks])

    @staticmethod
    def page_bytes(
        layers: Sequence[LayerKV], dtype: torch.dtype, device: torch.device | str = "cpu", *, int8: bool = False
    ) -> int:
        """Return the bytes of one page over all layers."""
        return sum(native.format(layer, dtype, torch.device(device), int8=int8).page_bytes for layer in layers)

    def pool(self, layer: int) -> native.Pool:
        """Return the pages of one layer."""
        return self._pools[layer]

    def clear(self, pages: list[int]) -> None:
        """Zero pages that change owners: leftovers of another request (a NaN, say) must not reach the next one."""
        for arena in self.arenas if pages else ():
            if self.device.type == "cpu":  # index_fill_ takes eight times as long there
                for page in pages:
                    arena[:, page].zero_()
            else:
                arena.index_fill_(1, torch.tensor(pages, device=self.device), 0)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy pages (source, target), in order: a page may be the target of one copy and the source of a later one."""
        for source, target in copies:
            for arena in self.arenas:
                arena[:, target].copy_(arena[:, source])

    def wipe(self, slots: torch.Tensor) -> None:
        """Zero single tokens at ``slots`` (page * BLOCK_SIZE + offset, int64 [T])."""
        for layer, pool in zip(self.layers, self._pools, strict=True):
            keys, values = (
                torch.zeros(len(slots), layer.heads, dim, dtype=self.dtype, device=self.device)
                for dim in (layer.dim, layer.value_dim)
            )
            native.write(keys, values, pool, native.places(slots, pool.format))

    def places(self, layer: int, batch: Batch) -> torch.Tensor:
        """Return where the batch's tokens go in the pages of one layer, in the native kernels' numbering."""
        self._follow(batch)
        format = self._pools[layer].format
        if format not in self._places:
            self._places[format] = native.places(batch.slots, format)
        return self._places[format]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> None:
        """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim] at ``batch.slots``."""
        native.write(keys, values, self._pools[layer], self.places(layer, batch))

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute causal attention of queries [T, heads, dim]: [T, heads, value_dim] (see ``network.KVPages``)."""
        self._follow(batch)
        pool = self._pools[layer]
        key = (queries.shape[1], pool.format, window)
        if key not in self._plans:
            self._plans[key] = native.plan(
                batch.spans,
                heads=queries.shape[1],
                format=pool.format,
                window=window,
                zero_page=self.blocks,
                device=self.device,
            )
        return native.attend(queries, pool, self._plans[key], scale=scale, softcap=softcap, sinks=sinks)

    def _follow(self, batch: Batch) -> None:
        """Drop the plans of the previous batch. A batch object belongs to one step and is never changed."""
        if batch is not self._batch:
            self._batch, self._plans, self._places = batch, {}, {}


def carve(whole: torch.Tensor, owners: Owners, places: list[Region], pages: int) -> list[torch.Tensor]:
    """Split shared memory by ``page_regions`` into tensors [layers of one format, pages, ...], by ``format_layers``."""
    arenas: list[torch.Tensor] = []
    for format, numbers in owners.items():
        first, size = places[numbers[0]].offset, len(numbers) * pages * format.page_bytes
        arenas.append(whole[first : first + size].view(format.dtype).view(len(numbers), pages, *format.shape))
    return arenas


def regions(owners: Owners, pages: int) -> list[Region]:
    """Return the region of each layer's pages in one block of memory, grouped by format, then by layer."""
    found: dict[int, Region] = {}
    offset = 0
    for format, numbers in owners.items():
        size = format.page_bytes
        for place, number in enumerate(numbers):
            found[number] = Region(offset + place * pages * size, size, size)
        offset = -(-(offset + len(numbers) * pages * size) // ALIGN) * ALIGN
    return [found[number] for number in range(len(found))]
