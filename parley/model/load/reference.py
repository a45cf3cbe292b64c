"""The reference for fused decoders: a model by its definitions, compared with the decoder at load.

A plain float32 forward pass on the unmerged weights, of a few tokens, compared by logits. It knows nothing of kernels
and packed weights, so that both cannot be wrong in the same way. With M-RoPE, some tokens have a picture's positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from parley.core.rope_positions import RopePositions
from parley.core.sequence import BLOCK_SIZE
from parley.model.checkpoint.files import Checkpoint
from parley.model.checkpoint.quantization import Quantization, read_plain_weight
from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.fuse import DecoderWeights
from parley.model.load.states.state_reference import run_state_layer
from parley.model.networks.config import DecoderConfig, RopeConfig
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layer_shape import LatentShape, LayerShape, Routing
from parley.native.layout import Span
from parley.native.state_shape import StateShape
from parley.types import EmbeddingRun, MediaItem

PROBE_TOKENS = 24  # tokens in the numeric check
PROBE_OUTPUTS = 4096  # vocabulary entries with compared logits
# Parameters; the check runs all layers of models up to this size, else the first and the last.
FULL_CHECK_PARAMETERS = 50_000_000
PROBE_PICTURE = MediaItem("image", b"", 7, 12, [EmbeddingRun(0, 12, (2, 3, 2))])
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
# Relative error (L2) of the logits.
DECODER_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}


@torch.inference_mode()
def decoder_deviation(decoder: FusedDecoder, checkpoint: Checkpoint, quantization: Quantization) -> float:
    """Return the relative error (L2) of the decoder's logits against ``reference_logits`` for a few tokens."""
    config = _choose_all_experts(decoder.config)
    layers = list(range(config.layer_count))
    if decoder.parameters > FULL_CHECK_PARAMETERS:
        kinds = [type(shape.state) for shape in config.layers]
        layers = sorted({0, config.layer_count - 1, *map(kinds.index, set(kinds))})
    token_ids = torch.linspace(0, config.vocab - 1, PROBE_TOKENS).long()
    outputs = torch.linspace(0, config.vocab - 1, min(config.vocab, PROBE_OUTPUTS)).long()
    expected = reference_logits(checkpoint, config, quantization, token_ids, outputs, layers)

    selected = decoder.select_layers(layers, config)
    device = decoder.device
    count = -(-PROBE_TOKENS // BLOCK_SIZE)
    pages = PagedKV(selected.layers, count, decoder.dtype, device)
    pages.clear_pages(list(range(count)))
    positions = torch.arange(PROBE_TOKENS, device=device)
    batch = PackedBatch(
        token_ids.to(device), positions, positions, [Span(0, PROBE_TOKENS, PROBE_TOKENS, list(range(count)))]
    )
    if config.rope.mrope_section:
        batch.rope_positions = _picture_positions().to(device)
    actual = selected.compute_logits(selected.compute_hidden(batch, pages)[-1:])[:, outputs.to(device)].cpu()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def _choose_all_experts(config: DecoderConfig) -> DecoderConfig:
    """Return a config whose mixtures compute all experts for each token, so that each expert is checked.

    Otherwise, rounding alone would send single tokens to other experts than the reference does.
    """

    def choose_all(shape: LayerShape) -> LayerShape:
        routing = shape.routing
        if routing is None:
            return shape
        return replace(shape, routing=replace(routing, chosen=routing.experts, groups=1, chosen_groups=1))

    return replace(config, layers=tuple(map(choose_all, config.layers)))


def _picture_positions() -> torch.Tensor:
    """Return the positions of the tokens on three axes if some of them are a picture's: int64 [3, PROBE_TOKENS]."""
    return torch.tensor(RopePositions([PROBE_PICTURE], PROBE_TOKENS).axes(0, PROBE_TOKENS))


def _position_table(rope: RopeConfig, count: int) -> torch.Tensor:
    """Return the position that turns each pair of dimensions of each token: float32 [count, 1, 1 or rotary / 2]."""
    if not rope.mrope_section:
        return torch.arange(count).float()[:, None, None]
    time, height, width = rope.mrope_section
    axes = [0] * time + [1] * height + [2] * width
    if rope.mrope_interleaved:
        axes = [pair % 3 if pair < 3 * rope.mrope_section[pair % 3] else 0 for pair in range(rope.rotary // 2)]
    return _picture_positions()[axes].T.float()[:, None]


def expert_shares(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """Return the weight of each expert for each row, 0 if it is not chosen: float32 [T, experts] for logits alike."""
    if routing.margin >= 0:
        return sparse_shares(logits, routing)
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.topk(routing.group_best).values.sum(-1).topk(routing.chosen_groups).indices
        outside = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter(1, best, False)
        choice = choice.masked_fill(outside.repeat_interleave(grouped.shape[2], 1), -math.inf)
    chosen = torch.zeros_like(scores).scatter(1, choice.topk(routing.chosen).indices, 1.0)
    shares = scores * chosen
    return routing.scale * (shares / shares.sum(-1, keepdim=True) if routing.normalized else shares)


def sparse_shares(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the result of ``expert_shares`` for a sparse mixer."""
    shares, left = torch.zeros_like(logits), logits.clone()
    for _ in range(routing.chosen):
        most, expert = left.max(-1, keepdim=True)
        close = most - logits <= routing.margin * logits.abs().clamp_min(most)
        own = left.masked_fill(~close, -math.inf).softmax(-1).gather(1, expert)
        shares.scatter_(1, expert, routing.scale * own)
        left.scatter_(1, expert, -math.inf)
    return shares


def reference_logits(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    quantization: Quantization,
    token_ids: torch.Tensor,
    outputs: torch.Tensor,
    layers: list[int],
) -> torch.Tensor:
    """Compute logits of some ``outputs`` after the last token by the definitions, using only ``layers``.

    token_ids int64 [T], outputs int64 [N] -> float32 [1, N]. The whole vocabulary in float32 would cost more than the
    rest of the start.
    """
    weights = DecoderWeights(checkpoint, config, quantization, torch.float32, torch.device("cpu"))
    count = len(token_ids)

    def view_float(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.view_tensor(name, *shape).float()

    def rms_norm_rows(x: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)

    def norm_rows(x: torch.Tensor, name: str, width: int, eps: float = config.eps) -> torch.Tensor:
        """The norm of rows of ``width`` numbers, or of parts of them."""
        x = x.unflatten(-1, (-1, width))
        x = rms_norm_rows(x - x.mean(-1, keepdim=True) if config.are_norms_centered else x, eps)
        if name:
            x = x * (config.norm_offset + weights.view_norm(name + ".weight", width).float())
        return (x + weights.view_norm(name + ".bias", width) if name and config.have_norms_bias else x).flatten(-2)

    def norm_heads(x: torch.Tensor, name: str, width: int) -> torch.Tensor:
        """The norm of queries or keys."""
        if not config.has_headwise_qk_norm:
            return norm_rows(x, name, width)
        heads = x.unflatten(-1, (-1, config.head_dim))
        heads = rms_norm_rows(heads - heads.mean(-1, keepdim=True) if config.are_norms_centered else heads, config.eps)
        return heads.flatten(-2) * weights.view_norm(name + ".weight", width).float()

    def project_parts(x: torch.Tensor, key: str, layer: int) -> list[torch.Tensor]:
        return [project_rows(x, linear) for linear in weights.linear_parts(layer)[key]]

    def project_rows(x: torch.Tensor, linear: LinearSpec) -> torch.Tensor:
        y = weights.read_linear(linear).multiply_rows(x)
        return y + weights.read_bias(linear).float() if linear.bias else y

    def apply_rope(x: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
        angles = _position_table(rope, count) * rope.inverse_frequencies()
        cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
        turning, rest = x[..., : rope.rotary], x[..., rope.rotary :]
        shape = (-1, 2) if rope.is_interleaved else (2, -1)
        a, b = turning.unflatten(-1, shape).unbind(-1 if rope.is_interleaved else -2)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if rope.is_interleaved else -2)
        return torch.cat((turned.flatten(-2), rest), -1)

    places = torch.arange(count)
    distance = places[:, None] - places

    def scale_queries() -> torch.Tensor:
        scaling = config.query_scaling
        assert scaling is not None
        steps = ((places + scaling.shift) / scaling.length).floor()
        return (1 + scaling.weight * (1 + steps).log())[:, None, None]

    def project_heads(rows: list[torch.Tensor], layer: int, norms: dict[str, tuple[str, int]]) -> list[torch.Tensor]:
        """The queries, keys and values of all heads."""
        shape, dim = config.layers[layer], config.head_dim
        sizes = [config.heads * dim, config.kv_heads * dim, config.kv_heads * dim]
        q, k, v = torch.cat(rows, -1).split(sizes, -1)
        if "query_norm" in norms and not shape.is_qk_norm_late:
            q, k = norm_heads(q, *norms["query_norm"]), norm_heads(k, *norms["key_norm"])
        q, k, v = (each.unflatten(-1, (-1, dim)) for each in (q, k, v))
        if shape.rope is not None:
            q, k = (apply_rope(each, config.ropes[shape.rope]) for each in (q, k))
        if "query_norm" in norms and shape.is_qk_norm_late:
            q, k = norm_rows(q, *norms["query_norm"]), norm_rows(k, *norms["key_norm"])
        if shape.has_scaled_queries:
            q = q * scale_queries()
        return [q, *(each.repeat_interleave(config.heads // config.kv_heads, 1) for each in (k, v))]

    def project_latents(
        x: torch.Tensor, latent: LatentShape, layer: int, norms: dict[str, tuple[str, int]]
    ) -> list[torch.Tensor]:
        """The queries, keys and values of all heads, from latents."""
        q, rows = project_parts(x, "qkv", layer)
        if latent.query_rank:
            q = project_parts(norm_rows(q, *norms["query_latent_norm"], 1e-6), "query_up", layer)[0]
        q_plain, q_turning = q.unflatten(-1, (config.heads, -1)).split([latent.plain_dim, latent.rotary_dim], -1)
        latents, k_turning = rows.split([latent.rank, latent.rotary_dim], -1)
        ups = project_parts(norm_rows(latents, *norms["latent_norm"], 1e-6), "latent_up", layer)[0]
        k_plain, v = ups.unflatten(-1, (config.heads, -1)).split([latent.plain_dim, latent.value_dim], -1)
        q_turning, k_turning = (apply_rope(each, config.rope) for each in (q_turning, k_turning[:, None]))
        k = torch.cat((k_plain, k_turning.expand_as(q_turning)), -1)
        return [torch.cat((q_plain, q_turning), -1), k, v]

    def attend_rows(x: torch.Tensor, layer: int, norms: dict[str, tuple[str, int]]) -> torch.Tensor:
        shape, gate = config.layers[layer], torch.ones(())
        if shape.state is not None and not shape.is_hybrid:
            return run_state(x, layer, shape.state)
        if config.latent is None:
            rows = project_parts(x, "qkv", layer)
            if shape.has_output_gate:
                q, gates, *rest = rows if len(rows) == 4 else [*rows[0].chunk(2, -1), *rows[1:]]
                rows, gate = [q, *rest], gates.sigmoid()
            q, k, v = project_heads(rows, layer, norms)
        else:
            q, k, v = project_latents(x, config.latent, layer, norms)
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.score_scale
        if shape.softcap is not None:
            scores = shape.softcap * (scores / shape.softcap).tanh()
        if shape.slopes:
            scores = scores - torch.tensor(shape.slopes)[:, None, None] * distance
        visible = distance >= 0
        if shape.chunk is not None:
            visible &= places[:, None] // shape.chunk == places // shape.chunk
        if shape.window is not None:
            visible &= distance < shape.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if (sinks := weights.read_sinks(layer)) is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, count, 1)), -1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :count], v)
        return project_parts(attended.reshape(count, -1) * gate, "output", layer)[0]

    def run_state(x: torch.Tensor, layer: int, shape: StateShape) -> torch.Tensor:
        state_weights = weights.states.read_layer(layer)
        assert state_weights is not None
        parts = weights.linear_parts(layer)
        rows, gates = (
            torch.cat([x[:, :0], *(project_rows(x, linear) for linear in parts.get(key, []))], -1)
            for key in ("state_input" if "state_input" in parts else "qkv", "state_gates")
        )
        outputs = run_state_layer(shape, state_weights, rows, gates, lambda x, name: project_parts(x, name, layer)[0])
        return project_parts(outputs, "state_output" if "state_output" in parts else "output", layer)[0]

    def run_layer_mlp(x: torch.Tensor, layer: int) -> torch.Tensor:
        routing = config.layers[layer].routing
        if routing is None:
            return run_mlp(x, layer)
        router, router_bias = weights.mixtures.read_router(layer)
        logits = x @ torch.cat(router).float().T + (0 if router_bias is None else router_bias.float())
        shares = expert_shares(logits[:, : routing.experts], weights.mixtures.read_choice_bias(layer), routing)
        total = torch.zeros_like(x)
        if routing.shared:
            total = run_mlp(x, layer) * (logits[:, routing.experts :].sigmoid() if routing.shared == 2 else 1.0)
        for expert in shares.sum(0).nonzero()[:, 0].tolist():
            rows = shares[:, expert].nonzero()[:, 0]
            own = shares[rows, expert, None]
            if routing.weighs_inputs:
                total[rows] += run_expert(own * x[rows], layer, expert)
            else:
                total[rows] += own * run_expert(x[rows], layer, expert)
        return total

    def run_expert(x: torch.Tensor, layer: int, expert: int) -> torch.Tensor:
        def project(x: torch.Tensor, key: str) -> torch.Tensor:
            y = torch.cat([each.multiply_rows(x) for each in weights.mixtures.read_expert(layer, expert, key)], -1)
            bias = weights.mixtures.read_expert_bias(layer, expert, key)
            return y if bias is None else y + bias

        rows, shape = project(x, "gate_up"), config.layers[layer]
        gate, up = rows.chunk(2, -1) if shape.is_gated else (rows, 1.0)
        return project(ACTIVATION_DEFINITIONS[shape.activation](gate, up), "down")

    def run_mlp(x: torch.Tensor, layer: int) -> torch.Tensor:
        rows, shape = torch.cat(project_parts(x, "gate_up", layer), -1), config.layers[layer]
        gate, up = rows.chunk(2, -1) if shape.is_gated else (rows, 1.0)
        gate = gate * shape.gate_scale
        return project_parts(ACTIVATION_DEFINITIONS[shape.activation](gate, up), "down", layer)[0]

    embedding = read_plain_weight(checkpoint, weights.embedding, config.vocab, config.hidden)
    x = embedding.select_outputs(token_ids).decode_into(torch.empty(count, config.hidden)) * config.embedding_scale
    if config.tensors.positions:
        table = view_float(config.tensors.positions + ".weight", config.max_len + config.position_offset, config.hidden)
        x = x + table[places + config.position_offset]
    if config.tensors.embedding_norm is not None:
        x = norm_rows(x, config.tensors.embedding_norm, config.hidden)
    for layer in layers:
        shape, norms = config.layers[layer], weights.layer_norms(layer)

        def normed(x: torch.Tensor, field: str, norms: dict[str, tuple[str, int]] = norms) -> torch.Tensor:
            return norm_rows(x, *norms[field]) if field in norms else x

        before = x
        if shape.has_mixer:
            attended = attend_rows(normed(x, "attention_norm"), layer, norms)
            if shape.is_hybrid and shape.state is not None:
                x = x + shape.state_scale * run_state(normed(x, "attention_norm"), layer, shape.state)
            x = x + shape.residual_scale * normed(attended, "attention_after_norm")
        if shape.has_mlp:
            inside = run_layer_mlp(normed(before if shape.is_parallel else x, "mlp_norm"), layer)
            scale = shape.residual_scale if shape.mlp_scale is None else shape.mlp_scale
            x = x + scale * normed(inside, "mlp_after_norm")
        checkpoint.release_pages(*weights.layer_tensors(layer))
    rows = norm_rows(x[-1:], config.tensors.norm, config.hidden)
    logits = weights.read_linear(weights.head, outputs).multiply_rows(rows)
    if weights.head.bias:
        logits = logits + view_float(weights.head.name + ".bias", config.vocab)[outputs]
    checkpoint.release_pages(*weights.linear_tensors(weights.head))
    logits = logits * config.logit_scale
    cap = config.logit_softcap
    return logits if cap is None else cap * (logits / cap).tanh()
