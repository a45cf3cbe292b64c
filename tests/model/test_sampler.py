"""The sampler against a naive reference in float64, and the properties that batching and seeds depend on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from parley.core.sequence import Sequence
from parley.model.sampling.draw import GOLDEN_GAMMA, draw_full, draw_truncated, draw_typical, splitmix64, uniform_number
from parley.model.sampling.logprobs import score_tokens
from parley.model.sampling.sampler import Sampler
from parley.types import EngineRequest, SamplingOptions


def cutoff_margin(sampling: SamplingOptions) -> float:
    """How close to a cut-off float32 and float64 may disagree; temperature scales the rounding of logits up to 100."""
    return 1e-5 + 3e-5 / max(sampling.temperature, 1e-6)


def make_sequence(tokens=(0,), prompt_len=1, seed=0, sampling=None, **members) -> Sequence:
    return Sequence(
        request_id="s",
        index=0,
        request=EngineRequest("s", list(tokens[:prompt_len]), 99, sampling or SamplingOptions(), seed, **members),
        tokens=list(tokens),
        prompt_len=prompt_len,
        seed=seed,
        arrival_number=0,
    )


def sample_batch(logits, sequences, vocab=None, positions=None):
    """Tokens and scores of one batch in a fresh sampler, with slots in reverse so that slot and row differ."""
    count = len(sequences)
    sampler = Sampler(vocab or logits.shape[1], count)
    slots = list(range(count))[::-1]
    for slot, row_sequence in zip(slots, sequences, strict=True):
        sampler.set_slot(slot, row_sequence)
    return sampler.draw_tokens(logits, slots, positions or [row_sequence.output_length for row_sequence in sequences])


def reference_probabilities(logits: np.ndarray, sequence: Sequence, position: int) -> tuple[np.ndarray, bool]:
    """Probability of every token in float64, and whether any cut-off is too close to call."""
    request, options = sequence.request, sequence.request.sampling
    x = logits.astype(np.float64)
    for token, value in options.logit_bias.items():
        x[token] += value
    if position < request.min_tokens:
        x[request.stop_ids] = -np.inf
    window = options.penalty_window
    output = sequence.tokens[-window:] if window else sequence.tokens[sequence.prompt_len :]
    for token in set(output if window else sequence.tokens):
        x[token] = x[token] / options.repetition_penalty if x[token] > 0 else x[token] * options.repetition_penalty
        x[token] -= options.frequency_penalty * output.count(token)
        x[token] -= options.presence_penalty * (token in output)
    margin_width = cutoff_margin(options)
    if options.temperature < 1e-6:
        rivals = np.sort(x)[-2:]
        return np.eye(len(x))[x.argmax()], rivals[0] != rivals[1] and rivals[1] - rivals[0] < 3e-5
    x = (x - x.max()) / options.temperature
    p = np.exp(x)
    too_close = np.any((np.abs(p - options.min_p) < margin_width) & (p != options.min_p))
    p[p < options.min_p] = 0
    order = np.sort(p)[::-1]
    if 0 < options.top_k < len(p):
        edge = order[options.top_k - 1]
        too_close |= np.any((np.abs(p - edge) < margin_width * edge) & (p != edge))
        p[p < edge] = 0
    if options.top_p < 1:
        above = np.array([p[p > value * (1 + 1e-9)].sum() for value in p]) / p.sum()
        too_close |= np.any((np.abs(above - options.top_p) < margin_width) & (above > 0))
        p[(above >= options.top_p) & (above > 0)] = 0  # the largest ones always stay
    if options.typical_p < 1:
        p /= p.sum()
        surprise = -np.log(p, where=p > 0, out=np.full(len(p), -np.inf))
        distance = np.where(p > 0, np.abs(surprise - (p[p > 0] * surprise[p > 0]).sum()), np.inf)
        rounding = 1e-5 * (1 + 3 / options.temperature)
        nearer = np.array([p[distance < value - rounding].sum() for value in distance])
        as_near = np.array(
            [p[distance < value + rounding].sum() - p[x == own].sum() for value, own in zip(distance, x, strict=True)]
        )
        too_close |= np.any(
            (as_near - nearer > 1e-12) & (as_near >= options.typical_p - margin_width) & (nearer <= options.typical_p)
        )
        too_close |= np.any((np.abs(nearer - options.typical_p) < margin_width) & (nearer > 0))
        p[(nearer >= options.typical_p) & (nearer > 0)] = 0
    return p / p.sum(), bool(too_close)


sampling_options = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 9e-7, 1e-4, 0.3, 0.7, 1.0, 1.5, 8.0]),
    top_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]) | st.floats(0.01, 1),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 300, 10_000]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.95, 0.5, 0.2, 1e-9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.5]),
    penalty_window=st.sampled_from([0, 0, 1, 3, 100]),
    logit_bias=st.dictionaries(st.integers(0, 6), st.sampled_from([-100.0, 100.0, 1.5, -0.5]), max_size=3),
)


@st.composite
def logits_and_sequence(draw):
    vocab = draw(st.sampled_from([7, 31, 64, 257, 1500]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(vocab, generator=generator) * draw(st.sampled_from([0.01, 1.0, 4.0]))
    if draw(st.booleans()):
        logits = (logits * 2).round() / 2  # many equal logits, as from a model in bf16
    tokens = draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    return logits, make_sequence(
        tokens,
        draw(st.integers(1, len(tokens))),
        draw(st.integers(0, 2**64 - 1)),
        draw(sampling_options),
        min_tokens=draw(st.sampled_from([0, 0, 4])),
        stop_ids=draw(st.lists(st.integers(0, 6), max_size=2)),
    )


@given(logits_and_sequence())
@settings(max_examples=300, deadline=None)
def test_sampler_matches_the_naive_reference(case):
    logits, row_sequence = case
    expected, too_close = reference_probabilities(logits.numpy(), row_sequence, row_sequence.output_length)
    assume(not too_close)
    ((token, _),) = sample_batch(logits[None], [row_sequence])
    assert expected[token] > 0
    mass_before = expected[:token].sum()
    u = uniform_number(row_sequence.seed, row_sequence.output_length)
    if row_sequence.request.sampling.temperature >= 1e-6:
        margin_width = cutoff_margin(row_sequence.request.sampling)
        assert mass_before - margin_width <= u <= mass_before + expected[token] + margin_width


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(),
        SamplingOptions(temperature=0.6, top_k=12),
        SamplingOptions(temperature=1.3, top_p=0.8),
        SamplingOptions(top_p=0.95, top_k=30, min_p=0.02),
        SamplingOptions(min_p=0.1),
    ],
    ids=repr,
)
def test_draws_follow_the_expected_distribution(sampling):
    """Chi-square of 10^5 draws; the bound is 5 standard deviations above its mean."""
    draws, vocab = 100_000, 60
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(7)) * 1.5
    expected, _ = reference_probabilities(logits.numpy(), make_sequence(sampling=sampling), 0)
    sampler = Sampler(vocab, 100)
    for slot in range(100):
        sampler.set_slot(slot, make_sequence(seed=1234 + slot, sampling=sampling))
    counts = np.zeros(vocab)
    rows = logits.expand(100, vocab)
    for position in range(draws // 100):
        for token, _ in sampler.draw_tokens(rows, list(range(100)), [position] * 100):
            counts[token] += 1
    assert counts[expected == 0].sum() == 0
    is_kept = expected > 0
    chi = ((counts - draws * expected)[is_kept] ** 2 / (draws * expected[is_kept])).sum()
    freedom = is_kept.sum() - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("way", [{}, {"top_k": 50}, {"typical_p": 0.999999}], ids=str)
def test_lowest_temperature_still_draws_by_weight(way):
    """A logit lower by exactly the temperature is drawn e times less often; equal logits are drawn equally often."""
    step = 2.0**-20
    logits = torch.tensor([1.0, 1.0 - step, 1.0, 0.5, -30.0])
    weights = np.exp([0.0, -step / 1e-6, 0.0])
    rows = 4000
    options = SamplingOptions(temperature=1e-6, **way)
    drawn = [
        token
        for token, _ in sample_batch(
            logits.expand(rows, 5), [make_sequence(seed=n, sampling=options) for n in range(rows)]
        )
    ]
    counts = np.bincount(drawn, minlength=5)
    assert counts[3:].sum() == 0
    assert np.abs(counts[:3] / rows - weights / weights.sum()).max() < 0.03
    assert {
        token for token, _ in sample_batch(logits[None], [make_sequence(sampling=SamplingOptions(temperature=9e-7))])
    } == {0}


@pytest.mark.parametrize("typical_p", [0.05, 0.3, 0.7, 0.95])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (25, 1.0), (0, 0.8), (25, 0.9)])
def test_typical_p_matches_transformers(typical_p, top_k, top_p):
    """Draw in the middle of each kept token's share of u: if all are hit, no other token has a share."""
    logits = torch.randn(400, generator=torch.Generator().manual_seed(5)) * 2
    scores = logits[None] / 0.8
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    probabilities = TypicalLogitsWarper(typical_p)(None, scores)[0].double().softmax(-1)
    kept_ids = (probabilities > 1e-6).nonzero()[:, 0]  # smaller shares are too narrow for float32
    rows = len(kept_ids)
    drawn = draw_typical(
        logits.expand(rows, 400),
        torch.full((rows,), 0.8),
        torch.zeros(rows, dtype=torch.float64),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), typical_p, dtype=torch.float64),
        (probabilities.cumsum(-1) - probabilities / 2)[kept_ids],
    )
    assert drawn.tolist() == kept_ids.tolist()


def test_uniform_number_follows_splitmix64():
    """Guards against changed random numbers: the same seed must give the same text in every release."""
    assert [splitmix64(GOLDEN_GAMMA * n & (2**64 - 1)) for n in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert [uniform_number(0, 0), uniform_number(0, 1), uniform_number(2**64 - 1, 5)] == [
        0.6524484863740322,
        0.7012121095215252,
        0.15403342580516755,
    ]
    assert uniform_number(2**64 + 3, 8) == uniform_number(3, 8)


@pytest.mark.parametrize("along", ["position", "seed", "difference"])
def test_uniform_numbers_are_uniform(along):
    numbers = np.array(
        {
            "position": [uniform_number(42, n) for n in range(100_000)],
            "seed": [uniform_number(n, 3) for n in range(100_000)],
            "difference": [(uniform_number(n + 1, 9) - uniform_number(n, 9)) % 1 for n in range(100_000)],
        }[along]
    )
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, 256, (0, 1))[0]
    expected = len(numbers) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * math.sqrt(510)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / math.sqrt(len(numbers))


@given(st.lists(logits_and_sequence(), min_size=2, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_sampled_row_is_batch_invariant(batch, random):
    """Bit for bit, scores included: alone, in the batch, and in the batch in another order."""
    vocab = max(len(logits) for logits, _ in batch)
    logits = torch.stack([torch.nn.functional.pad(row, (0, vocab - len(row)), value=-5.0) for row, _ in batch])
    sequences = [row_sequence for _, row_sequence in batch]
    for row_sequence in sequences[::2]:
        row_sequence.request.logprobs = 4
    together = sample_batch(logits, sequences)
    assert together == [sample_batch(logits[[row]], [row_sequence])[0] for row, row_sequence in enumerate(sequences)]
    order = random.sample(range(len(batch)), len(batch))
    assert [together[row] for row in order] == sample_batch(logits[order], [sequences[row] for row in order])


@given(logits_and_sequence(), st.sampled_from([1, 2, 33, 256]))
@settings(max_examples=100, deadline=None)
def test_candidate_count_does_not_change_drawn_tokens(case, width):
    logits, row_sequence = case
    options = row_sequence.request.sampling
    vocab, rows = len(logits), 100
    args = (
        logits.expand(rows, vocab),
        torch.full((rows,), max(options.temperature, 1e-5)),
        torch.full((rows,), options.min_p, dtype=torch.float64),
        torch.full((rows,), options.top_k if options.top_k < vocab else 0),
        torch.full((rows,), options.top_p, dtype=torch.float64),
        torch.linspace(0, 1 - 2**-53, rows, dtype=torch.float64),
    )
    tokens = draw_truncated(*args, width=vocab)
    assert torch.equal(draw_truncated(*args, width=width), tokens)
    if options.top_k in (0, 10_000) and options.top_p == 1:
        assert torch.equal(draw_full(args[0], args[1], args[2], args[5]), tokens)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("top_k", [0, 700])
def test_wide_nucleus_is_cut_at_the_same_token(top_p, top_k):
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(2)).expand(500, 3000)
    u = torch.linspace(0, 1 - 2**-53, 500, dtype=torch.float64)
    options = (torch.ones(500), torch.zeros(500).double(), torch.full((500,), top_k), torch.full_like(u, top_p), u)
    assert torch.equal(draw_truncated(logits, *options, width=3000), draw_truncated(logits, *options, width=4))


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_sampler_handles_a_large_vocabulary(spread):
    """151,936 tokens, a common size: nucleus within and far beyond the candidates, alone and together."""
    logits = torch.randn(6, 151_936, generator=torch.Generator().manual_seed(1)) * spread
    logits[:2, 1000:1040] += 25
    options = [
        SamplingOptions(top_p=0.9),
        SamplingOptions(top_p=0.5, top_k=20),
        SamplingOptions(top_p=0.99),
        SamplingOptions(),
        SamplingOptions(top_k=5000),
        SamplingOptions(typical_p=0.95),
    ]
    sequences = [make_sequence(seed=n, sampling=sampling, logprobs=20) for n, sampling in enumerate(options)]
    together = sample_batch(logits, sequences)
    assert together == [sample_batch(logits[[n]], [sequence])[0] for n, sequence in enumerate(sequences)]
    for row, (token, token_score) in enumerate(together):
        raw = logits[row].double().log_softmax(-1)
        assert token_score.logprob == pytest.approx(raw[token].item(), abs=1e-5)
        assert token_score.top_logprobs == pytest.approx(raw.topk(20).values.tolist(), abs=1e-5)
    rank = {row: token_score.rank for row, (_, token_score) in enumerate(together)}
    assert rank[0] <= 40 and rank[1] <= 20 and rank[4] <= 5000


def test_torch_exp_does_not_depend_on_position():
    """``draw_full`` depends on this: the exp of an element is the same in every tensor that contains it."""
    x = -torch.rand(100_003, generator=torch.Generator().manual_seed(0)) * 30
    exp_of_all = x.exp()
    for length in (*range(1, 40), 255, 1024, 4097):
        for first in range(0, 40, 3):
            assert torch.equal(x[first : first + length].clone().exp(), exp_of_all[first : first + length])
    assert torch.equal(x[::3].exp(), exp_of_all[::3])
    assert torch.equal(x[:100_000].view(100, 1000)[:, 3:701].exp(), exp_of_all[:100_000].view(100, 1000)[:, 3:701])


@given(st.sampled_from([1, 5, 70, 900]), st.integers(0, 25), st.integers(0, 99), st.booleans())
@settings(deadline=None)
def test_token_scores_match_the_naive_reference(vocab, count, seed, ties):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(20, vocab, generator=generator) * 3
    if ties:
        logits = logits.round()
    tokens = torch.randint(0, vocab, (20,), generator=generator).tolist()
    scores = score_tokens(logits, tokens, count)
    raw = logits.double().log_softmax(-1)
    for row, (token, token_score) in enumerate(zip(tokens, scores, strict=True)):
        assert token_score.logprob == pytest.approx(raw[row, token].item(), abs=1e-5)
        assert token_score.rank == 1 + (logits[row] > logits[row, token]).sum().item()
        order = sorted(range(vocab), key=lambda token_id, row=row: (-logits[row, token_id].item(), token_id))[:count]
        assert token_score.top_ids == order
        assert token_score.top_logprobs == pytest.approx(raw[row][order].tolist(), abs=1e-5)
    assert scores == [score_tokens(logits[[row]], tokens[row : row + 1], count)[0] for row in range(20)]


def test_logprobs_use_the_raw_logits():
    """Guards against log-probabilities computed after the in-place logits processors."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    before = logits.clone()
    strong_edits = SamplingOptions(temperature=0.2, logit_bias={3: 100.0}, presence_penalty=2.0, top_k=1)
    ((token, token_score),) = sample_batch(logits, [make_sequence([1, 3, 3], 1, sampling=strong_edits, logprobs=2)])
    assert token == 3 and token_score.rank == 4 and token_score.top_ids == [1, 2]
    assert token_score.logprob == pytest.approx(logits.log_softmax(-1)[0, 3].item(), abs=1e-6)
    assert torch.equal(logits, before)


def test_logprobs_are_returned_only_when_requested():
    logits = torch.randn(3, 10)
    results = sample_batch(logits, [make_sequence(), make_sequence(logprobs=0), make_sequence(logprobs=3)])
    assert results[0][1] is None and results[1][1].top_ids == [] and len(results[2][1].top_logprobs) == 3


def test_choices_draw_like_separate_requests():
    """Choice k of n has seed + k and shares nothing else with the batch; different seeds differ."""
    logits = torch.randn(1, 500).expand(8, 500)
    choices = sample_batch(logits, [make_sequence(seed=77 + k) for k in range(8)])
    assert choices == [sample_batch(logits[:1], [make_sequence(seed=77 + k)])[0] for k in range(8)]
    assert len({token for token, _ in choices}) > 1


@pytest.mark.parametrize("window", [0, 1, 7, 100])
def test_penalties_after_draws_match_a_fresh_sampler(window):
    """A sampler that drew the tokens itself is in the same state as one that gets them after a preemption."""
    vocab, steps = 12, 40
    logits = torch.randn(steps, 1, vocab, generator=torch.Generator().manual_seed(3))
    sampling = SamplingOptions(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, penalty_window=window
    )
    sampler, row_sequence = Sampler(vocab, 1), make_sequence([1, 2], 2, 5, sampling)
    sampler.set_slot(0, row_sequence)
    for step in range(steps):
        ((token, _),) = sampler.draw_tokens(logits[step], [0], [step])
        ((fresh_token, _),) = sample_batch(logits[step], [row_sequence])
        assert token == fresh_token
        row_sequence.tokens.append(token)
    assert len(set(row_sequence.tokens)) > 6


def test_penalties_with_a_window_look_at_the_last_tokens_of_prompt_and_output():
    logits = torch.tensor([[2.0, 1.9, 1.8, -5.0]])
    for penalty in ({"repetition_penalty": 2.0}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}):
        for window, token in ((1, 0), (2, 0), (3, 2), (4, 2), (2**31 - 1, 2)):
            sampling = SamplingOptions(temperature=0, penalty_window=window, **penalty)
            assert sample_batch(logits, [make_sequence([0, 1, 3], 2, sampling=sampling)])[0][0] == token


def test_prompt_counts_only_for_repetition_penalty():
    logits = torch.tensor([[2.0, 1.9, -5.0]])
    prompt, output = ([0], 1), ([2, 0], 1)
    for sampling, after_prompt in [
        (SamplingOptions(temperature=0, repetition_penalty=2.0), 1),
        (SamplingOptions(temperature=0, presence_penalty=1.0), 0),
        (SamplingOptions(temperature=0, frequency_penalty=1.0), 0),
    ]:
        assert sample_batch(logits, [make_sequence(*prompt, sampling=sampling)])[0][0] == after_prompt
        assert sample_batch(logits, [make_sequence(*output, sampling=sampling)])[0][0] == 1


def test_stop_tokens_wait_for_min_tokens():
    logits = torch.tensor([[9.0, 1.0, 8.0]])
    two_stops = make_sequence(sampling=SamplingOptions(temperature=0), min_tokens=2, stop_ids=[0, 2, 99])
    assert [sample_batch(logits, [two_stops], positions=[n])[0][0] for n in range(4)] == [1, 1, 0, 0]
    all_stops = make_sequence(sampling=SamplingOptions(temperature=0), min_tokens=2, stop_ids=[0, 1, 2])
    assert sample_batch(logits, [all_stops])[0][0] == 0


def test_logit_bias_forbids_and_forces_tokens():
    logits = torch.tensor([[9.0, 1.0, 8.0, 0.0]]).expand(50, 4)
    forbidden = [make_sequence(seed=n, sampling=SamplingOptions(logit_bias={0: -100.0, 2: -100.0})) for n in range(50)]
    assert {token for token, _ in sample_batch(logits, forbidden)} == {1, 3}
    forced = [make_sequence(seed=n, sampling=SamplingOptions(logit_bias={3: 100.0, 99: 100.0})) for n in range(50)]
    assert {token for token, _ in sample_batch(logits, forced)} == {3}


def test_greedy_takes_lowest_id_of_equal_logits():
    logits = torch.zeros(1, 100)
    logits[0, [40, 41, 70]] = 3.0
    assert sample_batch(logits, [make_sequence(sampling=SamplingOptions(temperature=0))])[0][0] == 40
    assert (
        sample_batch(logits, [make_sequence(sampling=SamplingOptions(temperature=0, logit_bias={40: -1.0}))])[0][0]
        == 41
    )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(temperature=1e-38),
        SamplingOptions(temperature=1e-6),
        SamplingOptions(temperature=1e-6, top_k=5, top_p=0.9, min_p=0.1),
        SamplingOptions(temperature=1e-6, typical_p=0.5),
        SamplingOptions(temperature=1e30),
        SamplingOptions(temperature=1e30, top_p=1e-30),
        SamplingOptions(repetition_penalty=1e-38),
        SamplingOptions(repetition_penalty=1e38),
        SamplingOptions(repetition_penalty=1e-320, allowed=[1, 3], top_p=0.9, typical_p=0.9),
        SamplingOptions(logit_bias={0: math.inf, 1: -math.inf}),
        SamplingOptions(logit_bias={0: 1e300, 1: 1e300}, top_k=1),
        SamplingOptions(frequency_penalty=1e30, presence_penalty=-1e30),
        SamplingOptions(min_p=1.0, top_p=1e-300, top_k=1),
        SamplingOptions(temperature=5e-5, top_p=0.5),
        SamplingOptions(temperature=1e30, typical_p=1e-300),
        SamplingOptions(temperature=5e-5, typical_p=0.5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e38])
def test_extreme_parameters_give_valid_tokens_and_scores(sampling, scale):
    """No parameter breaks a row: the token is in the vocabulary, and its score is not NaN."""
    logits = torch.linspace(-1, 1, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(0))] * scale
    logits[7] = float("-inf")
    sequences = [make_sequence([0, 1, 2, 2], 2, n, sampling, logprobs=0) for n in range(20)]
    for token, token_score in sample_batch(logits.expand(20, 40), sequences):
        assert 0 <= token < 40 and token != 7
        assert not math.isnan(token_score.logprob)


def test_sampler_accepts_an_empty_batch():
    assert Sampler(10, 2).draw_tokens(torch.zeros(0, 10), [], []) == []
    assert score_tokens(torch.zeros(0, 10), []) == []


def test_reused_sampler_slot_keeps_no_state():
    """Guards against penalties or settings of the previous request in the slot."""
    sampler = Sampler(50, 1)
    sampler.set_slot(
        0, make_sequence(seed=1, sampling=SamplingOptions(temperature=3.0, top_k=3, presence_penalty=2.0), logprobs=2)
    )
    sampler.clear_slot(0)
    sampler.set_slot(0, make_sequence(seed=2))
    logits = torch.randn(1, 50)
    assert sampler.draw_tokens(logits, [0], [0]) == sample_batch(logits, [make_sequence(seed=2)])
