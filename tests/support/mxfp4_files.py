"""GPT-OSS with random experts of 4 bits, in the files that it is published in."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support import tiny_models

from parley.native.torch_forms.torch_grouped import E2M1_NUMBERS


def write_mxfp4(target: Path) -> tuple[Path, Path]:
    """Write GPT-OSS with random MXFP4 experts as it is published, and the same with plain numbers: both folders."""
    target.mkdir(exist_ok=True)
    plain, packed = (
        shutil.copytree(tiny_models.model_folder("gpt_oss"), target / name) for name in ("plain", "packed")
    )
    source, numbers = torch.Generator().manual_seed(8), torch.tensor(E2M1_NUMBERS)
    wide, blocks = load_file(plain / "model.safetensors"), {}
    for name, tensor in wide.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            blocks[name] = tensor
            continue
        experts, in_features, out_features = tensor.shape
        values = torch.randint(0, 16, (experts, out_features, in_features // 32, 32), generator=source)
        exponents = torch.randint(-6, -2, values.shape[:3], generator=source)
        blocks[name + "_blocks"] = (values[..., 0::2] + 16 * values[..., 1::2]).to(torch.uint8)
        blocks[name + "_scales"] = (exponents + 127).to(torch.uint8)
        weight = numbers[values] * 2.0 ** exponents[..., None]
        wide[name] = weight.view(experts, out_features, in_features).transpose(1, 2).contiguous().bfloat16()
    save_file(wide, plain / "model.safetensors", {"format": "pt"})
    save_file(blocks, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed


@functools.cache
def mxfp4_folder() -> Path:
    """Return the folder of such a model, written once per test run. Tests must not change it."""
    return write_mxfp4(tiny_models.models_home() / "mxfp4")[1]
