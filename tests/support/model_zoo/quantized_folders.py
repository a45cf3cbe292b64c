"""The zoo's folders with quantized weights: safetensors in the forms of their makers, and GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from support.decoder_families import FAMILIES
from support.model_zoo.zoo_folder import ZooFolder, write_plain
from support.tiny_models import ARCHITECTURES

# Sizes with whole groups and blocks, and a rest of both
SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320}
EXPERT_SIZES: dict[str, Any] = {"moe_intermediate_size": 96}
ROUNDED_ACTIVATIONS = {"W8A8"}
# Each form once with Llama, and those that families are published in with these
FORMS = (
    "FP8, 128 x 128 blocks", "FP8, one scale", "FP8 of fbgemm", "FP8 of compressed-tensors, one scale",
    "FP8 of compressed-tensors, channels", "FP8 of compressed-tensors, blocks", "W4A16, groups", "W4A16, channels",
    "W4A16, zero points", "W8A16, groups", "W8A16, channels", "W8A8", "NVFP4", "MXFP4 of compressed-tensors",
    "MXFP8 of compressed-tensors", "W4A8",
    "GPTQ 4 bits", "GPTQ 4 bits, act-order", "GPTQ 4 bits, version 2", "GPTQ 4 bits, no groups", "GPTQ 8 bits",
    "GPTQ 2 bits", "GPTQ 3 bits", "AWQ", "AWQ for GEMV", "ModelOpt FP8", "ModelOpt MXFP8", "ModelOpt NVFP4",
    "Quark FP8", "Quark FP8, channels", "Quark int8", "Quark MXFP4", "Quark int4", "Quark int4, symmetric",
    "BitNet", "BitNet, autobitlinear", "AutoRound 4 bits",
    "AutoRound 4 bits, as AWQ", "bitsandbytes nf4", "bitsandbytes nf4, double", "bitsandbytes int8",
    "bitsandbytes fp4", "bitsandbytes fp4, double", "HQQ 4 bits", "HQQ 8 bits", "HQQ 3 bits", "HQQ 2 bits", "HQQ 1 bit",
    "HQQ 4 and 8 bits", "HQQ 4 bits, some layers", "torchao int8", "torchao int4 in bytes", "torchao int4",
    "torchao FP8",
)  # fmt: skip
PUBLISHED_FORMS = {
    "bitnet": ("BitNet, autobitlinear",),
    "qwen2": ("GPTQ 4 bits", "AWQ", "W8A8", "FP8, one scale", "bitsandbytes nf4, double"),
    "qwen3": ("FP8, 128 x 128 blocks", "GPTQ 4 bits", "AWQ", "NVFP4", "torchao FP8", "torchao int4"),
    "qwen3_moe": (
        "FP8, 128 x 128 blocks", "GPTQ 4 bits", "AWQ", "W4A16, groups", "NVFP4", "ModelOpt NVFP4", "Quark MXFP4",
        "Quark FP8",
    ),
    "mixtral": (
        "HQQ 4 bits", "HQQ 4 and 8 bits", "HQQ 4 and 8 bits, in several orders", "AWQ",
        "GPTQ 4 bits, act-order", "FP8 of compressed-tensors, one scale",
        "W4A16, groups",
    ),
    "glm4_moe": ("FP8 of compressed-tensors, channels", "AWQ"),
    "phi3": ("GPTQ 4 bits", "AWQ", "W4A16, groups"),
    "mistral": ("FP8, one scale", "AWQ"),
    "gemma2": ("W8A8", "W4A16, groups"),
    "gemma3": ("GPTQ 4 bits", "bitsandbytes nf4, double", "FP8 of compressed-tensors, channels"),
    "gemma3n": ("W4A16, groups", "FP8 of compressed-tensors, channels", "bitsandbytes nf4, double"),
    "gemma4": ("W4A16, groups", "FP8 of compressed-tensors, channels", "NVFP4"),
    "gemma4 with inputs of layers": ("GPTQ 4 bits", "bitsandbytes nf4, double"),
    "granite": ("FP8 of compressed-tensors, channels", "W4A16, groups"),
    "gpt_neo": ("GPTQ 4 bits", "AWQ"),
    "minimax_m2": ("FP8, 128 x 128 blocks", "AWQ"),
    "kolibri1": ("FP8, 128 x 128 blocks", "NVFP4"),
    "nemotron_h with latents of experts": ("ModelOpt NVFP4", "ModelOpt FP8"),
    "apertus": ("FP8 of compressed-tensors, channels", "W4A16, groups"),
    "lfm3": ("W4A16, groups",),
    "olmo_hybrid": ("FP8 of compressed-tensors, channels",),
}  # fmt: skip
# Forms of folders of MLX
MLX_FORMS = {
    "llama": (
        "MLX 4 bits", "MLX 8 bits", "MLX 2 bits", "MLX 3 bits", "MLX 5 bits", "MLX 6 bits", "MLX 4 and 8 bits",
        "MLX mxfp4", "MLX mxfp8", "MLX nvfp4", "MLX bfloat16",
    ),
    "qwen3": ("MLX 4 bits",),
    "gemma2": ("MLX 4 bits",),
    "gemma3n": ("MLX 4 bits",),
    "gemma4 of experts": ("MLX 4 bits",),
    "gemma4 with inputs of layers": ("MLX 4 bits",),
    "qwen3_moe": ("MLX 4 bits", "MLX bfloat16"),
    "gpt_oss": ("MLX 4 bits",),
    "deepseek_v3": ("MLX 4 bits", "MLX bfloat16"),
    "qwen3_next": ("MLX 4 bits", "MLX bfloat16"),
}  # fmt: skip
SHIFTED_BY_MLX = ("qwen3_next",)  # converters add one to the weights of norms
# Forms of tensors that hold the weights of all experts
STACKED_FORMS = {
    "qwen3_moe": ("FP8, 128 x 128 blocks", "torchao int8", "torchao int4 in bytes", "torchao int4", "torchao FP8"),
    "mixtral": ("FP8, 128 x 128 blocks", "torchao int4"),
    "mistral4": ("FP8, 128 x 128 blocks",),
}
GGUF_KINDS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4", "Q4_K_M", "Q5_K_M",
)  # fmt: skip
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
GGUF_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "phi3": ("phi3", {"sliding_window": 53, "pad_token_id": 0}),
    "gemma": ("gemma", {"head_dim": 32, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", GEMMA | {"sliding_window": 45}),
    "gemma3": ("gemma3_text", GEMMA | {"sliding_window": 33, "rope_theta": 1e6, "num_hidden_layers": 7}),
}
GGUF_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        | {"shared_expert_intermediate_size": 256, "norm_topk_prob": False},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
        | {"norm_topk_prob": True},
    ),
}
MIXTURE_KINDS = ("BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "Q4_K_M")


def quantized_folders() -> list[ZooFolder]:
    """Return all of them."""
    folders = [_quantized_folder("llama", form) for form in FORMS]
    folders += [_quantized_folder(family, form) for family, forms in PUBLISHED_FORMS.items() for form in forms]
    folders += [
        _quantized_folder(family, form, is_published=False) for family, forms in STACKED_FORMS.items() for form in forms
    ]
    folders += [_mlx_folder(family, form) for family, forms in MLX_FORMS.items() for form in forms]
    folders.append(ZooFolder("gpt_oss, MXFP4", "gpt_oss", "MXFP4 of GPT-OSS", _write_gpt_oss, is_quantized=True))
    folders += [_gguf_folder("llama", "llama", {}, kind) for kind in GGUF_KINDS]
    folders += [_gguf_folder(name, *family, "Q8_0") for name, family in GGUF_FAMILIES.items()]
    folders += [_gguf_folder(name, *shape, kind) for name, shape in GGUF_MIXTURES.items() for kind in MIXTURE_KINDS]
    return folders


def family_fields(name: str) -> tuple[str, dict[str, Any]]:
    """Return the model type and the fields of a family of the decoder's tests."""
    return (ARCHITECTURES | FAMILIES)[name]


def _quantized_folder(family: str, form: str, *, is_published: bool = True) -> ZooFolder:
    model_type, fields = family_fields(family)
    sizes = SIZES | (EXPERT_SIZES if "moe_intermediate_size" in fields else {})
    return ZooFolder(
        f"{family}, {form}" + ", experts in one tensor" * (not is_published),
        model_type,
        form,
        partial(_write_form, model_type=model_type, fields={**fields, **sizes}, form=form, is_published=is_published),
        is_quantized=True,
        has_rounded_activations=form in ROUNDED_ACTIVATIONS,
    )


def _write_form(
    home: Path, *, model_type: str, fields: Mapping[str, Any], form: str, is_published: bool
) -> tuple[Path, Path]:
    from support.model_zoo import quantized_files

    source = write_plain(home / "source", model_type, fields, is_published=is_published)
    return quantized_files.write_quantized(source, home, quantized_files.FORMS[form])


def _mlx_folder(family: str, form: str) -> ZooFolder:
    model_type, fields = family_fields(family)
    sizes = SIZES | (EXPERT_SIZES if "moe_intermediate_size" in fields else {})
    write = partial(_write_mlx, model_type=model_type, fields={**fields, **sizes}, form=form)
    return ZooFolder(f"{family}, {form}", model_type, form, write, is_quantized=form != "MLX bfloat16")


def _write_mlx(home: Path, *, model_type: str, fields: Mapping[str, Any], form: str) -> tuple[Path, Path]:
    from support.model_zoo import mlx_files

    source = write_plain(home / "source", model_type, fields)
    return mlx_files.write_mlx(source, home, mlx_files.MLX_FORMS[form], shifts_norms=model_type in SHIFTED_BY_MLX)


def _write_gpt_oss(home: Path) -> tuple[Path, Path]:
    from support.mxfp4_files import write_mxfp4

    plain, packed = write_mxfp4(home)
    return packed, plain


def _gguf_folder(name: str, model_type: str, fields: Mapping[str, Any], kind: str) -> ZooFolder:
    return ZooFolder(
        f"{name}, GGUF {kind}",
        model_type,
        f"GGUF {kind}",
        partial(_write_gguf, model_type=model_type, fields=fields, kind=kind),
        is_quantized=True,
    )


def _write_gguf(home: Path, *, model_type: str, fields: Mapping[str, Any], kind: str) -> tuple[Path, Path]:
    """Write a file, and the folder with the numbers that its blocks mean."""
    from support.model_zoo.gguf_numbers import write_gguf_pair

    return write_gguf_pair(home, model_type, fields, kind)
