"""Against Transformers: greedy tokens are those of ``generate``, log-probabilities those of its logits, in float32.

Fifty prompts of 1 to 600 tokens per architecture, served all at once: in chunks, in a changing batch, in too few pages.
"""

from __future__ import annotations

import models
import pytest
import torch
from serving import serve, start
from transformers import AutoModelForCausalLM

from parley.types import Sampling, Work

LENGTHS = [*range(1, 34, 2), 16, 32, 36, 37, 38, 45, 46, 48, 53, 54, 60, 63, 64, 65, 70, 75, 80, 85, 90, 100, 110, 120]
LENGTHS += [127, 128, 129, 150, 160, 200, 250, 300, 400, 512, 577, 600]
NEW = 8
END = 2  # the end token of all models of the fixtures
LOWERED = {"llama", "llama3", "mistral", "qwen2", "qwen3", "phi3"}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    made = [torch.randint(3, models.VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    made[-1][:512] = made[-3]  # a shared prefix
    return made


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_tokens_and_logprobs_are_those_of_transformers(architecture, tmp_path):
    assert len(LENGTHS) >= 50
    folder = models.write_model(tmp_path / architecture, architecture, dtype="float32")
    want = reference(folder)
    works = [
        Work(str(i), prompt, NEW, Sampling(temperature=0), stop_ids=[END], logprobs=0, prompt_logprobs=0)
        for i, prompt in enumerate(prompts())
    ]
    for lowering in [True, False] if architecture in LOWERED else [True]:
        runner, info = start(folder, dtype="float32", lowering=lowering)
        assert info.lowered == (lowering and architecture in LOWERED)
        answers, stats = serve(runner, works, step=160, blocks=90)
        assert stats.preemptions > 0
        for i, (tokens, scores, prompt_scores) in enumerate(want):
            answer = answers[str(i), 0]
            assert answer.token_ids == tokens
            assert [score.logprob for score in answer.scores] == pytest.approx(scores, abs=1e-4)
            assert answer.prompt_scores[0] is None
            assert [score.logprob for score in answer.prompt_scores[1:]] == pytest.approx(prompt_scores, abs=1e-4)


@torch.inference_mode()
def reference(folder) -> list[tuple[list[int], list[float], list[float]]]:
    """For each prompt: the tokens generate gives, their log-probabilities, and those of the prompt's tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    results = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        scores = [row[0].log_softmax(-1)[token].item() for row, token in zip(out.logits, tokens, strict=True)]
        raw = model(ids, use_cache=False).logits[0].log_softmax(-1)
        results.append((tokens, scores, raw[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()))
    return results
