"""The interface between runner and network: the network's methods, and its input of a packed batch and the KV pages.

All rows of a step are packed into one list of T tokens, sequences one after another and without padding. The position
of a token is its index in its own sequence. A network knows no sequences, slots or requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.state_arena import BatchStates
from parley.native.device_copy import copy_to_device
from parley.native.layout import LayerKV, RowSpan
from parley.native.pool import LayerPages


class MediaRows(NamedTuple):
    """Embeddings that encoders computed: row i of ``embeddings`` [rows, hidden] stands for token ``tokens[i]``, a
    position in the batch (int64 [rows]).

    ``deepstack``: further embeddings for the same tokens, one tensor [rows, hidden] for each of the first layers,
    added to the residual after that layer (Qwen3-VL's deepstack); usually none.
    """

    tokens: torch.Tensor
    embeddings: torch.Tensor
    deepstack: Sequence[torch.Tensor] = ()


@dataclass
class SeenImages:
    """The images that tokens of a batch see in layers with cross-attention.

    ``rows``: the numbers of the tokens that see any, int64 [S]. ``attention``: these alone, for their attention: the
    spans have the pages of the embeddings that they see. ``embeddings`` [N, hidden]: those whose keys and values this
    step writes, at the ``slot_mapping`` of ``written``; None: it writes none.
    """

    rows: torch.Tensor
    attention: PackedBatch
    embeddings: torch.Tensor | None
    written: PackedBatch


@dataclass
class PackedBatch:
    """The tokens of one step. ``token_ids``, ``positions`` and ``slot_mapping`` are int64 [T].

    * ``slot_mapping``: where the key and value of each token are stored: page * PAGE_SIZE + offset in the page.
    * ``spans``: the tokens of each sequence, with its pages.
    * ``lora_rows``: the tokens that have LoRA adapters; None if there are none.
    * ``long_rope``: whether each token uses the long rotary factors (``DecoderNetwork.long_rope_after``), bool [T];
      None if none does.
    * ``media``: embeddings from encoders; None if there are none.
    * ``rope_positions``: rotary positions on the three axes of M-RoPE, int64 [3, T], or on four; None if they all
      equal ``positions``.
    * ``visible_ends``: the last position that each token attends to, plus 1, int64 [T]; None: attention is causal.
    * ``has_window_ahead``: in layers with a window of w tokens, a token attends to at most the next w - 1 tokens.
    * ``whole_prompts``: for each span, whether all of its tokens attend to all of a prompt, even in layers with a
      window; None if there is no such span.
    * ``images``: those that layers with cross-attention read; None if no token sees any, and none is written.
    * ``states``: of the sequences, for layers that keep one; None if all sequences begin here and do not continue.
    * ``tables``: the same sequences as tensors for kernels on a GPU, made when the first kernel needs them.
    * ``result_counts``: for each span, how many of its last tokens have results that are read; None: all. In the last
      layer a network may skip the other tokens; their rows in its result are undefined.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    spans: list[RowSpan]
    lora_rows: native.LoraRows | None = None
    long_rope: torch.Tensor | None = None
    media: MediaRows | None = None
    rope_positions: torch.Tensor | None = None
    visible_ends: torch.Tensor | None = None
    has_window_ahead: bool = False
    whole_prompts: list[bool] | None = None
    images: SeenImages | None = None
    states: BatchStates | None = None
    tables: native.BatchTables | None = None
    result_counts: list[int] | None = None

    @classmethod
    def pack_parts(cls, parts: Iterable[tuple[list[int], int, list[int]]], device: torch.device) -> PackedBatch:
        """Pack parts of sequences: (tokens, position of the first, pages of the sequence)."""
        spans: list[RowSpan] = []
        token_ids: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        for tokens, start, table in parts:
            end = start + len(tokens)
            spans.append(RowSpan(len(token_ids), len(tokens), end, table))
            token_ids += tokens
            if end - start == 1:
                positions.append(start)
                slot_mapping.append(table[start // PAGE_SIZE] * PAGE_SIZE + start % PAGE_SIZE)
                continue
            positions += range(start, end)
            for page in range(start // PAGE_SIZE, (end - 1) // PAGE_SIZE + 1):
                first = page * PAGE_SIZE
                shift = table[page] * PAGE_SIZE - first
                slot_mapping += range(max(start, first) + shift, min(end, first + PAGE_SIZE) + shift)
        columns = copy_to_device(np.array((token_ids, positions, slot_mapping), np.int64), device)
        return cls(columns[0], columns[1], columns[2], spans)

    def mark_long_rope(self, flags: list[bool]) -> None:
        """Set ``long_rope`` from one flag for each span."""
        if any(flags):
            counts = torch.tensor([span.count for span in self.spans])
            self.long_rope = torch.tensor(flags).repeat_interleave(counts).to(self.positions.device)

    def limit_ends(self, window: int | None) -> torch.Tensor | None:
        """Return ``visible_ends`` in a layer with a window of ``window`` tokens; None: the layer has no window."""
        if self.visible_ends is None or window is None or not self.has_window_ahead:
            return self.visible_ends
        return torch.minimum(self.visible_ends, self.positions + window)


class LinearSite(NamedTuple):
    """Where a linear layer of the checkpoint is computed: as outputs ``first`` to ``first + out_features`` of the
    network's linear layer number ``site``, which reads ``in_features`` numbers per token. ``order``: as in
    ``LinearSpec``."""

    site: int
    first: int
    out_features: int
    in_features: int
    order: torch.Tensor | None = None


class KVPages(Protocol):
    """The KV cache of one model, in pages of PAGE_SIZE tokens. The layout inside a page is private to the kernels.

    ``layer`` is an index in ``DecoderNetwork.kv_layers``.
    """

    def layer_pool(self, layer: int) -> LayerPages:
        """Return the pages of one layer, for kernels that write them directly."""

    def write_indices(self, layer: int, batch: PackedBatch) -> torch.Tensor:
        """Return ``batch.slot_mapping`` as the indices that ``native.write_kv`` takes for the pages of one layer."""

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch) -> None:
        """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim] at ``batch.slot_mapping``."""

    def attend_pages(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        sees_later: bool = True,
        max_seen: int | None = None,
    ) -> torch.Tensor:
        """Compute attention of queries [T, heads, dim] over the pages: [T, heads, value_dim], same dtype. A token
        attends to itself, to earlier tokens, and, if ``sees_later``, to later ones up to ``batch.visible_ends``.

        * ``window`` w: of the earlier tokens, it attends only to the last w - 1.
        * ``chunk`` c: it attends only to tokens of its own chunk of c tokens: from position p // c * c on.
        * ``softcap`` c: scores become c * tanh(score / c).
        * ``slopes`` [heads]: minus slope times the distance of a key is added to its score (ALiBi, arXiv 2108.12409).
        * ``sinks`` [heads]: one extra logit per head that gets probability but contributes no value.
        * ``max_seen``: the results of rows that attend to more tokens than this are undefined.
        """


class DecoderNetwork(Protocol):
    """A decoder-only language model over pages."""

    vocab_size: int
    parameters: int  # number of elements in all weights, shared ones counted once
    weights_bytes: int  # memory of the weights in bytes
    kv_layers: list[LayerKV]  # the KV cache of each layer that has one, in order
    state_sizes: list[int]  # the size of a sequence's state in each layer that keeps one, in numbers
    long_rope_after: float  # tokens; longer sequences use the long rotary factors; inf: there is one set
    linears: Mapping[str, LinearSite]  # the layers that LoRA adapters may change, by their names in the checkpoint

    def set_context_length(self, length: int) -> None:
        """Prepare for contexts of ``length`` tokens. Before this call, only contexts of a single step can be
        computed."""

    def position_bytes(self, length: int) -> int:
        """Return the bytes that each position of a context of ``length`` tokens needs in addition to the KV cache."""

    def compute_hidden(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Return final (normed) hidden states [T, hidden]; write keys and values of all T tokens to the pages.

        With ``batch.result_counts``, the other rows are undefined.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of hidden rows: float32 [rows, vocab_size]. Row i depends on row i alone, bitwise in bf16."""
