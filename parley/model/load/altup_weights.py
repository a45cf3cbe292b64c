"""Reads the weights of alternating updates (``AltUpShape``) from the mapped files."""

from __future__ import annotations

import torch

from parley import native
from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.linear_reader import LinearReader
from parley.model.networks.token_embeddings import StreamProjections
from parley.native.layer import AltUpWeights

ROUTER, PREDICTION, CORRECTION = "altup.modality_router", "altup.prediction_coefs", "altup.correction_coefs"
OUTPUT_SCALE = "altup.correct_output_scale"
FIRST, LAST = "model.altup_projections.{}", "model.altup_unembed_projections.{}"


class LayerAltUpWeights:
    """The alternating updates of one checkpoint; nothing for other models."""

    def __init__(self, weights: LinearReader):
        self._weights, self._config = weights, weights.config

    def layer_linears(self, layer: int) -> list[LinearSpec]:
        """Return the router of a layer, and the linear layers of its predictions and corrections."""
        if self._config.altup is None:
            return []
        count = self._config.altup.streams
        sizes = {
            ROUTER: (count, self._config.hidden_size),
            PREDICTION: (count * count, count),
            CORRECTION: (count, count),
        }
        return [LinearSpec(self._weights.layer_name(layer, name), *size) for name, size in sizes.items()]

    def layer_tensors(self, layer: int) -> list[str]:
        """Return the names of a layer's tensors that are read here."""
        names = [name for linear in self.layer_linears(layer) for name in self._weights.linear_tensors(linear)]
        if self._config.altup is not None:
            names.append(self._weights.layer_name(layer, OUTPUT_SCALE))
        return names

    def layer_parameters(self, layer: int) -> int:
        """Return the number of elements in these tensors."""
        linears = self.layer_linears(layer)
        return sum(linear.out_features * linear.in_features for linear in linears) + self._config.hidden_size * bool(
            linears
        )

    def check_shapes(self, layer: int) -> None:
        """Check shapes and types of a layer's tensors, without reading any. Raises LoadError."""
        for linear in self.layer_linears(layer):
            self._weights.quantization.check_stored_weight(self._weights.checkpoint, linear)
        if self._config.altup is not None:
            self._weights.checkpoint.check_tensor(
                self._weights.layer_name(layer, OUTPUT_SCALE), self._config.hidden_size
            )

    def read_coefficients(self, layer: int) -> list[torch.Tensor]:
        """Return the weights of ``layer_linears``, float32. They are never quantized here. Raises LoadError."""
        read = self._weights.quantization.read_stored_weight
        return [read(self._weights.checkpoint, linear).to_float() for linear in self.layer_linears(layer)]

    def read_output_scale(self, layer: int) -> torch.Tensor | None:
        """Return the factors of the rows that read a layer's input, float32 [hidden]; None without. Raises LoadError.

        Files have them even where the config turns them off.
        """
        if self._config.altup is None or not self._config.altup.has_output_scale:
            return None
        name = self._weights.layer_name(layer, OUTPUT_SCALE)
        return self._weights.checkpoint.view_tensor(name, self._config.hidden_size).float()

    def pack_layer(self, layer: int) -> AltUpWeights | None:
        """Return the weights of a layer; None for models with one residual stream. Raises LoadError."""
        if self._config.altup is None:
            return None
        router, *coefficients = self.read_coefficients(layer)
        device = self._weights.device
        packed = native.pack_weight(router.to(device, self._weights.dtype, copy=True))
        prediction, correction = (weight.to(device, torch.float32, copy=True) for weight in coefficients)
        scale = self.read_output_scale(layer)
        return AltUpWeights(
            packed, prediction, correction, None if scale is None else scale.to(device, torch.float32, copy=True)
        )

    def stream_linears(self) -> tuple[list[LinearSpec], list[LinearSpec]]:
        """Return the linear layers that compute the streams from embeddings, and those that read the streams after the
        last layer; none for models with one stream."""
        if self._config.altup is None:
            return [], []
        hidden, others = self._config.hidden_size, range(self._config.altup.streams - 1)
        first = [LinearSpec(FIRST.format(i), hidden, hidden) for i in others]
        return first, [LinearSpec(LAST.format(i), hidden, hidden) for i in others]

    def pack_streams(self) -> StreamProjections | None:
        """Return the linear layers at both ends of the streams; None for models with one. Raises LoadError."""
        first, last = self.stream_linears()
        if not first:
            return None
        pack, read = self._weights.pack_weights, self._weights.read_linear
        return StreamProjections(
            pack([read(linear) for linear in first], None), tuple(pack([read(linear)], None) for linear in last)
        )
