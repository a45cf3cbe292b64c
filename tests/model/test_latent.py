"""Models with multi-head latent attention (DeepSeek-V2 and V3 and their kind): their files, pages and refusals.

``test_decoder_families`` compares their logits with Transformers', ``test_exact`` their bits in all schedules.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.lora_adapters import write_adapter
from support.run_model import load_test_runner, long_logprobs
from transformers import AutoConfig, Mistral3Config, Mistral3ForConditionalGeneration

from parley.core.sequence import PAGE_SIZE
from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.rope import Unfusable
from parley.types import ParleySettings

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}


def change_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def write_fp8_models(source: Path, folder: Path) -> tuple[Path, Path]:
    """Write a model as DeepSeek publishes it, and its dequantized weights in float32."""
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name], plain[name] = tensor, tensor.float()
        if ("proj" not in name and ".indexer.w" not in name) or "weights_proj" in name:
            continue
        shape = [-(-size // 128) for size in tensor.shape]
        scales = torch.rand(shape, generator=torch.Generator().manual_seed(len(name))) / 100 + 1e-3
        spread = scales.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)[:, : tensor.shape[1]]
        stored[name] = (tensor.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scales
        plain[name] = stored[name].float() * spread
    # A layer that predicts one more token, which is not used.
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128), "model.layers.2.enorm.weight": torch.ones(64)}
    for name, tensors in (("fp8", stored | extra), ("plain", plain)):
        shutil.copytree(source, folder / name)
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
    change_config(folder / "fp8", quantization_config=FP8, num_nextn_predict_layers=1, num_mtp_layers=1)
    change_config(folder / "plain", dtype="float32")
    return folder / "fp8", folder / "plain"


@pytest.mark.parametrize(
    ("architecture", "rows"),
    [("deepseek_v3", 200), ("deepseek_v32", 32)],  # roundings to bfloat16 change what indexers choose for later rows
)
def test_a_checkpoint_as_deepseek_publishes_it_computes_as_its_dequantized_weights(architecture, rows, tmp_path):
    fp8, plain = write_fp8_models(tiny_models.model_folder(architecture, kv_lora_rank=136), tmp_path)
    assert check_model(ParleySettings(model=str(fp8))).load_caveat == ""
    exact = long_logprobs(plain, "float32")
    assert (long_logprobs(fp8, "float32") - exact).norm() < 1e-5 * exact.norm()
    assert 0 < (long_logprobs(fp8, "bfloat16") - exact)[:rows].abs().mean() < 0.1


def test_kimi_k2_loads_as_deepseek_v3(tmp_path):
    """Transformers knows its type by code in the model's folder only, which is never run."""
    folder = shutil.copytree(tiny_models.model_folder("deepseek_v3"), tmp_path / "kimi")
    change_config(folder, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    assert check_model(ParleySettings(model=str(folder))).load_caveat == ""
    model_type, fields = tiny_models.LATENT_DECODERS["deepseek_v3"]
    configs = [read_decoder_config({**fields, "model_type": name}) for name in (model_type, "kimi_k2")]
    assert configs[0] == configs[1]


def test_norms_after_dense_layers_of_axk1_are_left_out(tmp_path):
    """Published files have them, but only mixtures are normed."""
    source, folder = tiny_models.model_folder("axk1"), tmp_path / "axk1"
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    assert "model.layers.1.post_mlp_layernorm.weight" in tensors
    tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.full((64,), 9.0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert load_test_runner(folder, dtype="float32")[1].fused
    assert torch.equal(long_logprobs(folder, "float32"), long_logprobs(source, "float32"))


def test_mistral4_in_a_multimodal_folder_has_the_logits_of_transformers(tmp_path):
    """It is published in such folders only."""
    text = AutoConfig.for_model("mistral4", **tiny_models.LATENT_DECODERS["mistral4"][1]).to_dict()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "pixtral", "head_dim": 16, "image_size": 56, "patch_size": 14, **sizes}
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=5)
    tiny_models.write_random_model(tmp_path, Mistral3ForConditionalGeneration(config), seed=0, dtype="float32")
    tiny_models.write_tokenizer(tmp_path)
    model = Mistral3ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    runner, info = load_test_runner(tmp_path, dtype="float32")
    assert info.fused and info.media_kinds == {"image"}
    ids = list(range(7, 97))
    pages = PagedKV(runner.network.kv_layers, 6, torch.float32)
    pages.clear_pages(list(range(6)))
    batch = PackedBatch.pack_parts([(ids, 0, list(range(6)))], torch.device("cpu"))
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.tensor([ids])).logits[0]
        actual = runner.network.compute_logits(runner.network.compute_hidden(batch, pages))
    assert (actual - expected).norm() < 1e-5 * expected.norm()


PUBLISHED_HY4 = {
    "hc_pre.hc_attn_layer.hc_": "hc_attn_layer.hc_pre.hc_",
    "hc_pre.hc_mlp_layer.hc_": "hc_mlp_layer.hc_pre.hc_",
    "hc_pre.hc_head.hc_head_": "hc_head.hc_pre.hc_head_",
    "mlp.linear_gate": "mlp.gate_proj",
    "shared_experts.linear_gate": "shared_experts.gate_proj",
}
NEW_HY4 = {
    "hc_pre.hc_attn_layer.hc_": "attn_hc.",
    "hc_pre.hc_mlp_layer.hc_": "ffn_hc.",
    "hc_pre.hc_head.hc_head_": "hc_head.hc_",
    "linear_gate": "gate_proj",
    "learnable_sink_param": "sinks",
}
NEW_AXK2 = {"W_down": "mlp.fc1", "W_up": "mlp.fc2", "q_b_proj": "q_gate_proj"}


@pytest.mark.parametrize(("kind", "names"), [("hy4", PUBLISHED_HY4), ("hy4", NEW_HY4), ("axk2", NEW_AXK2)])
def test_tensors_may_have_published_names_or_those_of_transformers(kind, names, tmp_path):
    source, folder = tiny_models.model_folder(kind, dtype="float32"), tmp_path / kind
    shutil.copytree(source, folder)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    assert all(new in " ".join(tensors) for new in names.values())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert load_test_runner(folder, dtype="float32")[1].fused
    assert torch.equal(long_logprobs(folder, "float32"), long_logprobs(source, "float32"))


@pytest.mark.parametrize(("kv_dtype", "size"), [("auto", 2 * (32 + 16)), ("int8", 32 + 16 + 4)])
def test_pages_hold_one_latent_for_each_token(kv_dtype, size):
    runner, info = load_test_runner(
        tiny_models.model_folder("deepseek_v2_lite"), dtype="bfloat16", kv_dtype=kv_dtype, kv_memory=1 << 20
    )
    page_bytes = PAGE_SIZE * size * len(runner.network.kv_layers)
    assert info.fused and info.kv_bytes == info.kv_pages * page_bytes
    assert info.kv_pages == (1 << 20) // page_bytes


@pytest.mark.parametrize(("kv_dtype", "latent"), [("auto", 2 * (32 + 16)), ("int8", 32 + 16 + 4)])
def test_pages_hold_the_keys_of_indexers_in_the_dtype_of_the_model(kv_dtype, latent):
    _, info = load_test_runner(
        tiny_models.model_folder("glm_moe_dsa"), dtype="bfloat16", kv_dtype=kv_dtype, kv_memory=1 << 20
    )
    page_bytes = PAGE_SIZE * (3 * latent + 2 * 2 * 32)  # two of three layers have indexers
    assert info.fused and info.kv_bytes == info.kv_pages * page_bytes
    assert info.kv_pages == (1 << 20) // page_bytes


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"index_topk_freq": 2}, [1, 1, 0, 1, 0, 1, 0]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 3}, [1, 1, 1, 0, 0, 1, 0]),
        ({"index_topk_pattern": "FSSFSSF", "index_topk_freq": 2}, [1, 0, 0, 1, 0, 0, 1]),
    ],
)
def test_layers_of_glm_have_the_indexers_that_transformers_gives_them(fields, own):
    fields = tiny_models.LATENT_DECODERS["glm_moe_dsa"][1] | {"indexer_types": None, "num_hidden_layers": 7} | fields
    types = AutoConfig.for_model("glm_moe_dsa", **fields).indexer_types
    config = read_decoder_config({"model_type": "glm_moe_dsa", **fields})
    assert (
        [shape.has_indexer for shape in config.layers] == [kind == "full" for kind in types] == [bool(n) for n in own]
    )


def test_adapter_of_the_absorbed_layer_is_refused_by_name(tmp_path):
    folder = tiny_models.model_folder("minicpm3")
    adapter = write_adapter(tmp_path / "adapter", folder, 1, r=2, target_modules=["kv_b_proj"])
    runner, _ = load_test_runner(folder, dtype="float32")
    with pytest.raises(LoadError, match=r"self_attn\.kv_b_proj, which is not a linear layer that adapters may change"):
        runner.load_adapter(str(adapter))


@pytest.mark.parametrize(
    ("architecture", "change", "reason"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method as 'noaux_tc'"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias as True"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "4 heads over 2 key/value heads do not share latents"),
        ("deepseek_v3", {"kv_lora_rank": 36}, "no multiples of 8"),
        ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank as -1"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "rotates 8 of 16 dimensions"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types do not say"),
        ("minicpm3", {"num_hidden_layers": "many"}, "num_hidden_layers as 'many'"),
        ("deepseek_v32", {"q_lora_rank": None}, "indexers have no latents of queries"),
        ("deepseek_v32", {"index_head_dim": 8}, "8 numbers in a key, of which 16 turn"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk as 0"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "or the first has none"),
        ("glm_moe_dsa", {"indexer_types": ["full", "own", "full"]}, "indexer_types as "),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FS"}, "has an indexer, or"),
        ("axk2", {"gated_norm_rank": 12}, "gates of its norms have 12 numbers inside"),
        ("axk2", {"n_group": 4, "topk_group": 2}, "n_group as 4"),
        ("axk2", {"moe_layer_freq": 2}, "moe_layer_freq as 2"),
        ("hy4", {"swiglu_limit": 0.0}, "swiglu_limit as 0.0"),
        ("hy4", {"hc_mult": 0}, "hc_mult as 0"),
        ("hy4", {"indexer_types": ["shared", "full", "full"]}, "or the first has none"),
    ],
)
def test_configs_that_do_not_fit_have_no_fused_decoder(architecture, change, reason):
    model_type, fields = tiny_models.LATENT_DECODERS[architecture]
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config({"model_type": model_type, **fields, **change})
