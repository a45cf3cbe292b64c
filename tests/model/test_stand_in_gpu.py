"""The code for GPUs on a stand-in for one: each operator has its tensors on one device, and answers are the CPU's."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from support import tiny_models
from support.lora_adapters import write_adapter
from support.media_requests import build_media_prompt, random_image, random_sound
from support.multimodal_models import FAMILIES, multimodal_folder
from support.run_model import Answer, load_test_runner, serve_requests
from support.stand_in_gpu import GPU, MixedDevices, stand_in_gpu

from parley.text.text_pipeline import TextPipeline
from parley.types import BeamOptions, EngineRequest, Grammar, SamplingOptions

IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
# Each has layers that no one before it has.
ARCHITECTURES = ["llama", "gpt_oss", "qwen3_next", "mamba2", "deepseek_v32", "lfm2"]
if IS_NIGHT:
    ARCHITECTURES += ["beam", "gemma3", "gemma3n", "gemma4", "jamba", "kimi_linear", "minimax", "minimax_m3"]
MEDIA_FAMILIES = ["qwen2_5_vl", "phi4_multimodal"]
if IS_NIGHT:
    MEDIA_FAMILIES += ["gemma3", "gemma4", "llama4", "mllama", "paligemma2", "qwen3_asr", "lfm2_vl", "kimi_k25"]
GREEDY = SamplingOptions(temperature=0.0)
REQUESTS = [
    EngineRequest(
        str(k),
        [3 + (7 * k + i * i) % (tiny_models.VOCAB - 3) for i in range(1 + 23 * k)],
        6,
        SamplingOptions(temperature=(k % 3) * 0.4, top_p=0.9, top_k=20 * (k % 2), repetition_penalty=1.1),
        seed=k,
        n=1 + k % 2,
        logprobs=2,
        prompt_logprobs=0 if k % 4 == 0 else -1,
    )
    for k in range(4)
]


def check_equal(on_gpu: dict[tuple[str, int], Answer], on_cpu: dict[tuple[str, int], Answer]) -> None:
    """Check that answers have the same tokens, with the same scores but for rounding."""
    assert on_gpu.keys() == on_cpu.keys()
    for key, expected in on_cpu.items():
        answer = on_gpu[key]
        assert answer.token_ids == expected.token_ids
        scores = [score.logprob for score in answer.scores]
        assert scores == pytest.approx([score.logprob for score in expected.scores], abs=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_on_a_gpu_are_those_of_the_cpu(architecture):
    folder = tiny_models.model_folder(architecture)
    expected = serve_requests(load_test_runner(folder, dtype="float32")[0], REQUESTS, step=64, blocks=60)[0]
    with stand_in_gpu():
        runner, info = load_test_runner(folder, device="cuda", dtype="float32")
        assert info.device == "cuda" and runner.device.type == "cuda"
        check_equal(serve_requests(runner, REQUESTS, step=64, blocks=60)[0], expected)


def test_options_of_requests_on_a_gpu(tmp_path):
    """Each in a request of its own, all in the same steps, with drafts of another model."""
    folder = tiny_models.model_folder("qwen3")
    adapters = {"adapter": str(write_adapter(tmp_path / "adapter", folder, seed=1))}
    grammar = TextPipeline.from_folder(folder).grammar_compiler.compile_grammar(Grammar("regex", "[a-z]{3,9}"))
    options: list[dict[str, Any]] = [
        {"sampling": SamplingOptions(logit_bias={5: 4.0, 9: -100.0}, presence_penalty=0.5, penalty_window=4)},
        {"sampling": SamplingOptions(allowed=list(range(3, 60)), frequency_penalty=0.3), "min_tokens": 5},
        {"sampling": SamplingOptions(banned=[[7], [8, 9]], no_repeat_ngram=2, temperature=0.0)},
        {"sampling": SamplingOptions(typical_p=0.5, min_p=0.01, watermark=True), "logprob_ids": [4, 90]},
        {"grammar": grammar},
        {"beam": BeamOptions(3), "n": 2},
        {"adapter": "adapter", "n": 2},
        {"prediction": list(range(20, 40)), "sampling": SamplingOptions(temperature=0.0), "prompt_logprobs": 1},
    ]
    requests = [
        EngineRequest(str(k), list(range(3 + k, 30 + k)), 20, seed=k, **members) for k, members in enumerate(options)
    ]
    answers = []
    for device in ("cpu", "cuda"):
        with stand_in_gpu() if device == "cuda" else nullcontext():
            runner, _ = load_test_runner(folder, device=device, dtype="float32", speculate=f"draft={folder}")
            served, stats = serve_requests(runner, requests, step=64, blocks=60, adapters=adapters)
            assert stats.draft_tokens
            answers.append(served)
    check_equal(answers[1], answers[0])


@pytest.mark.parametrize("family", MEDIA_FAMILIES)
def test_media_on_a_gpu_are_encoded_as_on_the_cpu(family):
    sound = "audio" in FAMILIES[family].parts
    prompt = build_media_prompt(family, ["a ", random_sound(3) if sound else random_image(4, 90, 60), " bc"])
    answers = []
    for device in ("cpu", "cuda"):
        with stand_in_gpu() if device == "cuda" else nullcontext(), prompt.open_media() as media:
            runner, _ = load_test_runner(multimodal_folder(family, "float32"), dtype="float32", device=device)
            request = EngineRequest("0", prompt.token_ids, 6, GREEDY, logprobs=0, media=media)
            answers.append(serve_requests(runner, [request], blocks=60)[0])
    check_equal(answers[1], answers[0])


MIXTURES = {
    "sum": lambda host, gpu: gpu + host,
    "product": lambda host, gpu: host @ gpu,
    "concatenation": lambda host, gpu: torch.cat((host, gpu)),
    "value": lambda host, gpu: gpu.__setitem__(torch.tensor([0]).to(GPU), host[:1]),
    "index": lambda host, gpu: host[torch.tensor([0]).to(GPU)],
    "linear": lambda host, gpu: torch.nn.functional.linear(gpu, host),
    "result": lambda host, gpu: torch.add(gpu, gpu, out=host),
    "in place": lambda host, gpu: host.add_(gpu),
}
UNREADABLE = {
    "numpy": lambda gpu: gpu.numpy(),
    "array": lambda gpu: numpy.asarray(gpu),
    "address": lambda gpu: gpu.data_ptr(),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_stand_in_refuses_tensors_of_two_devices(name):
    host = torch.ones(3, 3)
    with stand_in_gpu():
        gpu = torch.ones(3, 3, device="cuda")
        with pytest.raises(MixedDevices):
            MIXTURES[name](host, gpu)


@pytest.mark.parametrize("name", UNREADABLE)
def test_stand_in_refuses_to_be_read_by_the_host(name):
    with stand_in_gpu(), pytest.raises(TypeError):
        UNREADABLE[name](torch.ones(3, device="cuda"))


def test_stand_in_computes_and_copies_as_a_gpu():
    host = torch.arange(6.0).view(2, 3)
    with stand_in_gpu():
        gpu = host.to("cuda")
        assert (gpu.device, gpu.is_cuda, (gpu * 2)[1].device, gpu.cpu().device.type) == (GPU, True, GPU, "cpu")
        assert gpu.max(1).values.device == GPU and gpu.new_zeros(2).device == GPU
        gpu[0] = host[1]  # slices are copied
        gpu += 1
        assert gpu.cpu().tolist() == [[4, 5, 6], [4, 5, 6]] and host.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert gpu[torch.tensor([1])].device == GPU and float(gpu.sum()) == 30
        gpu.copy_(host)
        assert torch.equal(gpu.cpu(), host)
