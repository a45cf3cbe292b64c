"""Layers with hyper-connections by their definition, for the numeric check. Streams are float32 [T, N, hidden]."""

from __future__ import annotations

import torch

from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.hyper_weights import LAST
from parley.model.load.numeric_check.reference_layer import ReferenceLayer


def read_shares(weights: DecoderWeights, streams: torch.Tensor, prefix: str, sides: int) -> torch.Tensor:
    """Return the sigmoids of a hyper-connection, [T, sides * N]. ``prefix``: of the names of its tensors."""
    weight, scale, base = weights.hyper.read_tensors(prefix, sides=sides)
    rows = streams.flatten(1)
    rows = rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + weights.config.eps)
    return (rows @ weight.T * scale + base).sigmoid()


def sum_streams(weights: DecoderWeights, streams: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of all streams after the last layer, [T, hidden]."""
    shape = weights.config.hyper
    assert shape is not None
    return torch.einsum("tn,tnh->th", read_shares(weights, streams, LAST, 1) + shape.eps, streams)


class ReferenceHyperLayer(ReferenceLayer):
    """A layer of a decoder with hyper-connections."""

    def run_rows(self, x: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the streams after the layer, for those before it ``x`` [T, N, hidden]."""
        shape, prefixes = self._config.hyper, self._weights.hyper.layer_prefixes(self._number)
        assert shape is not None
        for field, prefix in prefixes.items():
            read, write = read_shares(self._weights, x, prefix, 2).chunk(2, -1)
            rows = torch.einsum("tn,tnh->th", read + shape.eps, x)
            if field == "attention_hyper":
                added = self._mix_rows(self._norm_field(rows, "attention_norm"))
            else:
                added = self._run_mlps(rows, rows)
            x = x + (shape.magnitude * write + shape.eps)[..., None] * added[:, None]
        return x
