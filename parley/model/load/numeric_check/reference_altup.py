"""Layers with alternating updates by their definition, for the numeric check. Streams are float32 [N, T, hidden]."""

from __future__ import annotations

import torch

from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.numeric_check.reference_layer import ACTIVATION_DEFINITIONS, ReferenceLayer

MIN_SQUARE = 1e-5  # the least mean square of rows that are scaled


def make_streams(weights: DecoderWeights, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the residual streams of embeddings [T, hidden]."""
    first, _ = weights.altup.stream_linears()
    others = [weights.read_linear(linear).multiply_rows(embeddings) for linear in first]
    return torch.stack([embeddings, *(_scale_rows(rows, embeddings) for rows in others)])


def merge_streams(weights: DecoderWeights, streams: torch.Tensor) -> torch.Tensor:
    """Return the mean of all streams after the last layer, [T, hidden]."""
    _, last = weights.altup.stream_linears()
    others = [weights.read_linear(linear).multiply_rows(rows) for linear, rows in zip(last, streams[1:], strict=True)]
    return torch.stack([streams[0], *(_scale_rows(rows, streams[0]) for rows in others)]).mean(0)


def _scale_rows(rows: torch.Tensor, models: torch.Tensor) -> torch.Tensor:
    """Return rows with the mean square of those of ``models``."""
    target, own = (numbers.square().mean(-1, keepdim=True) for numbers in (models, rows))
    return rows * (target / own.clamp_min(MIN_SQUARE)).sqrt()


class ReferenceAltUpLayer(ReferenceLayer):
    """A layer of a decoder with alternating updates."""

    def run_rows(self, x: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the streams after the layer, for those before it ``x`` and the layer's inputs [T, width]."""
        shape = self._config.altup
        assert shape is not None and inputs is not None
        router, prediction, correction = self._weights.altup.read_coefficients(self._number)
        shares = self._modalities(x[shape.active], router) @ prediction.T
        predicted = x + torch.einsum("tij,jth->ith", shares.unflatten(-1, (shape.streams, shape.streams)), x)
        active = predicted[shape.active]
        normed = self._norm_field(active, "attention_norm")
        laurel = self._project(self._project(normed, "laurel_left"), "laurel_right")
        laurel = normed + self._norm_field(laurel, "laurel_norm")
        attended = self._norm_field(self._mix_rows(normed), "attention_after_norm")
        residual = (active + attended + laurel) / 2**0.5
        residual = residual + self._norm_field(self._run_mlps(residual, active), "mlp_after_norm")
        factors = 1 + self._modalities(residual, router) @ correction.T
        corrected = predicted + factors.T[..., None] * (residual - active)
        scale = self._weights.altup.read_output_scale(self._number)
        rows = corrected[shape.active] if scale is None else corrected[shape.active] * scale
        gated = ACTIVATION_DEFINITIONS[self._shape.activation](self._project(rows, "input_gate"), inputs)
        corrected[1:] += self._norm_field(self._project(gated, "input_up"), "input_after_norm")
        return corrected

    def _modalities(self, rows: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        """Return the numbers that coefficients depend on: [T, streams]."""
        return (self._norm_field(rows, "altup_norm") @ router.float().T / self._config.hidden_size).tanh()
