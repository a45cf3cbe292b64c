"""GPT-2 and similar decoders in GGUF files, whose layers have LayerNorms and plain MLPs.

llama.cpp's converter stores all weights [out, in], and queries, keys and values one after the other
(``networks/config_reader.py``).
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.architecture import Architecture, fields_of
from parley.gguf.header import GgufError, GgufModel

GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    layer_prefix="transformer.h.",
    model_names={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
    },
    keys={"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
)
WIDE_LAYER_NAMES = {
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def falcon_architecture(model: GgufModel) -> Architecture | None:
    """Return the row for files whose layers have a norm for each part, as those of Falcon 40B."""
    return FALCON_OF_TWO_NORMS if "blk.0.attn_norm_2.weight" in model.tensors else None


def complete_falcon(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the generation of the model, which its heads and norms show."""
    has_two_norms, shared = falcon_architecture(model) is not None, config.get("num_kv_heads") == 1
    is_new = has_two_norms or not (shared or config.get("num_kv_heads") == config["num_attention_heads"])
    config |= {
        "new_decoder_architecture": is_new,
        "multi_query": shared,
        "parallel_attn": True,
        "alibi": False,
        "bias": config["attention_bias"],
    } | ({"num_ln_in_parallel_attn": 1 + has_two_norms} if is_new else {})


def complete_neox(model: GgufModel, config: dict[str, Any]) -> None:
    """Add whether attention and MLP have the same input. Raises GgufError."""
    is_parallel = fields_of(model).get("use_parallel_residual", True)
    if not isinstance(is_parallel, bool):
        raise GgufError(
            f"{model.paths[0].name} gives use_parallel_residual as {reprlib.repr(is_parallel)}; it is true or false"
        )
    config["use_parallel_residual"] = is_parallel


def complete_mpt(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the largest slope of heads, and the limit of queries, keys and values. Raises GgufError if there are no
    slopes, for models with other positions."""
    largest = fields_of(model).get("attention.max_alibi_bias")
    if not isinstance(largest, float) or not 0 < largest < math.inf:
        raise GgufError(
            f"{model.paths[0].name} gives attention.max_alibi_bias as {reprlib.repr(largest)}; it is more than 0"
        )
    limit = fields_of(model).get("attention.clamp_kqv")
    config["attn_config"] = {"alibi": True, "alibi_bias_max": largest, "clip_qkv": limit}


def complete_dbrx(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the objects about attention and MLPs that this model type has."""
    config["attn_config"] = {
        "kv_n_heads": config.get("num_key_value_heads", 1),
        "clip_qkv": fields_of(model).get("attention.clamp_kqv"),
        "rope_theta": config.get("rope_theta", 1e4),
    }
    config["ffn_config"] = {
        "ffn_hidden_size": config["intermediate_size"],
        "moe_num_experts": config["num_experts"],
        "moe_top_k": config["num_experts_per_tok"],
    }


def complete_multi_query(model: GgufModel, config: dict[str, Any]) -> None:
    """Set whether all heads share one head of keys and values (``multi_query``)."""
    config["multi_query"] = config.get("num_key_value_heads") == 1


FALCON = replace(
    GPT2,
    model_type="falcon",
    class_name="FalconForCausalLM",
    layer_names=WIDE_LAYER_NAMES
    | {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
    },
    model_names={"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"},
    keys={
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "feed_forward_length": "ffn_hidden_size",
        "attention.head_count_kv": "num_kv_heads",
    },
    complete=complete_falcon,
    bias_layer="attn_qkv",
)
FALCON_OF_TWO_NORMS = replace(
    FALCON, layer_names=FALCON.layer_names | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
)
DBRX = Architecture(
    "dbrx",
    "DbrxForCausalLM",
    {
        "attn_norm": "norm_attn_norm.norm_1",
        "attn_qkv": "norm_attn_norm.attn.Wqkv",
        "attn_output": "norm_attn_norm.attn.out_proj",
        "attn_output_norm": "norm_attn_norm.norm_2",
    },
    layer_prefix="transformer.blocks.",
    model_names={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
    complete=complete_dbrx,
)
GPT_ARCHITECTURES = {
    "dbrx": replace(DBRX, mixture=DBRX),
    "gpt2": GPT2,
    "starcoder": replace(
        GPT2, model_type="gpt_bigcode", class_name="GPTBigCodeForCausalLM", complete=complete_multi_query
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        WIDE_LAYER_NAMES | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        layer_prefix="gpt_neox.layers.",
        model_names={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        complete=complete_neox,
    ),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        model_names={"output_norm": "model.final_layernorm"},
    ),
    "falcon": replace(FALCON, variant=falcon_architecture),
    "bloom": replace(
        FALCON,
        model_type="bloom",
        class_name="BloomForCausalLM",
        layer_names=FALCON.layer_names | {"ffn_norm": "post_attention_layernorm"},
        model_names=FALCON.model_names | {"token_embd_norm": "transformer.word_embeddings_layernorm"},
        keys={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        complete=lambda model, config: None,
    ),
    "mpt": Architecture(
        "mpt",
        "MptForCausalLM",
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        layer_prefix="transformer.blocks.",
        model_names={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        keys={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        complete=complete_mpt,
    ),
}
