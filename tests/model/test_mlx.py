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
from parley.model.checkpoint.mlx import StackedMlxFormat, has_mlx_layout
from parley.model.checkpoint.quantization import read_quantization
from parley.model.checkpoint.stacked import StackedPlainFormat
from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.check import check_model
from parley.types import ParleySettings

EXPERTS, OUT_FEATURES, IN_FEATURES = 5, 8, 64


@pytest.mark.parametrize("shape", [(), (64,), (8, 8)])
def test_parts_of_latents_with_too_few_axes_are_refused(shape, tmp_path):
    folder, _ = ZOO["deepseek_v3, MLX 4 bits"].write(tmp_path)
    name = "model.layers.1.self_attn.unembed_out.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.zeros(shape).int().view(torch.uint32)
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    with pytest.raises(LoadError, match=rf"^Tensor {name} has shape \[.*\]; the config asks for \d+ outputs\.$"):
        check_model(ParleySettings(model=str(folder)))


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
    names = (
        ("weight", torch.zeros(OUT_FEATURES, IN_FEATURES // 8).int().view(torch.uint32)),
        ("scales", torch.zeros(OUT_FEATURES, 2).half()),
    )
    tensors = {f"x.{name}": tensor for name, tensor in (*names, ("biases", torch.zeros(OUT_FEATURES, 2).half()))}
    checkpoint = write_unaligned(tmp_path, tensors)
    quantization = read_quantization({"quantization": {"bits": 4, "group_size": 32}}, "none")
    with CountedCopies() as copies:
        quantization.check_stored_weight(checkpoint, LinearSpec("x", OUT_FEATURES, IN_FEATURES))
        assert copies.copied == 0
        quantization.read_stored_weight(checkpoint, LinearSpec("x", OUT_FEATURES, IN_FEATURES))
        assert copies.copied >= OUT_FEATURES * IN_FEATURES // 2
    with pytest.raises(LoadError, match=r"^Tensor x\.weight has shape"):
        quantization.check_stored_weight(checkpoint, LinearSpec("x", OUT_FEATURES + 1, IN_FEATURES))


def test_an_expert_of_unaligned_tensors_is_copied_alone(tmp_path):
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (EXPERTS, OUT_FEATURES, IN_FEATURES // 8)).int()
    scales, biases = torch.randn(2, EXPERTS, OUT_FEATURES, IN_FEATURES // 32).half().clone().unbind()
    plain = torch.randn(EXPERTS, OUT_FEATURES, IN_FEATURES)
    tensors = {"x.weight": words.view(torch.uint32), "x.scales": scales.clone(), "x.biases": biases.clone()}
    checkpoint = write_unaligned(tmp_path, {**tensors, "plain": plain, "turned": plain.mT.contiguous()})

    expert = StackedMlxFormat(frozenset({(4, 32)})).read_expert(
        checkpoint, LinearSpec("x.weight", OUT_FEATURES, IN_FEATURES), EXPERTS, 3
    )
    numbers = torch.stack([words[3] >> shift & 15 for shift in range(0, 32, 4)], -1).view(OUT_FEATURES, -1, 32)
    expected = numbers * scales[3].float()[..., None] + biases[3].float()[..., None]
    torch.testing.assert_close(expert.to_float(), expected.flatten(1))
    assert bytes_behind(expert.weight.scales) == scales[3].numel() * 2

    for name, transposed in (("plain", False), ("turned", True), ("turned", None)):
        values = (
            StackedPlainFormat(transposed)
            .read_expert(checkpoint, LinearSpec(name, OUT_FEATURES, IN_FEATURES), EXPERTS, 3)
            .values
        )
        assert torch.equal(values, plain[3])
        assert bytes_behind(values) == plain[3].numel() * 4


@pytest.mark.parametrize(
    ("name", "bits", "group"),
    [("model.layers.1.mlp.down_proj", 2, 32), ("model.layers.0.self_attn.q_proj", 4, 64)],
)
def test_bits_and_groups_that_the_config_does_not_name_are_refused(name, bits, group, tmp_path):
    folder, _ = ZOO["llama, MLX 4 bits"].write(tmp_path)
    check_model(ParleySettings(model=str(folder)))
    tensors = load_file(folder / "model.safetensors")
    if bits == 2:  # half of the words of each row
        tensors[name + ".weight"] = tensors[name + ".weight"].chunk(2, 1)[0].contiguous()
    else:
        for part in ("scales", "biases"):
            tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][:, ::2].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    words = rf"^Tensor {name}\.weight has numbers of {bits} bits in groups of {group}, which the config's quantization"
    with pytest.raises(LoadError, match=words):
        check_model(ParleySettings(model=str(folder)))


def test_heads_of_latents_have_bits_that_the_config_names(tmp_path):
    folder, _ = ZOO["deepseek_v3, MLX 4 bits"].write(tmp_path)
    name = "model.layers.1.self_attn.unembed_out.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].chunk(2, 2)[0].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    with pytest.raises(LoadError, match=rf"^Tensor {name} has numbers of 2 bits in groups of 32, which the config's"):
        check_model(ParleySettings(model=str(folder)))


@pytest.mark.parametrize("section", [{"bits": "4", "group_size": 32}, {"bits": 4, "group_size": 32, "x": {"bits": []}}])
def test_bits_that_are_no_numbers_are_refused(section):
    with pytest.raises(LoadError, match=r"^The checkpoint's quantization\.bits is ('4'|\[\]); it must be a number\.$"):
        read_quantization({"quantization": section}, "none")


@pytest.mark.parametrize("writer", ["mlx", "pt"])
@pytest.mark.parametrize(("shape", "is_mlx"), [((6, 4, 1), True), ((6, 1, 4), False), (None, None)])
def test_convolutions_tell_the_layout_before_the_header_does(shape, is_mlx, writer, tmp_path):
    tensors = {"model.norm.weight": torch.ones(4)} | ({} if shape is None else {"x.conv1d.weight": torch.ones(shape)})
    save_file(tensors, tmp_path / "model.safetensors", {"format": writer})
    assert has_mlx_layout(Checkpoint(tmp_path)) == (writer == "mlx" if is_mlx is None else is_mlx)
