"""Quantized weights through the real loader: accepted and rejected configs, and answers close to the plain model."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models

from parley.core.sequence import PAGE_SIZE, Sequence, Step, StepRow
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.checkpoint.quantization import read_quantization
from parley.model.checkpoint.weights import Int8Weight
from parley.model.load import fuse
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.loader import load_runner
from parley.model.load.numeric_check import decoder_check
from parley.model.networks.config_reader import read_decoder_config
from parley.native.torch_forms import torch_int8
from parley.types import EngineRequest, ParleySettings, SamplingOptions

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "observer": "minmax", "group_size": None}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True, "observer": None},
            "output_activations": None,
        }
    },
}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
FP8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
LAYERS = [f"model.layers.{number >> 8}.mlp.experts.{number % 256}.down_proj" for number in range(1 << 14)]


def write_w8a8(source, folder, config=W8A8, keep=lambda name: "proj" not in name, scale=torch.bfloat16, flat=False):
    """Write the checkpoint with int8 weights, except for the tensors that ``keep`` selects."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(".weight") or tensor.dim() != 2 or keep(name):
            tensors[name] = tensor
            continue
        scales = (tensor.float().abs().amax(1, keepdim=True) / 127).to(scale)
        tensors[name] = (tensor.float() / scales.float()).round().clamp(-128, 127).to(torch.int8)
        tensors[name + "_scale"] = scales.flatten() if flat else scales
    save_file(tensors, folder / "model.safetensors")
    write_config(folder, config)
    return folder


def write_config(folder, quantization):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))


def changed_config(path: str, value) -> dict:
    """W8A8 with one field set, or deleted if the value is ``...``."""
    config = json.loads(json.dumps(W8A8))
    *outer, last = path.split(".")
    fields = config
    for key in outer:
        fields = fields[key]
    if value is ...:
        del fields[last]
    else:
        fields[last] = value
    return config


def load_small_runner(folder, **settings):
    settings = {"kv_memory": 4 << 20, "max_batch": 8} | settings
    return load_runner(ParleySettings(model=str(folder), **settings), lambda stage, fraction: None)


def prompt_logprobs(runner, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens of a prompt but the first."""
    request = EngineRequest("a", prompt, 1, SamplingOptions(temperature=0.0), prompt_logprobs=0)
    blocks = list(range(-(-len(prompt) // PAGE_SIZE)))
    sequence = Sequence("a", 0, request, list(prompt), len(prompt), 0, 0, block_table=blocks, slot=0)
    runner.admit_sequence(sequence)
    (sampled,) = runner.run_step(Step([StepRow(sequence, 0, len(prompt), False, score_from=1)], blocks))
    runner.release_slot(sequence)
    return torch.tensor([prompt_score.logprob for prompt_score in sampled.prompt_scores])


PROMPT = torch.randint(3, tiny_models.VOCAB, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_weights_stay_close_to_the_plain_model(architecture, dtype, tmp_path):
    folder = tiny_models.model_folder(architecture)
    runner, info = load_small_runner(folder, dtype=dtype)
    plain_logprobs = prompt_logprobs(runner, PROMPT)
    shape = read_decoder_config(read_config(folder))
    head = shape.vocab_size * shape.hidden_size
    runner, int8_info = load_small_runner(folder, dtype=dtype, quantization="int8")
    assert int8_info.fused and int8_info.parameters == info.parameters and int8_info.quantization == "int8"
    table, other_parameters = head * getattr(torch, dtype).itemsize, info.parameters - head * (not shape.tied)
    assert table + other_parameters < int8_info.weights_bytes < table + 1.25 * other_parameters
    int8_logprobs = prompt_logprobs(runner, PROMPT)
    runner, checkpoint_info = load_small_runner(write_w8a8(folder, tmp_path / "m"), dtype=dtype)
    assert (
        checkpoint_info.fused
        and checkpoint_info.parameters == info.parameters
        and checkpoint_info.quantization == "compressed-tensors"
    )
    for logprobs in (int8_logprobs, prompt_logprobs(runner, PROMPT)):
        assert 0 < (logprobs - plain_logprobs).abs().mean() < plain_logprobs.std() / 10


DOWN_PROJ = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (W8A8, {"scale": torch.float32}),
        (W8A8, {"flat": True}),
        (changed_config("config_groups.group_0.targets", ["re:.*_proj$"]), {}),
        (changed_config("config_groups.group_0.input_activations", None), {}),
        (changed_config("config_groups.group_0.input_activations.dynamic", False), {}),
        (
            changed_config("ignore", ["re:.*lm_head", "re:.*\\.0\\.mlp"]),
            {"keep": lambda n: "proj" not in n or "0.mlp" in n},
        ),
        (changed_config("ignore", ["lm_head", "model.layers.1.self_attn"]), {}),  # not a linear layer's name: no effect
        (
            changed_config("ignore", ["lm_head", DOWN_PROJ]),
            {"keep": lambda n: "proj" not in n or n == DOWN_PROJ + ".weight"},
        ),
        (changed_config("ignore", []), {"keep": lambda name: "embed" in name}),
        (
            changed_config("ignore", ...) | {"version": "0.9", "sparsity_config": {}},
            {"keep": lambda name: "embed" in name},
        ),
        (  # one of two layers that are computed as one
            changed_config("ignore", ["lm_head", "model.layers.1.mlp.up_proj"]),
            {"keep": lambda name: "proj" not in name or "1.mlp.up" in name},
        ),
    ],
)
def test_load_accepts_compressed_tensors_variants(config, options, tmp_path):
    folder = write_w8a8(tiny_models.model_folder("llama"), tmp_path, config, **options)
    runner, info = load_small_runner(folder)
    assert info.fused
    assert (
        prompt_logprobs(runner, PROMPT)
        - prompt_logprobs(load_small_runner(tiny_models.model_folder("llama"))[0], PROMPT)
    ).abs().mean() < 0.2


GROUP_0 = "config_groups.group_0."


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (changed_config("format", "pack-quantized"), "no tensor .*weight_packed"),
        (changed_config("format", "marlin-24"), "format is marlin-24"),
        (changed_config("quantization_status", "frozen"), "quantization_status"),
        (changed_config("sparsity_config", {"format": "sparse-24-bitmask"}), "sparse-24"),
        (changed_config("config_groups", {}), "no config_groups"),
        (changed_config("config_groups", [1]), "no config_groups"),
        (changed_config("config_groups", {"a": 3}), "no config_groups"),
        (changed_config(GROUP_0 + "weights", None), "weights is nothing"),
        (changed_config(GROUP_0 + "weights.num_bits", 9), r"weights\.num_bits is 9; only 2 or 3"),
        (changed_config(GROUP_0 + "weights.num_bits", True), r"weights\.num_bits is True"),
        (changed_config(GROUP_0 + "weights.type", "float"), r"weights\.type is float"),
        (changed_config(GROUP_0 + "weights.symmetric", False), "no tensor .*weight_zero_point"),
        (
            changed_config(GROUP_0 + "weights.strategy", "row"),
            r"weights\.strategy is row; only channel or group or tensor",
        ),
        (changed_config(GROUP_0 + "weights.strategy", "group"), r"weights\.group_size is None; only a multiple of 8"),
        (changed_config(GROUP_0 + "output_activations", {"num_bits": 8}), "output_activations"),
        (changed_config(GROUP_0 + "targets", "Linear"), "targets is not a list"),
        (changed_config("ignore", ["re:("]), r"broken or unsupported pattern re:\("),
        (changed_config("ignore", ["re:a{99999999999}"]), r"broken or unsupported pattern re:a\{"),
        (
            changed_config("ignore", ["lm_head", "model.layers.0.self_attn.q_proj"]),
            "has a tensor .*q_proj.weight_scale",
        ),
        ({"quant_method": "exl2"}, "exl2"),
        ({"bits": 4}, "somehow"),
        ("x", "somehow"),
    ],
)
def test_load_rejects_unsupported_quantization_config(config, match, tmp_path):
    folder = write_w8a8(tiny_models.model_folder("llama"), tmp_path, config)
    with pytest.raises(LoadError, match=match) as failure:
        load_small_runner(folder)
    assert str(failure.value).endswith(".") and "\n" not in str(failure.value)


def test_more_rules_than_any_model_needs_are_refused():
    names = [f"model.layers.{number}.mlp" for number in range(1_000_000)]
    with pytest.raises(LoadError, match=r"config\.ignore has 1000000 entries; at most 16384 are read\."):
        read_quantization({"quantization_config": W8A8 | {"ignore": names}}, "none")
    with pytest.raises(LoadError, match=r"config\.dynamic has 1000000 entries; at most 16384 are read\."):
        read_quantization({"quantization_config": GPTQ | {"dynamic": {name: {} for name in names}}}, "none")
    groups = {str(i): W8A8["config_groups"]["group_0"] | {"targets": names[:16000]} for i in range(3)}
    with pytest.raises(LoadError, match=r"quantization_config has more than 32768 names and patterns in all; no more"):
        read_quantization({"quantization_config": W8A8 | {"config_groups": groups}}, "none")


@pytest.mark.parametrize(
    "config",
    [
        W8A8 | {"ignore": LAYERS},
        GPTQ | {"dynamic": {f"-:{layer}": {} for layer in LAYERS}},
        GPTQ | {"dynamic": {"-:" + re.escape(layer): {} for layer in LAYERS}},
        GPTQ | {"quant_method": "auto-round", "extra_config": {layer: {"bits": 16} for layer in LAYERS}},
        {"quant_method": "quark", "global_quant_config": FP8, "layer_quant_config": {layer: {} for layer in LAYERS}},
    ],
    ids=["compressed-tensors", "gptq", "gptq, escaped", "auto-round", "quark"],
)
def test_names_of_thousands_of_layers_are_looked_up(config):
    find = read_quantization({"quantization_config": config}, "none").find_format
    assert find(LAYERS[-1]) is None
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        value = find("model.layers.7.mlp.experts.3.up_proj")
    finally:
        sys.setprofile(None)
    assert value is not None
    assert len(calls) < 100


def test_load_reads_legacy_compression_config(tmp_path):
    folder = write_w8a8(tiny_models.model_folder("llama"), tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    fields["compression_config"] = fields.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(fields))
    assert load_small_runner(folder)[1].quantization == "compressed-tensors"


def test_load_rejects_conflicting_quantization_settings(tmp_path):
    def assert_load_fails(match, folder, **settings):
        with pytest.raises(LoadError, match=match):
            load_small_runner(folder, **settings)

    folder = write_w8a8(tiny_models.model_folder("llama"), tmp_path)
    assert_load_fails(
        "int5 is unknown; it must be one of none, int8", tiny_models.model_folder("llama"), quantization="int5"
    )
    assert_load_fails("lowering is off", folder, lowering=False)
    assert_load_fails("model type beam has no fused decoder", tiny_models.model_folder("beam"), quantization="int8")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for change, match in (
        ({name + "_scale": torch.ones(3)}, "weight_scale has shape"),
        ({name + "_scale": torch.ones(160, 2)}, "weight_scale has shape"),
        ({name + "_scale": torch.ones(160, dtype=torch.int32)}, "weight_scale holds int32"),
        ({name: torch.ones(160, 64)}, r"has a tensor model\.layers\.1\.mlp\.up_proj\.weight_scale"),
        ({name: torch.ones(160, 64, dtype=torch.uint8)}, "holds uint8; the config asks for int8"),
        ({name + "_zero_point": torch.zeros(160, 1, dtype=torch.int8)}, "weight_zero_point"),
    ):
        save_file(tensors | change, folder / "model.safetensors")
        assert_load_fails(match, folder)
    del tensors[name + "_scale"]
    save_file(tensors, folder / "model.safetensors")
    assert_load_fails("no tensor model.layers.1.mlp.up_proj.weight_scale", folder)


def test_wrong_weight_scale_fails_the_decoder_check(tmp_path):
    """Guards against a scale that is read for the wrong rows: the check must see it."""
    folder = write_w8a8(tiny_models.model_folder("qwen3"), tmp_path)
    checkpoint, config = Checkpoint(folder), read_config(folder)
    quantization = read_quantization(config, "none")
    weights = DecoderWeights(checkpoint, read_decoder_config(config), quantization, torch.bfloat16, torch.device("cpu"))
    decoder = fuse.fuse_decoder(weights, 64, lambda fraction: None)
    tolerance = decoder_check.DECODER_TOLERANCE[torch.bfloat16] + quantization.extra_tolerance
    assert decoder_check.decoder_deviation(decoder, checkpoint, quantization) < tolerance / 2
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight_scale"
    tensors[name] = tensors[name].flip(0) * 1.5
    save_file(tensors, folder / "model.safetensors")
    assert decoder_check.decoder_deviation(decoder, Checkpoint(folder), quantization) > tolerance


def test_int8_weights_round_to_the_nearest_value():
    weight = torch.randn(300, 77, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[7] = 0
    quantized = Int8Weight.from_float(weight)
    assert quantized.values[7].count_nonzero() == 0 and quantized.values.abs().amax(1)[:7].eq(127).all()
    error = (quantized.values * quantized.scales[:, None] - weight.float()).abs()
    assert (error <= quantized.scales[:, None] * 0.5001).all()
    assert quantized.scales.dtype == torch.float32 and quantized.values.shape == weight.shape
    selected = quantized.select_outputs(torch.tensor([5, 3]))
    x = torch.randn(4, 77, generator=torch.Generator().manual_seed(4))
    assert torch.allclose(selected.multiply_rows(x), quantized.multiply_rows(x)[:, [5, 3]], rtol=1e-5)
    rows = torch_int8.quantize_rows(x)
    exact = (rows.values * rows.scales[:, None]).double() @ (quantized.values * quantized.scales[:, None]).double().T
    assert torch.allclose(quantized.multiply_rows(x).double(), exact, rtol=1e-5, atol=1e-5)
