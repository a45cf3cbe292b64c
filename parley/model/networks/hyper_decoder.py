"""The fused decoder of models with hyper-connections (Hy4, DeepSeek V4). ``HyperShape`` defines its residual streams.

Streams are [T, N, hidden]. They are mixed elementwise, and stream after stream, so the bits of a row do not depend on
its index in the batch.
"""

from __future__ import annotations

from typing import Any

import torch

from parley import native
from parley.heartbeat import beat
from parley.model.networks.compressed_attention import CompressedAttention, CompressedStep
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.network import KVPages, PackedBatch
from parley.native.layer import DecoderLayer, HyperWeights
from parley.native.layer_shape import HyperShape


class HyperDecoder(FusedDecoder):
    """``network.DecoderNetwork`` for one model with hyper-connections. It always runs kernel by kernel."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: native.EmbeddingRows,
        layers: list[DecoderLayer],
        *args: Any,
        **options: Any,
    ):
        super().__init__(config, embedding, layers, *args, **options)
        self._compressed_attention = CompressedAttention(config, layers, self._layer_linears)

    def _compress_batch(self, batch: PackedBatch) -> CompressedStep | None:
        """Return what layers with compressed entries share in a step; None for models without them."""
        if self.config.compression is None:
            return None
        # The first rotary embedding is that of layers with entries
        return CompressedStep(self.config.compression, batch, self.position_tables.rope_table[0])

    def kernel_by_kernel(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Compute ``compute_hidden``."""
        assert self.config.hyper is not None
        embeddings = self.embeddings.embed_tokens(batch)
        step, compressed = self._begin_step(batch, pages, embeddings), self._compress_batch(batch)
        streams = embeddings[:, None].repeat(1, self.config.hyper.streams, 1)
        for i, (shape, weights) in enumerate(zip(self.config.layers, self.layer_weights, strict=True)):
            beat()
            x, shares, mixed_streams = self._read_streams(streams, weights.attention_hyper)
            x, rotation = native.norm_rows(x, weights.attention_norm), step.rotations[shape.rope]
            if compressed is None:
                mixed = self._attention.attend_layer(i, x, batch, pages, *rotation, step.query_scales, step.indexed)
            else:
                mixed = self._compressed_attention.attend_layer(i, x, batch, pages, *rotation, compressed)
            added = self._layer_linears.apply_linear(mixed, batch, i, "output")
            streams = _write_streams(mixed_streams, added, shares)
            x, shares, mixed_streams = self._read_streams(streams, weights.mlp_hyper)
            x = native.norm_rows(x, weights.mlp_norm)
            streams = _write_streams(mixed_streams, self._mlps.run_mlps(i, x, x, batch), shares)
        merged, _, _ = self._read_streams(streams, self.embeddings.parts.last_hyper)
        result: torch.Tensor = native.norm_rows(merged, self._norm)
        return result

    def _read_streams(
        self, streams: torch.Tensor, hyper: HyperWeights | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weighted sum of the streams [T, hidden], the share of each stream in what is added to them,
        float32 [T, N], and the streams that it is added to, float32; after the last layer nothing is added.

        Sigmoids and mixes are computed in float64, because in float32 their bits depend on a number's index in the
        tensor.
        """
        shape = self.config.hyper
        assert shape is not None and hyper is not None
        rows, count = streams.flatten(1), shape.streams
        ones = torch.ones(rows.shape[1], device=rows.device)
        numbers = native.lm_head_logits(native.norm_rows(rows, native.Norm(ones, self.config.eps)), hyper.weight)
        numbers = numbers * hyper.scale + hyper.base
        read, write = numbers[:, : 2 * count].double().sigmoid().float().tensor_split([count], 1)
        streams = streams.float()
        total = _sum_streams(streams, read + shape.eps)
        if numbers.shape[1] > 2 * count:
            mix = _balance_mix(numbers[:, 2 * count :].unflatten(1, (count, count)), shape)
            streams = torch.stack([_sum_streams(streams, mix[:, :, i]) for i in range(count)], 1)
        return total.to(rows.dtype), shape.magnitude * write + shape.write_eps, streams


def _sum_streams(streams: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the sum of streams [T, N, hidden] times their ``shares`` [T, N], one after another: [T, hidden]."""
    total = torch.zeros_like(streams[:, 0])
    for i in range(streams.shape[1]):
        total += shares[:, i, None] * streams[:, i]
    return total


def _balance_mix(numbers: torch.Tensor, shape: HyperShape) -> torch.Tensor:
    """Return the shares of streams in each other, float32 [T, N, N], of float32 numbers, as ``HyperShape`` says."""
    mix = numbers.double().softmax(-1) + shape.eps
    mix /= mix.sum(-2, keepdim=True) + shape.eps
    for _ in range(shape.sinkhorn_steps - 1):
        mix /= mix.sum(-1, keepdim=True) + shape.eps
        mix /= mix.sum(-2, keepdim=True) + shape.eps
    return mix.float()


def _write_streams(streams: torch.Tensor, added: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return float32 streams [T, N, hidden] plus rows [T, hidden] times the share [T, N] of each stream, in the dtype
    of the rows."""
    return (streams + shares[..., None] * added.float()[:, None]).to(added.dtype)
