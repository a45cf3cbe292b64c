"""A layer of a decoder by its definition, for the numeric check: float32, kernel-free, one whole sequence at a time.

``LayerShape`` says which of the parts below a layer has. Rows are float32 [T, ...], one for each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.norm_weights import AFTER_NORMS
from parley.model.load.numeric_check.reference_routing import expert_scores, expert_shares, weigh_shares
from parley.model.load.states.state_reference import run_state_layer
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.rope import RopeConfig
from parley.native.layer_shape import GateLimits, LatentShape, Routing
from parley.native.state_shape import GatedDeltaShape, StateShape

# Of the outputs of gate and up; of those of up and of 1 in an MLP that is not gated.
ACTIVATION_DEFINITIONS: dict[str, Callable[[torch.Tensor, torch.Tensor | float], torch.Tensor]] = {
    "silu": lambda gate, up: gate * gate.sigmoid() * up,
    "gelu": lambda gate, up: gate * (1 + (gate / 2**0.5).erf()) / 2 * up,
    "gelu_tanh": lambda gate, up: gate * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) / 2 * up,
    "relu": lambda gate, up: gate.clamp_min(0) * up,
    "relu2": lambda gate, up: gate.clamp_min(0) ** 2 * up,
    "clamped_swiglu": lambda gate, up: (
        gate.clamp_max(7) * (1.702 * gate.clamp_max(7)).sigmoid() * (torch.as_tensor(up).clamp(-7, 7) + 1)
    ),
}
StoredKV = dict[int, tuple[torch.Tensor, torch.Tensor]]  # keys and values by number of the layer
LATENT_NORM_EPS = 1e-6  # of the norms of latents, whatever the config says of other norms


class ReferenceNorms:
    """The norms of a decoder, by the names of their tensors."""

    def __init__(self, weights: DecoderWeights, config: DecoderConfig):
        self._weights, self._config = weights, config

    def norm_rows(
        self, x: torch.Tensor, name: str, width: int, eps: float | None = None, offset: float | None = None
    ) -> torch.Tensor:
        """Return the norm of rows of ``width`` numbers, or of each part of this width. ``name`` "": without weights.
        ``offset``: as ``NormForm.offset`` of the config, which is the default."""
        config = self._config
        x = self._normalize_rows(x.unflatten(-1, (-1, width)), config.eps if eps is None else eps)
        if name:
            offset = config.norms.offset if offset is None else offset
            x = x * (offset + self._weights.norms.view_norm(name + ".weight", width).float())
        if name and config.norms.has_bias:
            x = x + self._weights.norms.view_norm(name + ".bias", width)
        return x.flatten(-2)

    def norm_unweighted(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of rows [T, width] without weights: [T, width]."""
        return self._normalize_rows(x, self._config.eps)

    def norm_heads(self, x: torch.Tensor, name: str, width: int) -> torch.Tensor:
        """Return the norm of queries or keys of all heads: [T, heads * head_dim] -> the same."""
        if not self._config.norms.has_headwise_qk:
            return self.norm_rows(x, name, width)
        heads = self._normalize_rows(x.unflatten(-1, (-1, self._config.head_dim)), self._config.eps)
        return heads.flatten(-2) * self._weights.norms.view_norm(name + ".weight", width).float()

    def _normalize_rows(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        if self._config.norms.is_centered:
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


class ReferenceLayer:
    """Layer ``number`` of a decoder. ``media_positions`` int64 [3, T]: positions of the tokens on M-RoPE's axes.

    ``stored``: the keys and values of layers before it; the layer adds its own. ``token_ids`` int64 [T].
    """

    def __init__(
        self,
        weights: DecoderWeights,
        config: DecoderConfig,
        number: int,
        media_positions: torch.Tensor,
        stored: StoredKV,
        token_ids: torch.Tensor,
    ):
        self._weights, self._config, self._number = weights, config, number
        self._shape = config.layers[number]
        self._linears = weights.linears.linear_parts(number)
        self._norms, self._norm_fields = ReferenceNorms(weights, config), weights.norms.layer_norms(number)
        self._media_positions, self._stored, self._token_ids = media_positions, stored, token_ids
        self._places = torch.arange(media_positions.shape[1])

    def run_rows(self, x: torch.Tensor, inputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the residual stream after the layer, [T, hidden], for the one before it. ``inputs`` [T, width]: of
        the layer alone."""
        shape, layer_input = self._shape, x
        if shape.has_mixer:
            normed = self._norm_field(x, "attention_norm")
            x = normed if shape.has_normed_residual else x
            mixed = self._mix_rows(normed)
            if shape.is_hybrid and shape.state is not None:
                x = x + shape.state_scale * self._run_state(normed, shape.state)
            x = shape.attention_residual_factor * x + shape.residual_scale * self._norm_field(
                mixed, "attention_after_norm"
            )
        if shape.has_mlp:
            mlp_output = self._run_mlps(layer_input if shape.is_parallel else x, layer_input)
            scale = shape.residual_scale if shape.mlp_scale is None else shape.mlp_scale
            x = self._norm_field(x, "mlp_norm") if shape.has_normed_residual else x
            x = shape.mlp_residual_factor * x + scale * self._norm_field(mlp_output, "mlp_after_norm")
        if inputs is not None:
            active = ACTIVATION_DEFINITIONS[shape.activation](self._project(x, "input_gate"), inputs)
            x = x + self._norm_field(self._project(active, "input_up"), "input_after_norm")
        return x * self._weights.read_output_scale(self._number)

    def _norm_field(self, x: torch.Tensor, field: str) -> torch.Tensor:
        """Apply the norm of this field of ``TensorNames``, if the layer has it."""
        eps = self._config.after_norm_eps if field in AFTER_NORMS else None
        y = self._norms.norm_rows(x, *self._norm_fields[field], eps) if field in self._norm_fields else x
        if f"{field}_down" not in self._linears:
            return y
        inside = self._project(y, f"{field}_down")
        return y * self._project(inside * inside.sigmoid(), f"{field}_up").sigmoid()

    # -- linear layers

    def _project(self, x: torch.Tensor, key: str) -> torch.Tensor:
        """Apply the single linear layer of this key, or the first of several."""
        return self._project_parts(x, key)[0]

    def _project_parts(self, x: torch.Tensor, key: str) -> list[torch.Tensor]:
        return [self._project_rows(x, linear) for linear in self._linears[key]]

    def _project_rows(self, x: torch.Tensor, linear: LinearSpec) -> torch.Tensor:
        y = self._weights.read_linear(linear).multiply_rows(x)
        return y + self._weights.read_bias(linear).float() if linear.bias else y

    # -- attention, or a state in its place

    def _mix_rows(self, x: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        if shape.state is not None and not shape.is_hybrid:
            return self._run_state(x, shape.state)
        if shape.has_linear_mixer:
            return self._project(x, "output")
        rows = self._project_parts(x, "qkv")
        if shape.qkv_limit is not None:
            rows = [part.clamp(-shape.qkv_limit, shape.qkv_limit) for part in rows]
        if self._config.latent is not None:
            queries, gates = self._query_latents(rows[0], self._config.latent)
            attended = self._attend_heads(*self._project_latents(queries, rows[-1], self._config.latent))
            attended = attended if gates is None else attended * gates.sigmoid()
            for gate in rows[1:-1]:
                attended = attended * gate.sigmoid().repeat_interleave(attended.shape[1] // gate.shape[1], 1)
            return self._project(attended, "output")
        if not shape.has_output_gate:
            attended = self._attend_heads(*self._project_heads(rows))
            return self._project(self._norm_field(attended, "attended_norm"), "output")
        q, gates, *key_and_value = rows if len(rows) == 4 else [*rows[0].chunk(2, -1), *rows[1:]]
        attended = self._attend_heads(*self._project_heads([q, *key_and_value]))
        if shape.has_head_gates:
            gates = gates.repeat_interleave(self._config.head_sizes(self._number).dim, 1)
        gates = (1 + gates.exp()).log() if shape.has_softplus_gates else gates.sigmoid()
        return self._project(attended * gates, "output")

    def _project_heads(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the queries, keys and values of all heads, each [T, heads, dim]."""
        config, shape, fields = self._config, self._shape, self._norm_fields
        kv_heads, dim = config.head_sizes(self._number).kv_heads, config.head_sizes(self._number).dim
        if shape.kv_layer is not None:
            q = self._norms.norm_heads(rows[0], *fields["query_norm"]).unflatten(-1, (-1, dim))
            q = q if shape.rope is None else self._rotate_heads(q, config.ropes[shape.rope])
            return [q, *self._stored[shape.kv_layer]]
        if shape.has_keys_as_values:
            rows = [*rows, rows[-1]]
        heads = config.query_heads(self._number)
        value_dim = config.value_dim(self._number)
        q, k, v = torch.cat(rows, -1).split([heads * dim, kv_heads * dim, kv_heads * value_dim], -1)
        if "query_norm" in fields and not shape.is_qk_norm_late:
            q = self._norms.norm_heads(q, *fields["query_norm"])
            k = self._norms.norm_heads(k, *fields["key_norm"])
        q, k = (projected.unflatten(-1, (-1, dim)) for projected in (q, k))
        v = v.unflatten(-1, (-1, value_dim)) * shape.value_scale
        if shape.has_normed_values:
            v = self._norms.norm_unweighted(v)
        if shape.rope is not None:
            q, k = (self._rotate_heads(heads, config.ropes[shape.rope]) for heads in (q, k))
        if "query_norm" in fields and shape.is_qk_norm_late:
            q = self._norms.norm_rows(q, *fields["query_norm"])
            k = self._norms.norm_rows(k, *fields["key_norm"])
        if shape.has_scaled_queries:
            q = q * self._query_scales()
        k, v = (numbers.repeat_interleave(heads // kv_heads, 1) for numbers in (k, v))
        self._stored[self._number] = k, v
        return [q, k, v]

    def _query_scales(self) -> torch.Tensor:
        """Return the factor of each token's query, which grows with its position: [T, 1, 1]."""
        scaling = self._config.query_scaling
        assert scaling is not None
        steps = ((self._places + scaling.shift) / scaling.length).floor()
        return (1 + scaling.weight * (1 + steps).log())[:, None, None]

    def _query_latents(self, q: torch.Tensor, latent: LatentShape) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the queries of all heads, made from their latents if they have any, and the gates of the heads'
        outputs, made of the same, or None: [T, heads * dim]."""
        if not latent.query_rank:
            return q, None
        normed = self._norm_latents(q, "query_latent_norm")
        if not self._shape.has_latent_gates:
            return self._project(normed, "query_up"), None
        ups = self._project(torch.cat((normed, q), -1), "query_up").unflatten(-1, (self._config.heads, -1))
        queries, gates = ups.split([latent.head_dim, latent.value_dim], -1)
        return queries.flatten(1), gates.flatten(1)

    def _project_latents(self, q: torch.Tensor, rows: torch.Tensor, latent: LatentShape) -> list[torch.Tensor]:
        """Return the queries, keys and values of all heads, made from queries and from latents."""
        q_plain, q_turning = q.unflatten(-1, (self._config.heads, -1)).split([latent.plain_dim, latent.rotary_dim], -1)
        latents, k_turning = rows.split([latent.rank, latent.rotary_dim], -1)
        ups = self._project(self._norm_latents(latents, "latent_norm"), "latent_up")
        k_plain, v = ups.unflatten(-1, (self._config.heads, -1)).split([latent.plain_dim, latent.value_dim], -1)
        q_turning, k_turning = (
            self._rotate_heads(heads, self._config.rope) for heads in (q_turning, k_turning[:, None])
        )
        k = torch.cat((k_plain, k_turning.expand_as(q_turning)), -1)
        q = torch.cat((q_plain, q_turning), -1)
        return [q * self._query_scales() if self._shape.has_scaled_queries else q, k, v]

    def _norm_latents(self, x: torch.Tensor, field: str) -> torch.Tensor:
        return self._norms.norm_rows(x, *self._norm_fields[field], LATENT_NORM_EPS)

    def _rotate_heads(self, x: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
        """Apply the rotary embedding to queries or keys [T, heads, dim]."""
        angles = self._rotary_positions(rope) * rope.inverse_frequencies()
        cos, sin = angles.cos() * rope.scale, angles.sin() * (-rope.scale if rope.is_reversed else rope.scale)
        rotated, unrotated = x[..., : rope.rotary], x[..., rope.rotary :]
        shape = (-1, 2) if rope.is_interleaved else (2, -1)
        a, b = rotated.unflatten(-1, shape).unbind(-1 if rope.is_interleaved else -2)
        rotated_pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if rope.is_interleaved else -2)
        return torch.cat((rotated_pairs.flatten(-2), unrotated), -1)

    def _rotary_positions(self, rope: RopeConfig) -> torch.Tensor:
        """Return the position that turns each pair of dimensions of each token: float32 [T, 1, 1 or rotary / 2]."""
        if not rope.mrope_section:
            return self._places.float()[:, None, None]
        time, height, width = rope.mrope_section
        axes = [0] * time + [1] * height + [2] * width
        if rope.mrope_interleaved:
            axes = [pair % 3 if pair < 3 * rope.mrope_section[pair % 3] else 0 for pair in range(rope.rotary // 2)]
        return self._media_positions[axes].T.float()[:, None]

    def _attend_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attended values of all heads, [T, heads * dim]."""
        shape, count = self._shape, len(q)
        distance = self._places[:, None] - self._places
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.score_scale
        if shape.softcap is not None:
            scores = shape.softcap * (scores / shape.softcap).tanh()
        if shape.slopes:
            scores = scores - torch.tensor(shape.slopes)[:, None, None] * distance
        visible = distance >= 0
        if shape.chunk is not None:
            visible &= self._places[:, None] // shape.chunk == self._places // shape.chunk
        if shape.window is not None:
            visible &= distance < shape.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if (sinks := self._weights.read_sinks(self._number)) is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, count, 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :count], v).reshape(count, -1)

    def _run_state(self, x: torch.Tensor, shape: StateShape) -> torch.Tensor:
        state_weights = self._weights.states.read_layer(self._number)
        assert state_weights is not None
        has_gates = isinstance(shape, GatedDeltaShape)  # which read the layer's input
        rows, gates = (
            torch.cat([x[:, :0], *(self._project_rows(x, linear) for linear in self._linears.get(key, []))], -1)
            for key in ("state_input" if "state_input" in self._linears else "qkv", "state_gates" if has_gates else "")
        )
        outputs = run_state_layer(shape, state_weights, rows, gates, self._project)
        return self._project(outputs, "state_output" if "state_output" in self._linears else "output")

    # -- the MLP, or a mixture of experts

    def _run_mlps(self, residual: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP, of the mixture, or of both, for the residuals before it and before the
        layer."""
        x = self._norm_field(residual, "mlp_norm")
        if self._shape.routing is None:
            return self._run_mlp(x)
        if not self._shape.has_parallel_dense_mlp:
            return self._run_mixture(x, layer_input if self._shape.routes_early else x, self._shape.routing)
        experts = self._norm_field(residual, "experts_norm")
        scales = self._weights.mixtures.read_router_norm(self._number)
        assert scales is not None
        mixed = self._run_mixture(experts, self._norms.norm_unweighted(residual) * scales.weight, self._shape.routing)
        dense = self._norm_field(self._run_mlp(x), "dense_after_norm")
        return dense + self._norm_field(mixed, "experts_after_norm")

    def _run_mixture(self, x: torch.Tensor, router_rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the output of the mixture for rows x, whose router reads ``router_rows``."""
        mixtures = self._weights.mixtures
        router, router_bias = mixtures.read_router(self._number)
        logits = torch.cat([part.multiply_rows(router_rows) for part in router], -1)
        logits = logits if router_bias is None else logits + router_bias.float()
        own_logits, table = logits[:, : routing.experts], mixtures.read_table(self._number)
        if table is None:
            shares = expert_shares(own_logits, mixtures.read_choice_bias(self._number), routing)
        else:
            shares = weigh_shares(expert_scores(own_logits, routing), table[self._token_ids], routing)
        scales = mixtures.read_expert_scales(self._number)
        shares = shares if scales is None else shares * scales
        total = torch.zeros_like(x)
        if routing.shared:
            total = self._run_mlp(x) * (logits[:, routing.experts :].sigmoid() if routing.shared == 2 else 1.0)
        if latents := mixtures.read_latents(self._number):
            down, up = latents
            return total + up.multiply_rows(self._sum_experts(down.multiply_rows(x), shares, routing))
        return total + self._sum_experts(x, shares, routing)

    def _sum_experts(self, x: torch.Tensor, shares: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the sum of the experts' outputs for rows x, weighed by ``shares`` [T, experts]."""
        total = torch.zeros_like(x)
        for expert in shares.any(0).nonzero()[:, 0].tolist():
            rows = shares[:, expert].nonzero()[:, 0]
            own = shares[rows, expert, None]
            if routing.weighs_inputs:
                total[rows] += self._run_expert(own * x[rows], expert)
            else:
                total[rows] += own * self._run_expert(x[rows], expert)
        return total

    def _run_expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = self._split_gate(self._project_expert(x, expert, "gate_up"), self._shape.expert_limits)
        return self._project_expert(ACTIVATION_DEFINITIONS[self._shape.activation](gate, up), expert, "down")

    def _project_expert(self, x: torch.Tensor, expert: int, key: str) -> torch.Tensor:
        mixtures = self._weights.mixtures
        y = torch.cat([weight.multiply_rows(x) for weight in mixtures.read_expert(self._number, expert, key)], -1)
        bias = mixtures.read_expert_bias(self._number, expert, key)
        return y if bias is None else y + bias

    def _run_mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._split_gate(torch.cat(self._project_parts(x, "gate_up"), -1), self._shape.mlp_limits)
        gate = gate * self._shape.gate_scale
        if self._shape.gate_deviations is not None:
            threshold = gate.mean(-1, keepdim=True) + self._shape.gate_deviations * gate.std(-1, False, keepdim=True)
            gate = (gate - threshold).clamp_min(0)
        if self._shape.activation == "xielu":
            return self._project(self._run_xielu(gate) * up, "down")
        active = ACTIVATION_DEFINITIONS[self._shape.activation](gate, up)
        return self._project(self._norm_field(active, "active_norm"), "down")

    def _run_xielu(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation xIELU (arXiv 2411.13010, equation 9) with the layer's factors."""
        positive, negative, linear = self._weights.read_activation_factors(self._number)
        below = negative * (x.clamp_max(0).expm1() - x)
        return torch.where(x > 0, positive * x * x, below) + linear * x

    def _split_gate(self, rows: torch.Tensor, limits: GateLimits | None) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the outputs of gate and up within their limits; those of up and 1 if the MLP is not gated."""
        if not self._shape.is_gated:
            return rows, 1.0
        gate, up = rows.chunk(2, -1)
        return (gate, up) if limits is None else (gate.clamp_max(limits.gate), up.clamp(-limits.up, limits.up))
