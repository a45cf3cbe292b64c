"""Tiny models with random weights in Hugging Face format: one builder for every architecture under test.

Weights are drawn wide enough that logits differ clearly from token to token (greedy choices are not near-ties), and
every norm, bias and scale of an architecture is random, so that leaving one out cannot go unnoticed.
"""

import atexit
import functools
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

VOCAB = 640
TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog, then rests beside the river while the sun goes down. "
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 1 + 2 = 3, and 4 + 5 = 9; def f(x): return x "
    "She said: 'there is nothing either good or bad, but thinking makes it so.' The rain in Spain stays mainly in "
    'the plain. How much wood would a woodchuck chuck if a woodchuck could chuck wood? {"name": "value", "n": [1]} '
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BASE_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BASE_CONFIG),
    "llama3": (
        "llama",
        BASE_CONFIG
        | {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "mistral": ("mistral", BASE_CONFIG | {"sliding_window": 37, "head_dim": 32}),
    "qwen2": ("qwen2", BASE_CONFIG | {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 96}),
    "qwen3": ("qwen3", BASE_CONFIG | {"head_dim": 32, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", BASE_CONFIG | {"head_dim": 32, "sliding_window": 45, "query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3_text", BASE_CONFIG | {"head_dim": 32, "sliding_window": 33, "num_hidden_layers": 4}),
    "phi3": ("phi3", BASE_CONFIG | {"sliding_window": 53}),
    "mixtral": ("mixtral", BASE_CONFIG | EXPERTS),
    "qwen3_moe": (
        "qwen3_moe",
        BASE_CONFIG | {"head_dim": 32, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_experts": 4},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        BASE_CONFIG
        | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 72, "num_experts": 6}
        | {"mlp_only_layers": [1]},
    ),
    "glm4_moe": (
        "glm4_moe",
        BASE_CONFIG
        | {"moe_intermediate_size": 48, "n_shared_experts": 2, "n_routed_experts": 16, "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 2.5, "use_qk_norm": True, "head_dim": 32, "attention_bias": True},
    ),
    # These two run through Transformers.
    "aria_text": ("aria_text", BASE_CONFIG | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "beam": ("beam", BASE_CONFIG | {"mlp_layer_types": ["dense"] * BASE_CONFIG["num_hidden_layers"]}),
}
# Those whose checkpoints merge queries, keys and values. Only tests of decoders and adapters load them.
MERGED_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", BASE_CONFIG),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB,
            "n_positions": 1024,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
}
GEMMA_4 = BASE_CONFIG | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 20,
    "head_dim": 16,
    "global_head_dim": 48,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
}
GEMMA_3N = BASE_CONFIG | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 20,
    "head_dim": 16,
    "vocab_size_per_layer_input": VOCAB - 40,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
}
# Gemma 3n as its sizes have it, and with its other options.
GEMMA_3N_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (
        "gemma3n_text",
        GEMMA_3N
        | {"num_kv_shared_layers": 3, "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0, 0.0, 0.0]}
        | {"intermediate_size": [96, 96, 96, 160, 160, 160]},
    ),
    "gemma3n of three streams": (
        "gemma3n_text",
        GEMMA_3N
        | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None, "attention_bias": True}
        | {"altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False},
    ),
}
# Gemma 4 with all that its sizes have. Only tests of decoders and adapters load them.
GEMMA_4_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 of experts": (
        "gemma4_text",
        GEMMA_4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma4 with inputs of layers": (
        "gemma4_text",
        GEMMA_4 | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        GEMMA_4 | {"num_kv_shared_layers": 2, "attention_k_eq_v": True, "attention_bias": True},
    ),
}
LATENTS = BASE_CONFIG | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 8,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}
# Those with multi-head latent attention. Only tests of the fused decoder load them.
LATENT_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        LATENTS
        | {"moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 3, "routed_scaling_factor": 2.0}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2_lite": (
        "deepseek_v2",
        LATENTS
        | {"q_lora_rank": None, "moe_intermediate_size": 48, "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"n_group": 2, "topk_group": 1, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENTS
        | {"moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 1, "num_mtp_layers": 0}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    # Contexts of tests are longer than the number of tokens that indexers choose.
    "deepseek_v32": (
        "deepseek_v32",
        LATENTS
        | {"moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 1, "index_topk": 32, "index_head_dim": 24, "index_n_heads": 8}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    # Its middle layer attends to the tokens that the first one chose, which fill no whole pages.
    "glm_moe_dsa": (
        "glm_moe_dsa",
        LATENTS
        | {"moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 3, "num_hidden_layers": 3}
        | {"first_k_dense_replace": 1, "index_topk": 40, "index_head_dim": 32, "index_n_heads": 8}
        | {"indexer_types": ["full", "shared", "full"]},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        LATENTS | {"moe_intermediate_size": 48, "n_routed_experts": 6, "num_experts_per_tok": 2},
    ),
    "minicpm3": ("minicpm3", LATENTS | {"v_head_dim": None, "dim_model_base": 32, "scale_depth": 1.2}),
    "axk1": (
        "axk1",
        LATENTS
        | {"moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"num_hidden_layers": 3, "n_shared_experts": 2},
    ),
    "axk2": (
        "axk2",
        LATENTS
        | {"moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 3}
        | {"index_topk": 40, "index_head_dim": 24, "index_n_heads": 8, "gated_norm_rank": 8}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    # Its middle layer attends to the tokens that the first one chose.
    "hy4": (
        "hy_v4",
        LATENTS
        | {"moe_intermediate_size": 48, "n_routed_experts": 12, "num_experts_per_tok": 3, "num_hidden_layers": 3}
        | {"index_topk": 40, "index_head_dim": 32, "index_n_heads": 8, "indexer_types": ["full", "shared", "full"]}
        | {"swiglu_limit": 0.8, "hc_mult": 3},
    ),
    # Contexts of tests have more entries than indexers choose. Entries of the second layer are whole pages.
    "deepseek_v4": (
        "deepseek_v4",
        BASE_CONFIG
        | {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16}
        | {"moe_intermediate_size": 48, "n_routed_experts": 12, "num_experts_per_tok": 3, "num_hash_layers": 1}
        | {"sliding_window": 20, "o_groups": 2, "o_lora_rank": 24, "swiglu_limit": 0.8, "hc_mult": 3}
        | {"index_n_heads": 8, "index_head_dim": 24, "index_topk": 7}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}}
        | {
            "layer_types": ["sliding_attention", "heavily_compressed_attention"] + 2 * ["compressed_sparse_attention"],
            "rope_parameters": YARN,
        },
    ),
    "mistral4": (
        "mistral4",
        LATENTS
        | {"moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
        | {
            "rope_parameters": YARN
            | {
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
                "partial_rotary_factor": 0.4,
            }
        },
    ),
    # Transformers zeroes the embedding of its padding token, even after loading.
    "youtu": ("youtu", LATENTS | {"rope_interleave": False, "pad_token_id": None}),
}
DELTA_NETS = BASE_CONFIG | {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2}
GRANITE_FACTORS = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0,
}  # fmt: skip
# Those with layers that keep a state. Only tests of the fused decoder load them.
KIMI_DELTA = {name: value for name, value in BASE_CONFIG.items() if name != "max_position_embeddings"} | {
    "model_max_length": 1024,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_experts": 16,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
STATE_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite_hybrid": (
        "granitemoehybrid",
        BASE_CONFIG
        | MAMBA2
        | EXPERTS
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"shared_intermediate_size": 72, "intermediate_size": 48, "position_embedding_type": "rope"},
    ),
    "bamba": (
        "bamba",
        BASE_CONFIG
        | MAMBA2
        | {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_d_conv": 3, "mamba_proj_bias": True},
    ),
    "falcon_h1": (
        "falcon_h1",
        BASE_CONFIG
        | MAMBA2
        | {"mamba_d_ssm": 128, "mlp_bias": True, "mlp_multipliers": [0.9, 0.6], "key_multiplier": 0.4}
        | {"ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.3], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.2}
        | {"attention_in_multiplier": 1.5, "attention_out_multiplier": 0.9, "embedding_multiplier": 5.6}
        | {"lm_head_multiplier": 0.04},
    ),
    "falcon_h1 with norms": (
        "falcon_h1",
        BASE_CONFIG
        | MAMBA2
        | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "ssm_multipliers": [0.8, 2.0, 0.4, 0.5, 2.0]},
    ),
    "mamba2": (
        "mamba2",
        {name: BASE_CONFIG[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        | {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "use_bias": True},
    ),
    "mamba": (
        "mamba",
        {name: BASE_CONFIG[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        | {"state_size": 16, "time_step_rank": 8, "use_bias": True},
    ),
    "falcon_mamba": (
        "falcon_mamba",
        {name: BASE_CONFIG[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        | {"conv_kernel": 3, "use_conv_bias": False, "tie_word_embeddings": False},
    ),
    "jamba": (
        "jamba",
        BASE_CONFIG
        | {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6}
        | {"mamba_expand": 2, "mamba_d_state": 8},
    ),
    "nemotron_h": (
        "nemotron_h",
        {name: value for name, value in BASE_CONFIG.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "moe", "mlp"]}
        | {"head_dim": 24, "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 40}
        | {"moe_shared_expert_intermediate_size": 72, "routed_scaling_factor": 2.5},
    ),
    "nemotron_h with latents of experts": (
        "nemotron_h",
        {name: value for name, value in BASE_CONFIG.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_latent_size": 32}
        | {"head_dim": 24, "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"moe_shared_expert_intermediate_size": 80, "routed_scaling_factor": 2.5},
    ),
    "granite_hybrid without experts": (
        "granitemoehybrid",
        BASE_CONFIG
        | MAMBA2
        | GRANITE_FACTORS
        | {"layer_types": ["linear_attention", "full_attention"], "mamba_proj_bias": True, "num_local_experts": 0}
        | {"shared_intermediate_size": 96, "mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "qwen3_next": (
        "qwen3_next",
        DELTA_NETS
        | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 72, "num_experts": 6}
        | {"num_experts_per_tok": 2, "mlp_only_layers": [1]},
    ),
    "qwen3_5": ("qwen3_5_text", DELTA_NETS),
    "minimax": (
        "minimax",
        BASE_CONFIG
        | EXPERTS
        | {"num_hidden_layers": 4, "head_dim": 24, "block_size": 16, "full_attn_alpha_factor": 3.5}
        | {"linear_attn_alpha_factor": 2.5, "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.5},
    ),
    "kimi_linear": (
        "kimi_linear",
        KIMI_DELTA
        | {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 24, "num_heads": 3}}
        | {"linear_head_dim": 24, "linear_num_heads": 3},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        KIMI_DELTA | {"layer_group_size": 2, "head_dim": 24, "num_expert_group": 4, "short_conv_kernel_size": 3},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        DELTA_NETS
        | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 72, "num_experts": 6}
        | {"num_experts_per_tok": 2},
    ),
    "lfm2": (
        "lfm2",
        BASE_CONFIG | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    ),
    "lfm3": (
        "lfm3",
        BASE_CONFIG
        | {"num_hidden_layers": 5, "layer_types": ["conv", "sliding_attention", "conv", "full_attention", "conv"]}
        | {"head_dim": 32, "sliding_window": 20, "conv_L_cache": 7},
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        BASE_CONFIG
        | {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 24, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        BASE_CONFIG
        | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2},
    ),
}
# Those that only tests of the fused decoder and its mixtures load.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "gpt_oss",
        BASE_CONFIG | {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 24, "head_dim": 32},
    ),
    "olmoe": ("olmoe", BASE_CONFIG | {"intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}),
    "granitemoe": (
        "granitemoe",
        BASE_CONFIG | EXPERTS | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "granitemoeshared": (
        "granitemoeshared",
        BASE_CONFIG | EXPERTS | {"shared_intermediate_size": 72, "attention_multiplier": 0.1},
    ),
    # Contexts of tests have more blocks than its indexers choose; its first layer has no indexer.
    "minimax_m3": (
        "minimax_m3_vl_text",
        BASE_CONFIG
        | {"intermediate_size": 48, "dense_intermediate_size": 96, "shared_intermediate_size": 40, "head_dim": 32}
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 3, "index_n_heads": 2}
        | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_head_dim": 24}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "index_topk_blocks": 3, "index_block_size": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
        | {"rotary_dim": 16},
    ),
    "minimax_m2": (
        "minimax_m2",
        BASE_CONFIG | {"num_local_experts": 12, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "dots1": (
        "dots1",
        BASE_CONFIG
        | {"moe_intermediate_size": 48, "n_shared_experts": 2, "n_routed_experts": 16, "num_experts_per_tok": 3}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "attention_bias": True}
        | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "sliding_window": 24, "max_window_layers": 1},
    ),
    "ernie_moe": (
        "ernie4_5_moe",
        BASE_CONFIG
        | {"moe_intermediate_size": 48, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2}
        | {"num_hidden_layers": 4, "moe_layer_end_index": 2},
    ),
}


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer with a chat template; any text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_decoder(config: Any) -> Any:
    """Return a decoder of Transformers for a config, in float32; Muse Glimmer's inside a multimodal model."""
    import torch

    if config.model_type == "muse_glimmer_text":
        from transformers import MuseGlimmerConfig

        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = MuseGlimmerConfig(
            text_config=config.to_dict(), vision_config=vision, out_hidden_size=64, projector_hidden_size=32
        )
    return decoder_class(config)._from_config(config, dtype=torch.float32)


def decoder_class(config: Any) -> Any:
    """Return Transformers' class of a decoder. Their list of decoders alone lacks some."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, Mistral4ForCausalLM, MuseGlimmerForConditionalGeneration

    others = {"mistral4": Mistral4ForCausalLM, "muse_glimmer": MuseGlimmerForConditionalGeneration}
    return others.get(config.model_type) or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def write_model(folder: Path, architecture: str, *, seed: int = 0, dtype: str = "bfloat16", **overrides: Any) -> Path:
    """Write a model of the architectures above into ``folder``; overrides are fields of its Transformers config."""
    from transformers import AutoConfig

    families = (
        ARCHITECTURES
        | MIXTURES
        | MERGED_HEADS
        | GEMMA_3N_DECODERS
        | GEMMA_4_DECODERS
        | LATENT_DECODERS
        | STATE_DECODERS
    )
    model_type, fields = families[architecture]
    config = AutoConfig.for_model(model_type, **(fields | overrides))
    write_random_model(folder, make_decoder(config), seed=seed, dtype=dtype)
    write_tokenizer(folder)
    return folder


def write_random_model(folder: Path, model: Any, *, seed: int, dtype: str, **save: Any) -> None:
    """Draw the weights of a Transformers model anew, and write it into ``folder``. ``save``: as for save_pretrained."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("k_norm.weight") and model.config.model_type.startswith(("gemma3n", "gemma4")):
                parameter.copy_((1 + noise * 0.2) * parameter.numel() ** -0.5)  # its scores have no other scale
            elif name.endswith("modality_router.weight"):
                parameter.copy_(noise * parameter.shape[-1] ** 0.5)  # its results are divided by the hidden size
            elif name.endswith("_coefs.weight"):
                parameter.copy_(noise * 0.15)  # larger shares of residual streams cancel out, and roundings grow
            elif "norm" in name or ".ln_" in name:
                parameter.add_(noise * 0.2)
            elif "embed" in name or ".wte" in name or ".wpe" in name:
                parameter.copy_(noise * 0.3)  # smaller than the layers' output, or each token would predict itself
            elif parameter.dim() == 1:
                parameter.copy_(noise * 0.3)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):  # of a router's choice
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
            elif name.endswith("tid2eid"):  # the experts of each token
                order = torch.rand(len(buffer), model.config.n_routed_experts, generator=generator).argsort(1)
                buffer.copy_(order[:, : buffer.shape[1]])
            elif name.endswith(("layer_scalar", "std_bias", "std_scale")):
                buffer.copy_(1 + torch.randn(buffer.shape, generator=generator) * 0.3)
            elif name.endswith(("put_min", "put_max")):  # what layers of encoders clip their rows to
                buffer.copy_(torch.rand((), generator=generator) + 1.5).mul_(-1 if name.endswith("min") else 1)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about complex buffers, which are not saved
        model.to(getattr(torch, dtype))
    model.save_pretrained(folder, **save)


@functools.cache
def models_home() -> Path:
    """Return the folder of this test run's models."""
    home = Path(tempfile.mkdtemp(prefix="parley-models-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@functools.cache
def model_folder(architecture: str, **overrides: Any) -> Path:
    """Return the folder of such a model, written once per test run. Tests must not change it: copy it first."""
    folder_name = "-".join([architecture, *(f"{key}={value}" for key, value in sorted(overrides.items()))])
    return write_model(models_home() / folder_name, architecture, **overrides)
