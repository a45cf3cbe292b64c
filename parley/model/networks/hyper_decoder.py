"""The fused decoder of models with hyper-connections (Hy4). ``HyperShape`` defines its residual streams.

Streams are [T, N, hidden]. They are mixed elementwise, and stream after stream, so the bits of a row do not depend on
its index in the batch.
"""

from __future__ import annotations

import torch

from parley import native
from parley.heartbeat import beat
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.network import KVPages, PackedBatch
from parley.native.layer import HyperWeights


class HyperDecoder(FusedDecoder):
    """``network.DecoderNetwork`` for one model with hyper-connections. It always runs kernel by kernel."""

    def kernel_by_kernel(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Compute ``compute_hidden``."""
        assert self.config.hyper is not None
        embeddings = self.embeddings.embed_tokens(batch)
        step = self._begin_step(batch, pages, embeddings)
        streams = embeddings[:, None].repeat(1, self.config.hyper.streams, 1)
        for i, (shape, weights) in enumerate(zip(self.config.layers, self.layer_weights, strict=True)):
            beat()
            x, shares = self._read_streams(streams, weights.attention_hyper)
            x, rotation = native.norm_rows(x, weights.attention_norm), step.rotations[shape.rope]
            mixed = self._attention.attend_layer(i, x, batch, pages, *rotation, step.query_scales, step.indexed)
            streams = _write_streams(streams, self._layer_linears.apply_linear(mixed, batch, i, "output"), shares)
            x, shares = self._read_streams(streams, weights.mlp_hyper)
            x = native.norm_rows(x, weights.mlp_norm)
            streams = _write_streams(streams, self._mlps.run_mlps(i, x, x, batch), shares)
        merged, _ = self._read_streams(streams, self.embeddings.parts.last_hyper)
        result: torch.Tensor = native.norm_rows(merged, self._norm)
        return result

    def _read_streams(self, streams: torch.Tensor, hyper: HyperWeights | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of the streams [T, hidden], and the share of each stream in what is added to them,
        float32 [T, N]; after the last layer there are none.

        The sigmoid is computed in float64, because in float32 its bits depend on a number's index in the tensor.
        """
        shape = self.config.hyper
        assert shape is not None and hyper is not None
        rows = streams.flatten(1)
        ones = torch.ones(rows.shape[1], device=rows.device)
        numbers = native.lm_head_logits(native.norm_rows(rows, native.Norm(ones, self.config.eps)), hyper.weight)
        shares = (numbers * hyper.scale + hyper.base).double().sigmoid().float()
        read, write = shares.tensor_split([shape.streams], 1)
        total = torch.zeros_like(streams[:, 0], dtype=torch.float32)
        for i in range(shape.streams):
            total += (read[:, i, None] + shape.eps) * streams[:, i].float()
        return total.to(streams.dtype), shape.magnitude * write + shape.eps


def _write_streams(streams: torch.Tensor, added: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return streams [T, N, hidden] plus rows [T, hidden] times the share [T, N] of each stream."""
    return (streams.float() + shares[..., None] * added.float()[:, None]).to(streams.dtype)
