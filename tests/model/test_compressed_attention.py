"""Attention to compressed entries (DeepSeek V4): its files, configs, pages and refusals.

``test_decoder_families`` compares logits with Transformers', ``test_exact`` the bits in all schedules.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.run_model import load_test_runner, long_logprobs
from transformers import AutoConfig

from parley.core.sequence import PAGE_SIZE
from parley.model.checkpoint.files import LoadError
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable
from parley.native.layer_shape import EntryShape

MODEL_TYPE, FIELDS = tiny_models.LATENT_DECODERS["deepseek_v4"]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_NUMBERS = torch.cat((E2M1, -E2M1))
PLAIN_PARTS = ("norm", "compressor", "weights_proj", "gate.", "embed", "head")  # of names that are never quantized


def power_scales(*shape: int, seed: int) -> torch.Tensor:
    """Return random powers of two."""
    return torch.randint(-4, 0, shape, generator=torch.Generator().manual_seed(seed)).float().exp2()


def quantize_tensor(name: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors that the publisher stores for a linear layer, and the numbers that they mean."""
    stem, seed = name.removesuffix(".weight"), len(name)
    if ".experts." in name:
        codes = torch.randint(0, 16, tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        scales = power_scales(len(tensor), tensor.shape[1] // 32, seed=seed)
        numbers = E2M1_NUMBERS[codes.int()] * scales.repeat_interleave(32, 1)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
        return {name: packed, f"{stem}.scale": scales.to(torch.float8_e8m0fnu)}, numbers
    scales = power_scales(*(-(-size // 128) for size in tensor.shape), seed=seed)
    spread = scales.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
    stored = (tensor.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: stored, f"{stem}.scale": scales.to(torch.float8_e8m0fnu)}, stored.float() * spread


def write_published(folder: Path) -> tuple[Path, Path]:
    """Write a model as DeepSeek publishes it, and its numbers in float32 under the names that Transformers writes."""
    source = tiny_models.model_folder("deepseek_v4", moe_intermediate_size=64)
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        new_name = (
            "embed.weight" if "embed_tokens" in name else name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
        )
        stored[new_name], plain[name] = tensor, tensor
        is_linear = name.endswith(".weight") and tensor.dim() == 2
        if tensor.is_floating_point():
            plain[name] = tensor.float()
        if is_linear and not any(part in name for part in PLAIN_PARTS):
            del stored[new_name]
            tensors, plain[name] = quantize_tensor(new_name, tensor)
            stored |= tensors
    stored["mtp.0.e_proj.weight"] = torch.zeros(64, 64)  # of a layer that predicts one more token
    for name, tensors, fields in (
        ("published", stored, {"quantization_config": FP8, "expert_dtype": "fp4"}),
        ("plain", plain, {"dtype": "float32"}),
    ):
        shutil.copytree(source, folder / name)
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
        path = folder / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder / "published", folder / "plain"


def test_published_files_compute_as_their_dequantized_weights(tmp_path):
    published, plain = write_published(tmp_path)
    assert load_test_runner(published, dtype="float32")[1].fused
    exact = long_logprobs(plain, "float32")
    assert (long_logprobs(published, "float32") - exact).norm() < 1e-5 * exact.norm()


def test_published_configs_are_read_as_transformers_reads_them():
    published = {name: value for name, value in FIELDS.items() if name not in ("layer_types", "rope_parameters")}
    published |= {"compress_ratios": [0, 4, 128, 4, 0], "compress_rates": None, "num_hash_layers": 2}
    published["rope_scaling"] = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64}
    config = read_decoder_config({"model_type": MODEL_TYPE, **published})
    present = AutoConfig.for_model(MODEL_TYPE, **published).to_dict()
    assert config == read_decoder_config(present)
    assert [shape.entries for shape in config.layers] == [
        None, EntryShape(4, True), EntryShape(128, False), EntryShape(4, True)
    ]  # fmt: skip
    assert [shape.routing.is_hashed for shape in config.layers] == [True, True, False, False]
    assert [config.ropes[shape.rope].theta for shape in config.layers] == [10000.0, *[160000.0] * 3]


def test_configs_without_types_of_layers_have_those_of_transformers():
    fields = {name: value for name, value in FIELDS.items() if name != "layer_types"} | {"num_hidden_layers": 7}
    kinds = AutoConfig.for_model(MODEL_TYPE, **fields).layer_types
    layers = read_decoder_config({"model_type": MODEL_TYPE, **fields}).layers
    assert [shape.entries.is_chosen for shape in layers] == [kind.startswith("compressed") for kind in kinds]


@pytest.mark.parametrize(("kv_dtype", "key_bytes"), [("auto", 2 * 32), ("int8", 32 + 4)])
def test_pages_hold_entries_and_their_rows_in_the_dtype_of_the_model(kv_dtype, key_bytes):
    _, info = load_test_runner(
        tiny_models.model_folder("deepseek_v4"), dtype="bfloat16", kv_dtype=kv_dtype, kv_memory=1 << 20
    )
    all_seen = 2 * (PAGE_SIZE * 2 * 32 + 32)  # rows and gates of each token, and one entry
    chosen = 2 * (PAGE_SIZE * 4 * (32 + 24) + 4 * (32 + 24))  # two rows and gates, and four entries
    page_bytes = PAGE_SIZE * 4 * key_bytes + all_seen + 2 * chosen
    assert info.fused and info.kv_bytes == info.kv_pages * page_bytes


@pytest.mark.parametrize(
    ("table", "message"),
    [(None, r"has no tensor .*tid2eid"), (torch.full((tiny_models.VOCAB, 3), 12), "other experts than the 12")],
)
def test_tokens_without_experts_are_refused_by_name(table, message, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.model_folder("deepseek_v4"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("tid2eid"))
    del tensors[name]
    save_file(tensors | ({} if table is None else {name: table}), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=message):
        load_test_runner(folder, dtype="float32")


def test_windows_and_choices_beyond_every_context_are_those_that_kernels_take():
    longest, longer = (
        read_decoder_config({"model_type": MODEL_TYPE, **FIELDS, "sliding_window": size, "index_topk": size})
        for size in (2**31 - 1, 10**30)
    )
    assert longer == longest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads as 2"),
        ({"n_shared_experts": 2}, "n_shared_experts as 2"),
        ({"o_groups": 3}, "4 heads of 32 numbers in 3 groups"),
        ({"q_lora_rank": 44}, "with latents of 44, have sizes that are no multiples of 8"),
        ({"index_head_dim": 8}, "8 numbers in a key, of which 16 turn"),
        ({"index_head_dim": 22}, r"entries of \[32, 22\] numbers do not divide"),
        ({"compress_rates": {"heavily_compressed_attention": 24}}, "entries of 24 tokens neither divide pages of 16"),
        ({"compress_rates": {"heavily_compressed_attention": 32}}, "compress_rates as None"),
        ({"scoring_func": "tanh"}, "scoring_func as 'tanh'"),
        ({"swiglu_limit": 0.0}, "swiglu_limit as 0.0"),
        ({"swiglu_limit": 1e300}, r"swiglu_limit as 1e\+300"),
        ({"hc_sinkhorn_iters": 1001}, "hc_sinkhorn_iters as 1001"),
        ({"index_topk": 0}, "index_topk as 0"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters as 0"),
        ({"layer_types": None, "compress_ratios": [4]}, r"compress_ratios as \[4\]"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types as "),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types as "),
        ({"num_hash_layers": -1}, "num_hash_layers as -1"),
    ],
)
def test_configs_that_do_not_fit_have_no_fused_decoder(change, reason):
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config({"model_type": MODEL_TYPE, **FIELDS, **change})
