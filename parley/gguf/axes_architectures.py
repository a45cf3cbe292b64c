"""Decoders in GGUF files whose positions have several axes, because their models read images: Qwen's, GLM's and
PaddleOCR's."""

from __future__ import annotations

from dataclasses import replace

from parley.gguf.architecture import DEEPSEEK_MIXTURE_NAMES, NORM_AFTER_ATTENTION, SIGMOID, Architecture, fields_of
from parley.gguf.header import GgufModel
from parley.gguf.state_architectures import complete_axes

QWEN2_VL = Architecture("qwen2_vl_text", "Qwen2VLForConditionalGeneration", complete=complete_axes, has_axes=True)
QWEN3_VL = replace(QWEN2_VL, model_type="qwen3_vl_text", class_name="Qwen3VLForConditionalGeneration")
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe_text",
    class_name="Qwen3VLMoeForConditionalGeneration",
    fields={"norm_topk_prob": True},
)
GLM4 = Architecture(
    "glm4",
    "Glm4ForCausalLM",
    {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    bias_layer="attn_q",
)
# llama.cpp turns positions with axes by halves of heads only, so its converter reorders queries and keys
GLM4_V = replace(
    GLM4,
    model_type="glm4v_text",
    class_name="Glm4vForConditionalGeneration",
    complete=complete_axes,
    has_axes=True,
    has_parted_pairs=True,
)
GLM_OCR = replace(GLM4_V, model_type="glm_ocr_text", class_name="GlmOcrForConditionalGeneration")
GLM4_MOE = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    NORM_AFTER_ATTENTION | DEEPSEEK_MIXTURE_NAMES,
    bias_layer="attn_q",
    gating=SIGMOID,
)
GLM4_V_MOE = replace(
    GLM4_MOE,
    model_type="glm4v_moe_text",
    class_name="Glm4vMoeForConditionalGeneration",
    complete=complete_axes,
    has_axes=True,
)


def has_positions_with_axes(model: GgufModel) -> bool:
    """Whether a file says which dimensions each axis of positions turns."""
    sections = fields_of(model).get("rope.dimension_sections")
    return isinstance(sections, list) and any(sections)


def glm_variant(model: GgufModel) -> Architecture | None:
    """Return the row of GLM-4V, or of GLM-OCR, whose attention has no biases, for files of these."""
    if not has_positions_with_axes(model):
        return None
    return GLM4_V if "blk.0.attn_q.bias" in model.tensors else GLM_OCR


def glm_mixture_variant(model: GgufModel) -> Architecture | None:
    """Return the row of GLM-4.5V for its files."""
    return GLM4_V_MOE if has_positions_with_axes(model) else None


AXES_ARCHITECTURES = {
    "qwen2vl": QWEN2_VL,
    "qwen3vl": QWEN3_VL,
    "qwen3vlmoe": replace(QWEN3_VL_MOE, mixture=QWEN3_VL_MOE),
    "glm4": replace(GLM4, variant=glm_variant),
    "glm4moe": replace(GLM4_MOE, mixture=replace(GLM4_MOE, variant=glm_mixture_variant)),
    "paddleocr": replace(QWEN2_VL, model_type="paddleocr_vl_text", class_name="PaddleOCRVLForConditionalGeneration"),
}
