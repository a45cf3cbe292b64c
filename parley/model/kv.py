"""The KV cache of one model: its pages, and the plan by which a batch's rows attend to them.

It must not know who owns a page: the block pool in ``core`` hands pages out, the runner clears them, kernels use them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from parley import native
from parley.core.sequence import BLOCK_SIZE
from parley.model.network import Batch
from parley.native.layout import LayerKV


class PagedKV:
    """Keys and values of all layers in ``blocks`` pages of BLOCK_SIZE tokens.

    ``pool(i)`` are the pages of layer i, [blocks + 1, 2, heads, BLOCK_SIZE, dim]; dim is the larger of key and value
    size. The memory is only reserved: a page takes real memory when it is first cleared. The one extra page is zero
    for good.
    """

    def __init__(self, layers: list[LayerKV], blocks: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.layers = layers
        self.blocks = blocks
        self.device = torch.device(device)
        shapes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, layer in enumerate(layers):
            shapes[layer.heads, width(layer)].append(i)
        self._arenas: list[torch.Tensor] = []  # [layers of one shape, pages, ...]: one clear serves them all
        pools: dict[int, torch.Tensor] = {}
        for (heads, dim), owners in shapes.items():
            arena = torch.empty(len(owners), blocks + 1, 2, heads, BLOCK_SIZE, dim, dtype=dtype, device=self.device)
            self._arenas.append(arena)
            pools.update(zip(owners, arena.unbind(0), strict=True))
        self._pools = [pools[i] for i in range(len(layers))]
        self._batch: Batch | None = None
        self._plans: dict[tuple[int, LayerKV, int | None], native.Plan] = {}
        self._places: dict[int, torch.Tensor] = {}
        self.clear([blocks])

    @staticmethod
    def page_bytes(layers: Sequence[LayerKV], dtype: torch.dtype) -> int:
        """Bytes that one page takes over all layers."""
        return sum(2 * layer.heads * width(layer) for layer in layers) * BLOCK_SIZE * dtype.itemsize

    def pool(self, layer: int) -> torch.Tensor:
        """The pages of one layer."""
        return self._pools[layer]

    def clear(self, pages: list[int]) -> None:
        """Zero pages that change hands: what another request left there (a NaN, say) must not reach the next one."""
        if pages:
            index = torch.tensor(pages, device=self.device)
            for arena in self._arenas:
                arena.index_fill_(1, index, 0)

    def places(self, layer: int, batch: Batch) -> torch.Tensor:
        """Where the batch's tokens go in the pages of one layer (see ``native.places``)."""
        self._follow(batch)
        heads = self.layers[layer].heads
        if heads not in self._places:
            self._places[heads] = native.places(batch.slots, heads)
        return self._places[heads]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> None:
        """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim] at ``batch.slots``."""
        places, heads = self.places(layer, batch), self.layers[layer].heads
        native.write(keys, self._pools[layer], places[:, :heads])
        native.write(values, self._pools[layer], places[:, heads:])

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
        """Causal attention of queries [T, heads, dim]: [T, heads, value_dim] (see ``network.Pages``)."""
        self._follow(batch)
        shape = self.layers[layer]
        key = (queries.shape[1], shape, window)
        if key not in self._plans:
            self._plans[key] = native.plan(
                batch.spans,
                heads=queries.shape[1],
                layer=shape,
                window=window,
                zero_page=self.blocks,
                dtype=self._pools[layer].dtype,
                device=self.device,
            )
        return native.attend(
            queries,
            self._pools[layer],
            self._plans[key],
            scale=scale,
            value_dim=shape.value_dim,
            softcap=softcap,
            sinks=sinks,
        )

    def _follow(self, batch: Batch) -> None:
        """Forget what was worked out for the previous batch. A batch object is one step and never changed."""
        if batch is not self._batch:
            self._batch, self._plans, self._places = batch, {}, {}


def width(layer: LayerKV) -> int:
    """Numbers that a page has for a key, and for a value."""
    return max(layer.dim, layer.value_dim)
