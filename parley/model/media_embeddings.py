"""The embeddings of one media item, as an encoder computed them, in place of rows of the embedding table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EncodedItem:
    """``core.sequence.ItemEmbeddings`` in tensors: ``rows`` [n, hidden], one for each placeholder token of the item.

    ``deepstack``: further rows [n, hidden] for each of the first layers, as in ``MediaRows``; usually none. All have
    the dtype and device of the model.
    """

    rows: torch.Tensor
    deepstack: Sequence[torch.Tensor] = ()

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.rows.nbytes + sum(rows.nbytes for rows in self.deepstack)
