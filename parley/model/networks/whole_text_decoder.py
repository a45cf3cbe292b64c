"""A decoder that computes each text in a single step, as encoders do: for vectors of all tokens, and for classifiers.

The KV pages are scratch memory of one step. In models with bidirectional attention, a token also attends to later ones
of its text; the kernels do the same for images, whose tokens attend to each other. The result of a text does not
depend on other texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from parley.core.sequence import PAGE_SIZE
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.encoder import PackedTexts
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.device_copy import copy_to_device
from parley.native.layout import RowSpan


@dataclass(frozen=True)
class WholeTextSizes:
    """``encoder.EncoderSizes`` of a decoder."""

    vocab_size: int
    hidden_size: int
    max_length: int


class WholeTextDecoder:
    """``encoder.EncoderNetwork`` over a decoder whose tables reach ``max_length`` tokens.

    ``reads_both_ways``: a token attends to its whole text, and in layers with a window to as many later tokens as
    earlier ones.
    """

    def __init__(self, decoder: FusedDecoder, max_length: int, *, reads_both_ways: bool):
        self.decoder = decoder
        self.config = WholeTextSizes(decoder.vocab_size, decoder.config.hidden_size, max_length)
        self.device = decoder.device
        self._reads_both_ways = reads_both_ways
        self._pages = self._make_pages(1)

    def encode_packed(self, texts: PackedTexts) -> torch.Tensor:
        """Return the hidden states after the last norm: [T, hidden]."""
        page_counts = [-(-length // PAGE_SIZE) for length in texts.lengths]
        page_total = sum(page_counts)
        if page_total > self._pages.page_count:
            self._pages = self._make_pages(page_total)
        self._pages.clear_pages(list(range(page_total)))
        lengths = np.array(texts.lengths)
        last_pages = np.cumsum(page_counts)
        shifts = copy_to_device(np.repeat((last_pages - page_counts) * PAGE_SIZE, lengths), self.device)
        tables = [list(range(end - count, end)) for end, count in zip(last_pages.tolist(), page_counts, strict=True)]
        first_rows = (np.cumsum(lengths) - lengths).tolist()
        spans = [
            RowSpan(row, length, length, table)
            for row, length, table in zip(first_rows, texts.lengths, tables, strict=True)
        ]
        batch = PackedBatch(texts.token_ids, texts.positions, texts.positions + shifts, spans)
        batch.mark_long_rope([length > self.decoder.long_rope_after for length in texts.lengths])
        if self._reads_both_ways:
            batch.visible_ends = copy_to_device(np.repeat(lengths, lengths), self.device)
            batch.has_window_ahead = True
        return self.decoder.compute_hidden(batch, self._pages)

    def _make_pages(self, count: int) -> PagedKV:
        """Return pages for a step. Layers share them, unless some read the keys of others."""
        are_shared = all(shape.kv_layer is None for shape in self.decoder.config.layers)
        return PagedKV(self.decoder.kv_layers, count, self.decoder.dtype, self.device, one_layer_at_once=are_shared)
