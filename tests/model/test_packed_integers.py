"""Integers of few bits as compressed-tensors and GPTQ pack them: written here bit by bit, and read as defined."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from parley.model.checkpoint import fp8, quantization
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.weights import LinearSpec

OUT_FEATURES, IN_FEATURES, GROUP = 40, 72, 24
LINEAR = LinearSpec("model.layers.0.mlp.up_proj", OUT_FEATURES, IN_FEATURES)
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

    def __init__(self, bits: int, groups: int, symmetric: bool, outputs: int = OUT_FEATURES):
        self.values = torch.randint(0, 1 << bits, (OUT_FEATURES, IN_FEATURES), generator=SOURCE)
        self.scales = torch.rand(outputs, groups, generator=SOURCE).half() + 0.1
        middle = torch.full((outputs, groups), 1 << (bits - 1))
        self.zeros = middle if symmetric else torch.randint(1, 1 << bits, (outputs, groups), generator=SOURCE)
        self.index = torch.arange(IN_FEATURES) // -(-IN_FEATURES // groups)

    def reorder_inputs(self) -> None:
        self.index = self.index[torch.randperm(IN_FEATURES, generator=SOURCE)]

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
    quantization_config = quantization.read_quantization({"quantization_config": config}, "none")
    quantization_config.check_stored_weight(checkpoint, LINEAR)
    unread = set(checkpoint.tensor_names) - set(quantization_config.stored_tensor_names(checkpoint, LINEAR))
    assert not unread
    return quantization_config.read_stored_weight(checkpoint, LINEAR)


def assert_means(read, layer: Layer) -> None:
    assert torch.allclose(read.multiply_rows(torch.eye(IN_FEATURES)), layer.dequantize().T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("actorder", [None, "weight", "group"])
def test_pack_quantized_layers_are_read_as_defined(bits, strategy, symmetric, actorder, tmp_path):
    layer = Layer(bits, IN_FEATURES // GROUP if strategy == "group" else 1, symmetric)
    parts = {
        "weight_packed": pack_numbers(layer.values, bits),
        "weight_scale": layer.scales,
        "weight_shape": torch.tensor([OUT_FEATURES, IN_FEATURES]),
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
    layer = Layer(4, IN_FEATURES // GROUP, False)
    parts = {
        "weight_packed": pack_numbers(layer.values, 4),
        "weight_scale": layer.scales,
        "weight_zero_point": (layer.zeros - 8).to(torch.int8),
    }
    config = compressed_config(4, "group", symmetric=False, group_size=GROUP)
    assert_means(read_layer(tmp_path, config, parts), layer)


@pytest.mark.parametrize("outputs", [OUT_FEATURES, 1], ids=["channel", "tensor"])
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
    layer = Layer(bits, IN_FEATURES // GROUP, False)
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
        (compressed_config(1, "channel", stored_as="int-quantized"), r"num_bits is 1; only 2 or 3"),
        (compressed_config(4, "channel", stored_as="mixed-precision"), "format is mixed-precision"),
    ],
)
def test_refuses_unsupported_compressed_tensors(config, match):
    with pytest.raises(LoadError, match=match):
        quantization.read_quantization({"quantization_config": config}, "none")


@pytest.mark.parametrize(
    ("places", "match"),
    [
        (["weight_input", "weight_output"], ""),
        (["weight_output", "input"], "transform_config is at input; only weight_input or weight_output is supported"),
    ],
)
def test_refuses_transforms_that_are_not_merged_into_the_weights(places, match):
    apply = [{"targets": ["Linear"], "location": place, "inverse": False} for place in places]
    config = compressed_config(4, "channel")
    config["transform_config"] = {"config_groups": {"R1": {"type": "hadamard", "apply": apply}}}
    if not match:
        assert quantization.read_quantization({"quantization_config": config}, "none").find_format("a") is not None
        return
    with pytest.raises(LoadError, match=match):
        quantization.read_quantization({"quantization_config": config}, "none")


def test_quark_describes_layers_by_names_and_globs():
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    block = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [32, 32], "scale_format": "e8m0"}
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": spec},
        "layer_quant_config": {"*.mlp.*": {"weight": block}, "*o_proj": {"weight": None}, "*.k_proj": {"output": {}}},
    }
    find = quantization.read_quantization({"quantization_config": config}, "none").find_format
    assert find("model.layers.3.mlp.up_proj") == fp8.Fp8Format((32, 32))
    assert find("model.layers.3.self_attn.q_proj") == fp8.Fp8Format()
    assert find("model.layers.3.self_attn.o_proj") is None


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("pack_method", ["order", "reorder"])
def test_quark_integers_of_4_bits_are_read_as_defined(kind, symmetric, pack_method, tmp_path):
    """Of int4, numbers and zero points are in two's complement. Files have zero points in any case."""
    layer = Layer(4, IN_FEATURES // GROUP, symmetric)
    places = [0, 1, 2, 3, 4, 5, 6, 7] if pack_method == "order" else [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(numbers: torch.Tensor) -> torch.Tensor:
        stored = numbers - 8 & 15 if kind == "int4" else numbers
        return pack_numbers(stored.T.reshape(-1, OUT_FEATURES // 8, 8)[..., places].flatten(1), 4)

    weight = {"dtype": kind, "qscheme": "per_group", "group_size": GROUP, "symmetric": symmetric, "ch_axis": -1}
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight},
        "export": {"pack_method": pack_method},
    }
    parts = {"weight": pack(layer.values), "weight_scale": layer.scales.T, "weight_zero_point": pack(layer.zeros)}
    assert_means(read_layer(tmp_path, config, parts), layer)
    if kind == "int4" and symmetric:
        del parts["weight_zero_point"]
        assert_means(read_layer(tmp_path, config, parts), layer)


FP8_SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
E5M3_SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e5m3"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"global_quant_config": {"weight": FP8_SPEC | {"ch_axis": 1}}}, r"weight\.ch_axis is 1; only 0 is supported"),
        ({"global_quant_config": {"weight": E5M3_SPEC | {"ch_axis": 0}}}, r"weight\.ch_axis is 0; only 1 or -1"),
        ({"global_quant_config": {"weight": E5M3_SPEC}}, r"weight\.scale_format is e5m3"),
        ({"layer_quant_config": ["a"]}, r"layer_quant_config is \['a'\]; only an object"),
        ({"global_quant_config": {"weight": "int8"}}, r"global_quant_config\.weight is int8; only an object"),
        ({"export": {"pack_method": "swizzle"}}, r"export\.pack_method is swizzle; only reorder or order"),
        ({"layer_quant_config": {"a": {"weight": {"dtype": "bf16"}}}}, r"layer_quant_config\.a\.weight has numbers of"),
        ({"global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_channel"}}}, "symmetric is None"),
        ({"global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}}}, "scale_format is None"),
        ({"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group"}}}, "symmetric is None"),
    ],
)
def test_refuses_what_quark_writes_in_other_layouts(changes, match):
    config = {"quant_method": "quark", "global_quant_config": {}} | changes
    with pytest.raises(LoadError, match=match):
        quantization.read_quantization({"quantization_config": config}, "none")


def test_refuses_integers_of_more_bits_than_the_config_says(tmp_path):
    numbers = torch.full((OUT_FEATURES, IN_FEATURES), 7, dtype=torch.int8)
    scale = torch.ones(OUT_FEATURES, 1)
    config = compressed_config(4, "channel", stored_as="int-quantized")
    read_layer(tmp_path, config, {"weight": numbers, "weight_scale": scale})
    numbers[3, 5] = -9
    with pytest.raises(LoadError, match=r"up_proj\.weight has integers of more than 4 bits"):
        read_layer(tmp_path, config, {"weight": numbers, "weight_scale": scale})
    numbers[3, 5], zeros = -8, torch.full((OUT_FEATURES, 1), 7, dtype=torch.int8)
    config = compressed_config(4, "channel", stored_as="int-quantized", symmetric=False)
    parts = {"weight": numbers, "weight_scale": scale, "weight_zero_point": zeros}
    read_layer(tmp_path, config, parts)
    zeros[2] = 8
    with pytest.raises(LoadError, match=r"up_proj\.weight_zero_point has integers of more than 4 bits"):
        read_layer(tmp_path, config, parts)
    packed = torch.zeros(OUT_FEATURES // 4, IN_FEATURES, dtype=torch.uint8)
    read_layer(tmp_path, {"quant_method": "bitnet"}, {"weight": packed, "weight_scale": torch.ones(1)})
    packed[1, 2] = 0b110000
    with pytest.raises(LoadError, match="numbers other than -1, 0 and 1"):
        read_layer(tmp_path, {"quant_method": "bitnet"}, {"weight": packed, "weight_scale": torch.ones(1)})


def test_exponents_of_all_experts_in_bytes_are_read_as_defined(tmp_path):
    numbers = torch.randint(0, 0x7F, (2, OUT_FEATURES, 64), generator=SOURCE, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    exponents = torch.randint(120, 134, (2, OUT_FEATURES, 2), generator=SOURCE, dtype=torch.uint8)
    save_file({"up": numbers, "up_scale_inv": exponents}, tmp_path / "model.safetensors")
    found = quantization.read_quantization({"quantization_config": {"quant_method": "mxfp8"}}, "none")
    read = found.stacked_format.read_expert(Checkpoint(tmp_path), LinearSpec("up", OUT_FEATURES, 64), 2, 1)
    meant = numbers[1].float() * torch.exp2(exponents[1].float() - 127).repeat_interleave(32, 1)
    assert torch.equal(read.multiply_rows(torch.eye(64)), meant.T)
