"""A tiny nomic-embed-text-v2: its folder as published, and its hidden states computed token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support import tiny_models

HIDDEN, INNER, HEADS, LAYERS, EXPERTS, CHOSEN, THETA, EPS = 48, 64, 4, 4, 5, 2, 10_000.0, 1e-5
PUBLISHED_CONFIG: dict[str, Any] = {
    "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "vocab_size": tiny_models.VOCAB,
    "n_embd": HIDDEN, "n_inner": INNER, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 2048, "prenorm": False,
    "max_trained_positions": 128, "activation_function": "gelu", "layer_norm_epsilon": EPS, "rotary_emb_base": THETA,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "type_vocab_size": 1,
    "use_rms_norm": False, "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "causal": False,
    "parallel_block": False, "num_experts": EXPERTS, "moe_top_k": CHOSEN, "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False, "expert_choice_router": False, "num_shared_experts": 0,
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
}  # fmt: skip


def write_nomic_mixture(folder: Path, *, has_bias: bool = True, **members: Any) -> dict[str, torch.Tensor]:
    """Write a random model and return its tensors. ``has_bias``: mixtures add one, as GGUF files do not."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *sizes: int, scale: float = 0.25, offset: float = 0.0) -> None:
        tensors[name] = torch.randn(sizes, generator=generator) * scale + offset

    def add_norm(name: str) -> None:
        add(name + ".weight", HIDDEN, offset=1.0)
        add(name + ".bias", HIDDEN)

    add("embeddings.word_embeddings.weight", tiny_models.VOCAB, HIDDEN, scale=1.0)
    add("embeddings.token_type_embeddings.weight", 1, HIDDEN)
    add_norm("emb_ln")
    for layer in range(LAYERS):
        start = f"encoder.layers.{layer}."
        linears = {"attn.Wqkv": (3 * HIDDEN, HIDDEN), "attn.out_proj": (HIDDEN, HIDDEN)}
        if layer % 2 == 0:
            linears |= {"mlp.fc1": (INNER, HIDDEN), "mlp.fc2": (HIDDEN, INNER)}
        for name, sizes in linears.items():
            add(f"{start}{name}.weight", *sizes)
            add(f"{start}{name}.bias", sizes[0])
        if layer % 2:
            add(start + "mlp.router.layer.weight", EXPERTS, HIDDEN)
            add(start + "mlp.experts.mlp.w1", EXPERTS * INNER, HIDDEN)
            add(start + "mlp.experts.mlp.w2", EXPERTS * INNER, HIDDEN)
            add(start + "mlp.experts.bias", HIDDEN, scale=0.25 * has_bias)
        add_norm(start + "norm1")
        add_norm(start + "norm2")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(PUBLISHED_CONFIG | members))
    tiny_models.write_tokenizer(folder)
    return tensors


def nomic_states(tensors: dict[str, torch.Tensor], text: list[int]) -> torch.Tensor:
    """Return the hidden states of a text, [tokens, hidden]."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[name + ".weight"], tensors[name + ".bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (HIDDEN,), tensors[name + ".weight"], tensors[name + ".bias"], EPS)

    width = HIDDEN // HEADS
    angles = torch.arange(len(text))[:, None] / THETA ** (torch.arange(0, width, 2) / width)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = tensors["embeddings.word_embeddings.weight"][text] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "emb_ln")
    for layer in range(LAYERS):
        start = f"encoder.layers.{layer}."
        q, k, v = linear(x, start + "attn.Wqkv").view(len(text), 3, HEADS, width).unbind(1)
        q, k, v = (part.transpose(0, 1) for part in (rotate(q), rotate(k), v))
        attended = (q @ k.mT / width**0.5).softmax(-1) @ v
        x = norm(x + linear(attended.transpose(0, 1).flatten(1), start + "attn.out_proj"), start + "norm1")
        if layer % 2:
            inner = torch.stack([mix_token(tensors, start + "mlp.", row) for row in x])
        else:
            inner = linear(F.gelu(linear(x, start + "mlp.fc1")), start + "mlp.fc2")
        x = norm(x + inner, start + "norm2")
    return x


def mix_token(tensors: dict[str, torch.Tensor], start: str, x: torch.Tensor) -> torch.Tensor:
    """Return what the best experts make of a token's numbers [hidden]."""
    shares = (tensors[start + "router.layer.weight"] @ x).softmax(0)
    result = tensors[start + "experts.bias"].clone()
    for expert in shares.argsort(descending=True)[:CHOSEN].tolist():
        rows = slice(expert * INNER, (expert + 1) * INNER)
        inner = F.gelu(tensors[start + "experts.mlp.w1"][rows] @ x)
        result += shares[expert] * (inner @ tensors[start + "experts.mlp.w2"][rows])
    return result
