"""Beam search through the real runner: it matches Transformers, finds the best outputs and ignores other requests."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner, serve_requests
from transformers import AutoModelForCausalLM

from parley.types import BeamOptions, EngineRequest, SamplingOptions


@pytest.fixture(scope="module")
def runner():
    return load_test_runner(tiny_models.model_folder("qwen3"), dtype="float32", threads=1)[0]


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(tiny_models.model_folder("qwen3"), dtype=torch.float32).eval()


def transformers_beams(reference, request: EngineRequest) -> tuple[list[list[int]], list[float]]:
    """Return the outputs that Transformers generates for a request, in its ranking, and their scores."""
    sampling, beam = request.sampling, request.beam
    extra_options = {"min_new_tokens": request.min_tokens} if request.min_tokens else {}
    if sampling.banned:
        extra_options["bad_words_ids"] = sampling.banned
    with torch.inference_mode():
        generated = reference.generate(
            torch.tensor([request.token_ids]),
            num_beams=beam.width,
            num_return_sequences=request.n,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            eos_token_id=request.stop_ids,
            pad_token_id=0,
            max_new_tokens=request.max_tokens,
            do_sample=False,
            repetition_penalty=sampling.repetition_penalty,
            no_repeat_ngram_size=sampling.no_repeat_ngram,
            return_dict_in_generate=True,
            output_scores=True,
            **extra_options,
        )
    outputs = []
    for row in generated.sequences[:, len(request.token_ids) :].tolist():
        end = next((k + 1 for k, token_id in enumerate(row) if token_id in request.stop_ids), request.max_tokens)
        outputs.append(row[:end])
    return outputs, generated.sequences_scores.tolist()


def random_beam_request(rng: random.Random, vocabulary: int, early) -> EngineRequest:
    width = rng.choice([2, 3, 5])
    max_tokens = rng.choice([1, 5, 24])
    return EngineRequest(
        f"w{rng.random()}",
        [rng.randrange(3, vocabulary) for _ in range(rng.choice([1, 3, 15, 16, 17, 40]))],
        max_tokens,
        SamplingOptions(
            temperature=rng.choice([0.0, 1.0, 0.3]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            no_repeat_ngram=rng.choice([0, 0, 2]),
            banned=rng.choice([[], [[5], [rng.randrange(vocabulary), rng.randrange(vocabulary)]]]),
        ),
        n=rng.randint(1, width),
        stop_ids=rng.sample(range(vocabulary), rng.choice([1, 1, 2, 200])),
        min_tokens=rng.choice([0, 0, 3]) if max_tokens > 3 else 0,
        logprobs=rng.choice([-1, 0, 2]),
        beam=BeamOptions(width, rng.choice([-1.0, 0.0, 1.0, 2.0]), early),
    )


@pytest.mark.parametrize("early", [False, True, "never"])
def test_beam_search_matches_transformers(runner, reference, early) -> None:
    """Alone, all together, and with too few pages for all, so that beams are preempted and recomputed."""
    rng = random.Random(f"{early}")
    requests = [random_beam_request(rng, runner.vocab_size, early) for _ in range(6)]
    expected = [transformers_beams(reference, request) for request in requests]
    blocks = runner.page_count
    together = serve_requests(runner, requests, step=48)[0]
    crowded, stats = serve_requests(runner, requests, batch=6, blocks=36)
    assert stats.preemptions
    uncached = serve_requests(runner, requests, batch=6, blocks=36, cache=False)[0]
    serve_requests(runner, [], blocks=blocks)
    for request, (outputs, _) in zip(requests, expected, strict=True):
        alone = serve_requests(runner, [request])[0]
        for answers in (alone, together, crowded, uncached):
            assert [answers[request.id, k].token_ids for k in range(request.n)] == outputs


def test_beam_scores_equal_summed_logprobs(runner, reference) -> None:
    """Guards against a length penalty or a sum that differs from the reported token scores."""
    request = EngineRequest("w", [5, 6, 7], 9, n=3, stop_ids=[1], logprobs=2, beam=BeamOptions(3, 0.7))
    _, values = transformers_beams(reference, request)
    answers = serve_requests(runner, [request])[0]
    for k, value in enumerate(values):
        answer = answers["w", k]
        total = sum(score.logprob for score in answer.scores)
        assert total / len(answer.token_ids) ** 0.7 == pytest.approx(value, abs=1e-4)
        assert all(len(score.top_logprobs) == len(score.top_ids) == 2 for score in answer.scores)


def test_wide_beam_search_finds_the_best_outputs(runner) -> None:
    """With as many beams as outputs, beam search is exhaustive: it returns the best outputs of three allowed tokens."""
    allowed, length = [40, 41, 42], 3
    sampling = SamplingOptions(allowed=allowed)
    logprobs = {}
    for tail in itertools.product(allowed, repeat=length):
        forced = EngineRequest("f", [9, 8, 7, *tail], 0, prompt_logprobs=0)
        scores = serve_requests(runner, [forced])[0]["f", 0].prompt_scores
        logprobs[tail] = sum(score.logprob for score in scores[3:])
    best = sorted(logprobs, key=lambda tail: -logprobs[tail])
    request = EngineRequest("w", [9, 8, 7], length, sampling, n=5, beam=BeamOptions(9))
    answers = serve_requests(runner, [request])[0]
    assert [tuple(answers["w", k].token_ids) for k in range(5)] == best[:5]


def test_beam_search_repeats_outputs_when_too_few_exist(runner) -> None:
    """Only two outputs exist, but the request asks for four: the two are repeated instead of the request hanging."""
    request = EngineRequest("w", [9, 8, 7], 1, SamplingOptions(allowed=[40, 41]), n=4, logprobs=0, beam=BeamOptions(4))
    answers = serve_requests(runner, [request])[0]
    outputs = [answers["w", k].token_ids for k in range(4)]
    assert sorted(outputs[:2]) == [[40], [41]] and outputs[2:] == outputs[:2]


@pytest.mark.parametrize("kind", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_dtype": "int8"}], ids=str)
def test_forked_beams_copy_kv_pages_bit_for_bit(kind) -> None:
    """Forks that copy a page produce the same bits as forks that recompute its tokens."""
    runner = load_test_runner(tiny_models.model_folder("qwen3"), threads=1, **kind)[0]
    rng = random.Random(3)
    requests = [
        EngineRequest(f"w{k}", [rng.randrange(600) for _ in range(length)], 40, n=4, logprobs=3, beam=BeamOptions(4))
        for k, length in enumerate([3, 16, 21])
    ]
    roomy_answers = serve_requests(runner, requests, step=400)[0]
    copy_pages = type(runner.pages).copy_pages
    page_copies = []
    try:
        type(runner.pages).copy_pages = lambda self, copies: (page_copies.extend(copies), copy_pages(self, copies))
        crowded_answers = serve_requests(runner, requests, batch=5, step=40, blocks=36)[0]
    finally:
        type(runner.pages).copy_pages = copy_pages
    assert page_copies and crowded_answers == roomy_answers


def test_beam_search_and_sampling_do_not_affect_each_other() -> None:
    """In one step with sampling and prompt scores, each request gets the answer that it gets alone."""
    runner = load_test_runner(tiny_models.model_folder("qwen3"), threads=1)[0]
    rng = random.Random(8)
    requests = [
        EngineRequest(
            f"w{k}",
            [rng.randrange(600) for _ in range(20)],
            12,
            SamplingOptions(presence_penalty=0.5 * (k % 2), watermark=k % 3 == 0, logit_bias={7: 2.0}),
            seed=k,
            n=2,
            logprobs=1,
            prompt_logprobs=0,
            beam=BeamOptions(2 + k % 3) if k % 2 else None,
        )
        for k in range(6)
    ]
    together = serve_requests(runner, requests, batch=12, step=50)[0]
    for request in requests:
        alone = serve_requests(runner, [request], cache=False)[0]
        assert all(alone[request.id, k] == together[request.id, k] for k in range(2))
        assert all(math.isfinite(score.logprob) for score in together[request.id, 1].scores)
