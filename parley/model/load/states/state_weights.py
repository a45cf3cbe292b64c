"""Reads the weights of layers that keep a state, from the mapped files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch

from parley import native
from parley.model.checkpoint.files import Checkpoint
from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.norm_weights import NormWeights
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.state_layers import StateNames
from parley.native.layer import StateWeights
from parley.native.state_shape import GatedDeltaShape, KimiDeltaShape, Mamba1Shape, Mamba2Shape, StateShape


class StateTensorSource(Protocol):
    """The part of ``DecoderWeights`` that is used here: the checkpoint, and its names and norms."""

    checkpoint: Checkpoint
    config: DecoderConfig
    device: torch.device
    norms: NormWeights

    def layer_name(self, layer: int, name: str) -> str:
        """Return the name of a layer's tensor or linear layer."""


class LayerStateWeights:
    """The layers with a state of one checkpoint."""

    def __init__(self, weights: StateTensorSource):
        self._weights = weights
        self._checkpoint, self._config = weights.checkpoint, weights.config
        self._names = self._find_layout()

    def _find_layout(self) -> StateNames | None:
        """Return the layout whose tensors the checkpoint has, the first if it has none; None without such layers."""
        layouts, shapes = self._config.state_layouts, self._config.layers
        first = next((i for i, shape in enumerate(shapes) if shape.state is not None), None)
        if first is None or not layouts:
            return None
        for layout in layouts:
            tensors = (layout.input[0] + ".weight", *(f"{name}.weight" for name in layout.convolution[:1]))
            tensors += () if layout.decay is None else (layout.decay,)
            if all(self._weights.layer_name(first, name) in self._checkpoint for name in tensors):
                return layout
        return layouts[0]

    @property
    def norm_names(self) -> Mapping[str, str | None]:
        """The names of norms in layers with a state in place of attention, where those of other layers differ."""
        return {} if self._names is None else self._names.norms

    def linear_parts(self, layer: int, shape: StateShape) -> dict[str, list[LinearSpec]]:
        """Return the linear layers of a layer with a state, each as the parts to be merged, in order."""
        names, hidden, has_bias = self._names, self._config.hidden_size, "state" in self._config.biases
        assert names is not None

        def parts(
            names: tuple[str, ...], outs: list[int], in_features: int, group_sizes: list[int]
        ) -> list[LinearSpec]:
            groups = None
            if len(names) == 4 and isinstance(shape, GatedDeltaShape):
                outs = [*shape.convolved_sizes, shape.inner]
            if len(names) < len(outs) and isinstance(shape, GatedDeltaShape):  # merged for each key head
                outs, groups = [sum(outs)], (shape.key_heads, tuple(group_sizes))
            return [
                LinearSpec(self._weights.layer_name(layer, name), out_features, in_features, has_bias, groups)
                for name, out_features in zip(names, outs, strict=True)
            ]

        output = LinearSpec(self._weights.layer_name(layer, names.output), hidden, shape.inner, has_bias)
        if isinstance(shape, Mamba2Shape) and not shape.has_steps:
            entering = parts(names.input, [shape.inner, shape.channels], hidden, [])
            groups = shape.heads, (shape.state_dim, shape.state_dim, shape.head_dim)  # a head's C, B and values
            entering[1] = replace(entering[1], groups=groups, part_order=(2, 1, 0))
            return {"qkv": entering, "output": [output]}
        if isinstance(shape, Mamba2Shape):
            outs = [sum(shape.row_sizes)]
            return {"qkv": parts(names.input, outs, hidden, []), "output": [output]}
        if isinstance(shape, Mamba1Shape):
            parameters = LinearSpec(
                self._weights.layer_name(layer, names.parameters), sum(shape.parameter_sizes), shape.inner
            )
            step = LinearSpec(self._weights.layer_name(layer, names.step), shape.inner, shape.rank)
            entering = parts(names.input, [2 * shape.inner], hidden, [])
            return {"qkv": entering, "state_parameters": [parameters], "state_step": [step], "output": [output]}
        if isinstance(shape, KimiDeltaShape):
            outs = [*[shape.inner] * 3, shape.heads, *[shape.rank or shape.inner] * 2]
            widening = {"state_step": (names.step,), "state_gates": names.gates} if shape.rank else {}
            return {
                "qkv": parts(names.input, outs, hidden, []),
                **{key: parts(own, [shape.inner], shape.rank, []) for key, own in widening.items()},
                "output": [output],
            }
        if not isinstance(shape, GatedDeltaShape):
            return {"qkv": parts(names.input, [3 * shape.width], hidden, []), "output": [output]}
        share = shape.value_heads // shape.key_heads
        inputs = [shape.key_dim, shape.key_dim, share * shape.value_dim, share * shape.value_dim]
        return {
            "qkv": parts(names.input, [shape.channels, shape.inner], hidden, inputs),
            "state_gates": parts(names.gates, [shape.value_heads] * 2, hidden, [share, share]),
            "output": [output],
        }

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer's state besides its linear layers, and their sizes; none without a state."""
        shape, names = self._config.layers[layer].state, self._names
        if shape is None or names is None:
            return {}
        parts = [shape.channels]
        if len(names.convolution) > 1 and isinstance(shape, GatedDeltaShape):
            parts = self._convolution_sizes(layer, shape)
        if len(names.convolution) > 1 and isinstance(shape, KimiDeltaShape):
            parts = [shape.inner] * 3
        tensors: dict[str, tuple[int, ...]] = {}
        for convolution, channels in zip(names.convolution, parts, strict=bool(names.convolution)):
            sizes, swapped = (channels, 1, shape.kernel), (channels, shape.kernel, 1)
            own_name = self._weights.layer_name(layer, convolution + ".weight")
            if own_name in self._checkpoint and self._checkpoint.tensor_shape(own_name) == swapped:  # folders of MLX
                sizes = swapped
            tensors[convolution + ".weight"] = sizes
            if "convolution" in self._config.biases:
                tensors[convolution + ".bias"] = (channels,)
        if isinstance(shape, GatedDeltaShape):
            for name in (names.decay, names.step_bias):
                tensors[str(name)] = (shape.value_heads,)
            tensors[f"{names.norm}.weight"] = (shape.value_dim,)
        if isinstance(shape, KimiDeltaShape):
            tensors[str(names.decay)] = self._decay_sizes(layer, shape)
            tensors[str(names.step_bias)] = (shape.inner,)
            tensors[f"{names.norm}.weight"] = (shape.dim,)
        if isinstance(shape, Mamba2Shape):
            for name in (names.decay, names.step_bias, names.skip):
                if name is not None:
                    tensors[name] = (shape.heads,)
            if names.norm is not None:
                tensors[f"{names.norm}.weight"] = (shape.inner,)
        if isinstance(shape, Mamba1Shape):
            tensors[str(names.decay)] = (shape.inner, shape.state_dim)
            for name in (names.step_bias, names.skip):
                tensors[str(name)] = (shape.inner,)
            for norm, size in zip(names.parameter_norms, shape.parameter_sizes, strict=bool(names.parameter_norms)):
                tensors[norm + ".weight"] = (size,)
        return {self._weights.layer_name(layer, name): sizes for name, sizes in tensors.items()}

    def _decay_sizes(self, layer: int, shape: KimiDeltaShape) -> tuple[int, ...]:
        """Return the shape of the tensor with the heads' rates of decay. Some files have further dimensions of 1."""
        assert self._names is not None
        name, padded_shape = self._weights.layer_name(layer, str(self._names.decay)), (1, 1, shape.heads, 1)
        is_wide = name in self._checkpoint and self._checkpoint.tensor_shape(name) == padded_shape
        return padded_shape if is_wide else (shape.heads,)

    def _convolution_sizes(self, layer: int, shape: GatedDeltaShape) -> list[int]:
        """Return the channels of the convolutions of queries, keys and values. Transformers divides all channels among
        three tensors alike when it saves a model, and joins them again."""
        assert self._names is not None
        full_names = [self._weights.layer_name(layer, f"{name}.weight") for name in self._names.convolution]
        stored = [(0, *self._checkpoint.tensor_shape(name)[:1])[-1] for name in full_names if name in self._checkpoint]
        return stored if sum(stored) == shape.channels else shape.convolved_sizes

    def check_shapes(self, layer: int) -> None:
        """Check shapes and types of a layer's tensors, without reading any. Raises LoadError."""
        for name, sizes in self.layer_tensors(layer).items():
            self._checkpoint.check_tensor(name, *sizes)

    def read_layer(self, layer: int) -> StateWeights | None:
        """Return the weights of a layer's state, None if it has none. Raises LoadError."""
        shape, names = self._config.layers[layer].state, self._names
        if shape is None or names is None:
            return None
        sizes = self.layer_tensors(layer)

        def read(name: str) -> torch.Tensor:
            full_name = self._weights.layer_name(layer, name)
            stored = self._checkpoint.view_tensor(full_name, *sizes[full_name])
            return stored.to(device=self._weights.device, dtype=torch.float32, copy=True)

        convolution = torch.ones(1, shape.channels, device=self._weights.device)
        if names.convolution:
            convolution = torch.cat([read(f"{name}.weight").flatten(1) for name in names.convolution]).t().contiguous()
        if isinstance(shape, Mamba2Shape):
            widths = [shape.inner, shape.groups * shape.state_dim, shape.groups * shape.state_dim]
            convolution *= torch.tensor(shape.input_scales).repeat_interleave(torch.tensor(widths)).to(convolution)
        bias = None
        if "convolution" in self._config.biases:
            bias = torch.cat([read(f"{name}.bias") for name in names.convolution])
        if isinstance(shape, Mamba1Shape):
            norms: tuple[native.Norm, ...] = ()
            if (eps := shape.norm_eps) is not None:
                scales = [read(name + ".weight") for name in names.parameter_norms]
                ones = [torch.ones(size, device=self._weights.device) for size in shape.parameter_sizes]
                norms = tuple(native.Norm(scale, eps) for scale in scales or ones)
            decay = read(str(names.decay))
            decay = (decay if names.is_rate else -decay.exp()).t().contiguous()
            step_bias, share = read(str(names.step_bias)), read(str(names.skip))
            return StateWeights(convolution, bias, decay, step_bias, skip=share, parameter_norms=norms)
        if not isinstance(shape, GatedDeltaShape | KimiDeltaShape | Mamba2Shape):
            return StateWeights(convolution, bias)
        width, norm = math.prod(sizes.get(self._weights.layer_name(layer, f"{names.norm}.weight"), ())), None
        if names.norm is not None:
            norm = self._weights.norms.read_norm(self._weights.layer_name(layer, names.norm), width, 0.0)
            norm = replace(norm, weight=norm.weight.repeat(shape.inner // width))
            if isinstance(shape, GatedDeltaShape) and shape.norm_eps is not None:
                norm = replace(norm, eps=shape.norm_eps)
        if isinstance(shape, Mamba2Shape) and shape.rate_share:
            decay = torch.tensor(shape.fixed_decays, dtype=torch.float32, device=self._weights.device)
            return StateWeights(convolution, bias, decay, norm=norm)
        skip = None if names.skip is None else read(names.skip)
        decay = read(str(names.decay)).flatten()
        decay = decay if names.is_rate else -decay.exp()
        return StateWeights(convolution, bias, decay, read(str(names.step_bias)), norm, skip)
