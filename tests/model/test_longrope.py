"""Models with two sets of rotary factors (longrope) answer like Transformers, on both sides of the border and across.

Transformers uses the long factors for all tokens as soon as a sequence has more than original_max_position_embeddings
tokens, and drops the keys that it had cached with the short ones.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner, serve_requests
from transformers import AutoModelForCausalLM

from parley.types import EngineRequest, SamplingOptions

BORDER = 64  # tokens
LONGROPE = {
    "original_max_position_embeddings": BORDER,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}
MSCALE = {"short_mscale": 1.1, "long_mscale": 1.4, "original_max_position_embeddings": BORDER}
LENGTHS = (3, BORDER - 6, BORDER, BORDER + 1, BORDER + 40)
OUTPUT = 12


@cache
def longrope_folder(dtype: str):
    return tiny_models.write_model(tiny_models.models_home() / f"longrope-{dtype}", "phi3", dtype=dtype, **LONGROPE)


def random_prompt(length: int) -> list[int]:
    return torch.randint(3, tiny_models.VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def make_requests(**options) -> list[EngineRequest]:
    return [EngineRequest(str(length), random_prompt(length), OUTPUT, **options) for length in LENGTHS]


@pytest.mark.parametrize("lowering", [True, False], ids=["fused", "unfused"])
def test_greedy_tokens_equal_those_of_transformers(lowering):
    folder = longrope_folder("float32")
    runner, info = load_test_runner(folder, dtype="float32", lowering=lowering)
    assert info.fused == lowering
    answers, _ = serve_requests(runner, make_requests(sampling=SamplingOptions(temperature=0.0)), step=48)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for length in LENGTHS:
        ids = torch.tensor([random_prompt(length)])
        expected = model.generate(ids, do_sample=False, max_new_tokens=OUTPUT, eos_token_id=None, pad_token_id=0)
        assert answers[str(length), 0].token_ids == expected[0, length:].tolist(), length


@pytest.mark.parametrize("lowering", [True, False], ids=["fused", "unfused"])
def test_every_schedule_gives_the_same_bits(lowering):
    """bfloat16: alone, batched, in chunks, from the prefix cache, preempted, with drafts."""
    runner, _ = load_test_runner(longrope_folder("bfloat16"), lowering=lowering)
    requests = make_requests(sampling=SamplingOptions(temperature=0.9), seed=5, logprobs=2, prompt_logprobs=1)
    expected = {}
    for request in requests:
        expected |= serve_requests(runner, [request], step=4096, cache=False)[0]
    assert serve_requests(runner, requests, step=4096)[0] == expected
    assert serve_requests(runner, requests, step=17)[0] == expected
    longer = [EngineRequest("longer", [*random_prompt(BORDER - 8), *random_prompt(30)], 5), *requests]
    answers, stats = serve_requests(runner, longer, batch=1)  # its pages have other keys than a short prompt's
    assert {key: answers[key] for key in expected} == expected
    drafted = make_requests(sampling=SamplingOptions(temperature=0.9), seed=5, logprobs=2, prompt_logprobs=1)
    for request in drafted:
        request.prediction = expected[request.id, 0].token_ids
    answers, stats = serve_requests(runner, drafted)
    assert answers == expected and sum(stats.draft_accepted) > 0
    answers, stats = serve_requests(runner, requests, step=24, blocks=13)
    assert answers == expected and stats.preemptions > 0


def test_pages_of_long_prompts_serve_long_prompts():
    runner, _ = load_test_runner(longrope_folder("bfloat16"))
    prompt = random_prompt(BORDER + 40)
    requests = [EngineRequest("a", prompt, 4, seed=1), EngineRequest("b", prompt, 4, seed=1)]
    answers, stats = serve_requests(runner, requests, batch=1)
    assert answers["a", 0] == answers["b", 0]
    assert stats.prefix_hits == len(prompt) // 16 * 16


def test_other_architectures_choose_factors_by_sequence(tmp_path, monkeypatch):
    """PhiMoE scales cosines by the length as well. Each sequence of a batch has the scores that it has alone."""
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    rope = LONGROPE["rope_parameters"] | MSCALE
    config = tiny_models.BASE_CONFIG | fields | {"rope_parameters": rope}
    monkeypatch.setitem(tiny_models.ARCHITECTURES, "phimoe", ("phimoe", config))
    folder = tiny_models.write_model(tmp_path / "phimoe", "phimoe", dtype="float32")
    runner, info = load_test_runner(folder, dtype="float32")
    assert not info.fused
    requests = [
        EngineRequest(str(length), random_prompt(length), 1, SamplingOptions(temperature=0.0), prompt_logprobs=0)
        for length in LENGTHS
    ]
    answers, _ = serve_requests(runner, requests, step=48)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for length in LENGTHS:
        ids = torch.tensor([random_prompt(length)])
        with torch.inference_mode():
            scores = model(ids, use_cache=False).logits[0].log_softmax(-1)
        assert answers[str(length), 0].token_ids == [int(scores[-1].argmax())]
        for position, score in enumerate(answers[str(length), 0].prompt_scores[1:]):
            assert score.logprob == pytest.approx(float(scores[position, ids[0, position + 1]]), abs=2e-4)
