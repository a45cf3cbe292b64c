"""In float32, greedy tokens match ``generate`` of Transformers, and log-probabilities match its logits.

Fifty prompts of 1 to 600 tokens per architecture, served all at once: in chunks, in a changing batch, with too few
pages, and with prefixes from the cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from support import tiny_models
from support.run_model import Answer, load_test_runner, serve_requests
from transformers import AutoModelForCausalLM

from parley.types import EngineRequest, SamplingOptions, TokenScore

LENGTHS = [*range(1, 34, 2), 16, 32, 36, 37, 38, 45, 46, 48, 53, 54, 60, 63, 64, 65, 70, 75, 80, 85, 90, 100, 110, 120]
LENGTHS += [127, 128, 129, 150, 160, 200, 250, 300, 400, 512, 577, 600]
NEW_TOKENS = 8
TOP_LOGPROBS = 5  # alternatives per token
TOLERANCE = 1e-4  # tolerance between two log-probabilities
END_TOKEN = 2  # the end token of all test models
LOWERED = {
    "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3",
    "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe",
}  # fmt: skip
IS_NIGHT = "PARLEY_NIGHTLY" in os.environ
# By day one of each kind: test_decoder_families.py compares logits of most families.
TESTED = tiny_models.ARCHITECTURES if IS_NIGHT else ["llama", "qwen3", "gemma2", "qwen2_moe", "glm4_moe", "aria_text"]
# Those that are also computed by Transformers' own layers.
BOTH_WAYS = LOWERED - (set() if IS_NIGHT else {"qwen2_moe", "glm4_moe"})


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    result = [torch.randint(3, tiny_models.VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    result[-1][:512] = result[-3]  # a shared prefix
    return result


@pytest.mark.parametrize("architecture", TESTED)
def test_tokens_and_logprobs_match_transformers(architecture, tmp_path):
    assert len(LENGTHS) >= 50
    folder = tiny_models.write_model(tmp_path / architecture, architecture, dtype="float32")
    expected_results = transformers_results(folder)
    requests = [make_request(str(i), prompt) for i, prompt in enumerate(make_prompts())]
    for lowering in [True, False] if architecture in BOTH_WAYS else [True]:
        runner, info = load_test_runner(folder, dtype="float32", lowering=lowering)
        assert info.fused == (lowering and architecture in LOWERED)
        answers, stats = serve_requests(runner, requests, step=160, blocks=90)
        assert stats.preemptions > 0
        for i, expected in enumerate(expected_results):
            check_answer(answers[str(i), 0], expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_prefix_hits_do_not_change_tokens_or_logprobs(architecture, tmp_path):
    folder = tiny_models.write_model(tmp_path / architecture, architecture, dtype="float32")
    indices = [44, 48, 50]  # of 200, 512 and 600 tokens; the last two share a prefix
    expected, texts = transformers_results(folder, indices), make_prompts()
    cold = [make_request(f"cold {i}", texts[i]) for i in indices]
    scored = [make_request(f"scored {i}", texts[i]) for i in indices]
    plain = [make_request(f"plain {i}", texts[i], prompt_logprobs=-1) for i in indices]
    runner, _ = load_test_runner(folder, dtype="float32")
    answers, stats = serve_requests(runner, [*cold, *scored, *plain], batch=1, step=160)
    assert stats.prefix_hits >= 1200  # at least those of the requests without prompt scores
    for i, expected_result in zip(indices, expected, strict=True):
        for name in ("cold", "scored"):
            check_answer(answers[f"{name} {i}", 0], expected_result)
        check_answer(answers[f"plain {i}", 0], expected_result, prompt=False)


def make_request(name: str, prompt: list[int], prompt_logprobs: int = TOP_LOGPROBS) -> EngineRequest:
    greedy = SamplingOptions(temperature=0)
    return EngineRequest(
        name, prompt, NEW_TOKENS, greedy, stop_ids=[END_TOKEN], logprobs=TOP_LOGPROBS, prompt_logprobs=prompt_logprobs
    )


@dataclass
class TransformersResult:
    """The tokens of Transformers, and all log-probabilities at each of them and at each prompt token but the first."""

    tokens: list[int]
    rows: torch.Tensor  # [tokens, vocabulary]
    prompt: list[int]
    prompt_rows: torch.Tensor  # [prompt tokens but the first, vocabulary]


def check_answer(answer: Answer, expected: TransformersResult, prompt: bool = True) -> None:
    assert answer.token_ids == expected.tokens
    compare_scores(answer.scores, expected.tokens, expected.rows)
    assert len(answer.prompt_scores) == (len(expected.prompt) if prompt else 0)
    if prompt:
        assert answer.prompt_scores[0] is None
        compare_scores(answer.prompt_scores[1:], expected.prompt[1:], expected.prompt_rows)


def compare_scores(scores: list[TokenScore], tokens: list[int], rows: torch.Tensor) -> None:
    """Compare log-probabilities, ranks and alternatives; nearly equal log-probabilities may be in either order."""
    assert len(scores) == len(tokens) == len(rows)
    if not scores:
        return
    token_logits = rows.gather(1, torch.tensor(tokens)[:, None])
    assert torch.allclose(torch.tensor([score.logprob for score in scores]), token_logits[:, 0], rtol=0, atol=TOLERANCE)
    ranks = torch.tensor([score.rank for score in scores])
    assert ((rows > token_logits + TOLERANCE).sum(1) < ranks).all() and (
        ranks <= (rows > token_logits - TOLERANCE).sum(1)
    ).all()
    best = rows.topk(TOP_LOGPROBS).values
    assert torch.allclose(torch.tensor([score.top_logprobs for score in scores]), best, rtol=0, atol=TOLERANCE)
    ids = torch.tensor([score.top_ids for score in scores])
    assert torch.allclose(rows.gather(1, ids), best, rtol=0, atol=TOLERANCE)
    assert all(len(set(score.top_ids)) == TOP_LOGPROBS for score in scores)


@torch.inference_mode()
def transformers_results(folder, indices: list[int] | None = None) -> list[TransformersResult]:
    """For all prompts, or those at these indices: the output of ``generate`` and all log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    results = []
    all_prompts = make_prompts()
    for prompt in all_prompts if indices is None else [all_prompts[i] for i in indices]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        rows = torch.cat(out.logits).log_softmax(-1)
        prompt_rows = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        results.append(TransformersResult(tokens, rows, prompt, prompt_rows))
    return results
