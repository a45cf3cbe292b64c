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
WINDOW = HEADS | {"sliding_window": 20}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 32}
LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
SMALL_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
GPT_SIZES = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
# Variations of a family that are checkpoints of their own
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "granite_swa, two bases": ("granite_swa", {"sliding_window": 20, "layer_rope_theta": [1e4, 5e4]}),
    "granite_swa, one base": ("granite_swa", {"sliding_window": 20}),
    "mellum, own bases": ("mellum", WINDOW | EXPERTS),
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
    "phi4_multimodal": (
        "phi4_multimodal",
        {
            "rope_parameters": DEFAULT_ROPE,
            "vision_config": SMALL_ENCODER | {"image_size": 28, "patch_size": 14, "crop_size": 28},
            "audio_config": SMALL_ENCODER | {"num_blocks": 1, "ext_pw_out_channel": 32, "nemo_conv_channels": 32},
        },
    ),
    "stablelm, normed queries": ("stablelm", {"qk_layernorm": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
}
RUN_BY_TRANSFORMERS = {
    "granite_swa, two bases", "llama, dynamic rope", "stablelm, normed queries", "stablelm, parallel",
}  # fmt: skip
# Families that run Transformers' code
THROUGH_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ctrl": ("ctrl", GPT_SIZES | {"dff": 96}),
    "biogpt": ("biogpt", {}),
    "bert as a decoder": ("bert", {"is_decoder": True, "max_position_embeddings": 256}),
    "ernie": ("ernie", {"is_decoder": True, "max_position_embeddings": 256}),
    "roc_bert": ("roc_bert", {"is_decoder": True, "max_position_embeddings": 256}),
    "bert-generation": ("bert-generation", {"is_decoder": True}),
    "jetmoe": ("jetmoe", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "aria_text": ("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "longcat_flash": ("longcat_flash", LATENTS | {
        "n_routed_experts": 8, "moe_topk": 2, "num_layers": 2, "head_dim": 16, "qk_head_dim": 32,
        "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96}),
    "modernbert-decoder": ("modernbert-decoder", {"sliding_window": 20, "local_attention": 20}),
    "cohere_compass_text": ("cohere_compass_text", WINDOW | {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": DEFAULT_ROPE}}),
    "beam": ("beam", WINDOW | EXPERTS | {"n_group": 2, "topk_group": 1}),
}  # fmt: skip
# What Transformers' code does is found out when it runs
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rwkv": ({}, "keeps a state of each sequence in place of keys and values"),
    "xlstm": ({}, "keeps a state of each sequence in place of keys and values"),
    "diffllama": ({}, "attends twice, which is not supported"),
    "marian": (
        {
            "d_model": 64,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "encoder_layers": 1,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "is_decoder": True,
            "is_encoder_decoder": False,
        },
        "counts the positions of its tokens itself",
    ),
    "openai-gpt": ({}, "attention cannot be replaced"),
}


def plain_folders() -> list[ZooFolder]:
    """Return all of them."""
    own = {name: shape for name, shape in ARCHITECTURES.items() if name not in ("beam", "aria_text")} | FAMILIES
    # Transformers saves the decays of MiniMax, which files of bfloat16 would round
    dtypes = {"minimax": "float32"}
    folders = [plain_folder(name, *shape, dtype=dtypes.get(name, "bfloat16")) for name, shape in own.items()]
    folders += [plain_folder(name, *shape, fused=name not in RUN_BY_TRANSFORMERS) for name, shape in VARIANTS.items()]
    folders += [
        plain_folder(f"{name}, new names", *MIXTURES_BY_NAME[name], is_published=False, files="bfloat16, new names")
        for name in MIXTURES_BY_NAME
    ]
    for name, shape in THROUGH_TRANSFORMERS.items():
        folders.append(plain_folder(name, *shape, fused=False))
    folders += [
        plain_folder(f"refused: {kind}", kind, fields, refusal=refusal) for kind, (fields, refusal) in REFUSED.items()
    ]
    return folders


MIXTURES_BY_NAME = MIXTURES | {name: ARCHITECTURES[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")}
