"""Weights of bitsandbytes and of GPTQ with 3 bits: each layout against the dequantized weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.grouped_products import largest_product_error, padded_outputs
from support.model_zoo.quantized_files import FORMS

from parley import native
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.quantization import read_quantization
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, PlainWeight

OUT_FEATURES, IN_FEATURES = 96, 256
LINEAR = LinearSpec("model.layers.0.mlp.up_proj", OUT_FEATURES, IN_FEATURES)
NF4, NESTED, INT8 = "bitsandbytes nf4", "bitsandbytes nf4, double", "bitsandbytes int8"
FP4, FP4_NESTED = "bitsandbytes fp4", "bitsandbytes fp4, double"
STATE = "weight.quant_state.bitsandbytes__nf4"


def random_layer(form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a layer in a form, and the dequantized weight."""
    weight = torch.randn(OUT_FEATURES, IN_FEATURES, generator=torch.Generator().manual_seed(3)) * 0.05
    return FORMS[form].quantize(weight)


def read_layer(folder: Path, parts: dict[str, torch.Tensor], form: str):
    """Write the tensors of a layer, and read them as a checkpoint's."""
    tensors = {f"{LINEAR.name}.{name}": part.contiguous() for name, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    quantization_config = read_quantization({"quantization_config": FORMS[form].config}, "none")
    checkpoint = Checkpoint(folder)
    assert sorted(quantization_config.stored_tensor_names(checkpoint, LINEAR)) == sorted(tensors)
    return quantization_config.read_stored_weight(checkpoint, LINEAR)


@pytest.mark.parametrize("form", [NF4, NESTED, FP4, FP4_NESTED, INT8, "GPTQ 3 bits"])
def test_each_format_is_read_as_defined(form, tmp_path):
    parts, dequantized = random_layer(form)
    read = read_layer(tmp_path, parts, form)
    assert torch.allclose(read.multiply_rows(torch.eye(IN_FEATURES)), dequantized.T, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("form", "limit"),
    [(NF4, 2.5e-3), (NESTED, 2.5e-3), (FP4, 2e-6), (FP4_NESTED, 2e-6), (INT8, 2e-5), ("GPTQ 3 bits", 2e-6)],
)
def test_kernels_multiply_the_bits_of_the_file(form, limit, tmp_path):
    """The 16 numbers of nf4 are rounded to bfloat16; all else is exact but for the rounding of sums and scales."""
    parts, dequantized = random_layer(form)
    weight = read_layer(tmp_path, parts, form)
    packed = GroupedLinearWeight.pack_merged([weight], None, torch.bfloat16, torch.device("cpu"))
    x = torch.randn(9, IN_FEATURES, generator=torch.Generator().manual_seed(1)).bfloat16()
    actual, expected = native.lm_head_logits(x, packed), (x.double() @ dequantized.double().T).float()
    assert (actual - expected).norm() / expected.norm() < largest_product_error(limit)
    assert torch.equal(native.lm_head_logits(x[4:5], packed), actual[4:5])
    if native.packed_layout_id() and form in (NF4, NESTED, FP4, FP4_NESTED):
        assert packed.weight.nbytes * 8 == padded_outputs(OUT_FEATURES) * IN_FEATURES * 4.5


def test_a_layer_that_was_skipped_is_plain(tmp_path):
    plain = torch.randn(OUT_FEATURES, IN_FEATURES).bfloat16()
    read = read_layer(tmp_path, {"weight": plain}, NF4)
    assert isinstance(read, PlainWeight) and torch.equal(read.values, plain)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({STATE: b"{"}, "does not hold the JSON"),
        ({STATE: b"[]"}, "does not hold the JSON"),
        ({STATE: {"blocksize": 64}}, "does not hold the JSON"),
        (
            {STATE: {"blocksize": 64, "shape": [IN_FEATURES, OUT_FEATURES]}},
            r"is of shape \[256, 96\]; the config asks for \[96, 256\]",
        ),
        ({STATE: {"blocksize": 0, "shape": [OUT_FEATURES, IN_FEATURES]}}, "groups of 0 numbers"),
        (
            {STATE: {"blocksize": 100, "shape": [OUT_FEATURES, IN_FEATURES]}},
            "groups of 100 numbers, which do not fill 256 inputs",
        ),
        ({STATE: {"blocksize": 4, "shape": [OUT_FEATURES, IN_FEATURES]}}, "groups of 4 numbers; only multiples of 8"),
        ({STATE: {"blocksize": float("inf"), "shape": [OUT_FEATURES, IN_FEATURES]}}, "does not hold the JSON"),
        ({STATE: {"blocksize": 64, "shape": [OUT_FEATURES, IN_FEATURES], "nested_blocksize": 7}}, "absmax"),
        ({"weight.absmax": torch.ones(5)}, r"shape \[5\]; the config asks for \[384\]"),
        ({"weight": torch.ones(7, 1, dtype=torch.uint8)}, r"shape \[7, 1\]"),
        ({"weight.quant_map": torch.linspace(-1, 1, 16)}, "does not hold the numbers of nf4"),
    ],
)
def test_refuses_weights_that_do_not_fit(change, match, tmp_path):
    parts, _ = random_layer(NF4)
    for name, value in change.items():
        data = json.dumps(value).encode() if isinstance(value, dict) else value
        parts[name] = data if isinstance(data, torch.Tensor) else torch.tensor(list(data), dtype=torch.uint8)
    with pytest.raises(LoadError, match=match) as failure:
        read_layer(tmp_path, parts, NF4)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("kind", ["nf5", ["nf4"]])
def test_refuses_other_kinds_of_4_bits(kind):
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    with pytest.raises(LoadError, match=r"bnb_4bit_quant_type is .*; only nf4 and fp4 are supported"):
        read_quantization({"quantization_config": config}, "none")
