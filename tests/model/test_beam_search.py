"""Beam search through the real runner: it matches Transformers, finds the best outputs and ignores other requests."""

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
    """Return the outputs that Transformers generates for a request, in its ranking, and their scores."""
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
def test_beam_search_matches_transformers(runner, reference, early) -> None:
    """Alone, all together, and with too few pages for all, so that beams are preempted and recomputed."""
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


def test_beam_scores_equal_summed_logprobs(runner, reference) -> None:
    """Guards against a length penalty or a sum that differs from the reported token scores."""
    work = Work("w", [5, 6, 7], 9, n=3, stop_ids=[1], logprobs=2, beam=Beam(3, 0.7))
    _, values = expected(reference, work)
    answers = serve(runner, [work])[0]
    for k, value in enumerate(values):
        answer = answers["w", k]
        total = sum(score.logprob for score in answer.scores)
        assert total / len(answer.token_ids) ** 0.7 == pytest.approx(value, abs=1e-4)
        assert all(len(score.top) == len(score.top_ids) == 2 for score in answer.scores)


def test_wide_beam_search_finds_the_best_outputs(runner) -> None:
    """With as many beams as outputs, beam search is exhaustive: it returns the best outputs of three allowed tokens."""
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


def test_beam_search_repeats_outputs_when_too_few_exist(runner) -> None:
    """Only two outputs exist, but the request asks for four: the two are repeated instead of the request hanging."""
    work = Work("w", [9, 8, 7], 1, Sampling(allowed=[40, 41]), n=4, logprobs=0, beam=Beam(4))
    answers = serve(runner, [work])[0]
    outputs = [answers["w", k].token_ids for k in range(4)]
    assert sorted(outputs[:2]) == [[40], [41]] and outputs[2:] == outputs[:2]


@pytest.mark.parametrize("kind", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_dtype": "int8"}], ids=str)
def test_forked_beams_copy_kv_pages_bit_for_bit(kind) -> None:
    """Forks that copy a page produce the same bits as forks that recompute its tokens."""
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


def test_beam_search_and_sampling_do_not_affect_each_other() -> None:
    """In one step with sampling and prompt scores, each request gets the answer that it gets alone."""
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
