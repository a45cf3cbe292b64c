"""The zoo's folders of plain numbers: every family on the fused decoder, and those that run Transformers' code."""

from __future__ import annotations

from typing import Any

from support.decoder_families import FAMILIES
from support.model_zoo.zoo_folder import ZooFolder, plain_folder
from support.tiny_models import ARCHITECTURES, MIXTURES

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}
ROUTED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HEADS = {"head_dim": 16}
GPT_SIZES = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
# Variations of a family that are checkpoints of their own
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, wide heads": ("mistral", {"head_dim": 48, "num_attention_heads": 2, "sliding_window": None}),
    "qwen2, window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3, yarn": ("qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3, partial rotation": ("phi3", {"partial_rotary_factor": 0.75, "head_dim": 32, "hidden_size": 128}),
    "stablelm, normed queries": ("stablelm", {"qk_layernorm": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "phi, normed queries": ("phi", {"qk_layernorm": True}),
}
RUN_BY_TRANSFORMERS = {
    "llama, dynamic rope", "stablelm, normed queries", "stablelm, parallel", "phi, normed queries",
}  # fmt: skip
# Families that run Transformers' code
THROUGH_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ctrl": ("ctrl", GPT_SIZES | {"dff": 96}),
    "biogpt": ("biogpt", {}),
    "apertus": ("apertus", {}),
    "bitnet": ("bitnet", {}),
    "persimmon": ("persimmon", {}),
    "jetmoe": ("jetmoe", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "aria_text": ("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "nanochat": ("nanochat", {}),
    "granite_swa": ("granite_swa", {"sliding_window": 20}),
    "gemma4_text": ("gemma4_text", HEADS | {"vocab_size_per_layer_input": 640, "sliding_window": 20,
                                            "hidden_size_per_layer_input": 16, "global_head_dim": 32}),
}  # fmt: skip


def plain_folders() -> list[ZooFolder]:
    """Return all of them."""
    own = {name: shape for name, shape in ARCHITECTURES.items() if name not in ("apertus", "aria_text")} | FAMILIES
    folders = [plain_folder(name, *shape) for name, shape in own.items()]
    folders += [plain_folder(name, *shape, fused=name not in RUN_BY_TRANSFORMERS) for name, shape in VARIANTS.items()]
    folders += [
        plain_folder(f"{name}, new names", *MIXTURES_BY_NAME[name], is_published=False, files="bfloat16, new names")
        for name in MIXTURES_BY_NAME
    ]
    for name, shape in THROUGH_TRANSFORMERS.items():
        folders.append(plain_folder(name, *shape, fused=False))
    return folders


MIXTURES_BY_NAME = MIXTURES | {name: ARCHITECTURES[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")}
