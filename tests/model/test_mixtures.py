"""Mixtures of experts on the fused decoder: layouts of checkpoints, quantized experts, and configs that do not fit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.mxfp4_files import write_mxfp4

from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.checkpoint.stacked import StackedPlainFormat
from parley.model.checkpoint.weights import LinearSpec
from parley.model.load import fuse, plan
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.numeric_check import decoder_check
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.rope import Unfusable
from parley.native import kernel_choice
from parley.types import ParleySettings

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
TOKENS = list(range(5, 50))


def load_decoder(folder: Path, dtype: str = "bfloat16", quantization: str = "none") -> FusedDecoder:
    """Load the fused decoder of a folder, and check it as the loader does."""
    with torch.inference_mode():
        decoder_plan = plan.plan_decoder(
            ParleySettings(model=str(folder), dtype=dtype, quantization=quantization), read_config(folder)
        )
        checkpoint = plan.open_decoder(folder, decoder_plan)
        config = plan.find_fused_config(checkpoint, decoder_plan)
        assert config is not None
        method, cpu = decoder_plan.quantization, torch.device("cpu")
        weights = DecoderWeights(checkpoint, config, method, decoder_plan.dtype, cpu)
        decoder = fuse.fuse_decoder(weights, 64, lambda fraction: None)
        tolerance = decoder_check.DECODER_TOLERANCE[decoder_plan.dtype] + method.extra_tolerance
        assert decoder_check.decoder_deviation(decoder, checkpoint, method) < tolerance
        return decoder


@torch.inference_mode()
def compute_logits(decoder: FusedDecoder, counts: list[int]) -> torch.Tensor:
    """Return the logits of TOKENS, computed in chunks of these sizes."""
    pages = PagedKV(decoder.kv_layers, 4, decoder.dtype)
    pages.clear_pages([0, 1, 2, 3])
    logits, start = [], 0
    for count in counts:
        part = TOKENS[start : start + count], start, [0, 1, 2, 3]
        batch = PackedBatch.pack_parts([part], torch.device("cpu"))
        logits.append(decoder.compute_logits(decoder.compute_hidden(batch, pages)))
        start += count
    return torch.cat(logits)


def stack_experts(folder: Path, target: Path) -> Path:
    """Copy a checkpoint, with all experts of a layer in one tensor."""
    shutil.copytree(folder, target)
    tensors, experts = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensors.pop(name)
    for prefix, parts in experts.items():
        count = len(parts) // 3
        gate_up = [torch.cat((parts["gate", i], parts["up", i])) for i in range(count)]
        tensors[prefix + ".gate_up_proj"] = torch.stack(gate_up)
        tensors[prefix + ".down_proj"] = torch.stack([parts["down", i] for i in range(count)])
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_experts_in_one_tensor_load_like_separate_experts(tmp_path, quantization):
    folder = tiny_models.model_folder("qwen2_moe")
    stacked = stack_experts(folder, tmp_path / "stacked")
    assert "model.layers.0.mlp.experts.gate_up_proj" in Checkpoint(stacked)
    results = [
        compute_logits(load_decoder(model_folder, quantization=quantization), [45])
        for model_folder in (folder, stacked)
    ]
    assert torch.equal(*results)


def test_transposed_experts_are_known_by_their_shape(tmp_path):
    weights, linear = torch.arange(2 * 24 * 8.0).view(2, 24, 8), LinearSpec("experts", 24, 8)
    save_file({"experts": weights.mT.contiguous()}, tmp_path / "model.safetensors")
    for transposed in (None, True):
        read = StackedPlainFormat(transposed).read_expert(Checkpoint(tmp_path), linear, 2, 1)
        assert torch.equal(read.multiply_rows(torch.eye(8)), weights[1].T)
    with pytest.raises(LoadError, match=r"shape \[2, 8, 24\]; the config asks for \[2, 24, 8\]"):
        StackedPlainFormat(False).view_tensors(Checkpoint(tmp_path), linear, 2)
    save_file({"experts": weights}, tmp_path / "model.safetensors")
    read = StackedPlainFormat(None).read_expert(Checkpoint(tmp_path), linear, 2, 1)
    assert torch.equal(read.multiply_rows(torch.eye(8)), weights[1].T)


def test_published_mxfp4_is_read_directly(tmp_path):
    plain, packed = write_mxfp4(tmp_path)
    whole = [45]
    wide, exact = (compute_logits(load_decoder(model_folder, "float32"), whole) for model_folder in (plain, packed))
    assert torch.equal(wide, exact)
    decoder = load_decoder(packed)
    logits = compute_logits(decoder, whole)
    assert (logits - wide).norm() / wide.norm() < 0.03
    assert torch.equal(logits, compute_logits(decoder, [7, 1, 30, 1, 6]))
    mixture = decoder.layer_weights[0].mixture
    if kernel_choice.compiled_kernels() is not None:
        experts = mixture.experts.gate_up, mixture.experts.down
        numbers = 6 * 3 * 64 * 160
        assert sum(expert.weight.nbytes for expert in experts) < numbers * 0.6 + 6 * 64 * (
            160 + 64
        )  # panels are padded


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("down_proj_scales", lambda scales: scales[..., :1], r"down_proj_scales has shape \[6, 64, 1\]"),
        ("gate_up_proj_blocks", lambda blocks: blocks.int(), "gate_up_proj_blocks holds int32"),
        ("down_proj_scales", lambda scales: torch.full_like(scales, 255), "Layer 1 cannot be packed"),
        ("down_proj_bias", lambda bias: bias[:, :-1], r"down_proj_bias has shape \[6, 63\]"),
    ],
)
def test_damaged_mxfp4_is_refused(tmp_path, name, change, reason):
    _, packed = write_mxfp4(tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts." + name
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(LoadError, match=reason):
        load_decoder(packed)


@pytest.mark.parametrize(
    ("architecture", "quantization"), [("qwen2_moe", "int8"), ("glm4_moe", "int4"), ("gpt_oss", "int8")]
)
def test_chunks_give_the_bits_of_one_prefill(architecture, quantization):
    decoder = load_decoder(tiny_models.model_folder(architecture), quantization=quantization)
    assert torch.equal(compute_logits(decoder, [45]), compute_logits(decoder, [7, 1, 30, 1, 6]))


def test_layers_that_predict_further_tokens_are_not_used(tmp_path):
    folder = shutil.copytree(tiny_models.model_folder("glm4_moe"), tmp_path / "extra")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for count, is_fused in ((1, True), (0, False)):
        fields = {**config, "num_nextn_predict_layers": count, "num_mtp_layers": count}
        (folder / "config.json").write_text(json.dumps(fields))
        decoder_plan = plan.plan_decoder(ParleySettings(model=str(folder), dtype="bfloat16"), fields)
        decoder_config = plan.find_fused_config(plan.open_decoder(folder, decoder_plan), decoder_plan)
        assert (decoder_config is not None) == is_fused


@pytest.mark.parametrize(
    ("architecture", "change", "reason"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "choose 9 of 4 experts"),
        ("qwen3_moe", {"moe_intermediate_size": 44}, "no multiple of 8"),
        ("glm4_moe", {"n_group": 3}, "16 experts in 2 of 3 groups"),
        ("glm4_moe", {"topk_group": 5}, "5 of 4 groups"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window as True"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit as 5.0"),
        ("mixtral", {"num_local_experts": "all"}, "num_experts as 'all'"),
    ],
)
def test_configs_that_do_not_fit_have_no_fused_decoder(architecture, change, reason):
    model_type, fields = (tiny_models.ARCHITECTURES | tiny_models.MIXTURES)[architecture]
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config({"model_type": model_type, **fields, **change})


def test_missing_expert_is_named(tmp_path):
    folder = shutil.copytree(tiny_models.model_folder("qwen3_moe"), tmp_path / "missing")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"no tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        load_decoder(folder)
