"""Mixtures of 2026 in GGUF files: Hy3 and Mellum 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.gguf.architecture import (
    DEEPSEEK_MIXTURE_NAMES,
    SIGMOID,
    Architecture,
    complete_windows,
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


def complete_mellum(model: GgufModel, config: dict[str, Any]) -> None:
    """Add which layers have a mixture, and the rotary embeddings of layers with and without a window."""
    complete_windows(model, config)
    _list_mixtures(model, config)
    _set_ropes(config)


HY_3 = Architecture("hy_v3", "HYV3ForCausalLM", DEEPSEEK_MIXTURE_NAMES, gating=SIGMOID, complete=complete_hy_3)
MELLUM = Architecture("mellum", "MellumForCausalLM", fields={"norm_topk_prob": True}, complete=complete_mellum)
RECENT_ARCHITECTURES = {
    "hy_v3": replace(HY_3, mixture=HY_3),
    "mellum": replace(MELLUM, mixture=MELLUM),
}
