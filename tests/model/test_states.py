"""Models with layers that keep a state: forks, memory, formats and refusals.

``test_decoder_families`` compares their logits with Transformers' and their bits in all cuts, ``test_exact`` their bits
in schedules with preemptions, and ``invariant_ledger`` which state each row finds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner, long_logprobs, serve_requests

from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.model.load.memory import plan_cache
from parley.model.networks.config import Unfusable, read_decoder_config
from parley.types import BeamOptions, EngineRequest, Sampling, Settings

CPU = torch.device("cpu")


def change_config(source: Path, folder: Path, **fields) -> Path:
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def beam_requests(count: int) -> list[EngineRequest]:
    prompts = [[3 + (7 * i + j) % 600 for j in range(20 + 9 * i)] for i in range(count)]
    return [
        EngineRequest(str(i), prompt, 10, Sampling(temperature=0.0), n=3, logprobs=0, beam=BeamOptions(3, 1.0, False))
        for i, prompt in enumerate(prompts)
    ]


def test_beams_have_the_same_bits_with_few_pages_and_slots():
    """Guards against a beam that continues from the state of another, or from none."""
    folder = tiny_models.model_folder("lfm2")
    requests, expected = beam_requests(2), {}
    runner = load_test_runner(folder, max_batch=4)[0]
    for request in requests:
        expected |= serve_requests(runner, [request])[0]
    crowded, stats = serve_requests(runner, requests, batch=4, step=16, blocks=18)
    assert crowded == expected and stats.prefix_hits == 0


def test_choices_and_prefixes_have_the_same_bits_without_a_cache():
    runner, info = load_test_runner(tiny_models.model_folder("lfm2"), max_batch=8)
    assert info.fused and info.state_bytes == 8 * 2 * 2 * 64 * 4
    request = EngineRequest("a", list(range(3, 60)), 8, Sampling(), seed=5, n=3, logprobs=0)
    answers, _ = serve_requests(runner, [request], step=20)
    for index in range(3):
        alone = EngineRequest("b", request.token_ids, 8, Sampling(), seed=5 + index, logprobs=0)
        assert serve_requests(runner, [alone])[0]["b", 0] == answers["a", index]


def test_a_model_without_attention_serves_more_tokens_than_it_has_pages_for():
    """Pages still count tokens, but hold nothing."""
    folder = tiny_models.model_folder("mamba2")
    requests = [EngineRequest(str(i), [3 + 5 * i] * (40 + i), 20, Sampling(), seed=i, logprobs=0) for i in range(6)]
    expected = {}
    for request in requests:
        expected |= serve_requests(load_test_runner(folder, max_batch=4)[0], [request])[0]
    runner, info = load_test_runner(folder, max_batch=4)
    assert info.fused and runner.network.layers == []
    assert serve_requests(runner, requests, batch=4, step=24, blocks=12)[0] == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_linear_layers_may_be_quantized(quantization):
    folder = tiny_models.model_folder("qwen3_5", num_hidden_layers=2)
    exact = long_logprobs(folder, "float32")
    rounded = long_logprobs(folder, "bfloat16", quantization=quantization)
    assert 0 < (rounded - exact).abs().mean() < (0.2 if quantization == "int8" else 1.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"speculate": "ngram"}, "which rejected drafts would spoil: it runs without --speculate."),
        ({"shared": True}, "which is not handed over between instances: it runs without --role."),
        ({"kv_memory": 2000}, "kv_memory is 2000 bytes, of which states get half, but one sequence's take 1024."),
    ],
)
def test_settings_that_need_more_than_a_state_are_refused(settings, sentence):
    options = Settings(model=str(tiny_models.model_folder("lfm2")), **settings)
    for load in (check_model, lambda options: load_test_runner(Path(options.model), **settings)):
        with pytest.raises(LoadError) as refused:
            load(options)
        assert str(refused.value).endswith(sentence)


def test_a_draft_model_with_states_is_refused():
    folder = tiny_models.model_folder("llama")
    draft = tiny_models.model_folder("lfm2")
    for load in (check_model, lambda options: load_test_runner(folder, speculate=f"draft={draft}")):
        with pytest.raises(LoadError, match="cannot guess tokens: it has layers that keep a state"):
            load(Settings(model=str(folder), speculate=f"draft={draft}"))


def test_states_take_half_of_the_memory_and_a_restart_the_same():
    settings = Settings(model="m", max_batch=100, kv_memory=10_000)
    sizes = plan_cache(100, CPU, 1600, settings, 1000)
    assert sizes == (50, 5)
    assert plan_cache(100, CPU, 16, settings, 10).slots == 100  # all useful pages fit, and so do all states
    few = Settings(model="m", max_batch=2, kv_memory=10_000)
    assert plan_cache(100, CPU, 16, few, 4000) == (2, 2)
    assert plan_cache(100, CPU, 16, Settings(model="m", max_batch=2, kv_memory=8200), 4000) == (2, 2)


@pytest.mark.parametrize(
    ("architecture", "change", "reason"),
    [
        ("qwen3_5", {"linear_num_value_heads": 3}, "3 value heads over 2 key heads do not divide"),
        ("qwen3_5", {"hidden_act": "gelu"}, "its convolutions have the activation gelu"),
        ("qwen3_5", {"linear_key_head_dim": None}, "linear_key_head_dim as None"),
        ("lfm2", {"layer_types": ["mamba"] * 3}, "layer_types are not one of"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache as 0"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias as False"),
        ("bamba", {"mamba_n_heads": 3}, "3 heads of 32 in 2 groups do not divide 128 numbers"),
        ("bamba", {"hidden_act": "gelu"}, "its convolutions have the activation gelu"),
        ("bamba", {"partial_rotary_factor": 1.0}, "partial_rotary_factor as 1.0"),
        ("granite_hybrid", {"time_step_limit": [1.0, 0.5]}, "time_step_limit as"),
        ("granite_hybrid", {"time_step_limit": [{"__float__": "many"}, 1]}, "time_step_limit as"),
        ("granite_hybrid", {"layer_types": ["mlp"] * 3}, "layer_types are not one of"),
        ("nemotron_h", {"layers_block_type": None}, "layer_types are not one of"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "its convolutions have the activation gelu"),
    ],
)
def test_configs_that_do_not_fit_have_no_fused_decoder(architecture, change, reason):
    model_type, fields = tiny_models.STATE_DECODERS[architecture]
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config({"model_type": model_type, **fields, **change})


def test_old_configs_name_layers_otherwise():
    def shapes_of(architecture: str, **change) -> tuple:
        model_type, fields = tiny_models.STATE_DECODERS[architecture]
        return read_decoder_config({"model_type": model_type, **fields, **change}).layers

    expected = shapes_of("granite_hybrid")
    assert [shape.state is None for shape in expected] == [False, True, False]
    assert shapes_of("granite_hybrid", layer_types=["mamba", "attention", "mamba"]) == expected
    pattern = {"layers_block_type": None, "hybrid_override_pattern": "M-M*--", "num_hidden_layers": 6}
    assert shapes_of("nemotron_h", **pattern) == shapes_of("nemotron_h")
