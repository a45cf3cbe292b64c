"""Checks that the tests of kernels share: empty pages, and the bits of a row in batches of many sizes."""

from __future__ import annotations

import torch

from parley import native
from parley.native.layout import LayerKV

ROWS = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 100, 128, 257]


def empty_pool(pages: int, layer: LayerKV, int8: bool = False) -> native.LayerPages:
    """Return pages of bfloat16 rows, or of int8, filled with zeros."""
    page_format = native.choose_page_format(layer, torch.bfloat16, torch.device("cpu"), int8=int8)
    return native.LayerPages(torch.zeros(pages, *page_format.shape, dtype=page_format.dtype), page_format)


def check_batch_invariant(kernel, *inputs: torch.Tensor) -> torch.Tensor:
    """Check that rows in batches of many sizes and positions have the bits of the row alone; return the results."""
    rows_alone = torch.cat([kernel(*(tensor[i : i + 1] for tensor in inputs)) for i in range(len(inputs[0]))])
    for rows in ROWS:
        for first in {0, 3, len(rows_alone) - rows}:
            if first >= 0 and first + rows <= len(rows_alone):
                batch_rows = slice(first, first + rows)
                assert torch.equal(kernel(*(tensor[batch_rows] for tensor in inputs)), rows_alone[batch_rows]), (
                    rows,
                    first,
                )
    return rows_alone
