"""Where a tensor of a checkpoint lies, and how its numbers in the file become those of Hugging Face format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parley.gguf.header import BlockType


@dataclass(frozen=True)
class TensorEntry:
    """The location of a tensor: bytes ``start`` to ``end`` of file number ``file``.

    ``blocks``: it has blocks of this type, and ``dtype`` is uint8. ``heads``: the number of heads
    whose rows alternate between the first and the second half of the head, as in llama.cpp; 0 if they do not.
    ``rows``: where each row of Hugging Face format lies in the file, int64 [out]; None: in order. ``columns``: likewise
    of runs of inputs, int64 [runs], each of some whole blocks. ``restore``: makes the numbers of Hugging Face format of
    those in the file. ``parts``: the tensors in the file that this one consists of, and ``join`` makes it of their
    numbers in float32; then ``file`` and ``start`` say nothing. Without parts, ``join`` knows the numbers.
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
        """Return rows as stored [out, ...] in the order of Hugging Face format; a copy if that is another one.

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
