"""The linear layers of each layer of a decoder, by their names in Hugging Face checkpoints.

A linear layer of the fused decoder consists of one or more linear layers of the checkpoint, its parts.
"""

from __future__ import annotations

from dataclasses import replace

from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.linear_reader import LinearReader
from parley.model.load.mixture_weights import MixtureWeights
from parley.model.load.states.state_weights import LayerStateWeights
from parley.model.networks.layer_linears import linear_site
from parley.model.networks.network import LinearSite


class LayerLinearParts:
    """The linear layers of one checkpoint, except routers and experts."""

    def __init__(self, weights: LinearReader, states: LayerStateWeights, mixtures: MixtureWeights):
        self._weights, self._config = weights, weights.config
        self._states, self._mixtures = states, mixtures

    def linear_parts(self, layer: int) -> dict[str, list[LinearSpec]]:
        """Return the linear layers of a layer, each as the parts to be merged, in order."""
        config, state = self._config, self._config.layers[layer].state
        parts: dict[str, list[LinearSpec]] = {}
        if config.layers[layer].has_linear_mixer:
            (linear,) = self._name_parts(
                "output", layer, (config.tensors.output,), [config.hidden_size], config.hidden_size
            )
            parts = {"output": [replace(linear, bias=False)]}
        elif config.layers[layer].has_mixer:
            parts = self._attention_parts(layer) if state is None else self._states.linear_parts(layer, state)
        if state is not None and config.layers[layer].is_hybrid:
            parts = {**self._attention_parts(layer), "state_input": parts["qkv"], "state_output": parts["output"]}
        shape, width = config.layers[layer], config.mlp_width(layer)
        gate_up, down = config.tensors.gate_up, config.tensors.down
        merged = config.tensors.merged_gate_up
        if merged and self._weights.layer_name(layer, merged) + ".weight" in self._weights.checkpoint:
            gate_up = (merged,)
        if shape.routing is not None and not shape.has_parallel_dense_mlp:
            gate_up, down = self._mixtures.names.shared_gate_up, self._mixtures.names.shared_down
        if width and shape.has_mlp:
            parts["gate_up"] = self._name_parts(
                "gate_up", layer, gate_up, [width] * (1 + shape.is_gated), config.hidden_size
            )
            parts["down"] = self._name_parts("down", layer, (down,), [config.hidden_size], width)
        for key, gate in (
            ("attention_norm", config.tensors.attention_norm_gate if shape.has_gated_attention_norm else None),
            ("mlp_norm", config.tensors.mixture_norm_gate if shape.has_gated_mlp_norm else None),
        ):
            if gate is not None:
                hidden, rank, (gate_down, gate_up_name) = config.hidden_size, config.norm_gate_rank, gate
                parts[f"{key}_down"] = self._name_parts(f"{key}_down", layer, (gate_down,), [rank], hidden)
                parts[f"{key}_up"] = self._name_parts(f"{key}_up", layer, (gate_up_name,), [hidden], rank)
        if config.altup is not None:
            rank, name = config.altup.laurel_rank, "laurel.linear_{}".format
            parts["laurel_left"] = self._name_parts("laurel_left", layer, (name("left"),), [rank], config.hidden_size)
            parts["laurel_right"] = self._name_parts(
                "laurel_right", layer, (name("right"),), [config.hidden_size], rank
            )
        if shape.layer_input is not None:
            names, width = config.tensors, config.layer_inputs.width
            parts["input_gate"] = self._name_parts(
                "input_gate", layer, (names.input_gate,), [width], config.hidden_size
            )
            parts["input_up"] = self._name_parts("input_up", layer, (names.input_up,), [config.hidden_size], width)
        return parts

    def _attention_parts(self, layer: int) -> dict[str, list[LinearSpec]]:
        """Return the linear layers of a layer's attention. ``latent_up`` is packed as two weights of each head."""
        config, latent, shape = self._config, self._config.latent, self._config.layers[layer]
        sizes, names = config.head_sizes(layer), config.tensors.qkv
        heads = config.query_heads(layer)
        q, kv = heads * sizes.dim, sizes.kv_heads * sizes.dim
        if (compression := config.compression) is not None:
            rank, width = compression.query_rank, compression.output_groups * compression.output_rank
            assert config.tensors.query_up is not None
            return {
                "qkv": self._name_parts("qkv", layer, names, [rank, sizes.dim], config.hidden_size),
                "query_up": self._name_parts("query_up", layer, (config.tensors.query_up,), [q], rank),
                "output": self._name_parts("output", layer, (config.tensors.output,), [config.hidden_size], width),
            }
        if latent is None:
            queries = [q, heads if shape.has_head_gates else q] if shape.has_output_gate else [q]
            if len(config.tensors.qkv) < len(queries) + 2:
                queries = [sum(queries)]
            outs = [*queries, kv, sizes.kv_heads * config.value_dim(layer)]
            attended = heads * config.value_dim(layer)
            if not shape.stores_kv or shape.has_keys_as_values:
                outs = outs[: 2 if shape.stores_kv else 1]
                names = names[: len(outs)]
            return {
                "qkv": self._name_parts("qkv", layer, names, outs, config.hidden_size),
                "output": self._name_parts("output", layer, (config.tensors.output,), [config.hidden_size], attended),
            }
        assert config.tensors.latent_up is not None
        values, ups = config.heads * latent.value_dim, config.heads * (latent.plain_dim + latent.value_dim)
        gates = [config.heads if shape.has_head_gates else values] * (shape.has_head_gates or shape.has_output_gate)
        outs = [latent.query_rank or q, *gates, latent.stored_dim]
        parts = {
            "qkv": self._name_parts("qkv", layer, config.tensors.qkv, outs, config.hidden_size),
            "output": self._name_parts("output", layer, (config.tensors.output,), [config.hidden_size], values),
            "latent_up": self._name_parts("latent_up", layer, (config.tensors.latent_up,), [ups], latent.rank),
        }
        if config.tensors.query_up:
            outs = [q + values] if shape.has_latent_gates else [q]
            read = latent.query_rank * (1 + shape.has_latent_gates)
            parts["query_up"] = self._name_parts("query_up", layer, (config.tensors.query_up,), outs, read)
        return parts

    def _name_parts(
        self, site: str, layer: int, names: tuple[str, ...], outs: list[int], in_features: int
    ) -> list[LinearSpec]:
        """Return linear layers with ``outs`` outputs, or one with all of them if the checkpoint stores them merged."""
        config, layout = self._config, self._config.linear_layout
        groups, part_order = None, tuple[int, ...]()
        if site == "qkv" and layout.qkv_shards:
            groups, part_order = (layout.qkv_shards, (in_features // layout.qkv_shards,) * 3), (0, 2, 1)
        elif site == "qkv" and layout.has_grouped_qkv:
            groups = (
                config.kv_heads,
                (config.heads // config.kv_heads * config.head_dim, config.head_dim, config.head_dim),
            )
        outs = outs if len(names) == len(outs) else [sum(outs)]
        parts = [
            LinearSpec(
                self._weights.layer_name(layer, name),
                out_features,
                in_features,
                site in config.biases,
                groups,
                layout.is_transposed,
                part_order,
            )
            for name, out_features in zip(names, outs, strict=True)
        ]
        if site == "qkv" and config.layers[layer].has_output_gate and len(parts) == 3 and config.latent is None:
            parts[0] = replace(parts[0], groups=(config.heads, (config.head_dim, config.head_dim)))
        return parts

    def linear_sites(self) -> dict[str, LinearSite]:
        """Return where each linear layer of the checkpoint is computed."""
        sites: dict[str, LinearSite] = {}
        for layer in range(self._config.layer_count):
            for key, parts in self.linear_parts(layer).items():
                site = linear_site(key, layer, self._config.layer_count)
                if site is None:
                    continue
                first = 0
                for linear in parts:
                    sites[linear.name] = LinearSite(site, first, linear.out_features, linear.in_features, linear.order)
                    first += linear.out_features
        return sites
