"""Translates a GGUF file's architecture to Hugging Face format: the type of its model and the names of tensors.

A row of ``ARCHITECTURES`` makes an architecture readable; ``model_config.py`` makes the config.json.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.architecture import (
    DEEPSEEK_MIXTURE_NAMES,
    GRANITE_KEYS,
    NORM_AFTER_ATTENTION,
    NORM_AFTER_ROPE,
    SIGMOID,
    Architecture,
    complete_biases,
    complete_windows,
    fields_of,
    read_size,
)
from parley.gguf.axes_architectures import AXES_ARCHITECTURES, has_positions_with_axes
from parley.gguf.encoder_architectures import ENCODERS
from parley.gguf.gemma_architectures import GEMMA_3N, GEMMA_4, GEMMA_LAYER_NAMES, MUSE_GLIMMER
from parley.gguf.gpt_architectures import GPT_ARCHITECTURES
from parley.gguf.header import GgufError, GgufModel
from parley.gguf.latent_architectures import LATENT_ARCHITECTURES
from parley.gguf.llama_architectures import HUNYUAN_DENSE, LLAMA_ARCHITECTURES
from parley.gguf.mamba_architectures import MAMBA_ARCHITECTURES
from parley.gguf.mixture_architectures import MIXTURE_ARCHITECTURES
from parley.gguf.recent_architectures import RECENT_ARCHITECTURES
from parley.gguf.refused_architectures import REFUSED_ARCHITECTURES
from parley.gguf.state_architectures import (
    FALCON_H1,
    GRANITE_HYBRID,
    LFM2,
    LFM2_MOE,
    NEMOTRON_HYBRID,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
from parley.gguf.step_architecture import STEP_ARCHITECTURES

# The content of files that are no models, by their ``general.type`` or architecture
FOREIGN_KINDS = {
    "an image or audio encoder and no language model; name that, and this one as its mmproj": ("mmproj", "clip"),
    "a LoRA adapter, which is not read from GGUF; name its model, and the adapter as safetensors": ("adapter",),
    "the statistics of a quantizer and no model": ("imatrix",),
    "a vocabulary without weights": ("vocab",),
}
MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", interleaved=True, fields={"sliding_window": None})
QWEN2_MOE = Architecture("qwen2_moe", "Qwen2MoeForCausalLM", fields={"norm_topk_prob": False})
QWEN3_MOE = Architecture("qwen3_moe", "Qwen3MoeForCausalLM", fields={"norm_topk_prob": True})
GPT_OSS = Architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    NORM_AFTER_ATTENTION
    | {
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps.bias": "mlp.experts.gate_exps.weight_bias",
        "ffn_up_exps.bias": "mlp.experts.up_exps.weight_bias",
        "ffn_down_exps.bias": "mlp.experts.down_exps.weight_bias",
    },
    rope={"truncate": False},
)
MINIMAX_M2 = Architecture(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    gating=SIGMOID,
)
GRANITE_MOE = Architecture("granitemoeshared", "GraniteMoeSharedForCausalLM", interleaved=True, keys=GRANITE_KEYS)
ERNIE_MOE = Architecture(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    DEEPSEEK_MIXTURE_NAMES,
    keys={
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    },
)
OLMO_LAYER_NAMES = NORM_AFTER_ATTENTION | {"post_ffw_norm": "post_feedforward_layernorm"}
OLMO_3 = Architecture("olmo3", "Olmo3ForCausalLM", OLMO_LAYER_NAMES)
MINISTRAL_3 = Architecture(
    "ministral3",
    "Ministral3ForCausalLM",
    interleaved=True,
    fields={"sliding_window": None},
    rope_keys={
        "mscale": "rope.scaling.yarn_log_multiplier",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
        "llama_4_scaling_beta": "attention.temperature_scale",
    },
)


def mistral_3_variant(model: GgufModel) -> Architecture | None:
    """Return the row of Ministral 3 for files whose queries grow with their positions."""
    return MINISTRAL_3 if "attention.temperature_scale" in fields_of(model) else None


def olmo_variant(model: GgufModel) -> Architecture | None:
    """Return the row of OLMo 3 for files with windows."""
    return OLMO_3 if "attention.sliding_window" in fields_of(model) else None


def complete_stablelm(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the options of layers that the tensors show, under the names of this model type."""
    config["use_qkv_bias"] = config["attention_bias"]
    config["qk_layernorm"] = config["use_qk_norm"]
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in model.tensors


DOTS_1 = Architecture(
    "dots1",
    "Dots1ForCausalLM",
    DEEPSEEK_MIXTURE_NAMES,
    fields={"sliding_window": None},
    bias_layer="attn_q",
    gating=SIGMOID,
)


def complete_llama_4(model: GgufModel, config: dict[str, Any]) -> None:
    """Set whether queries and keys have norms: those of the model of 128 experts have none, as llama.cpp knows it.
    Raises GgufError."""
    config["use_qk_norm"] = read_size(model, "expert_count") != LLAMA_4_PLAIN_EXPERTS


LLAMA_4_PLAIN_EXPERTS = 128
LLAMA_4 = Architecture(
    "llama4_text",
    "Llama4ForCausalLM",
    {
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
        "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
        "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
    },
    keys={
        "feed_forward_length": "intermediate_size_mlp",
        "expert_feed_forward_length": "intermediate_size",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    gating=SIGMOID,
    complete=complete_llama_4,
)
OLMOE = Architecture("olmoe", "OlmoeForCausalLM", fields={"norm_topk_prob": False}, refused=("attention.clamp_kqv",))
FLEX_OLMO = Architecture("flex_olmo", "FlexOlmoForCausalLM", OLMO_LAYER_NAMES, fields={"norm_topk_prob": False})
HUNYUAN_MOE = Architecture(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    NORM_AFTER_ROPE
    | {
        "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
        "ffn_up_shexp": "mlp.shared_mlp.up_proj",
        "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    },
)
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", interleaved=True, fields={"sliding_window": None}, mixture=MIXTRAL
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": replace(QWEN2_MOE, mixture=QWEN2_MOE),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": replace(QWEN3_MOE, mixture=QWEN3_MOE),
    "qwen3next": replace(QWEN3_NEXT, mixture=QWEN3_NEXT),
    "qwen35": QWEN3_5,
    "qwen35moe": replace(QWEN3_5_MOE, mixture=QWEN3_5_MOE),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", {"ffn_up": "mlp.gate_up_proj"}),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", GEMMA_LAYER_NAMES, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", GEMMA_LAYER_NAMES, norm_offset=1.0),
    "gemma3n": GEMMA_3N,
    "gemma4": replace(GEMMA_4, mixture=GEMMA_4),
    "muse-glimmer": MUSE_GLIMMER,
    "gpt-oss": replace(GPT_OSS, mixture=GPT_OSS),
    "mistral3": Architecture(
        "mistral",
        "MistralForCausalLM",
        interleaved=True,
        fields={"sliding_window": None},
        variant=mistral_3_variant,
    ),
    **LATENT_ARCHITECTURES,
    "minimax-m2": replace(MINIMAX_M2, mixture=MINIMAX_M2),
    "granite": Architecture("granite", "GraniteForCausalLM", interleaved=True, keys=GRANITE_KEYS),
    "granitemoe": replace(GRANITE_MOE, mixture=GRANITE_MOE),
    "granitehybrid": replace(GRANITE_HYBRID, mixture=GRANITE_HYBRID),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", OLMO_LAYER_NAMES, variant=olmo_variant),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", NORM_AFTER_ATTENTION, bias_layer="attn_q"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5-moe": replace(ERNIE_MOE, mixture=ERNIE_MOE),
    "command-r": Architecture("cohere", "CohereForCausalLM"),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM"),
    "arcee": Architecture("arcee", "ArceeForCausalLM", interleaved=True),
    "dots1": replace(DOTS_1, mixture=DOTS_1),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", OLMO_LAYER_NAMES, complete=complete_windows),
    "hunyuan-dense": HUNYUAN_DENSE,
    "hunyuan-moe": replace(HUNYUAN_MOE, mixture=HUNYUAN_MOE),
    "lfm2": LFM2,
    "lfm2moe": replace(LFM2_MOE, mixture=LFM2_MOE),
    "nemotron": Architecture(
        "nemotron", "NemotronForCausalLM", norm_offset=1.0, keys={"attention.layer_norm_epsilon": "norm_eps"}
    ),
    "olmo": Architecture("olmo", "OlmoForCausalLM", interleaved=True, keys={"attention.clamp_kqv": "clip_qkv"}),
    "flex-olmo": replace(FLEX_OLMO, mixture=FLEX_OLMO),  # a name that llama.cpp has not settled yet
    "olmoe": replace(OLMOE, mixture=OLMOE),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", bias_layer="attn_q", complete=complete_stablelm),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fields={"sliding_window": 4096},  # of all published models; their files do not say it
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        complete=complete_biases,
    ),
    "llama4": replace(LLAMA_4, mixture=LLAMA_4),
    "falcon-h1": FALCON_H1,
    "nemotron_h": NEMOTRON_HYBRID,
    "nemotron_h_moe": replace(NEMOTRON_HYBRID, mixture=NEMOTRON_HYBRID),
    **LLAMA_ARCHITECTURES,
    **MIXTURE_ARCHITECTURES,
    **RECENT_ARCHITECTURES,
    **STEP_ARCHITECTURES,
    **AXES_ARCHITECTURES,
    **MAMBA_ARCHITECTURES,
    **GPT_ARCHITECTURES,
    **ENCODERS,
}


def find_architecture(model: GgufModel) -> Architecture:
    """Return the file's architecture. Raises GgufError if it is none that is read."""
    name, file = model.metadata.get("general.architecture"), model.paths[0].name
    for holds, kinds in FOREIGN_KINDS.items():
        if name in kinds or model.metadata.get("general.type") in kinds:
            raise GgufError(f"{file} holds {holds}")
    if isinstance(name, str) and name in REFUSED_ARCHITECTURES:
        reason = REFUSED_ARCHITECTURES[name]
        raise GgufError(f"{file} has the architecture {name}, which is not read from GGUF: {reason}")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise GgufError(
            f"{file} has the architecture {str(name)[:100]}, which is none of the {len(ARCHITECTURES)} that are read "
            "from GGUF (docs/models.md lists them)"
        )
    architecture = ARCHITECTURES[name]
    if model.metadata.get(name + ".expert_count"):
        if architecture.mixture is None:
            raise GgufError(f"{file} is a mixture of experts of the architecture {name}, which is not read from GGUF")
        architecture = architecture.mixture
    architecture = architecture.variant(model) or architecture
    _check_computation(model, architecture)
    return architecture


def _check_computation(model: GgufModel, architecture: Architecture) -> None:
    """Raise GgufError if a file asks for a computation that its architecture does not have here."""
    fields, file = fields_of(model), model.paths[0].name
    if has_positions_with_axes(model) and not architecture.has_axes:
        raise GgufError(f"{file} has positions with several axes, for images, which are not read from GGUF")
    for key in architecture.refused:
        if key in fields:
            raise GgufError(
                f"{file} gives {key} as {reprlib.repr(fields[key])}, which its architecture does not have here"
            )
    gating = fields.get("expert_gating_func") or architecture.gating
    if gating != architecture.gating:
        raise GgufError(f"{file} gives expert_gating_func as {reprlib.repr(gating)}, but its architecture has another")
