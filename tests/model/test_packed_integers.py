"""Integers of few bits as compressed-tensors and GPTQ pack them: written here bit by bit, and read as defined."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from parley.model.checkpoint import quantization
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.weights import LinearSpec

OUT, INTO, GROUP = 40, 72, 24
LINEAR = LinearSpec("model.layers.0.mlp.up_proj", OUT, INTO)
SOURCE = torch.Generator().manual_seed(3)


def pack_numbers(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers from 0 on along each row, first in the lowest bits, as many into a word as fit whole."""
    per_word = 32 // bits
    words = torch.zeros(len(numbers), -(-numbers.shape[1] // per_word), dtype=torch.int64)
    for k in range(numbers.shape[1]):
        words[:, k // per_word] |= numbers[:, k].long() << (bits * (k % per_word))
    return words.to(torch.int32)  # wraps


class Layer:
    """Random integers and scales of one layer, and what they mean: scale * (value - zero)."""

    def __init__(self, bits: int, groups: int, symmetric: bool, outputs: int = OUT):
        self.values = torch.randint(0, 1 << bits, (OUT, INTO), generator=SOURCE)
        self.scales = torch.rand(outputs, groups, generator=SOURCE).half() + 0.1
        middle = torch.full((outputs, groups), 1 << (bits - 1))
        self.zeros = middle if symmetric else torch.randint(1, 1 << bits, (outputs, groups), generator=SOURCE)
        self.index = torch.arange(INTO) // -(-INTO // groups)

    def reorder_inputs(self) -> None:
        self.index = self.index[torch.randperm(INTO, generator=SOURCE)]

    def dequantize(self) -> torch.Tensor:
        return (self.values - self.zeros[:, self.index]) * self.scales[:, self.index].float()


def compressed_config(bits: int, strategy: str, *, stored_as: str = "pack-quantized", **weights) -> dict:
    fields = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": fields}},
    }


def read_layer(folder, config: dict, parts: dict[str, torch.Tensor]):
    tensors = {f"{LINEAR.name}.{name}": part.contiguous() for name, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    found = quantization.read_quantization({"quantization_config": config}, "none")
    found.check_stored_weight(checkpoint, LINEAR)
    unread = set(checkpoint.tensor_names) - set(found.stored_tensor_names(checkpoint, LINEAR))
    assert not unread
    return found.read_stored_weight(checkpoint, LINEAR)


def assert_means(read, layer: Layer) -> None:
    assert torch.allclose(read.multiply_rows(torch.eye(INTO)), layer.dequantize().T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("actorder", [None, "weight", "group"])
def test_pack_quantized_layers_are_read_as_defined(bits, strategy, symmetric, actorder, tmp_path):
    layer = Layer(bits, INTO // GROUP if strategy == "group" else 1, symmetric)
    parts = {
        "weight_packed": pack_numbers(layer.values, bits),
        "weight_scale": layer.scales,
        "weight_shape": torch.tensor([OUT, INTO]),
    }
    if actorder == "group" and strategy == "group":
        layer.reorder_inputs()
        parts["weight_g_idx"] = layer.index.int()
    if not symmetric:
        parts["weight_zero_point"] = pack_numbers(layer.zeros.T, bits).T
    options = {"group_size": GROUP} if strategy == "group" else {}
    config = compressed_config(bits, strategy, symmetric=symmetric, actorder=actorder, **options)
    assert_means(read_layer(tmp_path, config, parts), layer)


def test_zero_points_of_early_versions_are_not_packed(tmp_path):
    layer = Layer(4, INTO // GROUP, False)
    parts = {
        "weight_packed": pack_numbers(layer.values, 4),
        "weight_scale": layer.scales,
        "weight_zero_point": (layer.zeros - 8).to(torch.int8),
    }
    config = compressed_config(4, "group", symmetric=False, group_size=GROUP)
    assert_means(read_layer(tmp_path, config, parts), layer)


@pytest.mark.parametrize("outputs", [OUT, 1], ids=["channel", "tensor"])
def test_int8_weights_without_int8_activations_are_weights_alone(outputs, tmp_path):
    layer = Layer(8, 1, False, outputs)
    parts = {
        "weight": (layer.values - 128).to(torch.int8),
        "weight_scale": layer.scales,
        "weight_zero_point": (layer.zeros - 128).to(torch.int8),
    }
    config = compressed_config(8, "channel" if outputs > 1 else "tensor", stored_as="int-quantized", symmetric=False)
    assert_means(read_layer(tmp_path, config, parts), layer)


def test_each_config_group_has_its_own_format_and_names_precede_classes(tmp_path):
    config = compressed_config(4, "group", group_size=GROUP, stored_as="mixed-precision")
    (common,) = config["config_groups"].values()
    common["format"] = "pack-quantized"
    up = {"targets": ["re:.*up_proj$"], "format": "int-quantized", "weights": {"num_bits": 8, "type": "int"}}
    config["config_groups"]["group_1"] = up
    find_format = quantization.read_quantization({"quantization_config": config}, "none").find_format
    up_format, down_format = find_format(LINEAR.name), find_format("model.layers.0.mlp.down_proj")
    assert (up_format.bits, up_format.packed) == (8, False) and (down_format.bits, down_format.packed) == (4, True)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("reordered", [False, True])
def test_gptq_layers_of_any_bits_are_read_as_defined(bits, checkpoint_format, reordered, tmp_path):
    layer = Layer(bits, INTO // GROUP, False)
    if reordered:
        layer.reorder_inputs()
    stored_zeros = layer.zeros - int(checkpoint_format == "gptq")
    parts = {
        "qweight": pack_numbers(layer.values, bits).T,
        "qzeros": pack_numbers(stored_zeros.T, bits),
        "scales": layer.scales.T,
        "g_idx": layer.index.int(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": checkpoint_format}
    assert_means(read_layer(tmp_path, config, parts), layer)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (compressed_config(9, "channel"), r"weights\.num_bits is 9"),
        (compressed_config(4, "group", group_size=12), r"group_size is 12; only a multiple of 8"),
        (compressed_config(4, "group", group_size=GROUP, actorder="random"), "actorder is random"),
        (compressed_config(4, "channel", stored_as="int-quantized"), r"num_bits is 4; only 8"),
        (compressed_config(4, "channel", stored_as="mixed-precision"), "format is mixed-precision"),
    ],
)
def test_refuses_what_it_cannot_read(config, match):
    with pytest.raises(LoadError, match=match):
        quantization.read_quantization({"quantization_config": config}, "none")
