"""The network of the built-in model for training: exactly Qwen3's mathematics, arranged for speed on a CPU.

The parameters have the names of the Hugging Face layout, so the state dict is the exported file. The token-wise parts
and the attention are separate functions because they are compiled separately: the former see the same number of tokens
in every batch, the latter is small and compiled once per length. The attention is written out; at these short lengths
that is several times faster than PyTorch's fused CPU kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# CPUs without instructions for bfloat16 are many times slower at it than at float32.
PRODUCT_DTYPE = (
    torch.bfloat16 if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
)


@dataclass(frozen=True)
class DemoConfig:
    """The hyperparameters in Qwen3's config file."""

    vocab_size: int = 3072
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096


class NamedWeight(nn.Module):
    """A single weight under its Hugging Face name."""

    def __init__(self, *size: int, value: float | None = None, std: float = 0.02) -> None:
        super().__init__()
        start = torch.full(size, value) if value is not None else torch.randn(size) * std
        self.weight = nn.Parameter(start)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _mixed_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in `PRODUCT_DTYPE`, with float32 master weights."""
    return F.linear(x.to(PRODUCT_DTYPE), weight.to(PRODUCT_DTYPE))


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def project_qkv(
    x: Tensor,
    norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a flat list of tokens, with rotary position embedding, in `PRODUCT_DTYPE`."""
    heads = (x.shape[0], -1, q_norm.shape[0])
    h = _rms_norm(x, norm, eps)
    queries = _apply_rotary(_rms_norm(_mixed_linear(h, q).view(heads), q_norm, eps), cos, sin)
    keys = _apply_rotary(_rms_norm(_mixed_linear(h, k).view(heads), k_norm, eps), cos, sin)
    return queries.to(PRODUCT_DTYPE), keys.to(PRODUCT_DTYPE), _mixed_linear(h, v).view(heads)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return causal attention over (batch, length, heads, head size); key and value heads are repeated."""
    repeats = q.shape[2] // k.shape[2]
    q = q.transpose(1, 2)
    k = k.repeat_interleave(repeats, 2).transpose(1, 2)
    v = v.repeat_interleave(repeats, 2).transpose(1, 2)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5 + mask
    result: Tensor = (scores.softmax(-1).to(PRODUCT_DTYPE) @ v).transpose(1, 2)
    return result


def finish_layer(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Return the residual stream after the attention's output projection and the feed-forward part."""
    x = x + _mixed_linear(attended, o).float()
    h = _rms_norm(x, norm, eps)
    return x + _mixed_linear(F.silu(_mixed_linear(h, gate)) * _mixed_linear(h, up), down).float()


class AttentionWeights(nn.Module):
    """The weights of one layer's attention."""

    def __init__(self, shape: DemoConfig, out_std: float) -> None:
        super().__init__()
        query, shared = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = NamedWeight(query, shape.hidden_size)
        self.k_proj = NamedWeight(shared, shape.hidden_size)
        self.v_proj = NamedWeight(shared, shape.hidden_size)
        self.o_proj = NamedWeight(shape.hidden_size, query, std=out_std)
        self.q_norm = NamedWeight(shape.head_dim, value=1.0)
        self.k_norm = NamedWeight(shape.head_dim, value=1.0)


class FeedForwardWeights(nn.Module):
    """The weights of one layer's feed-forward part."""

    def __init__(self, shape: DemoConfig, out_std: float) -> None:
        super().__init__()
        self.gate_proj = NamedWeight(shape.intermediate_size, shape.hidden_size)
        self.up_proj = NamedWeight(shape.intermediate_size, shape.hidden_size)
        self.down_proj = NamedWeight(shape.hidden_size, shape.intermediate_size, std=out_std)


class DemoLayer(nn.Module):
    """The weights of one decoder layer."""

    def __init__(self, shape: DemoConfig, out_std: float) -> None:
        super().__init__()
        self.input_layernorm = NamedWeight(shape.hidden_size, value=1.0)
        self.self_attn = AttentionWeights(shape, out_std)
        self.post_attention_layernorm = NamedWeight(shape.hidden_size, value=1.0)
        self.mlp = FeedForwardWeights(shape, out_std)


class DemoBody(nn.Module):
    """All weights; the output projection uses the embedding."""

    def __init__(self, shape: DemoConfig) -> None:
        super().__init__()
        out_std = 0.02 / (2 * shape.num_hidden_layers) ** 0.5  # keeps the residual stream small at the start
        self.embed_tokens = NamedWeight(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DemoLayer(shape, out_std) for _ in range(shape.num_hidden_layers))
        self.norm = NamedWeight(shape.hidden_size, value=1.0)


class DemoNetwork(nn.Module):
    """Qwen3 as a function from token ids to hidden states and, where needed, to logits."""

    def __init__(self, shape: DemoConfig) -> None:
        super().__init__()
        self.shape = shape
        self.model = DemoBody(shape)
        self.project, self.attend, self.mix = project_qkv, causal_attention, finish_layer

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.model.norm.weight.device

    def compile_parts(self) -> None:
        """Compile the three functions; worth it for training, not for a few evaluations."""
        self.project = torch.compile(project_qkv, dynamic=False)
        self.attend = torch.compile(causal_attention, dynamic=False)
        self.mix = torch.compile(finish_layer, dynamic=False)

    def _rotary_table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        half = self.shape.head_dim // 2
        frequencies = self.shape.rope_theta ** (-torch.arange(half, device=device).float() / half)
        angles = torch.arange(length, device=device).float()[:, None] * frequencies
        return angles.cos(), angles.sin()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the final hidden states (batch, length, hidden) of token ids (batch, length)."""
        batch, length = ids.shape
        eps = self.shape.rms_norm_eps
        # The token-wise parts see one flat list of tokens, so the rotary table is repeated for every row.
        cos, sin = (part.repeat(batch, 1)[:, None] for part in self._rotary_table(length, ids.device))
        mask = torch.full((length, length), -1e9, device=ids.device).triu(1)
        x = F.embedding(ids.flatten(), self.model.embed_tokens.weight)
        for layer in self.model.layers:
            assert isinstance(layer, DemoLayer)
            attention, mlp = layer.self_attn, layer.mlp
            queries, keys, values = self.project(
                x,
                layer.input_layernorm.weight,
                attention.q_proj.weight,
                attention.k_proj.weight,
                attention.v_proj.weight,
                attention.q_norm.weight,
                attention.k_norm.weight,
                cos,
                sin,
                eps,
            )
            rows = (batch, length, -1, self.shape.head_dim)
            attended = self.attend(queries.view(rows), keys.view(rows), values.view(rows), mask)
            x = self.mix(
                x,
                attended.reshape(batch * length, -1),
                attention.o_proj.weight,
                layer.post_attention_layernorm.weight,
                mlp.gate_proj.weight,
                mlp.up_proj.weight,
                mlp.down_proj.weight,
                eps,
            )
        return _rms_norm(x, self.model.norm.weight, eps).view(batch, length, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states; training needs them only for tokens that the model writes."""
        return _mixed_linear(hidden, self.model.embed_tokens.weight).float()
