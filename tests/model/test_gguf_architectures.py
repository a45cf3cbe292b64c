"""GGUF files of further architectures, laid out as llama.cpp does it, against the folders that they were made from."""

from __future__ import annotations

import json

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.decoder_families import FAMILIES
from support.gguf_conversion import convert_folder
from support.gguf_files import write_folder
from support.model_zoo.zoo_folder import write_plain
from support.run_model import load_test_runner, serve_requests
from transformers import AutoConfig, AutoModelForCausalLM

from parley.gguf.architectures import find_architecture
from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config
from parley.model.checkpoint.files import Checkpoint, read_config
from parley.model.checkpoint.gguf_tensors import read_gguf_entries
from parley.model.checkpoint.quantization import read_plain_weight
from parley.model.checkpoint.weights import GgufBlockWeight
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable
from parley.types import EngineRequest, SamplingOptions

GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0,
}  # fmt: skip
COHERE = {"logit_scale": 0.25, "layer_norm_eps": 1e-5, "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 64}
OLMO_3 = {
    "rope_theta": 1e6,
    "num_hidden_layers": 5,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    "rope_parameters": YARN | {"attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 2.0},
}
MINISTRAL = {
    "head_dim": 32,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25},
}
DEEPSEEK_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 64,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
PROMPT = list(range(5, 45))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("granite", GRANITE),
        ("olmo2", {}),
        ("olmo3", OLMO_3),
        ("seed_oss", {"head_dim": 32, "attention_bias": True}),
        ("smollm3", {"num_hidden_layers": 4}),
        ("glm4", {"head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5}),
        ("ernie4_5", {"head_dim": 32, "tie_word_embeddings": True}),
        ("cohere", COHERE),
        ("cohere", COHERE | {"use_qk_norm": True}),
        ("cohere2", COHERE | {"sliding_window": 24, "num_hidden_layers": 4}),
        ("ministral3", MINISTRAL),
    ],
)
def test_reads_the_config_and_every_tensor(model_type, fields, tmp_path):
    folder = write_folder(tmp_path / "folder", model_type, **fields)
    unpacked = unpack_gguf(convert_folder(tmp_path / "model.gguf", folder))
    stored, original = Checkpoint(unpacked), Checkpoint(folder)
    assert set(stored.tensor_names) == set(original.tensor_names)
    for name in stored.tensor_names:
        shape = original.tensor_shape(name)
        assert torch.equal(stored.view_tensor(name, *shape), original.view_tensor(name, *shape).float()), name
    assert read_decoder_config(read_config(unpacked)) == read_decoder_config(read_config(folder))


def answers(folder):
    """Return the tokens and scores of a greedy answer in float32."""
    runner, info = load_test_runner(folder, dtype="float32")
    assert info.fused
    request = EngineRequest("0", PROMPT, 12, SamplingOptions(temperature=0.0), logprobs=0)
    served, _ = serve_requests(runner, [request], step=64)
    return served["0", 0]


@pytest.mark.parametrize(
    ("architecture", "extra_layers"),
    [
        ("gpt_oss", 0),
        ("glm4_moe", 1),
        ("minimax_m2", 0),
        ("minimax_m3", 0),
        ("granitemoe", 0),
        ("granitemoeshared", 0),
    ],
)
def test_answers_of_mixtures_equal_those_of_the_folder(architecture, extra_layers, tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", architecture, dtype="float32")
    unpacked = unpack_gguf(convert_folder(tmp_path / "model.gguf", folder, extra_layers=extra_layers))
    assert answers(unpacked) == answers(folder)


def test_minimax_m3_without_indexers_attends_to_all_tokens(tmp_path):
    """As in files of the first converters."""
    folder = tiny_models.model_folder("minimax_m3", dtype="float32")
    model = read_model(convert_folder(tmp_path / "model.gguf", folder))
    assert model_config(model)["layer_types"] == ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    for name in [name for name in model.tensors if ".indexer." in name]:
        del model.tensors[name]
    assert model_config(model)["layer_types"] == ["full_attention"] * 3
    model.metadata["minimax-m3.expert_weights_norm"] = False
    with pytest.raises(GgufError, match="gives expert_weights_norm as False; only True is read here"):
        model_config(model)


def write_family(folder, name, fields):
    """Write a random model of a type in float32."""
    model_type, usual = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **(tiny_models.BASE_CONFIG | usual | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tiny_models.write_random_model(folder, model, seed=0, dtype="float32")
    tiny_models.write_tokenizer(folder)
    return folder


EXAONE_WINDOWS = {
    "sliding_window": 24,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
FEW_EXPERTS = {"num_hidden_layers": 3, "sliding_window": None, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("arcee", {}),
        ("dots1", FEW_EXPERTS),
        ("exaone4", {"sliding_window": None, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}),
        ("exaone4", EXAONE_WINDOWS),
        ("hunyuan", {}),
        ("hunyuan_moe", {}),
        ("lfm2", {"conv_bias": False, "block_auto_adjust_ff_dim": False}),
        ("lfm2_moe", {}),
        ("nemotron", {}),
        ("olmo with limits", {}),
        ("olmoe", {}),
        ("stablelm", {}),
        ("starcoder2", {"sliding_window": 4096}),
    ],
)
def test_answers_of_families_are_the_folders(name, fields, tmp_path):
    folder = write_family(tmp_path / "folder", name, fields)
    unpacked = unpack_gguf(convert_folder(tmp_path / "model.gguf", folder))
    actual, expected = answers(unpacked), answers(folder)
    if name == "hunyuan":  # the base is stored in float32
        assert actual.token_ids == expected.token_ids
        assert [score.logprob for score in actual.scores] == pytest.approx([score.logprob for score in expected.scores])
    else:
        assert actual == expected


@pytest.mark.parametrize("name", ["granite_hybrid", "granite_hybrid without experts"])
def test_answers_of_granite_with_mamba_layers_equal_those_of_the_folder(name, tmp_path):
    fields = {"position_embedding_type": "nope"}
    folder = tiny_models.write_model(tmp_path / "folder", name, dtype="float32", **fields)
    assert answers(unpack_gguf(convert_folder(tmp_path / "model.gguf", folder))) == answers(folder)


def test_bamba_is_refused_under_the_architecture_of_granite(tmp_path):
    fields = {"position_embedding_type": "rope"}
    folder = tiny_models.write_model(tmp_path / "folder", "granite_hybrid", dtype="float32", **fields)
    with pytest.raises(GgufError, match=r"^model\.gguf rotates queries and keys, which its architecture does not"):
        unpack_gguf(convert_folder(tmp_path / "model.gguf", folder))


def test_starcoder_has_the_window_of_the_published_models(tmp_path):
    folder = write_family(tmp_path / "folder", "starcoder2", {})
    model = read_model(convert_folder(tmp_path / "model.gguf", folder))
    assert {shape.window for shape in read_decoder_config(model_config(model)).layers} == {4096}


@pytest.mark.parametrize("tensor", ["attn_q_norm.weight", "ffn_norm.weight"])
def test_stablelm_of_other_layers_is_refused(tensor, tmp_path):
    folder = write_family(tmp_path / "folder", "stablelm", {})
    model = read_model(convert_folder(tmp_path / "model.gguf", folder))
    if tensor == "ffn_norm.weight":
        del model.tensors["blk.0." + tensor]
    else:
        model.tensors["blk.0." + tensor] = model.tensors["blk.0.attn_norm.weight"]
    with pytest.raises(Unfusable, match=r"its config gives (qk_layernorm|use_parallel_residual) as True"):
        read_decoder_config(model_config(model))


@pytest.mark.parametrize(
    "fields", [{}, {"moe_layer_start_index": 2}, {"moe_layer_interval": 2}, {"moe_num_shared_experts": 0}]
)
def test_answers_of_ernie_equal_those_of_the_folder(fields, tmp_path):
    fields = {"moe_layer_end_index": 3} | fields
    folder = tiny_models.write_model(tmp_path / "folder", "ernie_moe", dtype="float32", **fields)
    assert answers(unpack_gguf(convert_folder(tmp_path / "model.gguf", folder))) == answers(folder)


@pytest.fixture(scope="module")
def gemma_3n_folder(tmp_path_factory):
    return tiny_models.write_model(tmp_path_factory.mktemp("gemma3n"), "gemma3n", dtype="float32")


def test_answers_of_gemma_3n_are_the_folders(gemma_3n_folder, tmp_path):
    unpacked = unpack_gguf(convert_folder(tmp_path / "model.gguf", gemma_3n_folder))
    assert read_decoder_config(read_config(unpacked)) == read_decoder_config(read_config(gemma_3n_folder))
    assert answers(unpacked) == answers(gemma_3n_folder)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.sliding_window_pattern", 5, "of each layer whether it has a window"),
        ("attention.shared_kv_layers", -1, "attention.shared_kv_layers as -1"),
        ("activation_sparsity_scale", [1.6] * 5, "activation_sparsity_scale as"),
        ("altup.num_inputs", 0, "altup.num_inputs as 0"),
        ("altup.active_idx", None, "altup.active_idx as None"),
    ],
)
def test_other_layers_of_gemma_3n_are_refused(key, value, reason, gemma_3n_folder, tmp_path):
    model = read_model(convert_folder(tmp_path / "x.gguf", gemma_3n_folder))
    model_config(model)
    model.metadata[f"gemma3n.{key}"] = value
    with pytest.raises(GgufError, match=reason):
        model_config(model)


def test_the_width_of_gemma_3ns_mlps_is_needed(gemma_3n_folder, tmp_path):
    model = read_model(convert_folder(tmp_path / "x.gguf", gemma_3n_folder))
    model.metadata["gemma3n.expert_feed_forward_length"] = model.metadata.pop("gemma3n.feed_forward_length")[0]
    with pytest.raises(GgufError, match="has no feed_forward_length, so the model's shape is unknown"):
        model_config(model)


def test_tensors_of_gemma_3n_are_needed(gemma_3n_folder, tmp_path):
    model = read_model(convert_folder(tmp_path / "x.gguf", gemma_3n_folder))
    del model.tensors["blk.0.laurel_l.weight"]
    with pytest.raises(GgufError, match=r"no tensor blk\.0\.laurel_l\.weight"):
        model_config(model)


GEMMA_4 = ("gemma4", "gemma4 of experts", "gemma4 with inputs of layers")


@pytest.fixture(scope="module")
def gemma_4_folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("gemma4")
    return {name: write_plain(home / name, *FAMILIES[name], dtype="float32") for name in GEMMA_4}


@pytest.mark.parametrize("name", GEMMA_4)
def test_answers_of_gemma_4_are_the_folders(name, gemma_4_folders, tmp_path):
    folder = gemma_4_folders[name]
    unpacked = unpack_gguf(convert_folder(tmp_path / "model.gguf", folder))
    assert read_decoder_config(read_config(unpacked)) == read_decoder_config(read_config(folder))
    assert answers(unpacked) == answers(folder)


def test_gates_and_ups_of_gemma_4_in_one_tensor_may_be_blocks(gemma_4_folders, tmp_path):
    file = convert_folder(tmp_path / "model.gguf", gemma_4_folders["gemma4 of experts"], experts="Q8_0")
    checkpoint = Checkpoint(unpack_gguf(file))
    entry = read_gguf_entries(read_model(file))["model.layers.0.experts.gate_up_exps.weight"]
    assert entry.blocks is not None and entry.blocks.name == "Q8_0"
    assert "model.layers.0.experts.down_exps.weight" in checkpoint
    runner, info = load_test_runner(unpack_gguf(file), dtype="float32")
    assert info.fused and runner.network.layer_weights[0].mixture is not None


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.sliding_window_pattern", 6, "of each layer whether it has a window"),
        ("attention.shared_kv_layers", 6, "attention.shared_kv_layers as 6"),
        ("attention.head_count_kv", [2, 2, 1, 2, 1, 1], "layers of other sizes"),
        ("attention.head_count_kv", [2, 2, 1], "head_count_kv as"),
        ("feed_forward_length", [160, 160, 160, 320, 160, 320], "layers of other sizes"),
        ("rope.scaling.factor", 4.0, "rope.scaling.factor as 4.0"),
    ],
)
def test_other_layers_of_gemma_4_are_refused(key, value, reason, gemma_4_folders, tmp_path):
    model = read_model(convert_folder(tmp_path / "x.gguf", gemma_4_folders["gemma4 with inputs of layers"]))
    model_config(model)
    model.metadata[f"gemma4.{key}"] = value
    with pytest.raises(GgufError, match=reason):
        model_config(model)


def test_other_factors_of_gemma_4_are_refused(gemma_4_folders, tmp_path):
    model = read_model(convert_folder(tmp_path / "x.gguf", gemma_4_folders["gemma4"]))
    with pytest.raises(GgufError, match="divides frequencies by other numbers"):
        model_config(model, lambda name: (1.0, 2.0, 1e30) if name == "rope_freqs.weight" else None)
    del model.tensors["rope_freqs.weight"]
    with pytest.raises(GgufError, match=r"has no rope_freqs\.weight"):
        model_config(model)


@pytest.mark.parametrize("splits_latents", [True, False])
@pytest.mark.parametrize(
    ("architecture", "fields", "extra_layers"),
    [
        ("deepseek_v2", {}, 0),
        ("deepseek_v2_lite", {"n_group": 1}, 0),
        ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}, 0),
        ("glm4_moe_lite", {"first_k_dense_replace": 1}, 1),
        ("youtu", {"rope_interleave": True}, 0),
    ],
)
def test_answers_of_latent_attention_equal_those_of_the_folder(
    architecture, fields, extra_layers, splits_latents, tmp_path
):
    folder = tiny_models.write_model(tmp_path / "folder", architecture, dtype="float32", **fields)
    file = convert_folder(tmp_path / "model.gguf", folder, extra_layers=extra_layers, splits_latents=splits_latents)
    assert answers(unpack_gguf(file)) == answers(folder)


@pytest.mark.parametrize(
    ("architecture", "fields", "extra_layers"),
    [("deepseek_v32", {"rope_parameters": DEEPSEEK_YARN}, 0), ("glm_moe_dsa", {}, 1)],
)
def test_answers_of_indexed_attention_equal_those_of_the_folder(architecture, fields, extra_layers, tmp_path):
    """The prompt is longer than the number of tokens that indexers choose."""
    folder = tiny_models.write_model(tmp_path / "folder", architecture, dtype="float32", **fields)
    unpacked = unpack_gguf(convert_folder(tmp_path / "model.gguf", folder, extra_layers=extra_layers))
    assert read_decoder_config(read_config(unpacked)) == read_decoder_config(read_config(folder))
    assert answers(unpacked) == answers(folder)


def test_an_indexer_of_a_layer_that_shares_tokens_is_not_used(tmp_path):
    """Published files of GLM-5.2 have tensors of indexers in all layers."""
    folder = tiny_models.write_model(tmp_path / "folder", "glm_moe_dsa", dtype="float32", indexer_types=["full"] * 3)
    own = answers(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"indexer_types": ["full", "shared", "full"]}))
    unpacked = unpack_gguf(convert_folder(tmp_path / "x.gguf", folder))
    assert "model.layers.1.self_attn.indexer.wk.weight" in Checkpoint(unpacked)
    assert answers(unpacked) == answers(folder) != own


def test_types_of_indexers_that_a_file_does_not_say(tmp_path):
    fields = {"num_hidden_layers": 8, "indexer_types": ["full", *["shared"] * 7]}
    folder = tiny_models.write_model(tmp_path / "folder", "glm_moe_dsa", dtype="float32", **fields)
    model = read_model(convert_folder(tmp_path / "x.gguf", folder))
    for listed in ([1], [2] * 8, "full"):
        model.metadata["glm-dsa.attention.indexer.types"] = listed
        with pytest.raises(GgufError, match=r"gives attention\.indexer\.types as .*; each of 8 layers has 1, or"):
            model_config(model)
    del model.metadata["glm-dsa.attention.indexer.types"]
    assert model_config(model)["indexer_types"] == fields["indexer_types"]
    for layer in range(8):
        model.tensors[f"blk.{layer}.indexer.attn_k.weight"] = model.tensors["blk.0.indexer.attn_k.weight"]
    assert model_config(model)["indexer_types"] == ["full"] * 8  # GLM-5 and 5.1
    model.metadata["glm-dsa.context_length"] = 1 << 20
    assert model_config(model)["indexer_types"] == [*["full"] * 3, *["shared"] * 3, "full", "shared"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.indexer.top_k", None, "gives attention.indexer.top_k as None, so the model's shape is unknown"),
        ("attention.indexer.head_count", 2.5, "gives attention.indexer.head_count as 2.5, so the model's shape is"),
        ("attention.q_lora_rank", None, "has indexers, but no latents of queries, which they read"),
    ],
)
def test_indexers_of_unknown_sizes_are_refused(key, value, reason, tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "glm_moe_dsa", dtype="float32")
    model = read_model(convert_folder(tmp_path / "x.gguf", folder))
    model.metadata[f"glm-dsa.{key}"] = value
    with pytest.raises(GgufError, match=rf"^x\.gguf {reason}"):
        model_config(model)


def test_deepseek_3_without_groups_gets_the_published_groups(tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "deepseek_v3", dtype="float32")
    model = read_model(convert_folder(tmp_path / "x.gguf", folder))
    for key in ("expert_group_count", "expert_group_used_count"):
        del model.metadata[f"deepseek2.{key}"]
    groups = []
    for experts in (16, 256):
        model.metadata["deepseek2.expert_count"] = experts
        config = model_config(model)
        groups.append((config["n_group"], config["topk_group"]))
    assert groups == [(1, 1), (8, 4)]


def test_reads_split_latents_in_blocks(tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "deepseek_v3", dtype="float32", qk_nope_head_dim=32)
    checkpoint = Checkpoint(unpack_gguf(convert_folder(tmp_path / "x.gguf", folder, latents="Q8_0")))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    shape = checkpoint.tensor_shape(name)
    stored, original = checkpoint.view_tensor(name, *shape), Checkpoint(folder).view_tensor(name, *shape)
    assert 0 < (stored - original).norm() / original.norm() < 0.01
    assert checkpoint.without_data().view_tensor(name, *shape).shape == shape


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("rope.dimension_count", 64, r"^x\.gguf rotates 64 of 40 dimensions$"),
        ("attention.kv_lora_rank", "8", r"^x\.gguf gives attention\.kv_lora_rank as '8', so the model's shape"),
        ("attention.temperature_scale", 0.1, r"^x\.gguf gives attention\.temperature_scale as 0\.1, which its"),
        ("expert_gating_func", 1, r"^x\.gguf gives expert_weights_norm, but its architecture has it not$"),
    ],
)
def test_refuses_what_deepseek_does_not_compute(name, value, reason, tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "deepseek_v3", dtype="float32")
    model = read_model(convert_folder(tmp_path / "x.gguf", folder))
    model.metadata[f"deepseek2.{name}"] = value
    with pytest.raises(GgufError, match=reason):
        model_config(model)


@pytest.mark.parametrize("value", ["x" * 100_000, [0, 1] * 50_000])
@pytest.mark.parametrize(
    "name",
    [
        "block_count", "attention.kv_lora_rank", "attention.q_lora_rank", "attention.temperature_scale",
        "expert_gating_func", "nextn_predict_layers", "rope.dimension_count", "rope.scaling.type",
    ],
)  # fmt: skip
def test_refuses_huge_values_of_numbers_in_a_short_sentence(name, value, tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "deepseek_v3", dtype="float32")
    model = read_model(convert_folder(tmp_path / "x.gguf", folder))
    model.metadata[f"deepseek2.{name}"] = value
    with pytest.raises((GgufError, Unfusable)) as refusal:
        read_decoder_config(model_config(model))
    assert len(str(refusal.value)) < 250


def test_refuses_half_of_the_layer_that_unpacks_latents(tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "deepseek_v3", dtype="float32")
    model = read_model(convert_folder(tmp_path / "x.gguf", folder))
    del model.tensors["blk.1.attn_v_b.weight"]
    with pytest.raises(GgufError, match=r"^x\.gguf has only one of the tensors blk\.1\.attn_k_b and blk\.1\.attn_v_b$"):
        read_gguf_entries(model)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("qwen3_next", {"mlp_only_layers": []}),
        ("qwen3_5", {}),
        ("qwen3_5", {"linear_num_value_heads": 2}),
        ("qwen3_5", {"linear_num_value_heads": 6}),
        ("qwen3_5_moe", {}),
    ],
)
def test_answers_of_gated_delta_nets_equal_those_of_the_folder(architecture, fields, tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", architecture, dtype="float32", **fields)
    unpacked = unpack_gguf(convert_folder(tmp_path / "model.gguf", folder, extra_layers=1))
    actual, expected = answers(unpacked), answers(folder)
    assert actual.token_ids == expected.token_ids
    assert [score.logprob for score in actual.scores] == pytest.approx(
        [score.logprob for score in expected.scores], abs=1e-4
    )


@pytest.mark.parametrize(("width", "kind"), [(32, "Q8_0"), (48, "Q4_0"), (48, "Q8_0")])
def test_orders_the_inputs_of_tiled_value_heads(width, kind, tmp_path):
    fields = {"linear_value_head_dim": width, "hidden_size": 64}
    folder = tiny_models.write_model(tmp_path / "folder", "qwen3_5", dtype="float32", **fields)
    checkpoint = Checkpoint(unpack_gguf(convert_folder(tmp_path / "x.gguf", folder, outputs=kind)))
    name = "model.layers.0.linear_attn.out_proj.weight"
    stored = read_plain_weight(checkpoint, name, 64, 4 * width)
    assert isinstance(stored, GgufBlockWeight) == (width % 32 == 0)
    original = Checkpoint(folder).view_tensor(name, 64, 4 * width)
    assert (stored.to_float() - original).norm() / original.norm() < (0.01 if kind == "Q8_0" else 0.15)


def test_refuses_value_heads_that_do_not_divide(tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "qwen3_5", dtype="float32")
    model = read_model(convert_folder(tmp_path / "x.gguf", folder))
    model.metadata["qwen35.ssm.group_count"] = 3
    with pytest.raises(GgufError, match=r"^x\.gguf gives 96 numbers to 4 heads, which do not divide them$"):
        model_config(model)


def test_refuses_weights_of_other_sizes_than_the_heads(tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "qwen3_5", dtype="float32")
    model = read_model(convert_folder(tmp_path / "x.gguf", folder))
    model.metadata["qwen35.ssm.time_step_rank"] = 8
    with pytest.raises(GgufError, match=r"^a tensor ssm_\w+ has 4 rows, but the heads have 8$"):
        read_gguf_entries(model)


def test_reads_gpt_oss_with_experts_of_4_bits(tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "gpt_oss", dtype="float32")
    unpacked = unpack_gguf(convert_folder(tmp_path / "model.gguf", folder, experts="MXFP4"))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [experts, in, out], in blocks along the inputs
            blocks = gguf.quants.quantize(tensor.mT.contiguous().numpy(), gguf.GGMLQuantizationType.MXFP4)
            rounded = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4))
            tensors[name] = rounded.mT.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    actual, expected = answers(unpacked), answers(folder)
    assert actual.token_ids == expected.token_ids


def test_a_file_without_a_scaled_rotary_embedding_has_none_by_default(tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "gpt_oss", dtype="float32", rope_parameters={
        "rope_type": "default", "rope_theta": 1e4,
    })  # fmt: skip
    unpacked = unpack_gguf(convert_folder(tmp_path / "model.gguf", folder))
    ropes = [read_decoder_config(read_config(model_folder)).ropes for model_folder in (unpacked, folder)]
    assert ropes[0] == ropes[1] and ropes[0][0].kind == "default"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"expert_gating_func": 1}, r"^x\.gguf gives expert_gating_func as 1, but its architecture has another$"),
        ({"nextn_predict_layers": 2}, r"^x\.gguf gives nextn_predict_layers as 2, of 2 layers$"),
        ({"nextn_predict_layers": "1"}, r"^x\.gguf gives nextn_predict_layers as '1', of 2 layers$"),
        ({"block_count": 2.0}, r"^x\.gguf gives block_count as 2\.0; it is a whole number$"),
        (
            {"attention.head_count": 1 << 31, "attention.key_length": None, "rope.dimension_count": 8},
            r"^x\.gguf gives glm4moe\.attention\.head_count as 2147483648, more than its width$",
        ),
    ],
)
def test_refuses_what_the_architecture_does_not_compute(fields, reason, tmp_path):
    folder = tiny_models.model_folder("glm4_moe")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    model = read_model(convert_folder(tmp_path / "x.gguf", folder))
    model.metadata.update({f"glm4moe.{name}": value for name, value in fields.items()})
    with pytest.raises(GgufError, match=reason):
        model_config(model)
    find_architecture(read_model(tmp_path / "x.gguf"))


def test_refuses_positions_with_several_axes_where_the_architecture_has_one(tmp_path):
    model = read_model(convert_folder(tmp_path / "x.gguf", tiny_models.model_folder("qwen3")))
    model.metadata["qwen3.rope.dimension_sections"] = [8, 12, 12, 0]
    with pytest.raises(GgufError, match=r"^x\.gguf has positions with several axes, for images"):
        model_config(model)
