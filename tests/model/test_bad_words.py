"""Bans and allowed tokens against naive definitions; the watermark is detected, and plain text is not marked."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import make_sequence, sample_batch
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from parley import watermark
from parley.model.sampling.bans import BannedPhrases, RepeatedNgrams
from parley.model.sampling.sampler import Sampler
from parley.types import SamplingOptions

VOCAB = 40
tokens = st.lists(st.integers(0, 3), min_size=1, max_size=20)


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw_token(logits: torch.Tensor, sampling: SamplingOptions, before=(1, 2), prompt_len=1, seed=0, **members) -> int:
    return sample_batch(logits, [make_sequence(before, prompt_len, seed, sampling, **members)])[0][0]


@given(
    ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
    kind=st.sampled_from([{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"typical_p": 0.6}, {"min_p": 0.1}]),
)
@settings(max_examples=100, deadline=None)
def test_draws_from_allowed_tokens_as_if_no_others_existed(ids, seed, kind):
    logits = random_logits(seed)
    alone = torch.full_like(logits, float("-inf"))
    alone[:, ids] = logits[:, ids]
    assert draw_token(logits, SamplingOptions(allowed=ids, **kind), seed=seed) == draw_token(
        alone, SamplingOptions(**kind), seed=seed
    )


@given(tokens, st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=5), st.integers(0, 20))
@settings(max_examples=300, deadline=None)
def test_banned_phrases_match_a_search_of_the_output(sequence, phrases, start):
    start = min(start, len(sequence))
    banned_tokens = BannedPhrases(phrases).banned_next(sequence, start)
    for token in range(4):
        output = [*sequence[start:], token]
        assert (token in banned_tokens) == any(phrase and output[-len(phrase) :] == phrase for phrase in phrases)


@given(tokens, st.integers(1, 5), st.lists(st.integers(0, 3), max_size=6))
@settings(max_examples=300, deadline=None)
def test_repeated_ngrams_match_transformers(sequence, size, more):
    grams, processor = RepeatedNgrams(size), NoRepeatNGramLogitsProcessor(size)
    for token in [None, *more]:
        if token is not None:
            sequence.append(token)
        masked = processor(torch.tensor([sequence]), torch.zeros(1, 4))[0]
        assert grams.repeating_next(sequence) == set(torch.isneginf(masked).nonzero().flatten().tolist())


def test_long_output_never_contains_banned_phrases():
    banned, size = [[3], [5, 7], [9, 9, 9]], 3
    sampling = SamplingOptions(banned=banned, no_repeat_ngram=size, allowed=list(range(12)))
    row = make_sequence((9,), 1, 5, sampling)
    sampler = Sampler(VOCAB, 1)
    sampler.set_slot(0, row)
    for step in range(150):
        row.tokens.append(sampler.draw_tokens(random_logits(step), [0], [step])[0][0])
        if step == 70:  # preempted and resumed with its tokens so far
            sampler.clear_slot(0)
            sampler.set_slot(0, row)
    output = row.tokens[1:]
    padded_output = f" {' '.join(map(str, output))} "
    assert set(output) <= set(range(12)) - {3}
    assert " 5 7 " not in padded_output and " 9 9 9 " not in padded_output
    grams = [tuple(row.tokens[i : i + size]) for i in range(len(row.tokens) - size + 1)]
    assert len(set(grams)) == len(grams)


@pytest.mark.parametrize(
    ("sampling", "members", "expected"),
    [
        (SamplingOptions(banned=[[token_id] for token_id in range(VOCAB)], temperature=0.0), {}, 17),
        (SamplingOptions(banned=[[4], [6]], allowed=[4, 6], temperature=0.0), {}, 4),
        (SamplingOptions(allowed=[8], temperature=0.0), {"stop_ids": [8], "min_tokens": 99}, 8),
        (SamplingOptions(banned=[[VOCAB], [-1], []], temperature=0.0), {}, 17),
    ],
)
def test_bans_that_leave_no_token_are_ignored(sampling, members, expected):
    """A request whose bans exclude all tokens still gets an answer instead of a NaN distribution."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 17], logits[0, 4] = 2, 1
    assert draw_token(logits, sampling, **members) == expected


# -- watermark


def test_watermark_greens_half_the_vocabulary_per_previous_token():
    ids = torch.arange(150_000).numpy()
    halves = [watermark.is_green(previous, ids) for previous in range(20)]
    for half in halves:
        assert abs(half.mean() - 0.5) < 0.01
    for one, other in pairwise(halves):
        assert abs((one == other).mean() - 0.5) < 0.01


def generate_tokens(sampling: SamplingOptions, count: int, seed: int) -> list[int]:
    row = make_sequence((0,), 1, seed, sampling)
    sampler = Sampler(1000, 1)
    sampler.set_slot(0, row)
    for step in range(count):
        row.tokens.append(sampler.draw_tokens(random_logits(1000 * seed + step, vocab=1000), [0], [step])[0][0])
    return row.tokens[1:]


@pytest.mark.parametrize("seed", range(3))
def test_watermark_detects_marked_but_not_plain_tokens(seed):
    marked = watermark.detect_watermark(generate_tokens(SamplingOptions(watermark=True), 200, seed))
    assert marked.z_score > 4 and marked.is_marked and marked.false_positive_rate < 1e-4
    plain = watermark.detect_watermark(generate_tokens(SamplingOptions(), 200, seed))
    assert plain.z_score < 2 and not plain.is_marked


def test_watermark_z_scores_of_plain_text_are_standard_normal():
    z_scores = [
        watermark.detect_watermark(random.Random(seed).choices(range(5000), k=200)).z_score for seed in range(400)
    ]
    mean = sum(z_scores) / len(z_scores)
    assert abs(mean) < 0.2 and 0.8 < sum((z - mean) ** 2 for z in z_scores) / len(z_scores) < 1.2


def test_watermark_counts_repeated_pairs_once():
    """Guards against a false alarm for text that repeats one green pair."""
    text = [1, 2] * 500
    assert watermark.detect_watermark(text).pairs == 2 and not watermark.detect_watermark(text).is_marked
    assert watermark.detect_watermark([]).z_score == watermark.detect_watermark([7]).z_score == 0
