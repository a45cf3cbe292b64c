"""Writes weights as HQQ and torchao publish them.

Each function takes a weight float32 [out, in], and returns the tensors that hold it, by the ends of their names, and
the numbers that they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch

Parts = dict[str, torch.Tensor]
GROUP = 64


def quantize_hqq(bits: int, dtype: torch.dtype = torch.bfloat16):
    """Return a function that writes HQQ's tensors, with zero points that are no integers."""
    count, most = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}[bits], (1 << bits) - 1

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        grouped = weight.reshape(-1, GROUP)
        low, high = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).to(dtype)
        values = (grouped / scales.float() + zeros.float()).round().clamp(0, most)
        planes = torch.zeros(-(-len(values) // count) * count, GROUP, dtype=torch.int32)
        planes[: len(values)] = values.int()
        packed = sum(plane << bits * (count - 1 - i) for i, plane in enumerate(planes.view(count, -1, GROUP)))
        parts = {
            "W_q": packed if bits == 3 else packed.to(torch.uint8), "scale": scales, "zero": zeros,
            "shape": torch.tensor(weight.shape),
            **{name: torch.tensor(value, dtype=torch.int32)
               for name, value in (("nbits", bits), ("group_size", GROUP), ("axis", 1))},
            **{name: torch.tensor(int(name in ("channel_wise", "optimize")), dtype=torch.uint8)
               for name in ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "channel_wise", "optimize",
                            "round_zero")},
            "packing": torch.tensor(list(b"3bit_32" if bits == 3 else b"%dbit_u8" % bits), dtype=torch.uint8),
        }  # fmt: skip
        return parts, ((values - zeros.float()) * scales.float()).view(weight.shape)

    return quantize


def quantize_in_turn(*functions: Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]):
    """Return a function that writes one weight after another with one of these after another."""
    turn = cycle(functions)
    return lambda weight: next(turn)(weight)


def keep_plain(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write a weight that is not quantized."""
    return {"weight": weight.bfloat16()}, weight.bfloat16().float()


def describe_torchao(kind: str, block: tuple[int, int], target: str | None = None) -> dict:
    """Return what a header says of a weight."""
    data: dict = {"block_size": list(block), "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
    if target is not None:
        data["target_dtype"] = {"_type": "torch.dtype", "_data": target}
    return {"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale", "zero_point"]}


def quantize_torchao_integers(bits: int, group: int | None):
    """Return a function that writes signed integers in bytes. ``group`` None: a scale for each output."""
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def quantize(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        grouped = weight.view(len(weight), -1, group or weight.shape[1])
        low, high = grouped.amin(-1), grouped.amax(-1)
        scales = ((high - low) / (most - least)).bfloat16().float()
        zeros = (least - low / scales).round().clamp(least, most)
        values = (grouped / scales[..., None] + zeros[..., None]).round().clamp(least, most)
        parts = {"_weight_qdata": values.flatten(1).char(), "_weight_zero_point": zeros.char()}
        parts["_weight_scale"] = scales if group is None else scales.bfloat16()
        return parts, ((values - zeros[..., None]) * scales[..., None]).flatten(1)

    return quantize


def quantize_torchao_float8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write 8-bit floats with a scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {"_weight_qdata": values, "_weight_scale": scales}, values.float() * scales


def quantize_torchao_nibbles(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Write signed integers of 4 bits, two in a byte, with scales and what is added, [groups, out]."""
    grouped = weight.view(len(weight), -1, 32)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / 15).bfloat16().float()
    shifts = (low + 8 * scales).bfloat16().float()
    values = ((grouped - shifts[..., None]) / scales[..., None]).round().clamp(-8, 7)
    nibbles = values.flatten(1).int() & 15
    parts = {
        "_weight_qdata": (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8).view(torch.int8),
        "_weight_scale": scales.t().bfloat16().contiguous(),
        "_weight_zero_point": shifts.t().bfloat16().contiguous(),
    }
    return parts, (values * scales[..., None] + shifts[..., None]).flatten(1)
