"""The layers of a decoder that keep a state, kernel by kernel: they scan a sequence and advance its state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parley import native
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.layer_linears import LayerLinears
from parley.model.networks.network import PackedBatch
from parley.model.networks.state_arena import BatchStates
from parley.native.layer import DecoderLayer
from parley.native.state_shape import GatedDeltaShape, KimiDeltaShape, Mamba1Shape, Mamba2Shape


class StateScans:
    """The scans of one decoder's layers that keep a state."""

    def __init__(self, config: DecoderConfig, layer_weights: Sequence[DecoderLayer], linears: LayerLinears):
        self._config, self._layer_weights, self._linears = config, layer_weights, linears
        # The number of each layer among those with a state.
        self._state_numbers = [
            sum(other.state is not None for other in config.layers[:i]) for i in range(len(layer_weights))
        ]

    def scan_layer(
        self, layer: int, x: torch.Tensor | native.QuantizedRows, batch: PackedBatch, states: BatchStates
    ) -> torch.Tensor:
        """Return the result of a layer with a state before its output layer, [T, inner]; advance the states."""
        shape, weights = self._config.layers[layer].state, self._layer_weights[layer].state
        assert shape is not None and weights is not None
        stored = states.layers[self._state_numbers[layer]]
        input_name = "state_input" if self._config.layers[layer].is_hybrid else "qkv"
        rows = self._linears.apply_linear(x, batch, layer, input_name)
        if isinstance(shape, GatedDeltaShape):
            gates = self._linears.apply_linear(x, batch, layer, "state_gates")
            return native.scan_gated_delta(rows, gates, weights, shape, stored, states.spans)
        if isinstance(shape, KimiDeltaShape):
            rows = self._widen_gates(rows, batch, layer, shape) if shape.rank else rows
            return native.scan_kimi_delta(rows, weights, shape, stored, states.spans)
        if isinstance(shape, Mamba2Shape):
            return native.scan_mamba2(rows, weights, shape, stored, states.spans)
        if isinstance(shape, Mamba1Shape):
            active = native.convolve_channels(rows, weights, shape, stored, states.spans)
            steps, *keys = self._state_parameters(active, batch, layer, shape)
            steps = self._linears.apply_linear(steps, batch, layer, "state_step")
            return native.scan_channels(rows, active, steps, torch.cat(keys, 1), weights, shape, stored, states.spans)
        return native.convolve_gated(rows, weights, shape, stored, states.spans)

    def _widen_gates(self, rows: torch.Tensor, batch: PackedBatch, layer: int, shape: KimiDeltaShape) -> torch.Tensor:
        """Return the rows that the scan of Kimi Delta Attention reads, whose decays and gates have ``rank`` numbers."""
        first, *low = rows.split([shape.channels + shape.heads, shape.rank, shape.rank], 1)
        steps, gates = (
            self._linears.apply_linear(numbers.contiguous(), batch, layer, name)
            for numbers, name in zip(low, ("state_step", "state_gates"), strict=True)
        )
        return torch.cat((first, steps, gates), 1)

    def _state_parameters(
        self, active: torch.Tensor, batch: PackedBatch, layer: int, shape: Mamba1Shape
    ) -> list[torch.Tensor]:
        """Return the numbers that a Mamba 1 layer computes from its convolved channels: those of its steps [T, rank],
        and B and C [T, state_dim]."""
        rows = self._linears.apply_linear(active, batch, layer, "state_parameters")
        weights = self._layer_weights[layer].state
        assert weights is not None
        parts = [part.contiguous() for part in rows.split(shape.parameter_sizes, 1)]
        norms = weights.parameter_norms or (None,) * len(parts)
        return [native.norm_rows(part, norm) for part, norm in zip(parts, norms, strict=True)]
