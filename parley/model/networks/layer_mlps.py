"""The MLPs and mixtures of experts of a decoder's layers, and the contribution of per-layer inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parley import native
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.layer_linears import LayerLinears
from parley.model.networks.network import PackedBatch
from parley.native.layer import DecoderLayer


class LayerMLPs:
    """The MLPs and mixtures of each layer of one decoder."""

    def __init__(self, config: DecoderConfig, layer_weights: Sequence[DecoderLayer], linears: LayerLinears):
        self._config, self._layer_weights, self._linears = config, layer_weights, linears

    def route_early(self, layer: int, residual: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of a layer's router if it reads the residual before the layer, else None."""
        mixture = self._layer_weights[layer].mixture
        if mixture is None or not self._config.layers[layer].routes_early:
            return None
        return native.lm_head_logits(residual, mixture.router)

    def run_mlps(
        self,
        layer: int,
        x: torch.Tensor | native.QuantizedRows,
        residual: torch.Tensor,
        batch: PackedBatch,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of a layer's MLP, of its mixture of experts, or of both: [T, hidden]. ``x``: the norm of
        the residual. ``logits``: of ``route_early``."""
        weights = self._layer_weights[layer]
        if weights.mixture is None:
            return self._run_mlp(layer, x, batch)
        if not self._config.layers[layer].has_parallel_dense_mlp:
            return self._mix_experts(layer, x, x, batch, logits)
        dense = native.norm_rows(self._run_mlp(layer, x, batch), weights.dense_after_norm)
        router_rows = native.norm_rows(residual, weights.mixture.router_norm)
        mixed = self._mix_experts(layer, native.norm_rows(residual, weights.experts_norm), router_rows, batch)
        return native.add_norm(mixed, dense, None, after=weights.experts_after_norm)[1]

    def apply_layer_input(
        self, layer: int, residual: torch.Tensor, inputs: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        """Return the contribution of a layer's per-layer inputs [T, width] to the residual: [T, hidden]."""
        consumer = None if batch.lora_rows is not None else self._layer_weights[layer].input_up
        gates = self._linears.apply_linear(residual, batch, layer, "input_gate")
        active = native.activate(
            torch.cat((gates, inputs), 1), self._config.layers[layer].activation, consumer=consumer
        )
        return self._linears.apply_linear(active, batch, layer, "input_up")

    def _run_mlp(self, layer: int, x: torch.Tensor | native.QuantizedRows, batch: PackedBatch) -> torch.Tensor:
        """Return the output of a layer's MLP, or of its shared expert: [T, hidden]."""
        shape, weights = self._config.layers[layer], self._layer_weights[layer]
        consumer = None if batch.lora_rows is not None else weights.down
        rows = self._linears.apply_linear(x, batch, layer, "gate_up")
        if shape.gate_scale != 1:
            rows[:, : rows.shape[1] // 2] *= shape.gate_scale
        if shape.gate_deviations is not None:
            rows = native.sparsify_gates(rows, shape.gate_deviations)
        rows = native.limit_gates(rows, shape.mlp_limits)
        active = native.activate(
            rows,
            shape.activation,
            is_gated=shape.is_gated,
            factors=weights.activation_factors,
            consumer=consumer if weights.active_norm is None else None,
        )
        if weights.active_norm is not None:
            active = native.norm_rows(active, weights.active_norm, consumer=consumer)
        return self._linears.apply_linear(active, batch, layer, "down")

    def _mix_experts(
        self,
        layer: int,
        x: torch.Tensor | native.QuantizedRows,
        router_rows: torch.Tensor | native.QuantizedRows,
        batch: PackedBatch,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of a layer's mixture of experts: [T, hidden]. ``logits``: of the router, if known."""
        shape, mixture = self._config.layers[layer], self._layer_weights[layer].mixture
        assert mixture is not None and shape.routing is not None
        assert isinstance(x, torch.Tensor) and isinstance(router_rows, torch.Tensor), "routers read rows as they are"
        logits = native.lm_head_logits(router_rows, mixture.router) if logits is None else logits
        if mixture.table is None:
            ids, weights = native.route(logits, mixture.bias, shape.routing)
        else:
            ids = mixture.table.index_select(0, batch.token_ids)
            weights = native.weigh_experts(logits, ids, shape.routing)
        if mixture.scales is not None:
            weights = weights * mixture.scales[ids]
        shared = self._run_mlp(layer, x, batch) if shape.routing.shared else None
        if mixture.latent_down is not None and mixture.latent_up is not None:
            latents = native.linear(x, mixture.latent_down)
            own_weights = weights[:, : ids.shape[1]].contiguous()
            mixed = native.mix_experts(latents, mixture.experts, ids, own_weights, None, shape.activation)
            mixed = native.linear(mixed, mixture.latent_up)
            return mixed if shared is None else mixed + shared
        return native.mix_experts(
            x,
            mixture.experts,
            ids,
            weights,
            shared,
            shape.activation,
            weighs_inputs=shape.routing.weighs_inputs,
            limits=shape.expert_limits,
        )
