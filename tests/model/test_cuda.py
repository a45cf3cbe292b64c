"""The same code on a GPU: in float32 it draws and scores the same tokens as on the CPU."""

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner, serve_requests

from parley.types import EngineRequest, SamplingOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

REQUESTS = [
    EngineRequest(
        str(k),
        [3 + (7 * k + i * i) % (tiny_models.VOCAB - 3) for i in range(1 + 23 * k)],
        12,
        SamplingOptions(temperature=(k % 3) * 0.4, top_p=0.9, top_k=20 * (k % 2), repetition_penalty=1.1),
        seed=k,
        logprobs=2,
        prompt_logprobs=0 if k % 4 == 0 else -1,
    )
    for k in range(12)
]


@pytest.mark.parametrize("lowering", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "qwen3_moe", "beam"])
def test_gpu_outputs_match_cpu_in_float32(architecture, lowering):
    folder = tiny_models.model_folder(architecture)
    answers = []
    for device in ("cpu", "cuda"):
        runner, info = load_test_runner(folder, device=device, dtype="float32", lowering=lowering)
        assert info.device.startswith(device)
        answers.append(serve_requests(runner, REQUESTS, step=64, blocks=120)[0])
    for key, cpu_answer in answers[0].items():
        gpu_answer = answers[1][key]
        assert gpu_answer.token_ids == cpu_answer.token_ids
        for a, b in zip(cpu_answer.scores, gpu_answer.scores, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-3


def test_gpu_bf16_gives_valid_scores_and_finishes_every_answer():
    """The comparison of log-probabilities fails for NaN, so it guards against NaN scores in bfloat16."""
    runner, _ = load_test_runner(tiny_models.model_folder("qwen3"), device="cuda")
    answers, stats = serve_requests(runner, REQUESTS, step=64, blocks=120)
    assert all(score.logprob <= 0 for answer in answers.values() for score in answer.scores)
    assert stats.generated_tokens == sum(len(answer.token_ids) for answer in answers.values())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v2_lite"])
def test_gpu_bf16_answers_are_the_same_alone_in_a_batch_and_in_chunks(architecture):
    """Also with graphs and steps ahead, and without both."""
    runner, _ = load_test_runner(tiny_models.model_folder(architecture), device="cuda")
    expected = serve_requests(runner, REQUESTS, step=64, blocks=120)[0]
    for request in REQUESTS:
        assert serve_requests(runner, [request], step=64, blocks=120)[0][request.id, 0] == expected[request.id, 0]
    assert serve_requests(runner, REQUESTS, step=17, blocks=120)[0] == expected
    runner.starter = runner.graphs = None
    assert serve_requests(runner, REQUESTS, step=64, blocks=120)[0] == expected


def test_gpu_decodes_run_as_graphs_and_are_started_ahead():
    runner, _ = load_test_runner(tiny_models.model_folder("qwen3"), device="cuda")
    assert runner.graphs is not None and runner.starter is not None
    greedy = [EngineRequest(str(k), [3 + k, 5], 30, SamplingOptions(temperature=0.0)) for k in range(5)]
    answers = serve_requests(runner, greedy)[0]
    assert runner.graphs.replays >= 29
    runner.starter = runner.graphs = None
    assert serve_requests(runner, greedy)[0] == answers
