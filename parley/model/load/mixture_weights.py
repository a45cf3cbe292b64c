"""Reads and packs the mixtures of experts of a checkpoint, expert by expert, straight from the mapped files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain

import torch

from parley import native
from parley.model.checkpoint.files import LoadError, refuse_unpackable
from parley.model.checkpoint.stacked import StackedFormat, StackedPlainFormat
from parley.model.checkpoint.weights import LinearSpec, LinearWeight, PlainWeight
from parley.model.load.linear_reader import LinearReader
from parley.model.networks.mixtures import MixtureNames, joined_layouts, mlx_layouts
from parley.native.layer_shape import Routing

log = logging.getLogger("parley.engine")

HASH_TABLE = "mlp.gate.tid2eid"  # the experts of each token in layers that do not choose them (DeepSeek V4)


class MixtureWeights:
    """The routers and experts of all layers that have them. ``names``: the layout of this checkpoint."""

    def __init__(self, weights: LinearReader):
        self._weights = weights
        self._checkpoint, self._config = weights.checkpoint, weights.config
        self.names = self._find_layout()
        self._stacked_format = self._find_stacked_format()

    def _find_layout(self) -> MixtureNames:
        """Return the layout whose tensors the checkpoint has, the first if it has none."""
        layouts, shapes = self._config.mixture.layouts, self._config.layers
        first = next((i for i, shape in enumerate(shapes) if shape.routing is not None), None)
        if first is None or not layouts:
            return MixtureNames()
        merged_layouts = [
            layout
            for layout in joined_layouts(layouts)
            if self._weights.layer_name(first, layout.gate_up[0]) in self._checkpoint
        ]
        layouts = (*merged_layouts, *layouts, *mlx_layouts(layouts, is_gated=shapes[first].is_gated))
        return next((layout for layout in layouts if self._has_experts(first, layout)), layouts[0])

    def _has_experts(self, layer: int, layout: MixtureNames) -> bool:
        """Whether the checkpoint has the experts of a layer by the names of a layout."""
        name = self._weights.layer_name(layer, layout.down.format(0))
        down = LinearSpec(name, self._row_size, self._config.mixture.expert_width)
        if not layout.is_stacked:
            names = self._weights.quantization.stored_tensor_names(self._checkpoint, down)
            return all(tensor in self._checkpoint for tensor in names)
        stored = self._weights.quantization.stacked_format
        if name in self._checkpoint or stored is None:
            return name in self._checkpoint
        return all(tensor in self._checkpoint for tensor in stored.tensor_names(self._checkpoint, down))

    def _find_stacked_format(self) -> StackedFormat:
        """Return the format of the tensors that hold all experts. A quantized file may have plain ones."""
        stored = self._weights.quantization.stacked_format
        plain_format = StackedPlainFormat(self.names.transposed, self.names.has_joined_rows)
        first = next((i for i, shape in enumerate(self._config.layers) if shape.routing is not None), None)
        if stored is None or first is None:
            return plain_format
        (down,) = self.expert_parts(first, 0)["down"]
        has_all = all(name in self._checkpoint for name in stored.tensor_names(self._checkpoint, down))
        return plain_format if down.name in self._checkpoint and not has_all else stored

    @property
    def _row_size(self) -> int:
        """The size of the rows that chosen experts read and make."""
        return self._config.mixture.latent_size or self._config.hidden_size

    def latent_parts(self, layer: int) -> list[LinearSpec]:
        """Return the linear layers that make latents of rows, and rows of latents; none if experts read rows."""
        hidden, size = self._config.hidden_size, self._config.mixture.latent_size
        sizes = {self.names.latent_down: (size, hidden), self.names.latent_up: (hidden, size)} if size else {}
        return [LinearSpec(self._weights.layer_name(layer, name), *shape) for name, shape in sizes.items()]

    def router_parts(self, layer: int) -> list[LinearSpec]:
        """Return the linear layers whose outputs are the router's logits."""
        routing = self._config.layers[layer].routing
        assert routing is not None
        parts = {self.names.router: routing.experts}
        if routing.shared == 2 and self.names.shared_gate:
            parts[self.names.shared_gate] = 1
        hidden, bias = self._config.hidden_size, self.names.has_biases
        return [LinearSpec(self._weights.layer_name(layer, name), out, hidden, bias) for name, out in parts.items()]

    def expert_parts(self, layer: int, expert: int) -> dict[str, list[LinearSpec]]:
        """Return the linear layers of an expert, each as the parts to be merged. In a stacked layout, their names are
        those of the tensors that hold all experts."""
        hidden, width, bias = self._row_size, self._config.mixture.expert_width, self.names.has_biases
        names = [self._weights.layer_name(layer, name.format(expert)) for name in self.names.gate_up]
        outputs = width * (1 + self._config.layers[layer].is_gated)
        down = self._weights.layer_name(layer, self.names.down.format(expert))
        return {
            "gate_up": [LinearSpec(name, outputs // len(names), hidden, bias) for name in names],
            "down": [LinearSpec(down, hidden, width, bias, transposed=self.names.has_joined_rows)],
        }

    def layer_tensors(self, layer: int) -> list[str]:
        """Return the names of the tensors of a layer's mixture; none if it has none."""
        routing = self._config.layers[layer].routing
        if routing is None:
            return []
        names = []
        for linear in self.router_parts(layer):
            names += self._weights.linear_tensors(linear) + [linear.name + ".bias"] * linear.bias
        names += chain.from_iterable(map(self._weights.linear_tensors, self.latent_parts(layer)))
        own = self._choice_tensor(routing), self.names.router_scale, self.names.expert_scales
        names += [self._weights.layer_name(layer, name) for name in own if name]
        for expert in range(1 if self.names.is_stacked else routing.experts):
            names += self._expert_tensors(layer, expert)
        return names

    def _choice_tensor(self, routing: Routing) -> str | None:
        """Return the name of what chooses experts besides scores: a bias of these, or a table of tokens."""
        return HASH_TABLE if routing.is_hashed else self.names.choice_bias

    def _expert_tensors(self, layer: int, expert: int) -> list[str]:
        linears = list(chain.from_iterable(self.expert_parts(layer, expert).values()))
        if self.names.is_stacked:
            biases = [self._bias_name(linear) for linear in linears if linear.bias]
            stacked = (self._stacked_format.tensor_names(self._checkpoint, linear) for linear in linears)
            return [*chain.from_iterable(stacked), *biases]
        return [name for linear in linears for name in self._weights.linear_tensors(linear)]

    def layer_parameters(self, layer: int) -> int:
        """Return the number of elements in the weights of a layer's mixture."""
        routing = self._config.layers[layer].routing
        if routing is None:
            return 0
        linears = chain.from_iterable(self.expert_parts(layer, 0).values())
        experts = routing.experts * sum(linear.out_features * (linear.in_features + linear.bias) for linear in linears)
        scales = self._config.hidden_size * bool(self.names.router_scale) + routing.experts * bool(
            self.names.expert_scales
        )
        routers = sum(linear.out_features * (linear.in_features + linear.bias) for linear in self.router_parts(layer))
        latents = sum(linear.out_features * linear.in_features for linear in self.latent_parts(layer))
        return experts + routers + scales + latents

    def check_shapes(self, layer: int) -> None:
        """Check shapes and types of a layer's mixture, without reading any. Raises LoadError."""
        routing = self._config.layers[layer].routing
        if routing is None:
            return
        self.read_router(layer)
        self.read_choice_bias(layer)
        self.read_table(layer)
        self.read_router_norm(layer)
        self.read_expert_scales(layer)
        for linear in self.latent_parts(layer):
            self._weights.quantization.check_stored_weight(self._checkpoint, linear)
        for expert in range(1 if self.names.is_stacked else routing.experts):
            for linear in chain.from_iterable(self.expert_parts(layer, expert).values()):
                if self.names.is_stacked:
                    self._stacked_format.view_tensors(self._checkpoint.without_data(), linear, routing.experts)
                else:
                    self._weights.quantization.check_stored_weight(self._checkpoint, linear)
                if linear.bias:
                    self._checkpoint.check_tensor(self._bias_name(linear), routing.experts, linear.out_features)

    def _bias_name(self, linear: LinearSpec) -> str:
        """Return the name of the tensor with the biases of all experts, of a layer of a stacked layout."""
        name = linear.name.removesuffix(".weight") + ".bias"
        return name if name in self._checkpoint else linear.name + "_bias"

    def read_router(self, layer: int) -> tuple[list[PlainWeight], torch.Tensor | None]:
        """Return the weights of the router's parts, and its bias [out], if any, as a view of the file. Quantized ones
        are decoded. Raises LoadError."""
        parts = self.router_parts(layer)
        stored = [self._weights.quantization.read_stored_weight(self._checkpoint, linear) for linear in parts]
        weights = [weight if isinstance(weight, PlainWeight) else PlainWeight(weight.to_float()) for weight in stored]
        bias = self._checkpoint.view_tensor(parts[0].name + ".bias", parts[0].out_features) if parts[0].bias else None
        return weights, bias

    def read_choice_bias(self, layer: int) -> torch.Tensor | None:
        """Return the bias that is added to scores for the choice only, float32 [experts]; None without one. Raises
        LoadError."""
        routing, name = self._config.layers[layer].routing, self.names.choice_bias
        if routing is None or name is None or routing.is_hashed:
            return None
        name = self._weights.layer_name(layer, name)
        leading = (1,) * (len(self._checkpoint.tensor_shape(name)) > 1)  # ERNIE has it as a row
        view = self._checkpoint.view_tensor(name, *leading, routing.experts).flatten()
        return view.to(device=self._weights.device, dtype=torch.float32, copy=True)

    def read_table(self, layer: int) -> torch.Tensor | None:
        """Return the experts of each token, int64 [vocab, chosen]; None if the router chooses them.

        Raises LoadError, also if there is no such expert.
        """
        routing = self._config.layers[layer].routing
        if routing is None or not routing.is_hashed:
            return None
        name = self._weights.layer_name(layer, HASH_TABLE)
        dtype = self._checkpoint.tensor_form(name)[0]
        dtype = dtype if dtype == torch.int32 else torch.int64
        table = self._checkpoint.view_tensor(name, self._config.vocab_size, routing.experts_per_token, dtype=dtype)
        if ((table < 0) | (table >= routing.experts)).any():
            raise LoadError(f"Tensor {name} gives tokens other experts than the {routing.experts} that there are.")
        return table.to(self._weights.device, torch.int64, copy=True)

    def read_router_norm(self, layer: int) -> native.Norm | None:
        """Return the norm of the rows that the router reads, None if it reads those of experts. Raises LoadError."""
        if self.names.router_scale is None:
            return None
        name, hidden = self._weights.layer_name(layer, self.names.router_scale), self._config.hidden_size
        weight = self._checkpoint.view_tensor(name, hidden).to(self._weights.device, torch.float32, copy=True)
        return native.Norm(weight * hidden**-0.5, self._config.eps)

    def read_expert_scales(self, layer: int) -> torch.Tensor | None:
        """Return the factors of the chosen experts' weights, float32 [experts]; None without any. Raises LoadError."""
        if self.names.expert_scales is None:
            return None
        name = self._weights.layer_name(layer, self.names.expert_scales)
        scales = self._checkpoint.view_tensor(name, self._expert_count(layer))
        return scales.to(self._weights.device, torch.float32, copy=True)

    def read_latents(self, layer: int) -> list[LinearWeight]:
        """Read the weights of ``latent_parts``, quantized if requested. Raises LoadError."""
        return [self._weights.read_linear(linear) for linear in self.latent_parts(layer)]

    def read_expert(self, layer: int, expert: int, key: str) -> list[LinearWeight]:
        """Read the parts of an expert's linear layer ``key``, quantized if requested. Raises LoadError."""
        return [self._read_linear(layer, expert, key, linear) for linear in self.expert_parts(layer, expert)[key]]

    def _read_linear(self, layer: int, expert: int, key: str, linear: LinearSpec) -> LinearWeight:
        if not self.names.is_stacked:
            return self._weights.read_linear(linear)
        weight = self._stacked_format.read_expert(self._checkpoint, linear, self._expert_count(layer), expert)
        if (order := self._output_order(key)) is not None:
            weight = weight.select_outputs(order)
        return self._weights.quantization.quantize_plain(weight, head=False)

    def _expert_count(self, layer: int) -> int:
        routing = self._config.layers[layer].routing
        assert routing is not None
        return routing.experts

    def _output_order(self, key: str) -> torch.Tensor | None:
        """Return the order in which the file has the outputs of ``key``, int64 [out]; None for the usual one."""
        if key != "gate_up" or not self.names.interleaved:
            return None
        return torch.arange(2 * self._config.mixture.expert_width).view(-1, 2).t().flatten()

    def read_expert_bias(self, layer: int, expert: int, key: str) -> torch.Tensor | None:
        """Return the bias of an expert's linear layer ``key``, [out] in the network's dtype; None if it has none."""
        parts, count = self.expert_parts(layer, expert)[key], self._expert_count(layer)
        if not parts[0].bias:
            return None
        view = self._checkpoint.view_tensor
        bias = torch.cat([view(self._bias_name(part), count, part.out_features)[expert] for part in parts])
        order = self._output_order(key)
        bias = bias if order is None else bias[order]
        return bias.to(device=self._weights.device, dtype=self._weights.dtype, copy=True)

    def pack_layer(self, layer: int) -> native.Mixture | None:
        """Pack the mixture of a layer, None if it has none. Raises LoadError."""
        routing, weights = self._config.layers[layer].routing, self._weights
        if routing is None:
            return None
        with refuse_unpackable(f"Layer {layer}"):
            gate_up, down = (self._stack_experts(layer, key) for key in ("gate_up", "down"))
            latents = [weights.pack_weights([weight], None) for weight in self.read_latents(layer)]
        latent_down, latent_up = latents or (None, None)
        router, bias = self.read_router(layer)
        bias = None if bias is None else bias.to(device=weights.device, dtype=weights.dtype, copy=True)
        return native.Mixture(
            PlainWeight.pack_merged(router, bias, weights.dtype, weights.device),
            self.read_choice_bias(layer),
            native.Experts(routing.experts, gate_up, down, self._config.layers[layer].is_gated),
            self.read_router_norm(layer),
            self.read_expert_scales(layer),
            latent_down,
            latent_up,
            self.read_table(layer),
        )

    def _stack_experts(self, layer: int, key: str) -> native.PackedWeight:
        """Pack the linear layer ``key`` of all experts: as it is stored, or else as plain numbers."""
        count = self._expert_count(layer)
        try:
            return native.stack_experts(self._pack_experts(layer, key, decoded=False), count)
        except native.Unstackable as reason:
            log.info("The experts of layer %d are kept as plain numbers, which take more memory: %s.", layer, reason)
            return native.stack_experts(self._pack_experts(layer, key, decoded=True), count)

    def _pack_experts(self, layer: int, key: str, *, decoded: bool) -> Iterator[native.PackedWeight]:
        """Pack the linear layer ``key`` of one expert after another, and release its file pages."""
        for expert in range(self._expert_count(layer)):
            parts, bias = self.expert_parts(layer, expert)[key], self.read_expert_bias(layer, expert, key)
            weights = self.read_expert(layer, expert, key)
            if decoded:
                weights = [PlainWeight(weight.to_float()) for weight in weights]
            yield self._weights.pack_weights(weights, bias)
            if not self.names.is_stacked:
                self._checkpoint.release_pages(*chain.from_iterable(map(self._weights.linear_tensors, parts)))
