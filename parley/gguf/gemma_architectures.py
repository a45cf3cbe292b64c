"""Gemma 2, 3, 3n and 4 in GGUF files, and Muse Glimmer, which has Gemma's norms.

The names of their tensors, and the metadata of Gemma 3n, Gemma 4 and Muse Glimmer.
"""

from __future__ import annotations

import reprlib
from statistics import NormalDist
from typing import Any

from parley.gguf.architecture import Architecture, fields_of, read_size
from parley.gguf.header import GgufError, GgufModel

GEMMA_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_INPUT_NAMES = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA_3N_LAYER_NAMES = (
    GEMMA_LAYER_NAMES
    | LAYER_INPUT_NAMES
    | {
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
)
# Tensors that hold several linear layers, and the list of these in Hugging Face format
STACKED_NAMES = {"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections"}
GEMMA_4_LAYER_NAMES = (
    GEMMA_LAYER_NAMES
    | LAYER_INPUT_NAMES
    | {
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_exps": "experts.gate_exps",
        "ffn_up_exps": "experts.up_exps",
        "ffn_gate_up_exps": "experts.gate_up_exps",
        "ffn_down_exps": "experts.down_exps",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale.weight": "layer_scalar",
    }
)


def complete_gemma_4(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the heads of layers with and without a window, and the number of last layers that share keys of earlier
    ones. Raises GgufError."""
    fields, file, count = fields_of(model), model.paths[0].name, config["num_hidden_layers"]
    types = config.get("layer_types")
    if types is None or len(types) != count or "full_attention" not in types:
        raise GgufError(f"{file} does not say of each layer whether it has a window, so the model's shape is unknown")
    full, shared = types.index("full_attention"), fields.get("attention.shared_kv_layers", 0)
    if type(shared) is not int or not 0 <= shared < count:
        raise GgufError(f"{file} gives attention.shared_kv_layers as {reprlib.repr(shared)}, of {count} layers")

    def layer_sizes(key: str) -> list[int]:
        value = fields.get(key)
        sizes: list[Any] = value if isinstance(value, list) else [value] * count
        if len(sizes) != count or not all(type(size) is int and size > 0 for size in sizes):
            raise GgufError(f"{file} gives {key} as {reprlib.repr(value)}, so the model's shape is unknown")
        return sizes

    heads, widths = layer_sizes("attention.head_count_kv"), layer_sizes("feed_forward_length")
    window = types.index("sliding_attention") if "sliding_attention" in types else full
    by_type = {"sliding_attention": heads[window], "full_attention": heads[full]}
    is_double = shared > 0 and widths[-1] == 2 * widths[0]
    if heads != [by_type[layer_type] for layer_type in types] or widths != [
        widths[0] * (1 + (is_double and layer >= count - shared)) for layer in range(count)
    ]:
        raise GgufError(f"{file} has layers of other sizes than its architecture")
    table = model.tensors.get("per_layer_token_embd.weight")
    config |= {
        "head_dim": read_size(model, "attention.key_length_swa"),
        "global_head_dim": read_size(model, "attention.key_length"),
        "num_key_value_heads": heads[window],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in model.tensors,
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": is_double,
        "enable_moe_block": "num_experts" in config,
        "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
    }
    if not config["attention_k_eq_v"] and heads[window] != heads[full]:
        raise GgufError(f"{file} has layers of other sizes than its architecture")


def complete_gemma_3n(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the residual streams, sparse gates and inputs of layers, and the number of last layers that share keys of
    earlier ones. Raises GgufError."""
    fields, file, count = fields_of(model), model.paths[0].name, config["num_hidden_layers"]
    if len(config.get("layer_types", [])) != count:
        raise GgufError(f"{file} does not say of each layer whether it has a window, so the model's shape is unknown")
    scales, widths = fields.get("activation_sparsity_scale"), fields.get("feed_forward_length")
    if widths is None:
        raise GgufError(f"{file} has no feed_forward_length, so the model's shape is unknown")
    if not isinstance(scales, list) or len(scales) != count or any(type(scale) is not float for scale in scales):
        raise GgufError(f"{file} gives activation_sparsity_scale as {reprlib.repr(scales)}, of {count} layers")
    tables = {name: model.tensors.get(name) for name in ("blk.0.laurel_l.weight", "per_layer_token_embd.weight")}
    for name, tensor in tables.items():
        if tensor is None:
            raise GgufError(f"{file} has no tensor {name}")
    laurel_rank, inputs_vocab = (tensor.shape[0] for tensor in tables.values() if tensor is not None)
    config |= {
        "intermediate_size": widths,
        # The share of a normal distribution below ``scale`` standard deviations; files have the scale as float32
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "num_kv_shared_layers": _read_count(model, "attention.shared_kv_layers"),
        "altup_num_inputs": read_size(model, "altup.num_inputs"),
        "altup_active_idx": _read_count(model, "altup.active_idx"),
        "hidden_size_per_layer_input": read_size(model, "embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": inputs_vocab,
        "laurel_rank": laurel_rank,
    }


def _read_count(model: GgufModel, key: str) -> int:
    """Return an integer of at least 0. Raises GgufError."""
    value = fields_of(model).get(key)
    if type(value) is not int or value < 0:
        raise GgufError(f"{model.paths[0].name} gives {key} as {reprlib.repr(value)}, so the model's shape is unknown")
    return value


GEMMA_3N = Architecture(
    "gemma3n_text",
    "Gemma3nForCausalLM",
    GEMMA_3N_LAYER_NAMES,
    complete=complete_gemma_3n,
    lists=("feed_forward_length",),
    model_names=STACKED_NAMES,
)
# Its norms of queries have the factor of scores as their weights
MUSE_GLIMMER = Architecture(
    "muse_glimmer_text",
    "MuseGlimmerForConditionalGeneration",
    GEMMA_LAYER_NAMES | {"attn_gate": "self_attn.gate_proj"},
    interleaved=True,
    norm_offset=1.0,
    has_plain_last_norm=True,
    fields={"qk_scale_factor": 1.0},
)
GEMMA_4 = Architecture(
    "gemma4_text",
    "Gemma4ForCausalLM",
    GEMMA_4_LAYER_NAMES,
    complete=complete_gemma_4,
    lists=("attention.head_count_kv", "feed_forward_length"),
    refused=("rope.scaling.factor",),
    has_proportional_rope=True,
)
