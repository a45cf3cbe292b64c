"""Damaged folders of MLX, and tensors that begin within a number, as its writer leaves them."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_zoo.zoo import ZOO
from torch.utils._python_dispatch import TorchDispatchMode

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.mlx import StackedMlxFormat
from parley.model.checkpoint.quantization import read_quantization
from parley.model.checkpoint.stacked import StackedPlainFormat
from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.check import check_model
from parley.types import Settings

EXPERTS, OUT, INTO = 5, 8, 64


@pytest.mark.parametrize("shape", [(), (64,), (8, 8)])
def test_parts_of_latents_with_too_few_axes_are_refused(shape, tmp_path):
    folder, _ = ZOO["deepseek_v3, MLX 4 bits"].write(tmp_path)
    name = "model.layers.1.self_attn.unembed_out.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.zeros(shape).int().view(torch.uint32)
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    with pytest.raises(LoadError, match=rf"^Tensor {name} has shape \[.*\]; the config asks for \d+ outputs\.$"):
        check_model(Settings(model=str(folder)))


def write_unaligned(folder, tensors):
    """Write tensors as MLX does: they begin where the header ends, at any byte."""
    save_file(tensors, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.dumps(json.loads(content[8 : 8 + length])).encode()
    header += b" " * (3 - len(header) % 2)  # an odd number of bytes
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    return Checkpoint(folder)


def bytes_behind(tensor):
    return tensor.untyped_storage().nbytes()


class CountedCopies(TorchDispatchMode):
    """Adds up the bytes of tensors that are copied."""

    copied = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.clone.default:
            self.copied += args[0].numel() * args[0].itemsize
        return operator(*args, **(kwargs or {}))


def test_shapes_of_unaligned_tensors_are_checked_without_copies(tmp_path):
    names = ("weight", torch.zeros(OUT, INTO // 8).int().view(torch.uint32)), ("scales", torch.zeros(OUT, 2).half())
    tensors = {f"x.{name}": tensor for name, tensor in (*names, ("biases", torch.zeros(OUT, 2).half()))}
    checkpoint = write_unaligned(tmp_path, tensors)
    quantization = read_quantization({"quantization": {"bits": 4, "group_size": 32}}, "none")
    with CountedCopies() as copies:
        quantization.check_stored_weight(checkpoint, LinearSpec("x", OUT, INTO))
        assert copies.copied == 0
        quantization.read_stored_weight(checkpoint, LinearSpec("x", OUT, INTO))
        assert copies.copied >= OUT * INTO // 2
    with pytest.raises(LoadError, match=r"^Tensor x\.weight has shape"):
        quantization.check_stored_weight(checkpoint, LinearSpec("x", OUT + 1, INTO))


def test_an_expert_of_unaligned_tensors_is_copied_alone(tmp_path):
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (EXPERTS, OUT, INTO // 8)).int()
    scales, biases = torch.randn(2, EXPERTS, OUT, INTO // 32).half().clone().unbind()
    plain = torch.randn(EXPERTS, OUT, INTO)
    tensors = {"x.weight": words.view(torch.uint32), "x.scales": scales.clone(), "x.biases": biases.clone()}
    checkpoint = write_unaligned(tmp_path, {**tensors, "plain": plain, "turned": plain.mT.contiguous()})

    expert = StackedMlxFormat().read_expert(checkpoint, LinearSpec("x.weight", OUT, INTO), EXPERTS, 3)
    numbers = torch.stack([words[3] >> shift & 15 for shift in range(0, 32, 4)], -1).view(OUT, -1, 32)
    wanted = numbers * scales[3].float()[..., None] + biases[3].float()[..., None]
    torch.testing.assert_close(expert.to_float(), wanted.flatten(1))
    assert bytes_behind(expert.weight.scales) == scales[3].numel() * 2

    for name, transposed in (("plain", False), ("turned", True), ("turned", None)):
        values = StackedPlainFormat(transposed).read_expert(checkpoint, LinearSpec(name, OUT, INTO), EXPERTS, 3).values
        assert torch.equal(values, plain[3])
        assert bytes_behind(values) == plain[3].numel() * 4
