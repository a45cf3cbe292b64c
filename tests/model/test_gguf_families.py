"""GGUF files of architectures that compute what other types compute, and of further mixtures, against the folders that
they were made from. ``PARLEY_NIGHTLY=1`` tries all of them, otherwise a few."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import replace

import gguf
import pytest
import torch
from support import tiny_models
from support.decoder_families import FAMILIES
from support.gguf_conversion import convert_folder
from support.run_model import load_test_runner, serve_requests
from support.tiny_models import LATENT_DECODERS, STATE_DECODERS, models_home
from transformers import AutoConfig, AutoModelForCausalLM

from parley.gguf.architectures import ARCHITECTURES, FOREIGN_KINDS, find_architecture
from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config
from parley.gguf.refused_architectures import REFUSED_ARCHITECTURES
from parley.model.checkpoint.gguf_tensors import read_gguf_entries
from parley.model.networks.config_reader import read_decoder_config
from parley.types import EngineRequest, SamplingOptions

IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
PROMPT = list(range(5, 45))
LLAMA = {"sliding_window": None}
# The architecture, the family and the fields of the folder, and how it is converted
OTHER_NAMES = {
    "internlm2": ("llama", LLAMA, {"turns_heads": True}),
    "exaone": ("llama", LLAMA, {}),
    "pangu-embedded": ("llama", LLAMA | {"attention_bias": True}, {}),
    "minicpm": (
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 2.0},
        {},
    ),
    "orion": ("stablelm", {"partial_rotary_factor": 1.0, "use_qkv_bias": False, "head_dim": 16}, {}),
    "chatglm": ("glm", {"head_dim": 16, "attention_bias": True}, {"packs_heads": True}),
    "codeshell": ("starcoder2", {"sliding_window": None}, {"packs_heads": True}),
    "bailingmoe": (
        "granitemoeshared",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 64}
        | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
        | {"attention_multiplier": 0.25},
        {},
    ),
    "bailingmoe2": ("glm4_moe", {"attention_bias": False, "use_qk_norm": True}, {"packs_heads": True}),
}
HUNYUAN = {"head_dim": 16, "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
OTHER_NAMES["maincoder"] = ("hunyuan", HUNYUAN, {"turns_heads": True})
OTHER_NAMES["bitnet"] = ("bitnet", {"hidden_act": "silu", "tie_word_embeddings": True}, {})
OTHER_NAMES["qwen"] = ("qwen2", {"num_key_value_heads": 4}, {"packs_heads": True})
OTHER_NAMES |= dict.fromkeys(("xverse", "baichuan"), OTHER_NAMES["internlm2"])
MISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25,
}  # fmt: skip
OWN_TYPES = {
    "afmoe": {},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "cohere2_moe": {"expert_selection_fn": "sigmoid"},
    "exaone_moe": {"n_group": 1, "topk_group": 1},
    "flex_olmo": {},
    "granite_swa": {},
    "granitemoe_swa": {},
    "hy3": {},
    "jais2": {},
    "kimi_linear": {},
    "kolibri1": {},
    "laguna": {},
    "laguna with a gate for each number": {},
    "mellum": {"mlp_layer_types": ["sparse"] * 3},
    "mimo_v2_flash": {"n_group": 1, "topk_group": 1},
    "mistral4": {"rope_parameters": MISTRAL_ROPE, "n_group": 1, "topk_group": 1},
    "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "phimoe": {"router_jitter_noise": 0.01},
}
TRIED = (
    [*OTHER_NAMES, *OWN_TYPES]
    if IS_NIGHT
    else [
        "internlm2",
        "bailingmoe2",
        "kimi_linear",
        "mimo_v2_flash",
        "afmoe",
        "apertus",
        "minicpm3",
        "mistral4",
        "mellum",
        "maincoder",
        "granite_swa",
        "cohere2_moe",
        "kolibri1",
        "laguna",
    ]
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_family(folder, name, fields):
    """Write a random model of a family in float32."""
    if name in STATE_DECODERS or name in LATENT_DECODERS:
        return tiny_models.write_model(folder, name, dtype="float32", **fields)
    model_type, usual = FAMILIES.get(name, (name, {}))
    config = AutoConfig.for_model(model_type, **(tiny_models.BASE_CONFIG | usual | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tiny_models.write_random_model(folder, model, seed=0, dtype="float32")
    tiny_models.write_tokenizer(folder)
    return folder


@functools.cache
def family_paths(name):
    """Return a family's folder and the file of an architecture, written once."""
    home = models_home() / f"{name}-family-gguf"
    family, fields, options = OTHER_NAMES.get(name) or (name, OWN_TYPES[name], {})
    home.mkdir()
    source = write_family(home / "source", family, fields)
    arch = name if name in OTHER_NAMES else None
    return source, convert_folder(
        home / "x.gguf", source, arch=arch, splits_latents=name in ("kimi_linear", "mistral4"), **options
    )


def read_header(name):
    """Return the header of an architecture's file."""
    return read_model(family_paths(name)[1])


def answers(folder):
    """Return the tokens and scores of a greedy answer in float32."""
    runner, info = load_test_runner(folder, dtype="float32")
    assert info.fused
    request = EngineRequest("0", PROMPT, 12, SamplingOptions(temperature=0.0), logprobs=0)
    served, _ = serve_requests(runner, [request], step=64)
    return served["0", 0]


@pytest.mark.parametrize("name", TRIED)
def test_answers_are_those_of_the_folder(name):
    folder, file = family_paths(name)
    assert answers(unpack_gguf(file)) == answers(folder)


def test_packed_heads_and_joined_experts_of_mimo_are_read(tmp_path):
    """As in files of MiMo-V2.5, whose values are shorter than keys; layers with a window have more heads of keys."""
    folder, _ = family_paths("mimo_v2_flash")
    file = convert_folder(tmp_path / "x.gguf", folder, packs_heads=True, joins_experts=True)
    names = set(read_model(file).tensors)
    assert {"blk.1.attn_qkv.weight", "blk.1.ffn_gate_up_exps.weight"} <= names
    assert answers(unpack_gguf(file)) == answers(folder)


def test_baichuan_whose_scores_fall_with_the_distance_is_refused():
    model = read_header("baichuan")
    model.metadata["baichuan.block_count"] = 40
    with pytest.raises(GgufError, match=r"^x\.gguf is a Baichuan without a rotary embedding, which is not read from"):
        model_config(model)


def test_early_minicpm_files_get_the_published_factors():
    model = read_header("minicpm")
    for key in ("embedding_scale", "residual_scale", "logit_scale", "attention.scale"):
        del model.metadata[f"minicpm.{key}"]
    config = model_config(model)
    assert (config["embedding_multiplier"], config["logits_scaling"]) == (12.0, 0.25)
    assert config["residual_multiplier"] == pytest.approx(1.4 / 2**0.5)


@pytest.mark.parametrize("value", [0.5, [0.5], [0.5, float("nan")], ["a", "b"], None])
def test_refuses_activation_factors_unless_there_is_one_for_each_layer(value):
    model = read_header("apertus")
    model.metadata["xielu.beta"] = value
    with pytest.raises(GgufError, match=r"^x\.gguf gives xielu\.beta as .*; it is a number for each of 2 layers$"):
        read_gguf_entries(model)


def test_packed_heads_that_do_not_fit_are_refused():
    model = read_header("codeshell")
    model.metadata["codeshell.attention.head_count_kv"] = 1
    with pytest.raises(GgufError, match=r"^a tensor blk\.0\.attn_qkv\.\w+ has 128 rows, but the heads have 96$"):
        read_gguf_entries(model)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("rope.dimension_count", 1 << 20, r"rotates 1048576 of \d+ dimensions$"),
        (
            "attention.key_length",
            1 << 20,
            r"has \d+ rows in blk\.0\.attn_kv_b\.\S+, which 4 heads with keys of 1048576 ca",
        ),
        ("attention.head_count", 7, r"has \d+ rows in blk\.0\.attn_kv_b\.\S+, which 7 heads with keys of \d+ cannot"),
    ],
)
def test_latents_of_minicpm_that_do_not_fit_are_refused(key, value, reason):
    model = read_header("minicpm3")
    model.metadata[f"minicpm3.{key}"] = value
    with pytest.raises(GgufError, match=rf"^x\.gguf {reason}"):
        model_config(model)


@pytest.mark.parametrize("heads", [2, [2, 2, 2], [2, 4], [2, 3, 2]])
def test_other_heads_of_mimo_are_refused(heads):
    model = read_header("mimo_v2_flash")
    model.metadata["mimo2.attention.head_count_kv"] = heads
    with pytest.raises(GgufError, match=r"^x\.gguf gives attention\.head_count_kv as .*twice as large with a window$"):
        model_config(model)


def test_further_layers_of_mimo_are_left_out():
    """Of newer files, whose lists are of all layers."""
    model = read_header("mimo_v2_flash")
    config = model_config(model)
    model.metadata.update({"mimo2.block_count": 4, "mimo2.nextn_predict_layers": 1})
    model.metadata["mimo2.attention.head_count_kv"] = [2, 4, 2, 4]
    model.metadata["mimo2.attention.sliding_window_pattern"] = [0, 1, 0, 1]
    assert model_config(model) == config


@pytest.mark.parametrize("key", ["ssm.conv_kernel", "kda.head_dim", "attention.head_count_kv"])
def test_states_of_kimi_of_unknown_sizes_are_refused(key):
    model = read_header("kimi_linear")
    del model.metadata[f"kimi-linear.{key}"]
    with pytest.raises(GgufError, match=r"^x\.gguf .*, so the model's shape is unknown$"):
        model_config(model)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("leading_dense_block_count", 1, "gives leading_dense_block_count as 1; only 0 is read here"),
        ("expert_weights_norm", False, "gives expert_weights_norm as False; only True is read here"),
        ("expert_weights_scale", 2.5, "gives expert_weights_scale as 2.5; only 1.0 is read here"),
        ("attention.key_length", 32, "gives attention.key_length as 32; 4 heads must be 64 wide"),
    ],
)
def test_other_layers_of_ling_are_refused(key, value, reason):
    model = read_header("bailingmoe")
    model.metadata[f"bailingmoe.{key}"] = value
    with pytest.raises(GgufError, match=rf"^x\.gguf {reason}$"):
        model_config(model)


def test_window_of_phimoe_comes_from_the_file():
    model = read_header("phimoe")
    windows = []
    for stored in (131_072, 0):
        model.metadata["phimoe.attention.sliding_window"] = stored
        windows.append(model_config(model).get("sliding_window"))
    assert windows == [131_072, None]


def test_long_rotary_embedding_of_phimoe_has_the_published_scale():
    model = read_header("phimoe")
    factors = {"rope_factors_long.weight": (2.0, 4.0), "rope_factors_short.weight": (1.0, 1.5)}
    rope = model_config(model, factors.get)["rope_scaling"]
    assert (rope["rope_type"], rope["long_factor"], rope["short_factor"]) == ("longrope", [2.0, 4.0], [1.0, 1.5])
    assert rope["short_mscale"] == rope["long_mscale"] == 1.243163121016122


def test_window_of_0_means_no_window():
    """As in files of Phi-4."""
    model = read_header("exaone")
    phi = {key.replace("exaone.", "phi3."): value for key, value in model.metadata.items()}
    model.metadata.update(phi | {"general.architecture": "phi3", "phi3.attention.sliding_window": 0})
    assert "sliding_window" not in model_config(model)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("expert_weights_scale", 2.5, "gives expert_weights_scale as 2.5; only 1 is read here"),
        ("expert_shared_count", 2, "gives expert_shared_count as 2; only 1 is read here"),
    ],
)
def test_other_experts_of_kolibri_are_refused(key, value, reason):
    model = read_header("kolibri1")
    model.metadata[f"kolibri1.{key}"] = value
    with pytest.raises(GgufError, match=rf"^x\.gguf {reason}$"):
        model_config(model)


def test_kolibri_under_its_other_name_is_read_alike():
    model = read_header("kolibri1")
    renamed = {key.replace("kolibri1.", "kolibri."): value for key, value in model.metadata.items()}
    other = replace(model, metadata=renamed | {"general.architecture": "kolibri"})
    assert model_config(other) == model_config(model)


def test_every_architecture_of_llama_cpp_is_read_or_refused_with_a_reason():
    foreign = {kind for kinds in FOREIGN_KINDS.values() for kind in kinds}
    assert set(gguf.MODEL_ARCH_NAMES.values()) - {"clip"} <= ARCHITECTURES.keys() | REFUSED_ARCHITECTURES.keys()
    assert not ARCHITECTURES.keys() & REFUSED_ARCHITECTURES.keys()
    assert "clip" in foreign and not foreign & (ARCHITECTURES.keys() | REFUSED_ARCHITECTURES.keys())
    model = read_header("kolibri1")
    for name, reason in REFUSED_ARCHITECTURES.items():
        model.metadata["general.architecture"] = name
        with pytest.raises(GgufError) as refusal:
            find_architecture(model)
        assert str(refusal.value) == f"x.gguf has the architecture {name}, which is not read from GGUF: {reason}"


def test_hunyuan_ocr_stretches_its_rotary_embedding():
    """Its positions have axes, which are equal for text."""
    model = read_header("maincoder")
    shape = {f"hunyuan_vl{key.removeprefix('maincoder')}": value for key, value in model.metadata.items()}
    model.metadata.update(
        shape | {"general.architecture": "hunyuan_vl", "hunyuan_vl.rope.dimension_sections": [2, 2, 2, 2]}
    )
    for alpha, base in ((1000.0, 1e4 * 1000 ** (16 / 14)), (1.0, 1e4)):
        model.metadata["hunyuan_vl.rope.scaling.alpha"] = alpha
        (rope,) = read_decoder_config(model_config(model)).ropes
        assert rope.theta == pytest.approx(base)
    for alpha in ("1", 1e300):
        model.metadata["hunyuan_vl.rope.scaling.alpha"] = alpha
        message = f"x.gguf gives rope.scaling.alpha as {alpha!r} for heads of 16 numbers"
        with pytest.raises(GgufError, match=f"^{re.escape(message)}$"):
            model_config(model)


@pytest.mark.parametrize("listed", [[True], [1, 0, 1, 0], "full"])
def test_unclear_layers_of_granite_with_a_rotary_embedding_are_refused(listed):
    model = read_header("granite_swa")
    model.metadata["granite_swa.attention.rope_pattern"] = listed
    with pytest.raises(GgufError, match=r"^x\.gguf gives attention\.rope_pattern as .*; it is true or false for each"):
        model_config(model)
