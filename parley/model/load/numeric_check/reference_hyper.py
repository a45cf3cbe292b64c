"""Layers with hyper-connections by their definition, for the numeric check. Streams are float32 [T, N, hidden]."""

from __future__ import annotations

import torch

from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.hyper_weights import LAST
from parley.model.load.numeric_check.reference_layer import ReferenceLayer


def read_numbers(weights: DecoderWeights, streams: torch.Tensor, prefix: str, *, is_last: bool) -> torch.Tensor:
    """Return the numbers of a hyper-connection before their sigmoids, [T, outputs]. ``prefix``: of the names of its
    tensors."""
    weight, scale, base = weights.hyper.read_tensors(prefix, is_last=is_last)
    rows = streams.flatten(1)
    rows = rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + weights.config.eps)
    return rows @ weight.T * scale + base


def sum_streams(weights: DecoderWeights, streams: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of all streams after the last layer, [T, hidden]."""
    shape = weights.config.hyper
    assert shape is not None
    shares = read_numbers(weights, streams, LAST, is_last=True).sigmoid() + shape.eps
    return torch.einsum("tn,tnh->th", shares, streams)


def balance_mix(numbers: torch.Tensor, steps: int, eps: float) -> torch.Tensor:
    """Return the shares of streams in each other [T, N, N], by their numbers: of ``steps`` of Sinkhorn-Knopp."""
    mix = numbers.softmax(-1) + eps
    for step in range(2 * steps - 1):
        axis = -1 if step % 2 else -2
        mix = mix / (mix.sum(axis, keepdim=True) + eps)
    return mix


class ReferenceHyperLayer(ReferenceLayer):
    """A layer of a decoder with hyper-connections."""

    def run_rows(self, x: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the streams after the layer, for those before it ``x`` [T, N, hidden]."""
        shape, prefixes = self._config.hyper, self._weights.hyper.layer_prefixes(self._number)
        assert shape is not None
        for field, prefix in prefixes.items():
            numbers = read_numbers(self._weights, x, prefix, is_last=False)
            read, write, *mix = numbers.split(shape.side_sizes, -1)
            rows = torch.einsum("tn,tnh->th", read.sigmoid() + shape.eps, x)
            if field == "attention_hyper":
                added = self._mix_rows(self._norm_field(rows, "attention_norm"))
            else:
                added = self._run_mlps(rows, rows)
            for numbers in mix:
                square = numbers.unflatten(-1, (shape.streams, -1))
                x = torch.einsum("tji,tjh->tih", balance_mix(square, shape.sinkhorn_steps, shape.eps), x)
            x = x + (shape.magnitude * write.sigmoid() + shape.write_eps)[..., None] * added[:, None]
        return x
