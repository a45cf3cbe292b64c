"""One layer's KV pages in memory, laid out by the compiled kernels or by the torch kernels.

Only the kernels know the layout inside a page. To all other code it is a tensor [pages, ...]; an empty page is all
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley.native.layout import LayerKV


@dataclass(frozen=True)
class PageFormat:
    """The layout of one layer's pages.

    ``tiled``: the layout of ``pages.h``, else that of ``torch_attention``. ``dtype`` is that of the stored numbers:
    the model's, or int8.
    """

    layer: LayerKV
    shape: tuple[int, ...]  # of one page
    dtype: torch.dtype
    tiled: bool

    @property
    def page_bytes(self) -> int:
        """The size of one page in bytes."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer: ``data`` [pages, *format.shape]."""

    data: torch.Tensor
    page_format: PageFormat
