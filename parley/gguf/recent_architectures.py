"""Recent decoders in GGUF files: Command A+, Granite with windows, Hy3, Kolibri 1, Laguna, Mellum 2, MiniMax-M3 and
SmallThinker."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.architecture import (
    DEEPSEEK_MIXTURE_NAMES,
    GRANITE_KEYS,
    SIGMOID,
    SOFTMAX,
    Architecture,
    complete_windows,
    fields_of,
    read_size,
)
from parley.gguf.header import GgufError, GgufModel

FULL, SLIDING = "full_attention", "sliding_attention"


def _list_mixtures(model: GgufModel, config: dict[str, Any]) -> None:
    """Set which layers have a mixture, by their tensors."""
    config["mlp_layer_types"] = [
        "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in model.tensors else "dense"
        for layer in range(config["num_hidden_layers"])
    ]


def _set_ropes(config: dict[str, Any]) -> None:
    """Set the rotary embeddings of both kinds of layers: those with a window have no scaling."""
    theta = config.pop("rope_theta", 1e4)
    config["rope_parameters"] = {
        FULL: config.pop("rope_scaling") | {"rope_theta": theta},
        SLIDING: {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq", theta)},
    }


def _check_normalized(model: GgufModel, config: dict[str, Any]) -> None:
    """Raise GgufError if the weights of a token's experts are not divided by their sum."""
    if config.get("norm_topk_prob", True) is not True:
        raise GgufError(f"{model.paths[0].name} gives expert_weights_norm as False; only True is read here")


def complete_hy_3(model: GgufModel, config: dict[str, Any]) -> None:
    """Add which layers have a mixture, and how many shared experts. Raises GgufError if their width does not fit."""
    _check_normalized(model, config)
    _list_mixtures(model, config)
    width = read_size(model, "expert_feed_forward_length")
    shared = config.pop("shared_expert_intermediate_size", width)
    if shared % width:
        raise GgufError(
            f"{model.paths[0].name} gives expert_shared_feed_forward_length as {shared}, no multiple of {width}"
        )
    config["n_shared_experts"] = shared // width


def complete_minimax_m3(model: GgufModel, config: dict[str, Any]) -> None:
    """Add which layers have a mixture and which an indexer, and the widths, which converters write in different fields.
    Files of the first converters have no indexers; all tokens attend to all before them there. Raises GgufError."""
    _check_normalized(model, config)
    _list_mixtures(model, config)
    count, tensors = config["num_hidden_layers"], model.tensors
    config["layer_types"] = [
        "minimax_m3_sparse" if f"blk.{layer}.indexer.q_proj.weight" in tensors else FULL for layer in range(count)
    ]
    config["intermediate_size"] = read_size(model, "expert_feed_forward_length")
    config.pop("moe_intermediate_size", None)
    for field, stem in (("dense_intermediate_size", "ffn_gate"), ("shared_intermediate_size", "ffn_gate_shexp")):
        names = (f"blk.{layer}.{stem}.weight" for layer in range(count))
        if (tensor := next((tensors[name] for name in names if name in tensors), None)) is not None:
            config[field] = tensor.shape[0]


def complete_mellum(model: GgufModel, config: dict[str, Any]) -> None:
    """Add which layers have a mixture, and the rotary embeddings of layers with and without a window."""
    complete_windows(model, config)
    _list_mixtures(model, config)
    _set_ropes(config)


def _set_windows(model: GgufModel, config: dict[str, Any]) -> None:
    """Set which layers have a window, if the file does not list them: all but the first of each period."""
    period = fields_of(model).get("attention.sliding_window_pattern", USUAL_PERIOD)
    if isinstance(period, list):
        return
    if type(period) is not int or period < 1:
        raise GgufError(
            f"{model.paths[0].name} gives attention.sliding_window_pattern as {reprlib.repr(period)}; it is at least 1"
        )
    has_window = config.get("sliding_window") is not None
    config["layer_types"] = [
        SLIDING if has_window and layer % period else FULL for layer in range(config["num_hidden_layers"])
    ]


def complete_laguna(model: GgufModel, config: dict[str, Any]) -> None:
    """Add heads, windows and rotary embeddings of the layers, which of them have a mixture, and whether gates have a
    number for each head. Raises GgufError."""
    fields, file, count = fields_of(model), model.paths[0].name, config["num_hidden_layers"]
    _check_normalized(model, config)
    heads = fields["attention.head_count"]
    heads = heads[:count] if isinstance(heads, list) else [heads] * count
    gate = model.tensors.get("blk.0.attn_gate.weight")
    if gate is None:
        raise GgufError(f"{file} has no tensor blk.0.attn_gate.weight")
    _list_mixtures(model, config)
    _set_windows(model, config)
    head_dim = read_size(model, "attention.key_length")
    ropes = {FULL: {"partial_rotary_factor": config.pop("partial_rotary_factor", 1.0)}, SLIDING: {}}
    if "rope.dimension_count_swa" in fields:
        ropes[SLIDING]["partial_rotary_factor"] = read_size(model, "rope.dimension_count_swa") / head_dim
    _set_ropes(config)
    config["rope_parameters"] = {name: rope | ropes[name] for name, rope in config["rope_parameters"].items()}
    config |= {
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gate.shape[0] == heads[0] else "per-element",
    }


def complete_command_mixture(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the widths of experts and dense layers, the windows, and which layers have a mixture."""
    dense = model.tensors.get("blk.0.ffn_gate.weight")
    if dense is not None:
        config["prefix_dense_intermediate_size"] = dense.shape[0]
    config |= {
        "intermediate_size": config.pop("moe_intermediate_size", config.get("intermediate_size")),
        "expert_selection_fn": "sigmoid",
    }
    _set_windows(model, config)
    _list_mixtures(model, config)


def small_thinker_architecture(model: GgufModel) -> Architecture | None:
    """Return the row for files whose weights of experts are a softmax, else None."""
    is_softmax = fields_of(model).get("expert_gating_func") == SOFTMAX
    return replace(SMALL_THINKER, gating=SOFTMAX, mixture=None) if is_softmax else None


def complete_small_thinker(model: GgufModel, config: dict[str, Any]) -> None:
    """Add which layers have a window and a rotary embedding, and how weights of experts are made. Raises GgufError.

    llama.cpp has constants for what files do not say: with a window, it is 4096, and all layers have it and a rotary
    embedding but every fourth.
    """
    _check_normalized(model, config)
    count, has_window = config["num_hidden_layers"], config.get("sliding_window") is not None
    layout = [int(has_window and layer % USUAL_PERIOD > 0) for layer in range(count)]
    config |= {
        "sliding_window": SMALL_THINKER_WINDOW,
        "sliding_window_layout": layout,
        "rope_layout": layout if has_window else [1] * count,
        "moe_primary_router_apply_softmax": fields_of(model).get("expert_gating_func") == SOFTMAX,
    }


def check_kolibri(model: GgufModel, config: dict[str, Any]) -> None:
    """Raise GgufError if weights of experts have a factor, or if there is not one shared expert."""
    for key, name in (("expert_weights_scale", "routed_scaling_factor"), ("expert_shared_count", "n_shared_experts")):
        if config.get(name, 1) != 1:
            raise GgufError(f"{model.paths[0].name} gives {key} as {reprlib.repr(config[name])}; only 1 is read here")


def complete_granite_windows(model: GgufModel, config: dict[str, Any]) -> None:
    """Add which layers have a rotary embedding: all, if the file does not list them. Raises GgufError."""
    count = config["num_hidden_layers"]
    listed = fields_of(model).get(ROPE_PATTERN, [True] * count)
    if not isinstance(listed, list) or len(listed) != count or not all(isinstance(turns, bool) for turns in listed):
        raise GgufError(
            f"{model.paths[0].name} gives {ROPE_PATTERN} as {reprlib.repr(listed)}; it is true or false for each of "
            f"{count} layers"
        )
    if "blk.0.ffn_up_shexp.weight" in model.tensors and "blk.0.ffn_gate_shexp.weight" not in model.tensors:
        raise GgufError(f"{model.paths[0].name} has gates and ups of shared experts as one tensor, which is not read")
    theta = config.get("rope_theta", 1e4)
    config["layer_rope_theta"] = [theta if turns else 0 for turns in listed]


ROPE_PATTERN = "attention.rope_pattern"
SMALL_THINKER_WINDOW = 4096
USUAL_PERIOD = 4  # layers; of those with and without a window
COMMAND_MIXTURE = Architecture(
    "cohere2_moe",
    "Cohere2MoeForCausalLM",
    DEEPSEEK_MIXTURE_NAMES,
    gating=SIGMOID,
    complete=complete_command_mixture,
)
LAGUNA = Architecture(
    "laguna",
    "LagunaForCausalLM",
    DEEPSEEK_MIXTURE_NAMES | {"attn_gate": "self_attn.g_proj"},
    lists=("attention.head_count",),
    gating=SIGMOID,
    complete=complete_laguna,
)
GRANITE_WINDOWS = Architecture(
    "granite_swa",
    "GraniteSWAForCausalLM",
    {"attn_sinks.weight": "self_attn.sinks"},
    interleaved=True,
    keys=GRANITE_KEYS,
    complete=complete_granite_windows,
)
GRANITE_WINDOWS_MIXTURE = replace(
    GRANITE_WINDOWS,
    model_type="granitemoe_swa",
    class_name="GraniteMoeSWAForCausalLM",
)
HY_3 = Architecture("hy_v3", "HYV3ForCausalLM", DEEPSEEK_MIXTURE_NAMES, gating=SIGMOID, complete=complete_hy_3)
KOLIBRI = Architecture(
    "kolibri1",
    "Kolibri1ForCausalLM",
    DEEPSEEK_MIXTURE_NAMES | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    gating=SIGMOID,
    complete=check_kolibri,
)
MELLUM = Architecture("mellum", "MellumForCausalLM", fields={"norm_topk_prob": True}, complete=complete_mellum)
MINIMAX_M3 = Architecture(
    "minimax_m3_vl_text",
    "MiniMaxM3VLForCausalLM",
    DEEPSEEK_MIXTURE_NAMES
    | {f"indexer.{part}": f"self_attn.indexer.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
    norm_offset=1.0,
    keys={
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk_blocks",
        "attention.indexer.block_size": "index_block_size",
        "attention.indexer.local_blocks": "index_local_blocks",
    },
    gating=SIGMOID,
    complete=complete_minimax_m3,
)
SMALL_THINKER = Architecture(
    "smallthinker",
    "SmallThinkerForCausalLM",
    gating=SIGMOID,
    variant=small_thinker_architecture,
    complete=complete_small_thinker,
)
RECENT_ARCHITECTURES = {
    "cohere2moe": replace(COMMAND_MIXTURE, mixture=COMMAND_MIXTURE),
    "granite_swa": replace(GRANITE_WINDOWS, mixture=GRANITE_WINDOWS_MIXTURE),
    "hy_v3": replace(HY_3, mixture=HY_3),
    # llama.cpp does not know Kolibri yet; its ports have two names for it
    **dict.fromkeys(("kolibri1", "kolibri"), replace(KOLIBRI, mixture=KOLIBRI)),
    "laguna": replace(LAGUNA, mixture=LAGUNA),
    "mellum": replace(MELLUM, mixture=MELLUM),
    "minimax-m3": replace(MINIMAX_M3, mixture=MINIMAX_M3),
    "smallthinker": replace(SMALL_THINKER, mixture=SMALL_THINKER),
}
