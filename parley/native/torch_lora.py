"""Low-rank adapters in torch operators, where the compiled kernels do not apply.

For each linear layer of a model, by number, an adapter has parts that are added to the layer's outputs (LoRA, arXiv
2106.09685): y += scale * up (down x). The product down x is rounded to the dtype of the rows before it is scaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parley.native import torch_kernels
from parley.native.lowrank import LowRank

Part = tuple[int, torch_kernels.Packed, torch_kernels.Packed, float]  # first output, down, up, scale


class Adapter:
    """An adapter's weights for rows of one dtype on one device. ``nbytes`` is their size."""

    def __init__(self, sites: Sequence[Sequence[LowRank]], dtype: torch.dtype, device: torch.device):
        def pack(weight: torch.Tensor) -> torch_kernels.Packed:
            return torch_kernels.pack(weight.to(device=device, dtype=dtype, copy=True))

        self.sites: list[list[Part]] = [
            [(part.first, pack(part.down), pack(part.up), part.scale) for part in parts] for parts in sites
        ]
        self.nbytes = dtype.itemsize * sum(p.down.numel() + p.up.numel() for parts in sites for p in parts)


class Adapted:
    """The rows of a batch that have adapters: for each adapter, its row numbers."""

    def __init__(self, groups: Sequence[tuple[Adapter, Sequence[int]]], device: torch.device):
        self._groups = [(adapter, torch.tensor(rows, device=device)) for adapter, rows in groups]

    def add(self, x: torch.Tensor, y: torch.Tensor, site: int) -> None:
        """Add the adapters' products with x [T, into] to y [T, out], in linear layer number ``site``."""
        for adapter, rows in self._groups:
            parts = adapter.sites[site]
            some = x.index_select(0, rows) if parts else x
            for first, down, up, scale in parts:
                more = torch_kernels.linear(torch_kernels.linear(some, down).mul_(scale), up)
                y[:, first : first + more.shape[1]].index_add_(0, rows, more)
