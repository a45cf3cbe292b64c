"""One layer's pages as they lie in memory, and by whose rules: the compiled kernels' or the torch forms'.

Only the kernels look inside a page. All others see a tensor [pages, ...] of numbers in which zero bytes are an empty
page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley.native.layout import LayerKV


@dataclass(frozen=True)
class Format:
    """How the pages of one layer are laid out.

    ``tiled``: in the order of ``pages.h``, else in that of ``torch_attention``. ``dtype`` is that of the stored
    numbers: the model's, or int8.
    """

    layer: LayerKV
    shape: tuple[int, ...]  # of one page
    dtype: torch.dtype
    tiled: bool

    @property
    def page_bytes(self) -> int:
        size = self.dtype.itemsize
        for each in self.shape:
            size *= each
        return size


@dataclass(frozen=True)
class Pool:
    """The pages of one layer: ``data`` [pages, *format.shape]."""

    data: torch.Tensor
    format: Format
