"""Weights of 8 and 4-bit floating-point numbers: each published layout of scales, against the dequantized weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.run_model import long_logprobs

from parley import native
from parley.model.checkpoint import quantization
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.checkpoint.weights import LinearSpec, PlainWeight
from parley.model.load.check import check_model
from parley.native.torch_forms.torch_grouped import E2M1_NUMBERS
from parley.types import ParleySettings

OUT_FEATURES, IN_FEATURES = 200, 136
LINEAR = LinearSpec("model.layers.0.mlp.up_proj", OUT_FEATURES, IN_FEATURES)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}


def compressed_floats(strategy: str, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8},
        "config_groups": {"group_0": group},
    }


def write_layer(folder, **parts: torch.Tensor) -> Checkpoint:
    """Write the tensors of one layer, with its name as their prefix."""
    save_file({f"{LINEAR.name}.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    return Checkpoint(folder)


def random_fp8(*shape: int) -> torch.Tensor:
    """Every kind of e4m3: normal, subnormal and zero, of both signs, but no NaN."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 0.2).to(torch.float8_e4m3fn)


def spread_blocks(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The scale of each weight, number by number from the definition of blocks."""
    spread = torch.empty(OUT_FEATURES, IN_FEATURES)
    for n in range(OUT_FEATURES):
        for k in range(IN_FEATURES):
            spread[n, k] = scales[n // rows, k // columns]
    return spread


LAYOUTS = {
    "deepseek": (BLOCKS, "weight_scale_inv", (2, 2), (128, 128)),
    "deepseek-v3.1": (BLOCKS | {"scale_fmt": "ue8m0"}, "weight_scale_inv", (2, 2), (128, 128)),
    "mistral": (FP8, "weight_scale_inv", (), (OUT_FEATURES, IN_FEATURES)),
    "tensor": (FP8 | {"activation_scheme": "static"}, "weight_scale", (1,), (OUT_FEATURES, IN_FEATURES)),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "weight_scale",
        (OUT_FEATURES, 1),
        (1, IN_FEATURES),
    ),
    "compressed-tensor": (compressed_floats("tensor"), "weight_scale", (1,), (OUT_FEATURES, IN_FEATURES)),
    "compressed-channel": (compressed_floats("channel"), "weight_scale", (OUT_FEATURES, 1), (1, IN_FEATURES)),
    "compressed-block": (compressed_floats("block", block_structure=[128, 128]), "weight_scale", (2, 2), (128, 128)),
    "compressed-group": (compressed_floats("group", group_size=32), "weight_scale", (OUT_FEATURES, 5), (1, 32)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_of_scales_is_read_as_defined(layout, tmp_path):
    config, name, shape, block = LAYOUTS[layout]
    weight, scales = (
        random_fp8(OUT_FEATURES, IN_FEATURES),
        torch.rand(shape, generator=torch.Generator().manual_seed(5)) + 0.5,
    )
    stored = scales.log2().round().exp2().to(torch.float8_e8m0fnu) if "scale_fmt" in config else scales
    extra = {"input_scale": torch.ones(1)} if config.get("activation_scheme") == "static" else {}
    checkpoint = write_layer(tmp_path, weight=weight, **{name: stored}, **extra)
    quantization_config = quantization.read_quantization({"quantization_config": config}, "none")
    assert len(quantization_config.stored_tensor_names(checkpoint, LINEAR)) == 2 + len(extra)
    read = quantization_config.read_stored_weight(checkpoint, LINEAR)
    rows, columns = -(-OUT_FEATURES // block[0]), -(-IN_FEATURES // block[1])
    dequantized = weight.float() * spread_blocks(stored.float().reshape(rows, columns), *block)
    assert torch.allclose(read.multiply_rows(torch.eye(IN_FEATURES)), dequantized.T, rtol=1e-6, atol=0)


def test_a_layer_without_scales_is_plain(tmp_path):
    plain = torch.randn(OUT_FEATURES, IN_FEATURES).bfloat16()
    quantization_config = quantization.read_quantization({"quantization_config": BLOCKS}, "none")
    read = quantization_config.read_stored_weight(write_layer(tmp_path, weight=plain), LINEAR)
    assert isinstance(read, PlainWeight) and torch.equal(read.values, plain)
    with pytest.raises(LoadError, match="weight_scale"):
        quantization_config.check_stored_weight(
            write_layer(tmp_path, weight=random_fp8(OUT_FEATURES, IN_FEATURES)), LINEAR
        )


@pytest.mark.parametrize(
    ("config", "parts", "match"),
    [
        (BLOCKS, {"weight_scale_inv": torch.ones(2, 3)}, r"shape \[2, 3\]; the config asks for \[2, 2\]"),
        (FP8, {"weight_scale": torch.ones(2)}, r"shape \[2\]; the config asks for \[200, 1\]"),
        (FP8, {"weight_scale": torch.ones(1, dtype=torch.int32)}, "holds int32"),
        (FP8 | {"fmt": "e5m2"}, {}, "fmt is e5m2; only e4m3"),
        (FP8 | {"weight_block_size": [128]}, {}, r"weight_block_size is \[128\]"),
        (FP8 | {"weight_block_size": [128, 12]}, {}, "the second a multiple of 8"),
        (compressed_floats("token"), {}, r"weights\.strategy is token"),
        (compressed_floats("channel", num_bits=4), {}, r"weights\.num_bits is 4"),
        (compressed_floats("block"), {"weight_scale": torch.ones(2, 2)}, "asks for"),
    ],
)
def test_refuses_scales_and_configs_that_do_not_fit(config, parts, match, tmp_path):
    checkpoint = write_layer(tmp_path, weight=random_fp8(OUT_FEATURES, IN_FEATURES), **parts)
    with pytest.raises(LoadError, match=match):
        quantization.read_quantization({"quantization_config": config}, "none").read_stored_weight(checkpoint, LINEAR)


def test_refuses_numbers_that_are_nan(tmp_path):
    weight = random_fp8(OUT_FEATURES, IN_FEATURES)
    weight.view(torch.uint8)[7, 9] = 0xFF
    checkpoint = write_layer(tmp_path, weight=weight, weight_scale=torch.ones(1))
    with pytest.raises(LoadError, match=r"up_proj\.weight has numbers that are NaN"):
        quantization.read_quantization({"quantization_config": FP8}, "none").read_stored_weight(checkpoint, LINEAR)


def fp4_config(kind: str, group_size: int) -> dict:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": group_size}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


FP4_INTO = 96
FP4_LINEAR = LinearSpec(LINEAR.name, OUT_FEATURES, FP4_INTO)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize(("kind", "group"), [("nvfp4", 16), ("mxfp4", 32)])
def test_4_bit_floats_are_read_as_defined(kind, group, tmp_path):
    source = torch.Generator().manual_seed(6)
    values = torch.randint(0, 16, (OUT_FEATURES, FP4_INTO), generator=source)
    exponents = torch.randint(118, 136, (OUT_FEATURES, FP4_INTO // group), generator=source)
    if kind == "nvfp4":
        stored = (torch.rand(exponents.shape, generator=source) * 400).to(torch.float8_e4m3fn)
        scales, parts = stored.float() / 700.0, {"weight_global_scale": torch.tensor([700.0])}
    else:
        stored, scales, parts = exponents.to(torch.uint8), 2.0 ** (exponents - 127.0), {}
    packed = (values[:, 0::2] + 16 * values[:, 1::2]).to(torch.uint8)
    checkpoint = write_layer(tmp_path, weight_packed=packed, weight_scale=stored, **parts)
    quantization_config = quantization.read_quantization({"quantization_config": fp4_config(kind, group)}, "none")
    read = quantization_config.read_stored_weight(checkpoint, FP4_LINEAR)
    dequantized = E2M1[values] * scales.repeat_interleave(group, 1)
    assert torch.allclose(read.multiply_rows(torch.eye(FP4_INTO)), dequantized.T, rtol=1e-6, atol=0)
    x = torch.eye(FP4_INTO, dtype=torch.bfloat16)
    merged = type(read).pack_merged([read, read], None, torch.bfloat16, torch.device("cpu"))
    assert torch.allclose(native.lm_head_logits(x, merged), torch.cat((dequantized, dequantized)).T, rtol=1e-2, atol=0)
    with pytest.raises(LoadError, match="not whole groups"):
        quantization_config.check_stored_weight(checkpoint, LinearSpec(LINEAR.name, OUT_FEATURES, FP4_INTO + 8))


def test_refuses_4_bit_floats_of_other_groups():
    with pytest.raises(LoadError, match=r"weights\.group_size is 64; only 16"):
        quantization.read_quantization({"quantization_config": fp4_config("nvfp4", 64)}, "none")


def write_fp8_models(source, folder):
    """Write a model in DeepSeek's format, and its dequantized weights in float32."""
    quantized, plain = folder / "q", folder / "plain"
    stored, dequantized = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name], dequantized[name] = tensor, tensor.float()
        if not name.endswith("proj.weight"):
            continue
        rows, columns = -(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)
        scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name))) / 100 + 1e-3
        spread = scales.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
        stored[name] = (tensor.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scales
        dequantized[name] = stored[name].float() * spread
    for target, tensors, changes in (
        (quantized, stored, {"quantization_config": BLOCKS | {"modules_to_not_convert": ["lm_head"]}}),
        (plain, dequantized, {"dtype": "float32"}),
    ):
        shutil.copytree(source, target)
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        fields = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(fields | changes))
    return quantized, plain


def test_an_fp8_model_computes_as_its_dequantized_weights(tmp_path):
    """The tolerance that docs/performance.md states: in float32 sums alone differ, in bfloat16 what bfloat16 rounds."""
    quantized, plain = write_fp8_models(tiny_models.model_folder("qwen2", hidden_size=192), tmp_path)
    assert check_model(ParleySettings(model=str(quantized))).load_caveat == ""
    exact = long_logprobs(plain, "float32")
    error = (long_logprobs(quantized, "bfloat16") - exact).norm()
    assert 0 < error < 1.2 * (long_logprobs(plain, "bfloat16") - exact).norm()
    assert (long_logprobs(quantized, "float32") - exact).norm() < 1e-5 * exact.norm()
    assert 0 < (long_logprobs(quantized, "bfloat16", quantization="int8") - exact).abs().mean() < 0.1


def test_unquantized_tensors_are_read_despite_a_quantization_config(tmp_path):
    """llm-compressor lists layers that it left alone as they are merged in vLLM."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    config["ignore"] = ["model.layers.0.mlp.gate_up_proj"]
    plain = torch.randn(OUT_FEATURES, IN_FEATURES).bfloat16()
    quantization_config = quantization.read_quantization({"quantization_config": config}, "none")
    checkpoint = write_layer(tmp_path, weight=plain)
    assert quantization_config.stored_tensor_names(checkpoint, LINEAR) == [f"{LINEAR.name}.weight"]
    quantization_config.check_stored_weight(checkpoint, LINEAR)
    read = quantization_config.read_stored_weight(checkpoint, LINEAR)
    assert isinstance(read, PlainWeight) and torch.equal(read.values, plain)


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_reads_the_separate_config_file_of_model_optimizer(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "nvfp4", "group_size": 16}})
    )
    quantization_config = quantization.read_quantization(read_config(tmp_path), "none")
    assert quantization_config.method == "modelopt"
    linear = LinearSpec(LINEAR.name, OUT_FEATURES, 144)
    packed = torch.randint(0, 256, (OUT_FEATURES, linear.in_features // 2), dtype=torch.uint8)
    scales = (torch.rand(OUT_FEATURES, linear.in_features // 16) + 0.5).to(torch.float8_e4m3fn)
    checkpoint = write_layer(
        tmp_path,
        weight=packed,
        weight_scale=scales,
        weight_scale_2=torch.tensor(0.25),
        input_scale=torch.ones(()),
    )
    read = quantization_config.read_stored_weight(checkpoint, linear).to_float()
    numbers = torch.tensor(E2M1_NUMBERS)[torch.stack((packed & 15, packed >> 4), -1).flatten(1).int()]
    assert torch.equal(read, numbers * scales.float().repeat_interleave(16, 1) * 0.25)
    with pytest.raises(LoadError, match="group_size is 32; only 16"):
        quantization.read_quantization(
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}}, "none"
        )
