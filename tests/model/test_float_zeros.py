"""Weights of HQQ and torchao: each layout against the numbers that it means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.grouped_products import largest_product_error, padded_outputs
from support.model_zoo.float_zero_files import describe_torchao
from support.model_zoo.quantized_files import FORMS

from parley import native
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.quantization import read_quantization
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, PlainWeight

OUT_FEATURES, IN_FEATURES = 96, 256
LINEAR = LinearSpec("model.layers.0.mlp.up_proj", OUT_FEATURES, IN_FEATURES)
# By the form: bits of a number in memory, with its scales
BITS = {
    "HQQ 4 bits": 4.5, "HQQ 8 bits": 8.5, "HQQ 3 bits": 3.5, "HQQ 2 bits": 2.5, "HQQ 1 bit": 1.5, "torchao int8": 8.125,
    "torchao int4 in bytes": 5, "torchao int4": 5, "torchao FP8": 8.125,
}  # fmt: skip


def random_layer(form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a layer in a form, and the dequantized weight."""
    return FORMS[form].quantize(
        torch.randn(OUT_FEATURES, IN_FEATURES, generator=torch.Generator().manual_seed(3)) * 0.05
    )


def read_layer(folder: Path, parts: dict[str, torch.Tensor], form: str, description: dict | None = None):
    """Write the tensors of a layer, and read them as a checkpoint's."""
    tensors = {f"{LINEAR.name}.{name}": part.contiguous() for name, part in parts.items()}
    describe = FORMS[form].describe
    header = description or (describe(torch.Size((OUT_FEATURES, IN_FEATURES))) if describe is not None else {})
    save_file(tensors, folder / "model.safetensors", {f"{LINEAR.name}.weight": json.dumps(header)})
    quantization = read_quantization({"quantization_config": FORMS[form].config}, "none")
    checkpoint = Checkpoint(folder)
    assert {*quantization.stored_tensor_names(checkpoint, LINEAR)} == {*tensors}
    quantization.check_stored_weight(checkpoint, LINEAR)
    return quantization.read_stored_weight(checkpoint, LINEAR)


@pytest.mark.parametrize("form", BITS)
def test_each_format_is_read_as_defined_and_multiplied_by_kernels(form, tmp_path):
    """The kernel's products are those of the dequantized weight but for the rounding of sums."""
    parts, dequantized = random_layer(form)
    read = read_layer(tmp_path, parts, form)
    assert torch.allclose(read.to_float(), dequantized, rtol=1e-5, atol=1e-7)
    assert torch.equal(read.select_outputs(torch.arange(5, 9)).to_float(), read.to_float()[5:9])
    packed = GroupedLinearWeight.pack_merged([read], None, torch.bfloat16, torch.device("cpu"))
    x = torch.randn(9, IN_FEATURES, generator=torch.Generator().manual_seed(1)).bfloat16()
    actual, expected = native.lm_head_logits(x, packed), (x.double() @ dequantized.double().T).float()
    assert (actual - expected).norm() / expected.norm() < largest_product_error()
    assert torch.equal(native.lm_head_logits(x[4:5], packed), actual[4:5])
    if native.packed_layout_id():
        assert packed.weight.nbytes * 8 == padded_outputs(OUT_FEATURES) * IN_FEATURES * BITS[form]


def test_two_bits_lie_in_bytes_as_hqq_packs_them(tmp_path):
    """A weight of 2 x 16 in groups of 8."""
    parts, _ = random_layer("HQQ 2 bits")
    parts |= {
        "W_q": torch.tensor([[27, 228, 78, 177, 0, 255, 85, 170]], dtype=torch.uint8),
        "scale": torch.tensor([[0.5], [1], [2], [4]], dtype=torch.bfloat16),
        "zero": torch.tensor([[1.5], [0], [-1], [0.25]], dtype=torch.bfloat16),
        "group_size": torch.tensor(8, dtype=torch.int32),
    }
    save_file({f"one.{name}": part for name, part in parts.items()}, tmp_path / "model.safetensors")
    quantization = read_quantization({"quantization_config": FORMS["HQQ 2 bits"].config}, "none")
    read = quantization.read_stored_weight(Checkpoint(tmp_path), LinearSpec("one", 2, 16))
    integers = [[0, 3, 1, 2, 0, 3, 1, 2], [1, 2, 0, 3, 0, 3, 1, 2], [2, 1, 3, 0, 0, 3, 1, 2], [3, 0, 2, 1, 0, 3, 1, 2]]
    scales, zeros = torch.tensor([[0.5], [1], [2], [4]]), torch.tensor([[1.5], [0], [-1], [0.25]])
    assert torch.equal(read.to_float().view(4, 8), (torch.tensor(integers) - zeros) * scales)


@pytest.mark.parametrize("form", ["HQQ 4 bits", "torchao int4"])
def test_a_layer_that_was_skipped_is_plain(form, tmp_path):
    plain = torch.randn(OUT_FEATURES, IN_FEATURES).bfloat16()
    read = read_layer(tmp_path, {"weight": plain}, form)
    assert isinstance(read, PlainWeight) and torch.equal(read.values, plain)


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"nbits": number(5)}, "nbits is 5; only 1, 2, 3, 4, 8"),
        ({"axis": number(0)}, "axis is 0; only groups of inputs"),
        ({"group_size": number(0)}, "group_size is 0"),
        ({"group_size": number(96)}, "group_size is 96; it must be a multiple of 8 that divides the 256 inputs"),
        ({"quant_scale": torch.tensor(1, dtype=torch.uint8)}, "quant_scale is 1; only 0"),
        ({"scale": torch.ones(384, 1)}, "scale holds float32; only float16 and bfloat16"),
        ({"zero": torch.ones(384, 1)}, "zero holds float32; the config asks for bfloat16"),
        ({"scale": torch.ones(5, 1)}, r"scale has shape \[5, 1\]; the config asks for \[384, 1\]"),
        ({"W_q": torch.ones(7, 64, dtype=torch.uint8)}, r"W_q has shape \[7, 64\]"),
        ({"nbits": torch.tensor([4, 4], dtype=torch.int32)}, "nbits has shape"),
    ],
)
def test_refuses_weights_of_hqq_that_do_not_fit(change, match, tmp_path):
    with pytest.raises(LoadError, match=match):
        read_layer(tmp_path, random_layer("HQQ 4 bits")[0] | change, "HQQ 4 bits")


@pytest.mark.parametrize(
    ("form", "change", "description", "match"),
    [
        ("torchao int4", {}, {"_type": "Int4TilePackedTo4dTensor"}, "does not describe"),
        ("torchao int4", {}, describe_torchao("Int4TilePackedTo4dTensor", (1, 32)), "class Int4TilePackedTo4dTensor;"),
        ("torchao int4", {}, {"_type": "Int4Tensor", "_data": {}}, "does not describe tensor"),
        ("torchao int4", {}, {"_type": "Int4Tensor", "_data": {"block_size": [1, "x"]}}, "does not describe tensor"),
        ("torchao int4", {}, describe_torchao("Int4Tensor", (1, 48)), "blocks of 1 outputs and 48 inputs"),
        ("torchao int4", {}, describe_torchao("Int4Tensor", (1, 0)), "blocks of 1 outputs and 0 inputs"),
        ("torchao int8", {}, describe_torchao("Int8Tensor", (2, 256)), "blocks of 2 outputs and 256 inputs"),
        ("torchao int8", {}, describe_torchao("Int8Tensor", (1, 256), "int9"), "integers of 9 bits"),
        (
            "torchao int8",
            {},
            describe_torchao("Int8Tensor", (1, 256), "int4"),
            "qdata has integers of more than 4 bits",
        ),
        ("torchao int4", {"_weight_scale": torch.ones(8, 96)}, None, "scale holds float32"),
        ("torchao FP8", {"_weight_scale": torch.ones(5)}, None, r"scale has shape \[5\]"),
    ],
)
def test_refuses_weights_of_torchao_that_do_not_fit(form, change, description, match, tmp_path):
    with pytest.raises(LoadError, match=match) as failure:
        read_layer(tmp_path, random_layer(form)[0] | change, form, description)
    assert "\n" not in str(failure.value)


def test_scales_of_inputs_are_refused(tmp_path):
    parts, _ = random_layer("torchao int4")
    tensors = {f"{LINEAR.name}.{name}": part for name, part in parts.items()}
    tensors[f"{LINEAR.name}._weight_act_pre_scale"] = torch.ones(IN_FEATURES)
    save_file(
        tensors,
        tmp_path / "model.safetensors",
        {f"{LINEAR.name}.weight": json.dumps(describe_torchao("Int4Tensor", (1, 32)))},
    )
    quantization = read_quantization({"quantization_config": FORMS["torchao int4"].config}, "none")
    with pytest.raises(LoadError, match="act_pre_scale scales inputs, which is not supported"):
        quantization.check_stored_weight(Checkpoint(tmp_path), LINEAR)


def write_experts(folder: Path, form: str, leading: int = 1) -> list[torch.Tensor]:
    """Write the tensor of three experts in a form of torchao. Return the dequantized weights."""
    weights = torch.randn(3, OUT_FEATURES, IN_FEATURES, generator=torch.Generator().manual_seed(4)) * 0.05
    experts = [FORMS[form].quantize(weight) for weight in weights]
    parts = {name: torch.stack([parts[name] for parts, _ in experts]) for name in experts[0][0]}
    description = FORMS[form].describe(torch.Size((OUT_FEATURES, IN_FEATURES)))
    description["_data"]["block_size"].insert(0, leading)
    tensors = {f"mlp.experts.{name.replace('weight', 'up_proj')}": part for name, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"mlp.experts.up_proj": json.dumps(description)})
    return [dequantized for _, dequantized in experts]


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("torchao")])
def test_one_tensor_of_torchao_holds_the_weights_of_all_experts(form, tmp_path):
    expected = write_experts(tmp_path, form)
    checkpoint, linear = Checkpoint(tmp_path), LinearSpec("mlp.experts.up_proj", OUT_FEATURES, IN_FEATURES)
    stacked = read_quantization({"quantization_config": FORMS[form].config}, "none").stacked_format
    assert set(stacked.tensor_names(checkpoint, linear)) == set(checkpoint.tensor_names)
    for expert, dequantized in enumerate(expected):
        read = stacked.read_expert(checkpoint, linear, 3, expert)
        assert torch.allclose(read.to_float(), dequantized, rtol=1e-5, atol=1e-7)
    with pytest.raises(LoadError, match="has shape"):
        stacked.view_tensors(checkpoint, linear, 4)


def test_experts_that_share_scales_are_refused(tmp_path):
    write_experts(tmp_path, "torchao int4", leading=3)
    stacked = read_quantization({"quantization_config": FORMS["torchao int4"].config}, "none").stacked_format
    with pytest.raises(LoadError, match="blocks of 3 experts, 1 outputs and 32 inputs"):
        stacked.view_tensors(Checkpoint(tmp_path), LinearSpec("mlp.experts.up_proj", OUT_FEATURES, IN_FEATURES), 3)
