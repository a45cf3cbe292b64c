"""Step 3.5: the language model of Step 3.7, in a folder of its own as it is published, and as a GGUF file."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.gguf_conversion import convert_folder
from support.multimodal_models import load_whole_model, write_multimodal_model
from support.run_model import load_test_runner, long_logprobs, serve_requests
from test_decoder_families import check_schedules

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config
from parley.model.checkpoint.files import read_config
from parley.model.load.check import check_model
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable
from parley.types import EngineRequest, ParleySettings, SamplingOptions

LAYERS, EXTRA = 4, 2
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
LIMITS, SHARED_LIMITS = [0.0, 0.0, 0.3, 0.2], [0.0, 0.25, 0.0, 0.5]
ROPE = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
    "original_max_position_embeddings": 131072,
}
# Fields of published configs, whose lists go on with layers that predict further tokens
PUBLISHED = {
    "architectures": ["Step3p5ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"},
    "model_type": "step3p5",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 32,
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 32},
    "vocab_size": tiny_models.VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": 29,
    "layer_types": TYPES + ["full_attention"] * EXTRA,
    "rope_theta": [5e6, 1e4, 1e4, 5e6] + [5e6] * EXTRA,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5] + [0.5] * EXTRA,
    "rope_scaling": ROPE,
    "yarn_only_types": ["full_attention"],
    "use_rope_layers": [],
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "moe_router_activation": "sigmoid",
    "use_head_wise_attn_gate": True,
    "swiglu_limits": LIMITS + [0.0] * EXTRA,
    "swiglu_limits_shared": SHARED_LIMITS + [0.0] * EXTRA,
    "num_nextn_predict_layers": EXTRA,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
OWN = ("architectures", "auto_map", "model_type", "dtype", "vocab_size")


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    """A Step 3.7 whose decoder has all variations of layers."""
    text = {name: value for name, value in PUBLISHED.items() if name not in OWN}
    for field in ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"):
        text[field] = text[field][:LAYERS]
    text |= {"num_nextn_predict_layers": 0, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2}
    text |= {"mlp_layer_types": None, "num_sliding_attention_heads": None}
    return write_multimodal_model(tmp_path_factory.mktemp("models") / "step3p7", "step3p7", text=text)


@pytest.fixture(scope="module")
def folder(whole_folder, tmp_path_factory):
    """Its decoder, as Step 3.5 is published."""
    result = tmp_path_factory.mktemp("models") / "step3p5"
    result.mkdir()
    tiny_models.write_tokenizer(result)
    stored = load_file(whole_folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if name.startswith(("model.", "lm_head."))}
    assert {"model.layers.1.moe.router_bias", "model.layers.1.share_expert.up_proj.weight"} <= tensors.keys()
    save_file(tensors, result / "model.safetensors", {"format": "pt"})
    vocab_size = len(tensors["model.embed_tokens.weight"])
    (result / "config.json").write_text(json.dumps(PUBLISHED | {"vocab_size": vocab_size}))
    return result


@torch.inference_mode()
def test_log_probabilities_are_those_of_transformers(whole_folder, folder):
    assert check_model(ParleySettings(model=str(folder))).load_caveat == ""
    runner, info = load_test_runner(folder, dtype="float32")
    assert info.fused
    tokens = torch.randint(3, runner.vocab_size, (200,), generator=torch.Generator().manual_seed(0))
    expected = load_whole_model(whole_folder)(input_ids=tokens[None]).logits[0].log_softmax(-1)
    for each in (folder, whole_folder):
        actual = long_logprobs(each, "float32")[:, : expected.shape[1]]
        assert (actual - expected).norm() < 1e-5 * expected.norm()


def test_every_schedule_gives_the_same_bits(folder):
    check_schedules(load_test_runner(folder, dtype="bfloat16")[0].network)


def test_answers_in_bfloat16_are_those_alone_in_company_and_after_preemption(folder):
    runner, _ = load_test_runner(folder, dtype="bfloat16")
    prompts = [list(range(5 + i, 60 + i)) for i in range(4)]
    requests = [EngineRequest(str(i), prompt, 12, SamplingOptions(temperature=0.0)) for i, prompt in enumerate(prompts)]
    alone = [serve_requests(runner, [request], step=64)[0][request.id, 0].token_ids for request in requests]
    together, _ = serve_requests(runner, requests, step=40, blocks=11)
    assert [together[request.id, 0].token_ids for request in requests] == alone


@pytest.mark.parametrize("scaling", [ROPE, None])
def test_a_gguf_file_has_the_log_probabilities_of_its_folder(folder, tmp_path, monkeypatch, scaling):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(read_config(folder) | {"rope_scaling": scaling}))
    unpacked = unpack_gguf(convert_folder(tmp_path / "x.gguf", copy, extra_layers=EXTRA))
    shapes = [read_decoder_config(read_config(each)) for each in (unpacked, copy)]
    assert shapes[0].layers == shapes[1].layers and shapes[0].ropes == shapes[1].ropes
    assert torch.equal(long_logprobs(unpacked, "float32"), long_logprobs(copy, "float32"))


def test_files_with_other_layers_are_refused(folder, tmp_path):
    model = read_model(convert_folder(tmp_path / "x.gguf", folder, extra_layers=EXTRA))
    for key, value, reason in (
        ("attention.head_count", [4, 6, 8, 4], "gives attention.head_count as .* one number"),
        ("attention.sliding_window_pattern", [True], "does not say which of 4 layers have a window"),
        ("swiglu_clamp_exp", [0.0, -1.0, 0.0, 0.0], "gives swiglu_clamp_exp as .*; each layer has a number"),
        ("expert_weights_norm", False, "gives expert_weights_norm as False"),
    ):
        usual = model.metadata[f"step35.{key}"]
        model.metadata[f"step35.{key}"] = value
        with pytest.raises(GgufError, match=rf"^x\.gguf {reason}"):
            model_config(model)
        model.metadata[f"step35.{key}"] = usual
    with pytest.raises(GgufError, match="divides frequencies by other numbers"):
        model_config(model, {"rope_freqs.weight": (1.0,) * 7 + (3.0,) * 9}.get)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("sink", True, "gives sink as True"),
        ("use_rope_layers", [1, 0], "gives use_rope_layers as"),
        ("swiglu_limits", [1.0], "gives swiglu_limits as"),
        ("swiglu_limits", [float("inf")] * LAYERS, "gives swiglu_limits as"),
        ("rope_theta", [1e4], "gives rope_theta as"),
        ("moe_layers_enum", "a", "gives moe_layers_enum as 'a'"),
        ("attention_other_setting", {"num_attention_heads": 5}, "5 heads over 2 key/value heads do not divide"),
        ("query_pre_attn_scalar", 0, "gives query_pre_attn_scalar as 0"),
    ],
)
def test_other_configs_are_refused(field, value, reason):
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config(PUBLISHED | {field: value})
