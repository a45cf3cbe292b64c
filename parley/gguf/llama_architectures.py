"""Dense decoders in GGUF files that compute the same as a model type of Transformers with another name.

Most are Llama under another name. Their configs are those of the type that computes the same.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.architecture import (
    GRANITE_KEYS,
    NORM_AFTER_ROPE,
    Architecture,
    complete_biases,
    fields_of,
    read_size,
)
from parley.gguf.header import GgufError, GgufModel

# Of MiniCPM 1 and 2, whose first files do not say them
MINICPM_EMBEDDING, MINICPM_DEPTH, MINICPM_WIDTH = 12.0, 1.4, 256
BAICHUAN_LAYERS_WITH_SLOPES = 40  # of the model of 13 billion parameters, as llama.cpp knows it


def complete_minicpm(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the factors that the file leaves out, and the usual one of scores of attention."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    defaults = {
        "embedding_multiplier": MINICPM_EMBEDDING,
        "residual_multiplier": MINICPM_DEPTH / layers**0.5,
        "logits_scaling": hidden / MINICPM_WIDTH,
    }
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    config |= defaults | {name: config[name] for name in defaults if name in config}
    config["attention_multiplier"] = head_dim**-0.5


def complete_orion(model: GgufModel, config: dict[str, Any]) -> None:
    """Set that all dimensions turn, and that layers are those of the first StableLM: queries and keys have no norms,
    and the MLP comes after attention. Their biases get this type's name."""
    config |= {
        "partial_rotary_factor": 1.0,
        "use_qkv_bias": config["attention_bias"],
        "qk_layernorm": False,
        "use_parallel_residual": False,
    }


def check_baichuan(model: GgufModel, config: dict[str, Any]) -> None:
    """Raise GgufError for the larger model, whose scores fall with the distance."""
    if config["num_hidden_layers"] == BAICHUAN_LAYERS_WITH_SLOPES:
        raise GgufError(f"{model.paths[0].name} is a Baichuan without a rotary embedding, which is not read from GGUF")


def complete_deci(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the heads of keys and the MLP of each layer. Raises GgufError if the file does not say them of each."""
    count = config["num_hidden_layers"]
    heads, kv_heads, widths = (_read_list(model, key, count) for key in LISTS_OF_SIZES)
    config["block_configs"] = [
        {
            "attention": {
                "no_op": not queries,
                "num_key_value_heads": shared,
                "replace_with_linear": bool(queries and not shared),
            },
            "ffn": {"no_op": not width, "intermediate_size": width},
        }
        for queries, shared, width in zip(heads, kv_heads, widths, strict=True)
    ]


def complete_openelm(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the heads and the MLP of each layer. Raises GgufError if the file does not say them of each."""
    count = config["num_hidden_layers"]
    heads, kv_heads, widths = (_read_list(model, key, count) for key in LISTS_OF_SIZES)
    factors = [width / config["hidden_size"] for width in widths]
    config |= {"num_query_heads": heads, "num_kv_heads": kv_heads, "ffn_multipliers": factors, "ffn_dim_divisor": 1}


def _read_list(model: GgufModel, key: str, count: int) -> list[int]:
    """Return a number of at least 0 for each layer; the file may have a single one. Raises GgufError."""
    value = fields_of(model).get(key)
    listed: list[Any] = value if isinstance(value, list) else [value] * count
    if len(listed) != count or any(type(number) is not int or number < 0 for number in listed):
        raise GgufError(f"{model.paths[0].name} gives {key} as {reprlib.repr(value)}, so the model's shape is unknown")
    return listed


def complete_qwen(model: GgufModel, config: dict[str, Any]) -> None:
    """Halve the width of MLPs: the first Qwen's configs give the width of gates and ups together."""
    config["intermediate_size"] = read_size(model, "feed_forward_length") // 2


def complete_hunyuan(model: GgufModel, config: dict[str, Any]) -> None:
    """Stretch the base of the rotary embedding by ``alpha``, as HunyuanOCR's own code does. Raises GgufError."""
    alpha = fields_of(model).get("rope.scaling.alpha", 1.0)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if not isinstance(alpha, float) or not 0 < alpha <= MAX_ROPE_ALPHA or head_dim <= 2:
        raise GgufError(
            f"{model.paths[0].name} gives rope.scaling.alpha as {reprlib.repr(alpha)} for heads of {head_dim} numbers"
        )
    config["rope_theta"] = config.get("rope_theta", 1e4) * alpha ** (head_dim / (head_dim - 2))


MAX_ROPE_ALPHA = 1e6  # HunyuanOCR's is 1000
LISTS_OF_SIZES = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
LLAMA_BY_ANOTHER_NAME = Architecture(
    "llama", "LlamaForCausalLM", interleaved=True, fields={"sliding_window": None}, bias_layer="attn_q"
)
HUNYUAN_DENSE = Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", NORM_AFTER_ROPE)
LLAMA_ARCHITECTURES = {
    "bitnet": Architecture(
        "bitnet",
        "BitNetForCausalLM",
        {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
        fields={"hidden_act": "silu"},  # as llama.cpp computes it
        bias_layer="attn_q",
    ),
    "baichuan": replace(LLAMA_BY_ANOTHER_NAME, complete=check_baichuan),
    "deci": Architecture(
        "nemotron-nas",
        "DeciLMForCausalLM",
        interleaved=True,
        bias_layer="attn_q",
        lists=LISTS_OF_SIZES,
        complete=complete_deci,
    ),
    # Of the axes of positions all are the same for text
    "hunyuan_vl": replace(HUNYUAN_DENSE, complete=complete_hunyuan, has_axes=True),
    "maincoder": replace(HUNYUAN_DENSE, interleaved=True),
    "exaone": replace(LLAMA_BY_ANOTHER_NAME, interleaved=False, keys={"attention.layer_norm_epsilon": "rms_norm_eps"}),
    "internlm2": LLAMA_BY_ANOTHER_NAME,
    "pangu-embedded": replace(LLAMA_BY_ANOTHER_NAME, interleaved=False),
    "xverse": LLAMA_BY_ANOTHER_NAME,
    "llama-embed": replace(LLAMA_BY_ANOTHER_NAME, fields={"sliding_window": None, "is_causal": False}),
    "qwen": Architecture("qwen2", "Qwen2ForCausalLM", has_packed_heads=True, complete=complete_qwen),
    "minicpm": Architecture(
        "granite", "GraniteForCausalLM", interleaved=True, keys=GRANITE_KEYS, complete=complete_minicpm
    ),
    "openelm": Architecture(
        "openelm",
        "OpenELMForCausalLM",
        {
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.qkv_proj",
            "attn_output": "attn.out_proj",
            "attn_q_norm": "attn.q_norm",
            "attn_k_norm": "attn.k_norm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "ffn.gate_proj",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.proj_2",
        },
        layer_prefix="transformer.layers.",
        model_names={"token_embd": "transformer.token_embeddings", "output_norm": "transformer.norm"},
        lists=LISTS_OF_SIZES,
        complete=complete_openelm,
    ),
    "orion": Architecture("stablelm", "StableLmForCausalLM", bias_layer="attn_q", complete=complete_orion),
    "jais2": Architecture("jais2", "Jais2ForCausalLM"),
    "apertus": Architecture(
        "apertus",
        "ApertusForCausalLM",
        {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        fields={"hidden_act": "xielu"},
        layer_numbers={f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
    ),
    "chatglm": Architecture(
        "glm", "GlmForCausalLM", {"ffn_up": "mlp.gate_up_proj"}, bias_layer="attn_qkv", has_packed_heads=True
    ),
    "codeshell": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fields={"sliding_window": None, "rope_scaling": {"rope_type": "default"}},
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        has_packed_heads=True,
        complete=complete_biases,
    ),
}
