"""The zoo's folders whose config.json has the members of published ones, not those that Transformers writes now."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from support.model_zoo.zoo_folder import ZooFolder
from support.tiny_models import VOCAB, write_random_model, write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "torch_dtype": "bfloat16", "use_cache": True,
    "bos_token_id": 0, "eos_token_id": 2, "transformers_version": "4.50.0",
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 64}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "auto_map": {"AutoConfig": "configuration_deepseek.Config"},
}  # fmt: skip
MAMBA2 = {
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_state": 16,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_proj_bias": False,
}  # fmt: skip
GRANITE4 = MAMBA2 | {
    "shared_intermediate_size": 64, "attention_multiplier": 0.0156, "embedding_multiplier": 12, "logits_scaling": 8,
    "residual_multiplier": 0.22, "tie_word_embeddings": True, "num_local_experts": 0, "num_experts_per_tok": 0,
}  # fmt: skip
LONGROPE = {"long_factor": [1 + 0.5 * i for i in range(12)], "short_factor": [1 + 0.1 * i for i in range(12)]}
WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
# Model type and members beside those of SIZES
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1": ("llama", {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "eos_token_id": [2, 5, 7]}),
    "Llama 2 with yarn": ("llama", {"rope_scaling": {"type": "yarn", "factor": 16.0, "finetuned": True,
                                                     "original_max_position_embeddings": 32}, "head_dim": None}),
    "Qwen2.5-1M": ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 256, "local_size": 64},
                             "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}),
    "Qwen3 with yarn": ("qwen3", {"head_dim": 32, "sliding_window": None, "max_window_layers": 28,
                                  "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                   "original_max_position_embeddings": 32}}),
    "Phi-4-mini": ("phi3", {"hidden_size": 128, "partial_rotary_factor": 0.75, "full_attn_mod": 1, "pad_token_id": 3,
                            "rope_scaling": LONGROPE | {"type": "longrope"}, "sliding_window": 262144,
                            "original_max_position_embeddings": 32, "tie_word_embeddings": True,
                            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}),
    "Gemma": ("gemma", {"hidden_act": "gelu", "hidden_activation": None, "head_dim": 32, "pad_token_id": 0}),
    "Gemma 3 270M": ("gemma3_text", {"num_hidden_layers": 6, "_sliding_window_pattern": 6, "head_dim": 32,
                                     "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
                                     "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1e6,
                                     "sliding_window": 20, "use_bidirectional_attention": False, "pad_token_id": 0}),
    "Gemma 3 4B": ("gemma3_text", {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 20, "pad_token_id": 0,
                                   "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1e6}),
    "OLMo 3": ("olmo3", {"num_hidden_layers": 4, "layer_types": WINDOWS, "sliding_window": 20, "rope_theta": 500000,
                         "rope_scaling": YARN | {"rope_type": "yarn", "attention_factor": 1.2079441541679836},
                         "pad_token_id": 1}),
    "SmolLM3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4,
                            "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False,
                            "rope_theta": 5e6, "pad_token_id": 4}),
    "EXAONE 4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": "LLLG",
                             "layer_types": WINDOWS, "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
                             "pad_token_id": 0}),
    "Hunyuan": ("hunyuan_v1_dense", {"head_dim": 32, "attention_head_dim": 32, "use_qk_norm": True, "use_cla": False,
                                     "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0,
                                                      "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"},
                                     "pad_token_id": 1}),
    "GPT-OSS": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "experts_per_token": 2, "num_experts_per_tok": 2,
                            "layer_types": WINDOWS[2:], "sliding_window": 20, "initial_context_length": 32,
                            "rope_scaling": YARN | {"rope_type": "yarn", "truncate": False}, "swiglu_limit": 7.0,
                            "pad_token_id": 1}),
    "DeepSeek-V3": ("deepseek_v3", LATENT | {"num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "ep_size": 1,
                                             "num_nextn_predict_layers": 1, "rope_scaling": YARN | {
                                                 "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}}),
    "Moonlight": ("deepseek_v3", LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1,
                                           "routed_scaling_factor": 2.446, "rope_theta": 50000.0}),
    "DeepSeek-V3.2": ("deepseek_v32", LATENT | {"num_hidden_layers": 3, "n_group": 4, "topk_group": 2, "ep_size": 1,
                                                "num_nextn_predict_layers": 1, "index_head_dim": 32, "index_n_heads": 8,
                                                "index_topk": 48, "rope_scaling": YARN | {
                                                    "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}}),
    "GLM-5": ("glm_moe_dsa", LATENT | {"num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "ep_size": 1,
                                       "head_dim": 16, "num_nextn_predict_layers": 1, "index_head_dim": 32,
                                       "index_n_heads": 8, "index_topk": 48, "indexer_rope_interleave": True,
                                       "qk_head_dim": 32, "rope_parameters": {"rope_theta": 1e6,
                                                                              "rope_type": "default"},
                                       "rms_norm_eps": 1e-5, "pad_token_id": 1}),
    "A.X-K2": ("axk2", LATENT | {"num_hidden_layers": 3, "n_group": None, "topk_group": None, "index_head_dim": 32,
                                 "index_n_heads": 8, "index_topk": 48, "gated_norm_rank": 16, "pad_token_id": 1,
                                 "rope_theta": 1e4, "rope_scaling": YARN | {
                                     "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}}),
    "Hy4": ("hy_v4", LATENT | {"num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "index_head_dim": 32,
                               "index_n_heads": 8, "index_topk": 48, "indexer_types": ["full", "shared", "full"],
                               "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-6, "swiglu_limit": 10.0,
                               "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_theta": 1e4,
                               "routed_scaling_factor": 2.827, "pad_token_id": 1}),
    "DeepSeek V4": ("deepseek_v4", {
        "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 48,
        "o_groups": 2, "o_lora_rank": 32, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "num_hash_layers": 2, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "compress_ratios": [0, 0, 4, 128, 0],
        "compress_rope_theta": 160000.0, "rope_theta": 10000.0, "rope_scaling": YARN | {"type": "yarn", "factor": 16},
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "sliding_window": 16, "swiglu_limit": 10.0,
        "index_n_heads": 8, "index_head_dim": 32, "index_topk": 512, "num_nextn_predict_layers": 1}),
    "MiniMax-M2": ("minimax_m2", {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                                  "use_qk_norm": True, "qk_norm_type": "per_layer", "use_mtp": True,
                                  "attn_type_list": [1, 1], "scoring_func": "sigmoid", "use_routing_bias": True}),
    "MiniMax-M3": ("minimax_m3_vl_text", {
        "num_hidden_layers": 3, "head_dim": 32, "rotary_dim": 16, "partial_rotary_factor": 0.5, "rope_theta": 5e6,
        "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 96, "intermediate_size": 48,
        "shared_intermediate_size": 40, "n_shared_experts": 1, "scoring_func": "sigmoid", "use_routing_bias": True,
        "use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True, "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "moe_layer_freq": [0, 1, 1], "sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 32,
            "sparse_block_size": 16, "sparse_topk_blocks": 2, "sparse_local_block": 1, "use_sparse_attention": True}}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "pad_token_id": 0,
                                       "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
                                       "moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1,
                                       "moe_capacity": [64, 64, 64], "moe_use_aux_free": True,
                                       "tie_word_embeddings": True}),
    "Command R7B": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": 4,
                                "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0, "layer_switch": 4,
                                "position_embedding_type": "rope_gptj", "use_embedding_sharing": True,
                                "logit_scale": 0.25, "pad_token_id": 0}),
    "Granite 4 with states": ("granitemoehybrid", GRANITE4 | {"layer_types": ["mamba", "attention"], "pad_token_id": 1,
                                                              "position_embedding_type": "nope"}),
    "Granite 4 without states": ("granitemoehybrid", GRANITE4 | {"layer_types": ["attention"] * 2, "pad_token_id": 1,
                                                                 "position_embedding_type": "rope"}),
    "LFM2": ("lfm2", {"num_hidden_layers": 3, "block_auto_adjust_ff_dim": True, "block_ff_dim": 96, "block_dim": 64,
                      "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 32, "conv_L_cache": 3, "conv_bias": False,
                      "full_attn_idxs": [1], "tie_embedding": True, "use_pos_enc": True, "pad_token_id": 0}),
    "Codestral Mamba": ("mamba2", {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "pad_token_id": 0,
                                   "time_step_limit": [0.0, float("inf")], "tie_word_embeddings": False}),
    "Nemotron-H": ("nemotron_h", {"num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "mamba_num_heads": 4,
                                  "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
                                  "head_dim": 16, "attention_head_dim": 16, "mlp_hidden_act": "relu2",
                                  "time_step_limit": [0.0, float("inf")], "norm_eps": 1e-5, "pad_token_id": 0}),
    "Nemotron 3 Super": ("nemotron_h", {"num_hidden_layers": 4, "hybrid_override_pattern": "ME*E", "mamba_num_heads": 4,
                                        "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
                                        "head_dim": 16, "mlp_hidden_act": "relu2", "norm_eps": 1e-5, "pad_token_id": 0,
                                        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                                        "moe_latent_size": 32, "moe_shared_expert_intermediate_size": 80, "n_group": 1,
                                        "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 5.0,
                                        "norm_topk_prob": True, "num_nextn_predict_layers": 1,
                                        "mtp_hybrid_override_pattern": "*E"}),
    "Kolibri 1": ("kolibri1", {"head_dim": 32, "num_hidden_layers": 5, "sliding_window": 21, "use_sliding_window": True,
                               "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "num_experts": 8,
                               "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dtype": "float32",
                               "shared_expert_intermediate_size": 32, "norm_topk_prob": False, "rope_theta": 10000.0,
                               "attention_bias": False, "bos_token_id": None, "pad_token_id": 1}),
}  # fmt: skip


def published_folders() -> list[ZooFolder]:
    """Return all of them."""
    return [
        ZooFolder(f"{name} as published", model_type, "config as published", partial(_write_published, config={
            **SIZES, "model_type": model_type, **fields
        }))
        for name, (model_type, fields) in CONFIGS.items()
    ]  # fmt: skip


def _write_published(home: Path, *, config: dict[str, Any]) -> tuple[Path, Path]:
    """Write a model that Transformers makes of a config, with this config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source, folder = home / "source", home / "model"
    source.mkdir()
    written = {name: value for name, value in config.items() if name != "auto_map"}
    (source / "config.json").write_text(json.dumps(written))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    write_random_model(source, model, seed=0, dtype="bfloat16")
    write_tokenizer(source)
    (source / "config.json").write_text(json.dumps(written))
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, source
