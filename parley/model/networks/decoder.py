"""The fused decoder of Llama-shaped models: few operators per layer, all of them native kernels.

Query, key and value are one linear layer, as are gate and up, and each residual addition is fused into the following
norm. If the compiled kernels offer all layers as a single call, that call is used; it only saves Python overhead.
This module must not know files or configs; it receives packed weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from parley import native
from parley.model.networks.config import Shape
from parley.model.networks.network import Batch, Pages, Place
from parley.native.layer import Layer
from parley.native.layout import LayerKV

SITES = ("qkv", "output", "gate_up", "down")  # the linear layers within a layer, in the order of adapter sites


class Decoder:
    """``network.DecoderNetwork`` for one Llama-shaped model."""

    def __init__(
        self,
        shape: Shape,
        embedding: torch.Tensor,
        blocks: list[Layer],
        norm: torch.Tensor,
        head: native.Packed,
        max_len: int,
        parameters: int,
        weights_bytes: int,
        linears: Mapping[str, Place] | None = None,
    ):
        self.shape = shape
        self.linears = linears or {}
        self.parameters = parameters
        self.weights_bytes = weights_bytes
        self.vocab_size = shape.vocab
        self._kv = LayerKV(shape.kv_heads, shape.head_dim, shape.head_dim)
        self.layers = [self._kv] * len(blocks)
        self.blocks = blocks
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._scale = shape.head_dim**-0.5
        # A table, because the cosine of an angle must not depend on its place in a vector.
        angles = torch.outer(torch.arange(max_len).float(), shape.rope.inverse_frequencies())
        self._angles = torch.stack((angles.cos(), angles.sin()), 1).to(embedding.device)  # [max_len, 2, rotary / 2]
        self.stack = self._describe()  # all layers as one call; None: run kernel by kernel

    def select(self, blocks: list[int]) -> Decoder:
        """Return a decoder with only ``layers``. It shares the weights."""
        part = object.__new__(Decoder)
        part.__dict__.update(self.__dict__)
        part.blocks = [self.blocks[i] for i in blocks]
        part.layers = [self.layers[i] for i in blocks]
        part.stack = part._describe()
        return part

    def _describe(self) -> native.Stack | None:
        """Build the single call for all layers, or return None if the kernels have none for them."""
        heads, eps = self.shape.heads, self.shape.eps
        tables = self._embedding, self._norm, self._angles
        return native.stack(self.blocks, *tables, heads, self._kv, eps=eps, scale=self._scale)

    def hidden(self, batch: Batch, pages: Pages) -> torch.Tensor:
        """Return final (normed) hidden states [T, hidden]; write keys and values of all T tokens to the pages."""
        if self.stack is None:
            return self.kernel_by_kernel(batch, pages)
        pools = [pages.pool(i) for i in range(len(self.layers))]
        return self.stack.run(batch.token_ids, batch.positions, batch.slots, batch.spans, pools, batch.adapted)

    def _linear(self, x: torch.Tensor | native.Rows, batch: Batch, layer: int, name: str) -> torch.Tensor:
        """Apply one linear layer and add the LoRA adapters' share."""
        y = native.linear(x, getattr(self.blocks[layer], name))
        if batch.adapted is not None:
            assert isinstance(x, torch.Tensor), "adapters read rows as they are"
            batch.adapted.add(x, y, SITES.index(name) + layer * len(SITES))
        return y

    def kernel_by_kernel(self, batch: Batch, pages: Pages) -> torch.Tensor:
        """Compute ``compute_hidden`` kernel by kernel. This is the definition; a stack does the same in one call."""
        shape = self.shape
        cos, sin = self._angles.index_select(0, batch.positions)[:, None].unbind(2)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        residual = native.embed(batch.token_ids, self._embedding)
        # A norm knows which layer reads its result, because that layer may want int8; the head's rows are selected
        # later. A LoRA adapter reads rows unquantised; the layer then quantises them itself, with the same result.
        plain = batch.adapted is not None
        following = [(block.input_norm, None if plain else block.qkv) for block in self.blocks] + [(self._norm, None)]
        norm, reader = following[0]
        x = native.rms_norm(residual, norm, shape.eps, to=reader)
        for i, (block, (norm, reader)) in enumerate(zip(self.blocks, following[1:], strict=True)):
            qkv = self._linear(x, batch, i, "qkv")
            pool, places = pages.pool(i), pages.places(i, batch)
            queries = native.rope_write(qkv, cos, sin, pool, places, head_norm=block.head_norm, eps=shape.eps)
            attended = pages.attend(i, queries, batch, scale=self._scale, window=block.window)
            x = self._linear(attended.view(-1, shape.heads * shape.head_dim), batch, i, "output")
            to = None if plain else block.gate_up
            x, residual = native.add_rms_norm(x, residual, block.post_norm, shape.eps, to=to)
            x = native.silu_mul(self._linear(x, batch, i, "gate_up"), to=None if plain else block.down)
            x = self._linear(x, batch, i, "down")
            x, residual = native.add_rms_norm(x, residual, norm, shape.eps, to=reader)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the given hidden rows: float32 [rows, vocab_size]."""
        return native.logits(hidden, self._head)
