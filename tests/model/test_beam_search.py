"""Beam search through the real runner: what Transformers finds, what is there to be found, whatever else goes on."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from support import tiny_models
from support.run_model import serve, start
from transformers import AutoModelForCausalLM

from parley.types import Beam, Sampling, Work


@pytest.fixture(scope="module")
def runner():
    return start(tiny_models.model("qwen3"), dtype="float32", threads=1)[0]


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(tiny_models.model("qwen3"), dtype=torch.float32).eval()


def expected(reference, work: Work) -> tuple[list[list[int]], list[float]]:
    """What Transformers generates for a work, and how it ranks that."""
    sampling, beam = work.sampling, work.beam
    more = {"min_new_tokens": work.min_tokens} if work.min_tokens else {}
    if sampling.banned:
        more["bad_words_ids"] = sampling.banned
    with torch.inference_mode():
        found = reference.generate(
            torch.tensor([work.token_ids]),
            num_beams=beam.width,
            num_return_sequences=work.n,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            eos_token_id=work.stop_ids,
            pad_token_id=0,
            max_new_tokens=work.max_tokens,
            do_sample=False,
            repetition_penalty=sampling.repetition_penalty,
            no_repeat_ngram_size=sampling.no_repeat_ngram,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )
    outputs = []
    for row in found.sequences[:, len(work.token_ids) :].tolist():
        end = next((k + 1 for k, id in enumerate(row) if id in work.stop_ids), work.max_tokens)
        outputs.append(row[:end])
    return outputs, found.sequences_scores.tolist()


def search(rng: random.Random, vocabulary: int, early) -> Work:
    width = rng.choice([2, 3, 5])
    most = rng.choice([1, 5, 24])
    return Work(
        f"w{rng.random()}",
        [rng.randrange(3, vocabulary) for _ in range(rng.choice([1, 3, 15, 16, 17, 40]))],
        most,
        Sampling(
            temperature=rng.choice([0.0, 1.0, 0.3]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            no_repeat_ngram=rng.choice([0, 0, 2]),
            banned=rng.choice([[], [[5], [rng.randrange(vocabulary), rng.randrange(vocabulary)]]]),
        ),
        n=rng.randint(1, width),
        stop_ids=rng.sample(range(vocabulary), rng.choice([1, 1, 2, 200])),
        min_tokens=rng.choice([0, 0, 3]) if most > 3 else 0,
        logprobs=rng.choice([-1, 0, 2]),
        beam=Beam(width, rng.choice([-1.0, 0.0, 1.0, 2.0]), early),
    )


@pytest.mark.parametrize("early", [False, True, "never"])
def test_transformers_finds_the_same(runner, reference, early) -> None:
    """Alone, all together, and with too few pages for all, so that beams have to leave and come again."""
    rng = random.Random(f"{early}")
    works = [search(rng, runner.vocab_size, early) for _ in range(6)]
    wanted = [expected(reference, work) for work in works]
    blocks = runner.blocks
    together = serve(runner, works, step=48)[0]
    crowded, stats = serve(runner, works, batch=6, blocks=36)
    assert stats.preemptions
    uncached = serve(runner, works, batch=6, blocks=36, cache=False)[0]
    serve(runner, [], blocks=blocks)
    for work, (outputs, _) in zip(works, wanted, strict=True):
        alone = serve(runner, [work])[0]
        for answers in (alone, together, crowded, uncached):
            assert [answers[work.id, k].token_ids for k in range(work.n)] == outputs


def test_values_are_sums_of_log_probabilities(runner, reference) -> None:
    work = Work("w", [5, 6, 7], 9, n=3, stop_ids=[1], logprobs=2, beam=Beam(3, 0.7))
    _, values = expected(reference, work)
    answers = serve(runner, [work])[0]
    for k, value in enumerate(values):
        answer = answers["w", k]
        total = sum(score.logprob for score in answer.scores)
        assert total / len(answer.token_ids) ** 0.7 == pytest.approx(value, abs=1e-4)
        assert all(len(score.top) == len(score.top_ids) == 2 for score in answer.scores)


def test_all_that_there_is_to_be_found(runner) -> None:
    """With as many beams as there are outputs, the best of them all: here of three tokens that are allowed."""
    allowed, length = [40, 41, 42], 3
    sampling = Sampling(allowed=allowed)
    chances = {}
    for tail in itertools.product(allowed, repeat=length):
        forced = Work("f", [9, 8, 7, *tail], 0, prompt_logprobs=0)
        scores = serve(runner, [forced])[0]["f", 0].prompt_scores
        chances[tail] = sum(score.logprob for score in scores[3:])
    best = sorted(chances, key=lambda tail: -chances[tail])
    work = Work("w", [9, 8, 7], length, sampling, n=5, beam=Beam(9))
    answers = serve(runner, [work])[0]
    assert [tuple(answers["w", k].token_ids) for k in range(5)] == best[:5]


def test_fewer_outputs_than_beams_come_again(runner) -> None:
    work = Work("w", [9, 8, 7], 1, Sampling(allowed=[40, 41]), n=4, logprobs=0, beam=Beam(4))
    answers = serve(runner, [work])[0]
    outputs = [answers["w", k].token_ids for k in range(4)]
    assert sorted(outputs[:2]) == [[40], [41]] and outputs[2:] == outputs[:2]


@pytest.mark.parametrize("kind", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_dtype": "int8"}], ids=str)
def test_pages_are_copied_as_they_are(kind) -> None:
    """Forks that copy a page give the bits of those that compute its tokens again."""
    runner = start(tiny_models.model("qwen3"), threads=1, **kind)[0]
    rng = random.Random(3)
    works = [
        Work(f"w{k}", [rng.randrange(600) for _ in range(length)], 40, n=4, logprobs=3, beam=Beam(4))
        for k, length in enumerate([3, 16, 21])
    ]
    copied = serve(runner, works, step=400)[0]
    copy = type(runner.pages).copy
    seen = []
    try:
        type(runner.pages).copy = lambda self, copies: (seen.extend(copies), copy(self, copies))
        again = serve(runner, works, batch=5, step=40, blocks=36)[0]
    finally:
        type(runner.pages).copy = copy
    assert seen and again == copied


def test_beams_beside_others() -> None:
    """Neither is changed by the other: draws, prompts' scores, and searches in one step."""
    runner = start(tiny_models.model("qwen3"), threads=1)[0]
    rng = random.Random(8)
    works = [
        Work(
            f"w{k}",
            [rng.randrange(600) for _ in range(20)],
            12,
            Sampling(presence_penalty=0.5 * (k % 2), watermark=k % 3 == 0, logit_bias={7: 2.0}),
            seed=k,
            n=2,
            logprobs=1,
            prompt_logprobs=0,
            beam=Beam(2 + k % 3) if k % 2 else None,
        )
        for k in range(6)
    ]
    together = serve(runner, works, batch=12, step=50)[0]
    for work in works:
        alone = serve(runner, [work], cache=False)[0]
        assert all(alone[work.id, k] == together[work.id, k] for k in range(2))
        assert all(math.isfinite(score.logprob) for score in together[work.id, 1].scores)
