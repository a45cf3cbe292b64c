"""The reference for fused decoders: a Llama-shaped model by its definitions, compared with the decoder at load.

A plain float32 forward pass on the unmerged weights, of a few tokens, compared by logits. It knows nothing of kernels
and packed weights, so that both cannot be wrong in the same way. With M-RoPE, some tokens have a picture's positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parley.core.rope_positions import RopePositions
from parley.core.sequence import BLOCK_SIZE
from parley.model.checkpoint.files import Checkpoint
from parley.model.checkpoint.quantization import Quantization, read_plain_weight
from parley.model.load.fuse import EMBEDDING_TENSOR, NORM_TENSOR, LlamaWeights
from parley.model.networks.config import DecoderConfig, RopeConfig
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import Span
from parley.types import EmbeddingRun, MediaItem

PROBE_TOKENS = 24  # tokens in the numeric check
PROBE_OUTPUTS = 4096  # vocabulary entries with compared logits
# Parameters; the check runs all layers of models up to this size, else the first and the last.
FULL_CHECK_PARAMETERS = 50_000_000
PROBE_PICTURE = MediaItem("image", b"", 7, 12, [EmbeddingRun(0, 12, (2, 3, 2))])
DECODER_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06}  # relative error (L2) of the logits


@torch.inference_mode()
def decoder_deviation(decoder: FusedDecoder, checkpoint: Checkpoint, quantization: Quantization) -> float:
    """Return the relative error (L2) of the decoder's logits against ``reference_logits`` for a few tokens."""
    config = decoder.config
    layers = list(range(config.layer_count))
    if decoder.parameters > FULL_CHECK_PARAMETERS:
        layers = sorted({0, config.layer_count - 1})
    token_ids = torch.linspace(0, config.vocab - 1, PROBE_TOKENS).long()
    outputs = torch.linspace(0, config.vocab - 1, min(config.vocab, PROBE_OUTPUTS)).long()
    expected = reference_logits(checkpoint, config, quantization, token_ids, outputs, layers)

    selected = decoder.select_layers(layers)
    device = decoder.layer_weights[0].input_norm.device
    count = -(-PROBE_TOKENS // BLOCK_SIZE)
    pages = PagedKV(selected.layers, count, decoder.layer_weights[0].input_norm.dtype, device)
    pages.clear_pages(list(range(count)))
    positions = torch.arange(PROBE_TOKENS, device=device)
    batch = PackedBatch(
        token_ids.to(device), positions, positions, [Span(0, PROBE_TOKENS, PROBE_TOKENS, list(range(count)))]
    )
    if config.rope.mrope_section:
        batch.rope_positions = _picture_positions().to(device)
    actual = selected.compute_logits(selected.compute_hidden(batch, pages)[-1:])[:, outputs.to(device)].cpu()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


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
    llama_weights = LlamaWeights(checkpoint, config, quantization, torch.float32, torch.device("cpu"))
    count = len(token_ids)

    def rms_norm_rows(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = checkpoint.view_tensor(name, x.shape[-1]).float()
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + config.eps) * weight

    def project_parts(x: torch.Tensor, key: str, layer: int) -> list[torch.Tensor]:
        results = []
        for linear in llama_weights.linear_parts(layer)[key]:
            y = llama_weights.read_linear(linear).multiply_rows(x)
            results.append(y + checkpoint.view_tensor(linear.name + ".bias", linear.out).float() if linear.bias else y)
        return results

    angles = _position_table(config.rope, count) * config.rope.inverse_frequencies()
    cos, sin = angles.cos() * config.rope.scale, angles.sin() * config.rope.scale
    half = config.rope.rotary // 2

    def apply_rope(x: torch.Tensor) -> torch.Tensor:
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    distance = torch.arange(count)[:, None] - torch.arange(count)
    embedding = read_plain_weight(checkpoint, EMBEDDING_TENSOR, config.vocab, config.hidden)
    x = embedding.select_outputs(token_ids).decode_into(torch.empty(count, config.hidden))
    for layer in layers:
        norms = llama_weights.norm_names(layer)
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        qkv = torch.cat(project_parts(rms_norm_rows(x, norms[0]), "qkv", layer), -1).view(count, -1, config.head_dim)
        q, k, v = qkv.split(sizes, 1)
        if config.qk_norm:
            q, k = rms_norm_rows(q, norms[2]), rms_norm_rows(k, norms[3])
        q, k = apply_rope(q), apply_rope(k)
        k, v = (each.repeat_interleave(config.heads // config.kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        visible = distance >= 0
        window = config.windows[layer]
        if window is not None:
            visible &= distance < window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        x = x + project_parts(attended, "output", layer)[0]
        gate, up = torch.cat(project_parts(rms_norm_rows(x, norms[1]), "gate_up", layer), -1).chunk(2, -1)
        x = x + project_parts(F.silu(gate) * up, "down", layer)[0]
        checkpoint.release_pages(*llama_weights.layer_tensors(layer))
    logits = llama_weights.read_linear(llama_weights.head, outputs).multiply_rows(rms_norm_rows(x[-1:], NORM_TENSOR))
    checkpoint.release_pages(*llama_weights.linear_tensors(llama_weights.head))
    return logits
