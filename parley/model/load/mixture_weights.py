"""Reads and packs the mixtures of experts of a checkpoint, expert by expert, straight from the mapped files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Protocol

import torch

from parley import native
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.quantization import Quantization
from parley.model.checkpoint.weights import LinearSpec, LinearWeight, PlainWeight
from parley.model.networks.config import DecoderConfig
from parley.model.networks.mixtures import MixtureNames


class LinearReader(Protocol):
    """What ``DecoderWeights`` offers: the checkpoint, and its linear layers."""

    checkpoint: Checkpoint
    config: DecoderConfig
    quantization: Quantization
    dtype: torch.dtype
    device: torch.device

    def layer_name(self, layer: int, name: str) -> str:
        """Return the name of a layer's tensor or linear layer."""

    def linear_tensors(self, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold a linear layer's weight."""

    def read_linear(self, linear: LinearSpec) -> LinearWeight:
        """Read a linear layer's weight, quantised if requested."""

    def pack_weights(self, parts: list[LinearSpec], weights: list[LinearWeight]) -> native.PackedWeight:
        """Merge the weights of linear layers into one. Raises LoadError if they are quantised differently."""


class MixtureWeights:
    """The routers and experts of all layers that have them. ``names``: the layout of this checkpoint."""

    def __init__(self, weights: LinearReader):
        self._weights = weights
        self._checkpoint, self._config = weights.checkpoint, weights.config
        self.names = self._find_layout()

    def _find_layout(self) -> MixtureNames:
        """Return the layout whose tensors the checkpoint has, the first if it has none."""
        layouts, shapes = self._config.mixture_layouts, self._config.layers
        first = next((i for i, shape in enumerate(shapes) if shape.routing is not None), None)
        if first is None or not layouts:
            return MixtureNames()
        downs = [self._weights.layer_name(first, each.down.format(0)) for each in layouts]
        found = (each for each, down in zip(layouts, downs, strict=True) if down in self._checkpoint)
        return next(found, layouts[0])

    def router_parts(self, layer: int) -> list[LinearSpec]:
        """Return the linear layers whose outputs are the router's logits."""
        routing = self._config.layers[layer].routing
        assert routing is not None
        parts = {self.names.router: routing.experts}
        if routing.shared == 2 and self.names.shared_gate:
            parts[self.names.shared_gate] = 1
        hidden = self._config.hidden
        return [LinearSpec(self._weights.layer_name(layer, name), out, hidden) for name, out in parts.items()]

    def expert_parts(self, layer: int, expert: int) -> dict[str, list[LinearSpec]]:
        """Return the linear layers of an expert, each as the parts to be merged. In a stacked layout, their names are
        those of the tensors that hold all experts."""
        hidden, width = self._config.hidden, self._config.expert_width
        names = [self._weights.layer_name(layer, name.format(expert)) for name in self.names.gate_up]
        down = self._weights.layer_name(layer, self.names.down.format(expert))
        return {
            "gate_up": [LinearSpec(name, 2 * width // len(names), hidden) for name in names],
            "down": [LinearSpec(down, hidden, width)],
        }

    def layer_tensors(self, layer: int) -> list[str]:
        """Return the names of the tensors of a layer's mixture; none if it has none."""
        routing = self._config.layers[layer].routing
        if routing is None:
            return []
        names = [linear.name + ".weight" for linear in self.router_parts(layer)]
        if self.names.router_bias:
            names.append(self._weights.layer_name(layer, self.names.router_bias))
        for expert in range(1 if self.names.is_stacked else routing.experts):
            names += self._expert_tensors(layer, expert)
        return names

    def _expert_tensors(self, layer: int, expert: int) -> list[str]:
        linears = list(chain.from_iterable(self.expert_parts(layer, expert).values()))
        if self.names.is_stacked:
            return [linear.name for linear in linears]
        return [name for linear in linears for name in self._weights.linear_tensors(linear)]

    def layer_parameters(self, layer: int) -> int:
        """Return the number of elements in the weights of a layer's mixture."""
        routing = self._config.layers[layer].routing
        if routing is None:
            return 0
        experts = routing.experts * 3 * self._config.expert_width * self._config.hidden
        return experts + sum(linear.out * linear.into for linear in self.router_parts(layer))

    def check_shapes(self, layer: int) -> None:
        """Check shapes and types of a layer's mixture, without reading any. Raises LoadError."""
        routing = self._config.layers[layer].routing
        if routing is None:
            return
        for linear in self.router_parts(layer):
            self._checkpoint.view_tensor(linear.name + ".weight", linear.out, linear.into)
        self.read_bias(layer)
        for expert in range(routing.experts):
            for linear in chain.from_iterable(self.expert_parts(layer, expert).values()):
                if self.names.is_stacked:
                    self._view_stacked(linear, routing.experts)
                else:
                    self._weights.quantization.check_stored_weight(self._checkpoint, linear)

    def _view_stacked(self, linear: LinearSpec, experts: int) -> torch.Tensor:
        return self._checkpoint.view_tensor(linear.name, experts, linear.out, linear.into)

    def read_router(self, layer: int) -> list[torch.Tensor]:
        """Return the weights of the router's parts, [out, hidden] each, as views of the file. Raises LoadError."""
        return [
            self._checkpoint.view_tensor(linear.name + ".weight", linear.out, linear.into)
            for linear in self.router_parts(layer)
        ]

    def read_bias(self, layer: int) -> torch.Tensor | None:
        """Return what is added to the router's scores, float32 [experts]; None for nothing. Raises LoadError."""
        routing, name = self._config.layers[layer].routing, self.names.router_bias
        if routing is None or name is None:
            return None
        view = self._checkpoint.view_tensor(self._weights.layer_name(layer, name), routing.experts)
        return view.to(device=self._weights.device, dtype=torch.float32, copy=True)

    def read_expert(self, layer: int, expert: int, key: str) -> list[LinearWeight]:
        """Read the parts of an expert's linear layer ``key``, quantised if requested. Raises LoadError."""
        return [self._read_linear(layer, expert, linear) for linear in self.expert_parts(layer, expert)[key]]

    def _read_linear(self, layer: int, expert: int, linear: LinearSpec) -> LinearWeight:
        routing = self._config.layers[layer].routing
        assert routing is not None
        if not self.names.is_stacked:
            return self._weights.read_linear(linear)
        weight = PlainWeight(self._view_stacked(linear, routing.experts)[expert])
        return self._weights.quantization.quantize_plain(weight, head=False)

    def pack_layer(self, layer: int) -> native.Mixture | None:
        """Pack the mixture of a layer, None if it has none. Raises LoadError."""
        routing, weights = self._config.layers[layer].routing, self._weights
        if routing is None:
            return None
        try:
            gate_up, down = (
                native.stack_experts(self._pack_experts(layer, key), routing.experts) for key in ("gate_up", "down")
            )
        except ValueError as error:
            raise LoadError(f"Layer {layer} cannot be packed: {error}.") from None
        router = [PlainWeight(part) for part in self.read_router(layer)]
        return native.Mixture(
            PlainWeight.pack_merged(router, None, weights.dtype, weights.device),
            self.read_bias(layer),
            native.Experts(routing.experts, gate_up, down),
        )

    def _pack_experts(self, layer: int, key: str) -> Iterator[native.PackedWeight]:
        """Pack the linear layer ``key`` of one expert after another, and release its file pages."""
        routing = self._config.layers[layer].routing
        assert routing is not None
        for expert in range(routing.experts):
            parts = self.expert_parts(layer, expert)[key]
            yield self._weights.pack_weights(parts, self.read_expert(layer, expert, key))
            if not self.names.is_stacked:
                self._checkpoint.release_pages(*chain.from_iterable(map(self._weights.linear_tensors, parts)))
