"""Models with layers that keep a state: forks, memory, formats and refusals.

``test_decoder_families`` compares their logits with Transformers' and their bits in all cuts, ``test_exact`` their bits
in schedules with preemptions, and ``invariant_ledger`` which state each row finds.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support import tiny_models
from support.run_model import Answer, load_test_runner, long_logprobs, serve_requests

from parley.model.checkpoint.files import LoadError
from parley.model.load.check import check_model
from parley.model.load.memory import plan_cache
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable
from parley.types import BeamOptions, EngineRequest, ParleySettings, SamplingOptions

CPU = torch.device("cpu")
IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
STATE_MODELS = ["lfm2", "qwen3_5", "mamba2", *sorted(set(tiny_models.STATE_DECODERS) - {"lfm2", "qwen3_5", "mamba2"})]


def change_config(source: Path, folder: Path, **fields) -> Path:
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


class KnownOutputs:
    """A proposer that knows all answers, and makes every third guess wrong at its third token."""

    def __init__(self, answers: dict[tuple[str, int], Answer]):
        self.answers = answers

    def propose_drafts(self, draft_limits):
        return [self._guess(sequence, limit) for sequence, limit in draft_limits]

    def _guess(self, sequence, limit: int) -> list[int]:
        done = sequence.output_length
        guess = self.answers[sequence.request_id, sequence.index].token_ids[done : done + limit]
        return [*guess[:2], *(token ^ 1 for token in guess[2:3]), *guess[3:]] if done % 3 == 0 else guess

    def forget_sequence(self, sequence) -> None:
        pass


def beam_requests(count: int) -> list[EngineRequest]:
    prompts = [[3 + (7 * i + j) % 600 for j in range(20 + 9 * i)] for i in range(count)]
    return [
        EngineRequest(
            str(i), prompt, 10, SamplingOptions(temperature=0.0), n=3, logprobs=0, beam=BeamOptions(3, 1.0, False)
        )
        for i, prompt in enumerate(prompts)
    ]


def test_beams_have_the_same_bits_with_few_pages_and_slots():
    """Guards against a beam that continues from the state of another, or from none."""
    folder = tiny_models.model_folder("lfm2")
    requests, expected = beam_requests(2), {}
    runner = load_test_runner(folder, max_batch=4)[0]
    for request in requests:
        expected |= serve_requests(runner, [request])[0]
    assert serve_requests(runner, requests, batch=4, step=16, blocks=18)[0] == expected


@pytest.mark.parametrize("architecture", STATE_MODELS if IS_NIGHT else STATE_MODELS[:3])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"] if IS_NIGHT else ["none"])
def test_choices_prefixes_and_drafts_keep_every_bit(architecture, quantization):
    """Choices of one prompt, prompts that part, a later turn, in large and small chunks, with and without drafts."""
    settings = {"max_batch": 8, "quantization": quantization, "kv_memory": 16 << 20}
    runner, info = load_test_runner(tiny_models.model_folder(architecture), **settings)
    assert info.fused and runner.snapshot_slots > 0
    common, sampling = list(range(3, 103)), SamplingOptions(temperature=0.8)
    prompts = {"a": [*common, 5, 6, 7], "b": common + [9] * 20, "c": common[:60] + [8] * 9, "again": [*common, 5, 6, 7]}
    requests = [
        EngineRequest(name, prompt, 24, sampling, seed=5, n=3 if name == "a" else 1, logprobs=0)
        for name, prompt in prompts.items()
    ]
    expected: dict[tuple[str, int], Answer] = {}
    for request in requests:
        expected |= serve_requests(runner, [request], cache=False)[0]
    for draft_seed in (None, 1):
        for step in (20, 500):
            proposer = None if draft_seed is None else KnownOutputs(expected)
            answers, stats = serve_requests(runner, requests, step=step, proposer=proposer)
            assert answers == expected and stats.prefix_hits >= 3 * 96
            assert draft_seed is None or sum(stats.draft_accepted) > stats.drafts > 10


def test_model_without_attention_serves_more_tokens_than_its_pages_hold():
    """Pages still count tokens, but hold nothing."""
    folder = tiny_models.model_folder("mamba2")
    requests = [
        EngineRequest(str(i), [3 + 5 * i] * (40 + i), 20, SamplingOptions(), seed=i, logprobs=0) for i in range(6)
    ]
    expected = {}
    for request in requests:
        expected |= serve_requests(load_test_runner(folder, max_batch=4)[0], [request])[0]
    runner, info = load_test_runner(folder, max_batch=4)
    assert info.fused and runner.network.kv_layers == []
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
        ({"speculate": "ngram", "state_cache": 1023}, "it needs a larger --state-cache or --kv-memory."),
        (
            {"shared": True, "staging": 1 << 20},
            "on CPUs and without --kv-staging only: with --device cuda it runs without --role.",
        ),
        (
            {"shared": True, "state_cache": 0},
            "--role keeps states of 1024 bytes besides those of running sequences, and "
            "there is no memory for one: it needs a larger --state-cache or --kv-memory.",
        ),
        ({"kv_memory": 2000}, "kv_memory is 2000 bytes, of which states get half, but one sequence's take 1024."),
    ],
)
def test_settings_that_need_more_than_a_state_are_refused(settings, sentence):
    options = ParleySettings(model=str(tiny_models.model_folder("lfm2")), **settings)
    for load in (check_model, lambda options: load_test_runner(Path(options.model), **settings)):
        with pytest.raises(LoadError) as refused:
            load(options)
        assert str(refused.value).endswith(sentence)


def test_a_draft_model_with_states_is_refused():
    folder = tiny_models.model_folder("llama")
    draft = tiny_models.model_folder("lfm2")
    for load in (check_model, lambda options: load_test_runner(folder, speculate=f"draft={draft}")):
        with pytest.raises(LoadError, match="cannot be the draft model: it has layers that keep a state"):
            load(ParleySettings(model=str(folder), speculate=f"draft={draft}"))


def test_states_take_half_of_the_memory_and_a_restart_the_same():
    settings = ParleySettings(model="m", max_batch=100, kv_memory=10_000)
    assert plan_cache(100, CPU, 1600, settings, 1000) == (50, 3, 2)
    assert plan_cache(100, CPU, 16, replace(settings, kv_memory=15_000), 10) == (100, 100, 400)  # as many as are of use
    few = ParleySettings(model="m", max_batch=2, kv_memory=10_000)
    assert plan_cache(100, CPU, 16, few, 4000) == (2, 1, 1)
    assert plan_cache(100, CPU, 16, replace(few, kv_memory=8200), 4000) == (2, 1, 1)
    assert plan_cache(100, CPU, 1600, replace(settings, prefix_cache=False), 1000) == (50, 5, 0)


def test_the_memory_of_snapshots_can_be_set():
    settings = ParleySettings(model="m", max_batch=100, kv_memory=10_000, state_cache=4500)
    assert plan_cache(100, CPU, 1600, settings, 1000) == (30, 3, 4)
    assert plan_cache(100, CPU, 1600, replace(settings, state_cache=0), 1000) == (50, 5, 0)
    with pytest.raises(LoadError, match="of which snapshots take 9000 and states half of the rest, but one sequence's"):
        plan_cache(100, CPU, 1600, replace(settings, state_cache=9000), 1000)


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
        ("nemotron_h", {"layers_block_type": ["moe", "rwkv"]}, "layer_types are not one of"),
        ("nemotron_h", {"moe_latent_size": 33}, "its experts read latents of 33 numbers"),
        ("nemotron_h", {"moe_latent_size": 32, "mlp_bias": True}, "the latents of its experts have biases"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "its convolutions have the activation gelu"),
    ],
)
def test_configs_that_do_not_fit_have_no_fused_decoder(architecture, change, reason):
    model_type, fields = tiny_models.STATE_DECODERS[architecture]
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config({"model_type": model_type, **fields, **change})


def test_the_shape_of_a_layer_does_not_grow_with_its_heads():
    """A config may claim 65536 layers of as many heads."""
    model_type, fields = tiny_models.STATE_DECODERS["minimax"]
    many = {"num_attention_heads": 1 << 16, "head_dim": 32}
    assert len(pickle.dumps(read_decoder_config({"model_type": model_type, **fields, **many}).layers)) < 1 << 16


def test_reads_the_layer_names_of_old_configs():
    def shapes_of(architecture: str, **change) -> tuple:
        model_type, fields = tiny_models.STATE_DECODERS[architecture]
        return read_decoder_config({"model_type": model_type, **fields, **change}).layers

    expected = shapes_of("granite_hybrid")
    assert [shape.state is None for shape in expected] == [False, True, False]
    assert shapes_of("granite_hybrid", layer_types=["mamba", "attention", "mamba"]) == expected
    pattern = {"layers_block_type": None, "hybrid_override_pattern": "M-M*E-", "num_hidden_layers": 6}
    assert shapes_of("nemotron_h", **pattern) == shapes_of("nemotron_h")
