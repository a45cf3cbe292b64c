"""Low-rank adapters in torch operators, where the compiled kernels do not apply.

For each linear layer of a model, by number, an adapter has parts that are added to the layer's outputs (LoRA, arXiv
2106.09685): y += scale * up (down x). The product down x is rounded to the dtype of the rows before it is scaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parley.native.lowrank import LowRank
from parley.native.torch_forms import torch_kernels

LoraPart = tuple[int, torch_kernels.TorchPacked, torch_kernels.TorchPacked, float]  # first output, down, up, scale


class TorchLora:
    """An adapter's weights for rows of one dtype on one device. ``nbytes`` is their size."""

    def __init__(self, sites: Sequence[Sequence[LowRank]], dtype: torch.dtype, device: torch.device):
        def pack_part(weight: torch.Tensor) -> torch_kernels.TorchPacked:
            return torch_kernels.pack_weight(weight.to(device=device, dtype=dtype, copy=True))

        self.sites: list[list[LoraPart]] = [
            [(part.first, pack_part(part.down), pack_part(part.up), part.scale) for part in parts] for parts in sites
        ]
        self.nbytes = dtype.itemsize * sum(p.down.numel() + p.up.numel() for parts in sites for p in parts)


class TorchLoraRows:
    """The rows of a batch that have adapters: for each adapter, its row numbers."""

    def __init__(self, groups: Sequence[tuple[TorchLora, Sequence[int]]], device: torch.device):
        self._groups = [(adapter, torch.tensor(rows, device=device)) for adapter, rows in groups]

    def add_lora(self, x: torch.Tensor, y: torch.Tensor, site: int) -> None:
        """Add the adapters' products with x [T, in_features] to y [T, out], in linear layer number ``site``."""
        for adapter, rows in self._groups:
            parts = adapter.sites[site]
            inputs = x.index_select(0, rows) if parts else x
            for first, down, up, scale in parts:
                products = torch_kernels.linear(torch_kernels.linear(inputs, down).mul_(scale), up)
                y[:, first : first + products.shape[1]].index_add_(0, rows, products)
