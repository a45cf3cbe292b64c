"""Writes folders as the converters of MLX do, and folders in Hugging Face format with the numbers that they mean."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.model_zoo.quantized_files import E2M1, change_config, pack_stream

Parts = dict[str, torch.Tensor]
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
STACKED_BIAS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj_bias")
STACKED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
SHIFTED_NORMS = re.compile(r"(layernorm|model\.norm|[qk]_norm)\.weight$")


class MlxForm(NamedTuple):
    """``bits`` of integers, one weight after another; 16: plain. ``mode``: as mlx names it."""

    bits: tuple[int, ...]
    group: int = 32
    mode: str = "affine"
    dtype: torch.dtype = torch.bfloat16


MLX_FORMS = {
    "MLX 4 bits": MlxForm((4,)),
    "MLX 8 bits": MlxForm((8,), 64),
    "MLX 2 bits": MlxForm((2,)),
    "MLX 3 bits": MlxForm((3,)),
    "MLX 5 bits": MlxForm((5,)),
    "MLX 6 bits": MlxForm((6,)),
    "MLX 4 and 8 bits": MlxForm((4, 8, 8, 16, 4), dtype=torch.float16),
    "MLX mxfp4": MlxForm((4,), 32, "mxfp4"),
    "MLX mxfp8": MlxForm((8,), 32, "mxfp8"),
    "MLX nvfp4": MlxForm((4,), 16, "nvfp4"),
    "MLX bfloat16": MlxForm((16,)),
}


def quantize(weight: torch.Tensor, bits: int, form: MlxForm) -> tuple[Parts, torch.Tensor]:
    """Return the tensors of a weight float32 [..., in] by the ends of their names, and what they mean."""
    if bits == 16 or weight.shape[-1] % form.group:
        return {"weight": weight.to(form.dtype)}, weight.to(form.dtype).float()
    grouped = weight.view(*weight.shape[:-1], -1, form.group)
    if form.mode == "affine":
        low, high = grouped.amin(-1), grouped.amax(-1)
        scales = ((high - low) / ((1 << bits) - 1)).to(form.dtype)
        biases = low.to(form.dtype)
        numbers = ((grouped - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, (1 << bits) - 1)
        meant = numbers * scales.float()[..., None] + biases.float()[..., None]
        parts = {"scales": scales, "biases": biases}
    else:
        numbers, scales, meant = _quantize_floats(grouped, form.mode)
        parts = {"scales": scales}
    words = pack_stream(numbers.reshape(-1, weight.shape[-1]).int(), bits).view(torch.uint32)
    return {"weight": words.view(*weight.shape[:-1], -1), **parts}, meant.view(weight.shape)


def _quantize_floats(grouped: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bits of numbers [..., groups, group], the bytes of scales, and what they mean."""
    largest = grouped.abs().amax(-1)
    if mode == "nvfp4":
        scales = (largest / 6).to(torch.float8_e4m3fn)
    else:
        scales = torch.exp2((largest / (448 if mode == "mxfp8" else 6)).log2().ceil()).to(torch.float8_e8m0fnu)
    wide = scales.float()[..., None].clamp_min(2.0**-20)
    if mode == "mxfp8":
        values = (grouped / wide).to(torch.float8_e4m3fn)
        return values.view(torch.uint8), scales.view(torch.uint8), values.float() * wide
    codes = (grouped / wide)[..., None].sub(E2M1).abs().argmin(-1)
    return codes, scales.view(torch.uint8), E2M1[codes] * scales.float()[..., None]


def write_mlx(source: Path, home: Path, form: MlxForm, *, shifts_norms: bool = False) -> tuple[Path, Path]:
    """Write the model in ``source`` as MLX does, and with what its tensors mean in float32: both folders.

    ``shifts_norms``: the converter adds one to the weights of norms.
    """
    quantized, plain = home / "quantized", home / "plain"
    bits, config = cycle(form.bits), json.loads((source / "config.json").read_text())
    stored: Parts = {}
    meant: Parts = {}
    listed: dict[str, Any] = {}  # layers with other bits, as the config lists them
    stacks: dict[str, list[tuple[str, torch.Tensor]]] = {}

    def store(name: str, weight: torch.Tensor) -> torch.Tensor:
        """Store the weight NAME.weight and return what it means."""
        own = next(bits)
        parts, numbers = quantize(weight.float(), own, form)
        if own != form.bits[0]:
            listed[name] = {"group_size": form.group, "bits": own, "mode": form.mode} if "scales" in parts else False
        stored.update({f"{name}.{end}": part for end, part in parts.items()})
        return numbers

    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        if match := EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.switch_mlp.{match[3]}", []).append((name, tensor))
        elif match := STACKED_BIAS.fullmatch(name):  # of GPT-OSS: gate and up in turn
            gate_up = {"gate_proj": tensor[:, ::2], "up_proj": tensor[:, 1::2]}
            halves = gate_up if match[2] == "gate_up" else {"down_proj": tensor}
            stored |= {f"{match[1]}.{part}.bias": half for part, half in halves.items()}
            meant[name] = tensor.float()
        elif (match := STACKED.fullmatch(name)) and config["model_type"] == "gemma4_text":
            parts = (
                dict(zip(("gate", "up"), tensor.chunk(2, 1), strict=True))
                if match[2] == "gate_up"
                else {"down": tensor}
            )
            numbers = [store(f"{match[1]}.switch_glu.{part}_proj", part_tensor) for part, part_tensor in parts.items()]
            meant[name] = torch.cat(numbers, 1)
        elif match := STACKED.fullmatch(name):
            if match[2] == "down":
                meant[name] = store(f"{match[1]}.down_proj", tensor.mT.contiguous()).mT
            else:
                both = [store(f"{match[1]}.{part}_proj", tensor[..., i::2].mT.contiguous())
                        for i, part in enumerate(("gate", "up"))]  # fmt: skip
                meant[name] = torch.stack([half.mT for half in both], -1).flatten(-2)
        elif name.endswith("kv_b_proj.weight"):
            key, value = config["qk_nope_head_dim"], config["v_head_dim"]
            prefix = name.removesuffix("kv_b_proj.weight")
            keys, values = tensor.view(-1, key + value, tensor.shape[1]).split([key, value], 1)
            turned = store(prefix + "embed_q", keys.mT.contiguous()).mT
            meant[name] = torch.cat((turned, store(prefix + "unembed_out", values.contiguous())), 1).flatten(0, 1)
        elif "conv1d.weight" in name:
            stored[name], meant[name] = tensor.mT, tensor.float()
        elif shifts_norms and SHIFTED_NORMS.search(name):
            stored[name] = tensor + 1
            meant[name] = stored[name].float() - 1
        elif tensor.dim() == 2:
            meant[name] = store(name.removesuffix(".weight"), tensor)
        else:
            stored[name], meant[name] = tensor, tensor.float()
    for name, experts in stacks.items():
        experts.sort(key=lambda pair: int(EXPERT.fullmatch(pair[0])[2]))
        numbers = store(name, torch.stack([tensor for _, tensor in experts]))
        meant |= {name: own for (name, _), own in zip(experts, numbers, strict=True)}
    described = {"group_size": form.group, "bits": form.bits[0], "mode": form.mode, **listed}
    fields = {} if form.bits == (16,) else {"quantization": described, "quantization_config": described}
    for folder, tensors, members in ((quantized, stored, fields), (plain, meant, {"dtype": "float32"})):
        shutil.copytree(source, folder)
        file_format = {"format": "mlx" if folder is quantized else "pt"}
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors", file_format)
        change_config(folder, **members)
    return quantized, plain


@cache
def mlx_folder() -> Path:
    """Write Qwen3 in 4 bits, once per test run."""
    home = tiny_models.models_home() / "mlx"
    return write_mlx(tiny_models.model_folder("qwen3"), home, MLX_FORMS["MLX 4 bits"])[0]
