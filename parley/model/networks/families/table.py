"""The model types that run on the fused decoder."""

from __future__ import annotations

from parley.model.networks.families.decoder_family import DecoderFamily
from parley.model.networks.families.gemma_decoders import GEMMA, GEMMA2, GEMMA3
from parley.model.networks.families.layer_norm_decoders import COHERE, COHERE2, NEMOTRON, PHI, STABLELM, STARCODER2
from parley.model.networks.families.mixture_decoders import GLM4_MOE, GPT_OSS, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from parley.model.networks.families.rms_norm_decoders import (
    ARCEE,
    ERNIE,
    GLM,
    GLM4,
    GRANITE,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN2_VL,
    QWEN3,
    QWEN3_VL,
    SEED_OSS,
    SMOLLM3,
)

FAMILIES: dict[str, DecoderFamily] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl_text": QWEN3_VL,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "phi3": PHI3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "smollm3": SMOLLM3,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "glm": GLM,
    "glm4": GLM4,
    "ernie4_5": ERNIE,
    "starcoder2": STARCODER2,
    "stablelm": STABLELM,
    "phi": PHI,
    "nemotron": NEMOTRON,
    "arcee": ARCEE,
    "seed_oss": SEED_OSS,
    "ministral": MINISTRAL,
}
FUSABLE_TYPES = frozenset(FAMILIES)
