"""Small configs of the families on the fused decoder, so that each variation of a layer is in one of them."""

from __future__ import annotations

from typing import Any

from support.tiny_models import (
    ARCHITECTURES,
    GEMMA_3N_DECODERS,
    GEMMA_4_DECODERS,
    LATENT_DECODERS,
    MIXTURES,
    STATE_DECODERS,
)

HEADS = {"head_dim": 32}
OLMO3_ROPE = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
GPT_SIZES = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": (
        "llama4_text",
        HEADS
        | {
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 37,
            "floor_scale": 30,
        },
    ),
    "phimoe": (
        "phimoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3, "attention_bias": True,
         "lm_head_bias": True},
    ),
    "dbrx": (
        "dbrx",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
         "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
         "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}},
    ),
    "gpt2": ("gpt2", GPT_SIZES),
    "gpt_bigcode": ("gpt_bigcode", GPT_SIZES),
    "gpt_bigcode with heads of their own": ("gpt_bigcode", GPT_SIZES | {"multi_query": False}),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "window_size": 20, "attention_types": [[["global", "local"], 1]]},
    ),
    "gptj": ("gptj", GPT_SIZES | {"rotary_dim": 8}),
    "gptj, all dimensions turn": ("gptj", GPT_SIZES | {"rotary_dim": 16, "n_inner": 96}),
    "codegen": ("codegen", GPT_SIZES | {"rotary_dim": 8}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "xglm": ("xglm", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4, "pad_token_id": 11}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 256}),
    "mpt with limits": (
        "mpt", {"d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 256, "attn_config": {"clip_qkv": 0.5}},
    ),
    "phi, normed queries": ("phi", {"qk_layernorm": True}),
    "persimmon": ("persimmon", {}),
    "falcon with slopes": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "cohere, normed queries": ("cohere", {"use_qk_norm": True}),
    "olmo": ("olmo", {}),
    "olmo with limits": ("olmo", {"clip_qkv": 0.5}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "vaultgemma": ("vaultgemma", HEADS | {"sliding_window": 20, "query_pre_attn_scalar": 16}),
    "exaone4": ("exaone4", {"sliding_window": 20, "num_hidden_layers": 4}),
    "exaone_moe": (
        "exaone_moe",
        ROUTED | {"sliding_window": 20, "num_hidden_layers": 4, "num_shared_experts": 2, "n_group": 2},
    ),
    "granite_swa": (
        "granite_swa",
        {"sliding_window": 20, "num_hidden_layers": 4, "layer_rope_theta": [5e4, 0, 5e4, 0], "attention_bias": True,
         "attention_multiplier": 0.3, "residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {"sliding_window": 20, "num_local_experts": 8, "num_experts_per_tok": 2, "attention_multiplier": 0.3,
         "shared_intermediate_size": 48},
    ),
    "mellum": (
        "mellum",
        HEADS | ROUTED | {"sliding_window": 20, "num_hidden_layers": 3, "rope_parameters": OLMO3_ROPE,
                          "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                          "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "flint": (
        "flint",
        HEADS | ROUTED | {"sliding_window": 20, "num_hidden_layers": 5, "shared_expert_intermediate_size": 48},
    ),
    "kolibri1": (
        "kolibri1",
        HEADS | ROUTED | {"sliding_window": 20, "num_hidden_layers": 5, "shared_expert_intermediate_size": 48},
    ),
    "laguna": (
        "laguna",
        ROUTED
        | {"head_dim": 32, "shared_expert_intermediate_size": 48, "sliding_window": 20, "num_hidden_layers": 3,
           "layer_types": ["full_attention", "sliding_attention", "full_attention"],
           "num_attention_heads_per_layer": [4, 6, 4], "moe_routed_scaling_factor": 1.7},
    ),
    "laguna with a gate for each number": (
        "laguna",
        ROUTED | {"head_dim": 32, "shared_expert_intermediate_size": 48, "gating": "per-element"},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {"head_dim": 32, "v_head_dim": 24, "sliding_window": 20, "num_hidden_layers": 3, "n_routed_experts": 8,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "bitnet": ("bitnet", {}),
    "hyperclovax": ("hyperclovax", {"logits_scaling": 0.125, "residual_multiplier": 0.3}),
    "hyperclovax without norms after": ("hyperclovax", {"use_post_norm": False, "embedding_multiplier": 3.0}),
    "cwm": ("cwm", HEADS | {"sliding_window": 20, "num_hidden_layers": 3}),
    "helium": ("helium", {"head_dim": 16}),
    "internlm3": ("internlm3", HEADS | {"attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", HEADS),
    "jais2": ("jais2", {}),
    "ministral3": (
        "ministral3",
        HEADS
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "llama_4_scaling_beta": 0.1,
                               "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "apertus": ("apertus", HEADS),
    "cohere2_moe": (
        "cohere2_moe",
        HEADS | ROUTED | {"sliding_window": 20, "sliding_window_pattern": 2, "num_hidden_layers": 4,
                          "num_shared_experts": 2, "intermediate_size": 48, "first_k_dense_replace": 1,
                          "prefix_dense_intermediate_size": 96},
    ),
    "cohere2_moe with RMS norms": (
        "cohere2_moe",
        HEADS | ROUTED | {"sliding_window": 20, "rms_norm_eps": 1e-5, "expert_selection_fn": "sigmoid",
                          "shared_expert_combination_strategy": "sum", "num_shared_experts": 1},
    ),
    "nanochat": ("nanochat", HEADS),
    "muse_glimmer": (
        "muse_glimmer_text",
        HEADS | {"num_hidden_layers": 5, "sliding_window": 20, "qk_scale_factor": 1.7},
    ),
    "lfm3 without norms after and gates": (
        "lfm3",
        HEADS | {"num_hidden_layers": 4, "sliding_window": 20, "use_sandwich_norm": False, "use_attention_gate": False},
    ),
    "olmo_hybrid without a rotary embedding": (
        "olmo_hybrid",
        {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": None},
         "linear_allow_neg_eigval": False},
    ),
    "solar_open": (
        "solar_open",
        HEADS | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    ),
    "hunyuan": (
        "hunyuan_v1_dense",
        HEADS | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}},
    ),
    "hunyuan_moe": ("hunyuan_v1_moe", HEADS | {"num_experts": 4, "moe_topk": 2}),
    "hy3": ("hy_v3", ROUTED | HEADS | {"num_shared_experts": 2}),
    "afmoe": (
        "afmoe",
        ROUTED | HEADS | {"num_hidden_layers": 4, "num_shared_experts": 1, "sliding_window": 20, "mup_enabled": True},
    ),
}  # fmt: skip
# Model type and fields of its config, beside those of BASE_CONFIG.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", HEADS | {"sliding_window": 45, "query_pre_attn_scalar": 24}),
    **GEMMA_3N_DECODERS,
    **GEMMA_4_DECODERS,
    "gemma3": ("gemma3_text", HEADS | {"sliding_window": 33, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "granite": (
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 25, "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPE}),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 29, "sliding_window_pattern": 2}),
    "glm": ("glm", HEADS),
    "glm4": ("glm4", HEADS),
    "ernie": ("ernie4_5", HEADS | {"use_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 37}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "phi": ("phi", {}),
    "nemotron": ("nemotron", {}),
    "arcee": ("arcee", {}),
    "falcon": ("falcon", {}),
    "falcon with biases and heads of their own": ("falcon", {"multi_query": False, "bias": True}),
    "falcon of two norms": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon of one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "seed_oss": ("seed_oss", HEADS),
    "ministral": ("ministral", HEADS | {"sliding_window": 21, "layer_types": ["full_attention", "sliding_attention"]}),
    **LATER_FAMILIES,
    **{name: ARCHITECTURES[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")},
    **MIXTURES,
    **LATENT_DECODERS,
    **STATE_DECODERS,
}
