"""The location of a checkpoint's tensor in its file, and the conversion of its numbers to Hugging Face format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parley.gguf.header import BlockType


@dataclass(frozen=True)
class TensorEntry:
    """The location of a tensor: bytes ``start`` to ``end`` of file number ``file``.

    * ``blocks``: the tensor has blocks of this type, and ``dtype`` is uint8.
    * ``heads``: the number of heads whose rows alternate between the first and the second half of the head, as in
      llama.cpp; 0 if they do not.
    * ``rows``: the index in the file of each row of Hugging Face format, int64 [out]; None: the same order.
    * ``columns``: the same for runs of inputs, int64 [runs], each of some whole blocks.
    * ``restore``: converts the numbers in the file to those of Hugging Face format.
    * ``parts``: the tensors in the file that this one consists of. ``join`` computes it from their numbers in float32,
      or without parts from none; then ``file`` and ``start`` are unused.
    """

    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    blocks: BlockType | None = None
    heads: int = 0
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    restore: Callable[[torch.Tensor], torch.Tensor] | None = None
    parts: tuple[TensorEntry, ...] = ()
    join: Callable[..., torch.Tensor] | None = None

    def order_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return stored rows [out, ...] in the order of Hugging Face format; a copy if the order differs.

        Inputs are ordered as well, of numbers or of the bytes of blocks.
        """
        if self.rows is not None:
            rows = rows[self.rows]
        if self.columns is not None:
            rows = rows.reshape(len(rows), len(self.columns), -1)[:, self.columns].flatten(1)
        if not self.heads:
            return rows
        halves = rows.view(self.heads, -1, 2, *rows.shape[1:]).transpose(1, 2)
        return halves.reshape(rows.shape)
