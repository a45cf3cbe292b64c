"""Folders of MLX: damaged ones."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_zoo.zoo import ZOO

from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.types import Settings


@pytest.mark.parametrize("shape", [(), (64,), (8, 8)])
def test_parts_of_latents_with_too_few_axes_are_refused(shape, tmp_path):
    folder, _ = ZOO["deepseek_v3, MLX 4 bits"].write(tmp_path)
    name = "model.layers.1.self_attn.unembed_out.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.zeros(shape).int().view(torch.uint32)
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    with pytest.raises(LoadError, match=rf"^Tensor {name} has shape \[.*\]; the config asks for \d+ outputs\.$"):
        check_model(Settings(model=str(folder)))
