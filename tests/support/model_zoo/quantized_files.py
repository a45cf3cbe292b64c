"""Writes quantized checkpoints as they are published, and folders with the numbers that they mean.

Each function of ``FORMS`` takes a weight float32 [out, in] and returns the tensors that hold it, by the ends of their
names, and what they mean. Rounding is plain: what matters is that both agree.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support.model_zoo.float_zero_files import (
    describe_torchao,
    keep_plain,
    quantize_hqq,
    quantize_in_turn,
    quantize_torchao_float8,
    quantize_torchao_integers,
    quantize_torchao_nibbles,
)

Parts = dict[str, torch.Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP = 32
LINEAR = re.compile(r"(self_attn|attention|mlp|experts|block_sparse_moe).*(proj|\.w[123]|fc[12])\.weight$")

STACKED = re.compile(r"experts\.(gate_up|down)_proj$")  # all experts of a layer


class QuantizedForm(NamedTuple):
    """``config``: the checkpoint's quantization_config. ``quantize``: as in the module's docstring. ``describe``:
    from a weight's shape to the description of it in the header of the file."""

    config: dict[str, Any]
    quantize: Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]
    describe: Callable[[torch.Size], dict[str, Any]] | None = None


def pack_stream(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers [rows, n] along each row into int32, as one stream of bits."""
    places = torch.arange(numbers.shape[1])[:, None] * bits + torch.arange(bits)
    stream = torch.zeros(len(numbers), -(-numbers.shape[1] * bits // 32) * 32, dtype=torch.int64)
    stream[:, places.flatten()] = ((numbers.long()[..., None] >> torch.arange(bits)) & 1).flatten(1)
    return (stream.view(len(numbers), -1, 32) << torch.arange(32)).sum(-1).to(torch.int32)


def pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers [rows, n] from 0 on along each row into int32, the first in the lowest bits."""
    if bits == 3:
        return pack_stream(numbers, bits)
    per_word = 32 // bits
    words = torch.zeros(len(numbers), numbers.shape[1] // per_word, dtype=torch.int64)
    for k in range(per_word):
        words |= numbers[:, k::per_word].long() << (bits * k)
    return words.to(torch.int32)  # wraps


def in_groups(weight: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """Return the weight as [out, groups, group]."""
    return weight.view(len(weight), -1, group)


def round_asymmetric(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers [out, in], scales and zero points [out, groups], all float32."""
    grouped, most = in_groups(weight, group), (1 << bits) - 1
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half().float()
    zeros = (-low / scales).round().clamp(1, most)
    values = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return values.flatten(1), scales, zeros


def expand(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | float) -> torch.Tensor:
    """Return what integers mean: scale * (value - zero)."""
    size = values.shape[1] // scales.shape[1]
    zeros = zeros.repeat_interleave(size, 1) if isinstance(zeros, torch.Tensor) else zeros
    return (values - zeros) * scales.repeat_interleave(size, 1)


def quantize_gptq(bits: int, group: int, *, reorder: bool = False, version: int = 1):
    """Return a function that writes GPTQ's tensors. ``reorder``: as act-order does. ``version``: of its format."""

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        index = torch.arange(weight.shape[1]) // size
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5)) if reorder else None
        values, scales, zeros = round_asymmetric(weight if order is None else weight[:, order], bits, size)
        dequantized = expand(values, scales, zeros)
        if order is not None:
            back = order.argsort()
            values, dequantized, index = values[:, back], dequantized[:, back], index[back]
        parts = {
            "qweight": pack_bits(values, bits).T,
            "qzeros": pack_bits(zeros.T - (2 - version), bits),
            "scales": scales.T.half(),
            "g_idx": index.int(),
        }
        return parts, dequantized

    return quantize


NF4 = torch.tensor([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                    0.7229568362236023, 1.0])  # fmt: skip
SIZES4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
TABLES = {"nf4": NF4, "fp4": torch.cat((SIZES4, -SIZES4))}


def quantize_table(kind: str, *, nested: bool):
    """Return a function that writes bitsandbytes' nf4 or fp4. ``nested``: its scales are quantized as well."""
    table = TABLES[kind]

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        grouped = weight.reshape(-1, 64)
        scales = grouped.abs().amax(-1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        parts = {"weight.quant_map": table.clone(), "weight.absmax": scales}
        if nested:
            offset, numbers = float(scales.mean()), torch.linspace(-1, 1, 256)
            blocks = (scales - offset).split(256)
            nested_scales = torch.stack([block.abs().max() for block in blocks])
            codes = torch.cat(
                [
                    ((b - 0) / s)[:, None].sub(numbers).abs().argmin(1)
                    for b, s in zip(blocks, nested_scales, strict=True)
                ]
            )
            scales = numbers[codes] * nested_scales.repeat_interleave(256)[: len(codes)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": nested_scales,
                      "weight.nested_quant_map": numbers}  # fmt: skip
        codes = (grouped / scales[:, None])[..., None].sub(table).abs().argmin(-1)
        parts["weight"] = (codes.view(-1, 2)[:, :1] * 16 + codes.view(-1, 2)[:, 1:]).to(torch.uint8)
        parts["weight.quant_state.bitsandbytes__" + kind] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return parts, (table[codes] * scales[:, None]).view(weight.shape)

    return quantize


def quantize_llm_int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write bitsandbytes' int8."""
    most = weight.abs().amax(1)
    values = (weight / most[:, None] * 127).round()
    parts = {"weight": values.to(torch.int8), "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, values * most[:, None] / 127


def quantize_awq(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write AWQ's tensors (gemm)."""
    values, scales, zeros = round_asymmetric(weight, 4, GROUP)
    order = torch.arange(len(weight)).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    parts = {
        "qweight": pack_bits(values.T[:, order], 4),
        "qzeros": pack_bits(zeros.T[:, order], 4),
        "scales": scales.T.half(),
    }
    return parts, expand(values, scales, zeros)


def quantize_awq_gemv(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write AWQ's tensors for its kernel gemv: a row's scales and zero points fill whole words for 128 inputs."""
    values, scales, zeros = round_asymmetric(weight, 4, GROUP)
    words = math.ceil(math.ceil(scales.shape[1] / 8) / 4) * 4
    pad = (0, 8 * words - scales.shape[1])
    parts = {
        "qweight": pack_bits(values, 4),
        "qzeros": pack_bits(torch.nn.functional.pad(zeros, pad), 4),
        "scales": torch.nn.functional.pad(scales, pad).half(),
    }
    return parts, expand(values, scales, zeros)


def quantize_quark_int4(order: tuple[int, ...], *, symmetric: bool):
    """Return a function that writes Quark's int4: as AWQ's, with other names; symmetric ones in two's complement."""

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        if symmetric:
            scales = (in_groups(weight).abs().amax(-1) / 7).bfloat16().float()
            signed = (in_groups(weight) / scales[..., None]).round().clamp(-8, 7).flatten(1)
            values, zeros, meant = signed % 16, None, expand(signed, scales, 0.0)
        else:
            values, scales, zeros = round_asymmetric(weight, 4, GROUP)
            meant = expand(values, scales, zeros)
        places = torch.arange(len(weight)).view(-1, 8)[:, list(order)].flatten()
        parts = {"weight": pack_bits(values.T[:, places], 4), "weight_scale": scales.T.float()}
        if zeros is not None:
            parts["weight_zero_point"] = pack_bits(zeros.T[:, places], 4)
        return parts, meant

    return quantize


def quantize_bitnet(*, multiplied: bool):
    """Return a function that writes weights of -1, 0 and 1, each plus one, four in a byte."""

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        scale = weight.abs().mean().bfloat16().float()
        values = (weight / scale).round().clamp(-1, 1)
        rows = (values + 1).to(torch.uint8).view(4, -1, weight.shape[1])
        packed = rows[0] | rows[1] << 2 | rows[2] << 4 | rows[3] << 6
        stored = scale if multiplied else (1 / scale).bfloat16().float()
        return {"weight": packed, "weight_scale": stored.reshape(1)}, values * (stored if multiplied else 1 / stored)

    return quantize


def quantize_packed(bits: int, group: int | None, *, symmetric: bool = True):
    """Return a function that writes the tensors of compressed-tensors' pack-quantized."""

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        size, middle = group or weight.shape[1], 1 << (bits - 1)
        if symmetric:
            scales = (in_groups(weight, size).abs().amax(-1) / (middle - 1)).bfloat16().float()
            values = (in_groups(weight, size) / scales[..., None]).round().clamp(-middle, middle - 1).flatten(
                1
            ) + middle
            zeros = torch.full_like(scales, middle)
        else:
            values, scales, zeros = round_asymmetric(weight, bits, size)
        parts = {
            "weight_packed": pack_bits(values, bits),
            "weight_scale": scales.bfloat16() if symmetric else scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack_bits(zeros.T, bits).T
        return parts, expand(values, scales, zeros)

    return quantize


def quantize_int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write int8 weights with a scale for each output (compressed-tensors' int-quantized)."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales.float()


def quantize_int4_in_bytes(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write integers of 4 bits, each in a byte (compressed-tensors' int-quantized for W4A8)."""
    scales = (weight.abs().amax(1, keepdim=True) / 7).bfloat16()
    values = (weight / scales.float()).round().clamp(-8, 7)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales.float()


def quantize_quark_int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write Quark's int8 weights with a scale for each output."""
    parts, meant = quantize_int8(weight)
    parts |= {"weight_scale": parts["weight_scale"].float().flatten(), "input_scale": torch.tensor(0.1)}
    zeros = torch.zeros(len(weight), dtype=torch.int8)
    return parts | {"weight_zero_point": zeros, "input_zero_point": torch.tensor(0, dtype=torch.int8)}, meant


def quantize_mxfp8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write MXFP8: groups of 32 with a power of two as their scale, which is an exponent in a byte."""
    grouped = in_groups(weight, 32)
    exponents = (grouped.abs().amax(-1) / 448).log2().ceil().clamp(-127, 127)
    values = (grouped / 2.0 ** exponents[..., None]).to(torch.float8_e4m3fn)
    parts = {"weight": values.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}
    return parts, (values.float() * 2.0 ** exponents[..., None]).flatten(1)


def quantize_fp8(scale_name: str, block: tuple[int, int] | None = None, *, per_output: bool = False):
    """Return a function that writes FP8 weights with one scale, one for each output, or one for each ``block``."""

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        if block is not None:
            rows, columns = (-(-size // block_size) for size, block_size in zip(weight.shape, block, strict=True))
            scales = torch.empty(rows, columns)
            for i in range(rows):
                for j in range(columns):
                    part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
                    scales[i, j] = part.abs().max() / 448
            spread = scales.repeat_interleave(block[0], 0)[: len(weight)]
            spread = spread.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
        else:
            scales = spread = weight.abs().amax(1, keepdim=True) / 448 if per_output else weight.abs().max() / 448
        values = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        parts = {"weight": values, scale_name: scales}
        if block is None and not per_output:
            parts["input_scale"] = torch.tensor(1.0)
        return parts, values.float() * spread

    return quantize


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the nearest 4-bit floats, uint8."""
    return (values[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack uint8 codes [out, in] two in a byte, the first in the low bits."""
    return codes[:, 0::2] + 16 * codes[:, 1::2]


def quantize_nvfp4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write compressed-tensors' NVFP4: groups of 16 with scales in FP8, and one scale for all."""
    grouped = in_groups(weight, 16)
    whole = 448 * 6 / weight.abs().max()
    scales = (grouped.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    wide = (scales.float() / whole)[..., None]
    codes = nearest_e2m1(grouped / wide)
    parts = {
        "weight_packed": pack_nibbles(codes.flatten(1)),
        "weight_scale": scales,
        "weight_global_scale": whole.reshape(1),
        "input_global_scale": torch.ones(1),
    }
    return parts, (E2M1[codes.int()] * wide).flatten(1)


def quantize_modelopt_nvfp4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write NVFP4 as NVIDIA's Model Optimizer does: other names, and the scale for all is multiplied by."""
    parts, meant = quantize_nvfp4(weight)
    return {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": parts["weight_global_scale"].reciprocal().reshape(()),
        "input_scale": torch.tensor(1.0),
    }, meant


def quantize_mxfp4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write compressed-tensors' MXFP4: groups of 32 with a power of two as their scale."""
    grouped = in_groups(weight, 32)
    exponents = (grouped.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    codes = nearest_e2m1(grouped / 2.0 ** exponents[..., None])
    parts = {"weight_packed": pack_nibbles(codes.flatten(1)), "weight_scale": (exponents + 127).to(torch.uint8)}
    return parts, (E2M1[codes.int()] * 2.0 ** exponents[..., None]).flatten(1)


def quantize_quark_mxfp4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write Quark's MXFP4: other names."""
    parts, meant = quantize_mxfp4(weight)
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}, meant


def quark_config(pack_method: str = "reorder", **weight: Any) -> dict[str, Any]:
    """Return a config of Quark."""
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": pack_method},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
    }


def compressed_config(stored_as: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"],
        "config_groups": {"group_0": group | {"input_activations": activations}},
    }


BLOCKS = [128, 128]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FLOATS = {"type": "float", "num_bits": 8}
TOKEN_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
BITS4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
HQQ = {
    "quant_method": "hqq",
    "quant_config": {"weight_quant_params": {"nbits": 4, "axis": 1}},
    "skip_modules": ["lm_head"],
}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
MODEL_OPT = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.27.0"}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False, "data_type": "int",
              "block_name_to_quantize": "model.layers"}  # fmt: skip
FORMS: dict[str, QuantizedForm] = {
    "FP8, 128 x 128 blocks": QuantizedForm(
        FP8 | {"weight_block_size": BLOCKS}, quantize_fp8("weight_scale_inv", (128, 128))
    ),
    "FP8, one scale": QuantizedForm(FP8 | {"activation_scheme": "static"}, quantize_fp8("weight_scale")),
    "FP8 of fbgemm": QuantizedForm(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, quantize_fp8("weight_scale", per_output=True)
    ),
    "FP8 of compressed-tensors, one scale": QuantizedForm(
        compressed_config("float-quantized", **FLOATS, strategy="tensor"), quantize_fp8("weight_scale")
    ),
    "FP8 of compressed-tensors, channels": QuantizedForm(
        compressed_config("float-quantized", **FLOATS, strategy="channel"),
        quantize_fp8("weight_scale", per_output=True)
    ),
    "FP8 of compressed-tensors, blocks": QuantizedForm(
        compressed_config("float-quantized", **FLOATS, strategy="block", block_structure=BLOCKS),
        quantize_fp8("weight_scale", (128, 128)),
    ),
    "W4A16, groups": QuantizedForm(
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=GROUP), quantize_packed(4, GROUP)
    ),
    "W4A16, channels": QuantizedForm(
        compressed_config("pack-quantized", num_bits=4, strategy="channel"), quantize_packed(4, None)
    ),
    "W4A16, zero points": QuantizedForm(
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False),
        quantize_packed(4, GROUP, symmetric=False),
    ),
    "W8A16, groups": QuantizedForm(
        compressed_config("pack-quantized", num_bits=8, strategy="group", group_size=GROUP), quantize_packed(8, GROUP)
    ),
    "W8A16, channels": QuantizedForm(
        compressed_config("pack-quantized", num_bits=8, strategy="channel"), quantize_packed(8, None)
    ),
    "W8A8": QuantizedForm(
        compressed_config("int-quantized", TOKEN_INT8, num_bits=8, strategy="channel"), quantize_int8
    ),
    "NVFP4": QuantizedForm(
        compressed_config("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        quantize_nvfp4,
    ),
    "MXFP4 of compressed-tensors": QuantizedForm(
        compressed_config("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
        quantize_mxfp4
    ),
    "MXFP8 of compressed-tensors": QuantizedForm(
        compressed_config("mxfp8-quantized", type="float", num_bits=8, strategy="group", group_size=32), quantize_mxfp8
    ),
    "W4A8": QuantizedForm(
        compressed_config("int-quantized", TOKEN_INT8, num_bits=4, strategy="channel"), quantize_int4_in_bytes
    ),
    "GPTQ 4 bits": QuantizedForm(GPTQ, quantize_gptq(4, GROUP)),
    "GPTQ 4 bits, act-order": QuantizedForm(GPTQ | {"desc_act": True}, quantize_gptq(4, GROUP, reorder=True)),
    "GPTQ 4 bits, version 2": QuantizedForm(
        GPTQ | {"checkpoint_format": "gptq_v2"}, quantize_gptq(4, GROUP, version=2)
    ),
    "GPTQ 4 bits, no groups": QuantizedForm(GPTQ | {"group_size": -1}, quantize_gptq(4, -1)),
    "GPTQ 8 bits": QuantizedForm(GPTQ | {"bits": 8}, quantize_gptq(8, GROUP)),
    "GPTQ 2 bits": QuantizedForm(GPTQ | {"bits": 2}, quantize_gptq(2, GROUP)),
    "GPTQ 3 bits": QuantizedForm(GPTQ | {"bits": 3}, quantize_gptq(3, GROUP)),
    "ModelOpt FP8": QuantizedForm(MODEL_OPT | {"quant_algo": "FP8"}, quantize_fp8("weight_scale")),
    "ModelOpt NVFP4": QuantizedForm(MODEL_OPT | {"quant_algo": "NVFP4", "group_size": 16}, quantize_modelopt_nvfp4),
    "ModelOpt MXFP8": QuantizedForm(MODEL_OPT | {"quant_algo": "MXFP8"}, quantize_mxfp8),
    "Quark FP8": QuantizedForm(quark_config(dtype="fp8_e4m3", qscheme="per_tensor"), quantize_fp8("weight_scale")),
    "Quark FP8, channels": QuantizedForm(
        quark_config(dtype="fp8_e4m3", qscheme="per_channel", ch_axis=0), quantize_fp8("weight_scale", per_output=True)
    ),
    "Quark int8": QuantizedForm(quark_config(dtype="int8", qscheme="per_channel", symmetric=True), quantize_quark_int8),
    "Quark MXFP4": QuantizedForm(
        quark_config(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"), quantize_quark_mxfp4
    ),
    "Quark int4": QuantizedForm(
        quark_config(dtype="uint4", qscheme="per_group", group_size=GROUP, symmetric=False),
        quantize_quark_int4((0, 2, 4, 6, 1, 3, 5, 7), symmetric=False),
    ),
    "Quark int4, symmetric": QuantizedForm(
        quark_config("order", dtype="int4", qscheme="per_group", group_size=GROUP, symmetric=True),
        quantize_quark_int4(tuple(range(8)), symmetric=True),
    ),
    "BitNet": QuantizedForm(
        {"quant_method": "bitnet", "modules_to_not_convert": None}, quantize_bitnet(multiplied=False)
    ),
    "BitNet, autobitlinear": QuantizedForm(
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
        quantize_bitnet(multiplied=True),
    ),
    "AutoRound 4 bits": QuantizedForm(AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, quantize_gptq(4, GROUP)),
    "AutoRound 4 bits, as AWQ": QuantizedForm(AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, quantize_awq),
    "bitsandbytes nf4": QuantizedForm(BITS4, quantize_table("nf4", nested=False)),
    "bitsandbytes nf4, double": QuantizedForm(
        BITS4 | {"bnb_4bit_use_double_quant": True}, quantize_table("nf4", nested=True)
    ),
    "bitsandbytes fp4": QuantizedForm(BITS4 | {"bnb_4bit_quant_type": "fp4"}, quantize_table("fp4", nested=False)),
    "bitsandbytes fp4, double": QuantizedForm(
        BITS4 | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}, quantize_table("fp4", nested=True)
    ),
    "HQQ 4 bits": QuantizedForm(HQQ, quantize_hqq(4)),
    "HQQ 8 bits": QuantizedForm(HQQ, quantize_hqq(8)),
    "HQQ 3 bits": QuantizedForm(HQQ, quantize_hqq(3, torch.float16)),
    "HQQ 2 bits": QuantizedForm(HQQ, quantize_hqq(2)),
    "HQQ 1 bit": QuantizedForm(HQQ, quantize_hqq(1)),
    "HQQ 4 and 8 bits": QuantizedForm(HQQ, quantize_in_turn(quantize_hqq(4), quantize_hqq(8))),
    "HQQ 4 and 8 bits, in several orders": QuantizedForm(
        HQQ, quantize_in_turn(*(quantize_hqq(bits) for bits in (4, 4, 8, 8, 4, 4)))
    ),
    "HQQ 4 bits, some layers": QuantizedForm(HQQ, quantize_in_turn(quantize_hqq(4), keep_plain)),
    "torchao int8": QuantizedForm(
        TORCHAO, quantize_torchao_integers(8, None), lambda shape: describe_torchao("Int8Tensor", (1, shape[1]))
    ),
    "torchao int4 in bytes": QuantizedForm(
        TORCHAO,
        quantize_torchao_integers(4, GROUP),
        lambda shape: describe_torchao("IntxUnpackedToInt8Tensor", (1, GROUP), "int4"),
    ),
    "torchao int4": QuantizedForm(
        TORCHAO, quantize_torchao_nibbles, lambda shape: describe_torchao("Int4Tensor", (1, GROUP))
    ),
    "torchao FP8": QuantizedForm(
        TORCHAO, quantize_torchao_float8, lambda shape: describe_torchao("Float8Tensor", (1, shape[1]))
    ),
    "bitsandbytes int8": QuantizedForm({"quant_method": "bitsandbytes", "load_in_8bit": True}, quantize_llm_int8),
    "AWQ": QuantizedForm(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, quantize_awq
    ),
    "AWQ for GEMV": QuantizedForm(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemv", "zero_point": True},
        quantize_awq_gemv,
    ),
}  # fmt: skip


def write_quantized(source: Path, home: Path, form: QuantizedForm) -> tuple[Path, Path]:
    """Write the model in ``source`` with quantized linear layers, and with what they mean in float32: both folders."""
    quantized, plain = home / "quantized", home / "plain"
    stored: Parts = {}
    meant: Parts = {}
    metadata = {"format": "pt"}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = tensor
        meant[name] = tensor.float()
        if LINEAR.search(name) and "shared_expert_gate" not in name:
            parts, meant[name] = form.quantize(tensor.float())
            del stored[name]
            if form.describe is not None:
                metadata[name] = json.dumps(form.describe(tensor.shape))
            stored |= {name.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()}
        elif STACKED.search(name):
            experts = [form.quantize(expert) for expert in tensor.float()]
            meant[name] = torch.stack([numbers for _, numbers in experts])
            parts = {end: torch.stack([expert[end] for expert, _ in experts]) for end in experts[0][0]}
            del stored[name]
            if form.describe is None:
                stored |= {name + end.removeprefix("weight"): part for end, part in parts.items()}
            else:
                description = form.describe(tensor.shape[1:])
                description["_data"]["block_size"].insert(0, 1)
                metadata[name] = json.dumps(description)
                module, _, own = name.rpartition(".")
                stored |= {f"{module}.{end.replace('weight', own, 1)}": part for end, part in parts.items()}
    for folder, tensors, fields in (
        (quantized, stored, {"quantization_config": form.config}),
        (plain, meant, {"dtype": "float32"}),
    ):
        shutil.copytree(source, folder)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata
        )
        change_config(folder, **fields)
    return quantized, plain


def change_config(folder: Path, **fields: Any) -> None:
    """Set members of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
