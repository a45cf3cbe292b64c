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
from parley.model.sampling.draw import GOLDEN, draw, draw_cut, draw_typical, mix, uniform
from parley.model.sampling.logprobs import score
from parley.model.sampling.sampler import Sampler
from parley.types import Sampling, Work


def margin(sampling: Sampling) -> float:
    """How close to a cut-off float32 and float64 may disagree; temperature scales the rounding of logits up to 100."""
    return 1e-5 + 3e-5 / max(sampling.temperature, 1e-6)


def sequence(tokens=(0,), prompt_len=1, seed=0, sampling=None, **work) -> Sequence:
    return Sequence(
        id="s",
        index=0,
        work=Work("s", list(tokens[:prompt_len]), 99, sampling or Sampling(), seed, **work),
        tokens=list(tokens),
        prompt_len=prompt_len,
        seed=seed,
        order=0,
    )


def sample(logits, sequences, vocab=None, positions=None):
    """Tokens and scores of one batch in a fresh sampler, with slots in reverse so that slot and row differ."""
    count = len(sequences)
    sampler = Sampler(vocab or logits.shape[1], count)
    slots = list(range(count))[::-1]
    for slot, each in zip(slots, sequences, strict=True):
        sampler.admit(slot, each)
    return sampler.sample(logits, slots, positions or [each.generated for each in sequences])


def reference(logits: np.ndarray, sequence: Sequence, position: int) -> tuple[np.ndarray, bool]:
    """Probability of every token in float64, and whether any cut-off is too close to call."""
    work, options = sequence.work, sequence.work.sampling
    x = logits.astype(np.float64)
    for token, value in options.logit_bias.items():
        x[token] += value
    if position < work.min_tokens:
        x[work.stop_ids] = -np.inf
    output = sequence.tokens[sequence.prompt_len :]
    for token in set(sequence.tokens):
        x[token] = x[token] / options.repetition_penalty if x[token] > 0 else x[token] * options.repetition_penalty
        x[token] -= options.frequency_penalty * output.count(token)
        x[token] -= options.presence_penalty * (token in output)
    near = margin(options)
    if options.temperature < 1e-6:
        rivals = np.sort(x)[-2:]
        return np.eye(len(x))[x.argmax()], rivals[0] != rivals[1] and rivals[1] - rivals[0] < 3e-5
    x = (x - x.max()) / options.temperature
    p = np.exp(x)
    close = np.any((np.abs(p - options.min_p) < near) & (p != options.min_p))
    p[p < options.min_p] = 0
    order = np.sort(p)[::-1]
    if 0 < options.top_k < len(p):
        edge = order[options.top_k - 1]
        close |= np.any((np.abs(p - edge) < near * edge) & (p != edge))
        p[p < edge] = 0
    if options.top_p < 1:
        above = np.array([p[p > value * (1 + 1e-9)].sum() for value in p]) / p.sum()
        close |= np.any((np.abs(above - options.top_p) < near) & (above > 0))
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
        close |= np.any(
            (as_near - nearer > 1e-12) & (as_near >= options.typical_p - near) & (nearer <= options.typical_p)
        )
        close |= np.any((np.abs(nearer - options.typical_p) < near) & (nearer > 0))
        p[(nearer >= options.typical_p) & (nearer > 0)] = 0
    return p / p.sum(), bool(close)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 9e-7, 1e-4, 0.3, 0.7, 1.0, 1.5, 8.0]),
    top_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]) | st.floats(0.01, 1),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 300, 10_000]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.95, 0.5, 0.2, 1e-9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, 6), st.sampled_from([-100.0, 100.0, 1.5, -0.5]), max_size=3),
)


@st.composite
def cases(draw):
    vocab = draw(st.sampled_from([7, 31, 64, 257, 1500]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(vocab, generator=generator) * draw(st.sampled_from([0.01, 1.0, 4.0]))
    if draw(st.booleans()):
        logits = (logits * 2).round() / 2  # many equal logits, as from a model in bf16
    tokens = draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    return logits, sequence(
        tokens,
        draw(st.integers(1, len(tokens))),
        draw(st.integers(0, 2**64 - 1)),
        draw(samplings),
        min_tokens=draw(st.sampled_from([0, 0, 4])),
        stop_ids=draw(st.lists(st.integers(0, 6), max_size=2)),
    )


@given(cases())
@settings(max_examples=300, deadline=None)
def test_sampler_matches_the_naive_reference(case):
    logits, each = case
    expected, close = reference(logits.numpy(), each, each.generated)
    assume(not close)
    ((token, _),) = sample(logits[None], [each])
    assert expected[token] > 0
    before = expected[:token].sum()
    u = uniform(each.seed, each.generated)
    if each.work.sampling.temperature >= 1e-6:
        near = margin(each.work.sampling)
        assert before - near <= u <= before + expected[token] + near


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6, top_k=12),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(top_p=0.95, top_k=30, min_p=0.02),
        Sampling(min_p=0.1),
    ],
    ids=repr,
)
def test_draws_follow_the_expected_distribution(sampling):
    """Chi-square of 10^5 draws; the bound is 5 standard deviations above its mean."""
    draws, vocab = 100_000, 60
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(7)) * 1.5
    expected, _ = reference(logits.numpy(), sequence(sampling=sampling), 0)
    sampler = Sampler(vocab, 100)
    for slot in range(100):
        sampler.admit(slot, sequence(seed=1234 + slot, sampling=sampling))
    counts = np.zeros(vocab)
    rows = logits.expand(100, vocab)
    for position in range(draws // 100):
        for token, _ in sampler.sample(rows, list(range(100)), [position] * 100):
            counts[token] += 1
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi = ((counts - draws * expected)[kept] ** 2 / (draws * expected[kept])).sum()
    freedom = kept.sum() - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("way", [{}, {"top_k": 50}, {"typical_p": 0.999999}], ids=str)
def test_lowest_temperature_still_draws_by_weight(way):
    """A logit lower by exactly the temperature is drawn e times less often; equal logits are drawn equally often."""
    step = 2.0**-20
    logits = torch.tensor([1.0, 1.0 - step, 1.0, 0.5, -30.0])
    weights = np.exp([0.0, -step / 1e-6, 0.0])
    rows = 4000
    options = Sampling(temperature=1e-6, **way)
    drawn = [
        token for token, _ in sample(logits.expand(rows, 5), [sequence(seed=n, sampling=options) for n in range(rows)])
    ]
    found = np.bincount(drawn, minlength=5)
    assert found[3:].sum() == 0
    assert np.abs(found[:3] / rows - weights / weights.sum()).max() < 0.03
    assert {token for token, _ in sample(logits[None], [sequence(sampling=Sampling(temperature=9e-7))])} == {0}


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
    left = TypicalLogitsWarper(typical_p)(None, scores)[0].double().softmax(-1)
    kept = (left > 1e-6).nonzero()[:, 0]  # smaller shares are too narrow for float32
    rows = len(kept)
    drawn = draw_typical(
        logits.expand(rows, 400),
        torch.full((rows,), 0.8),
        torch.zeros(rows, dtype=torch.float64),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), typical_p, dtype=torch.float64),
        (left.cumsum(-1) - left / 2)[kept],
    )
    assert drawn.tolist() == kept.tolist()


def test_uniform_number_follows_splitmix64():
    """Guards against changed random numbers: the same seed must give the same text in every release."""
    assert [mix(GOLDEN * n & (2**64 - 1)) for n in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 5)] == [
        0.6524484863740322,
        0.7012121095215252,
        0.15403342580516755,
    ]
    assert uniform(2**64 + 3, 8) == uniform(3, 8)


@pytest.mark.parametrize("along", ["position", "seed", "difference"])
def test_uniform_numbers_are_uniform(along):
    numbers = np.array(
        {
            "position": [uniform(42, n) for n in range(100_000)],
            "seed": [uniform(n, 3) for n in range(100_000)],
            "difference": [(uniform(n + 1, 9) - uniform(n, 9)) % 1 for n in range(100_000)],
        }[along]
    )
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, 256, (0, 1))[0]
    expected = len(numbers) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * math.sqrt(510)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / math.sqrt(len(numbers))


@given(st.lists(cases(), min_size=2, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_sampled_row_is_batch_invariant(batch, random):
    """Bit for bit, scores included: alone, in the batch, and in the batch in another order."""
    vocab = max(len(logits) for logits, _ in batch)
    logits = torch.stack([torch.nn.functional.pad(row, (0, vocab - len(row)), value=-5.0) for row, _ in batch])
    sequences = [each for _, each in batch]
    for each in sequences[::2]:
        each.work.logprobs = 4
    together = sample(logits, sequences)
    assert together == [sample(logits[[row]], [each])[0] for row, each in enumerate(sequences)]
    order = random.sample(range(len(batch)), len(batch))
    assert [together[row] for row in order] == sample(logits[order], [sequences[row] for row in order])


@given(cases(), st.sampled_from([1, 2, 33, 256]))
@settings(max_examples=300, deadline=None)
def test_candidate_count_does_not_change_drawn_tokens(case, width):
    logits, each = case
    options = each.work.sampling
    vocab, rows = len(logits), 100
    args = (
        logits.expand(rows, vocab),
        torch.full((rows,), max(options.temperature, 1e-5)),
        torch.full((rows,), options.min_p, dtype=torch.float64),
        torch.full((rows,), options.top_k if options.top_k < vocab else 0),
        torch.full((rows,), options.top_p, dtype=torch.float64),
        torch.linspace(0, 1 - 2**-53, rows, dtype=torch.float64),
    )
    tokens = draw_cut(*args, width=vocab)
    assert torch.equal(draw_cut(*args, width=width), tokens)
    if options.top_k in (0, 10_000) and options.top_p == 1:
        assert torch.equal(draw(args[0], args[1], args[2], args[5]), tokens)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("top_k", [0, 700])
def test_wide_nucleus_is_cut_at_the_same_token(top_p, top_k):
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(2)).expand(500, 3000)
    u = torch.linspace(0, 1 - 2**-53, 500, dtype=torch.float64)
    options = (torch.ones(500), torch.zeros(500).double(), torch.full((500,), top_k), torch.full_like(u, top_p), u)
    assert torch.equal(draw_cut(logits, *options, width=3000), draw_cut(logits, *options, width=4))


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_sampler_handles_a_large_vocabulary(spread):
    """151,936 tokens, a common size: nucleus within and far beyond the candidates, alone and together."""
    logits = torch.randn(6, 151_936, generator=torch.Generator().manual_seed(1)) * spread
    logits[:2, 1000:1040] += 25
    options = [
        Sampling(top_p=0.9),
        Sampling(top_p=0.5, top_k=20),
        Sampling(top_p=0.99),
        Sampling(),
        Sampling(top_k=5000),
        Sampling(typical_p=0.95),
    ]
    sequences = [sequence(seed=n, sampling=each, logprobs=20) for n, each in enumerate(options)]
    together = sample(logits, sequences)
    assert together == [sample(logits[[n]], [each])[0] for n, each in enumerate(sequences)]
    for row, (token, found) in enumerate(together):
        raw = logits[row].double().log_softmax(-1)
        assert found.logprob == pytest.approx(raw[token].item(), abs=1e-5)
        assert found.top == pytest.approx(raw.topk(20).values.tolist(), abs=1e-5)
    rank = {row: found.rank for row, (_, found) in enumerate(together)}
    assert rank[0] <= 40 and rank[1] <= 20 and rank[4] <= 5000


def test_torch_exp_does_not_depend_on_position():
    """``draw_full`` depends on this: the exp of an element is the same in every tensor that contains it."""
    x = -torch.rand(100_003, generator=torch.Generator().manual_seed(0)) * 30
    whole = x.exp()
    for length in (*range(1, 40), 255, 1024, 4097):
        for first in range(0, 40, 3):
            assert torch.equal(x[first : first + length].clone().exp(), whole[first : first + length])
    assert torch.equal(x[::3].exp(), whole[::3])
    assert torch.equal(x[:100_000].view(100, 1000)[:, 3:701].exp(), whole[:100_000].view(100, 1000)[:, 3:701])


@given(st.sampled_from([1, 5, 70, 900]), st.integers(0, 25), st.integers(0, 99), st.booleans())
@settings(deadline=None)
def test_token_scores_match_the_naive_reference(vocab, count, seed, ties):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(20, vocab, generator=generator) * 3
    if ties:
        logits = logits.round()
    tokens = torch.randint(0, vocab, (20,), generator=generator).tolist()
    found = score(logits, tokens, count)
    raw = logits.double().log_softmax(-1)
    for row, (token, each) in enumerate(zip(tokens, found, strict=True)):
        assert each.logprob == pytest.approx(raw[row, token].item(), abs=1e-5)
        assert each.rank == 1 + (logits[row] > logits[row, token]).sum().item()
        order = sorted(range(vocab), key=lambda id, row=row: (-logits[row, id].item(), id))[:count]
        assert each.top_ids == order
        assert each.top == pytest.approx(raw[row][order].tolist(), abs=1e-5)
    assert found == [score(logits[[row]], tokens[row : row + 1], count)[0] for row in range(20)]


def test_logprobs_use_the_raw_logits():
    """Guards against log-probabilities computed after the in-place logits processors."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    before = logits.clone()
    bent = Sampling(temperature=0.2, logit_bias={3: 100.0}, presence_penalty=2.0, top_k=1)
    ((token, found),) = sample(logits, [sequence([1, 3, 3], 1, sampling=bent, logprobs=2)])
    assert token == 3 and found.rank == 4 and found.top_ids == [1, 2]
    assert found.logprob == pytest.approx(logits.log_softmax(-1)[0, 3].item(), abs=1e-6)
    assert torch.equal(logits, before)


def test_logprobs_are_returned_only_when_requested():
    logits = torch.randn(3, 10)
    found = sample(logits, [sequence(), sequence(logprobs=0), sequence(logprobs=3)])
    assert found[0][1] is None and found[1][1].top_ids == [] and len(found[2][1].top) == 3


def test_choices_draw_like_separate_requests():
    """Choice k of n has seed + k and shares nothing else with the batch; different seeds differ."""
    logits = torch.randn(1, 500).expand(8, 500)
    choices = sample(logits, [sequence(seed=77 + k) for k in range(8)])
    assert choices == [sample(logits[:1], [sequence(seed=77 + k)])[0] for k in range(8)]
    assert len({token for token, _ in choices}) > 1


def test_penalties_after_draws_match_a_fresh_sampler():
    """A sampler that drew the tokens itself is in the same state as one that gets them after a preemption."""
    vocab, steps = 12, 40
    logits = torch.randn(steps, 1, vocab, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)
    sampler, each = Sampler(vocab, 1), sequence([1, 2], 2, 5, sampling)
    sampler.admit(0, each)
    for step in range(steps):
        ((token, _),) = sampler.sample(logits[step], [0], [step])
        ((again, _),) = sample(logits[step], [each])
        assert token == again
        each.tokens.append(token)
    assert len(set(each.tokens)) > 6


def test_prompt_counts_only_for_repetition_penalty():
    logits = torch.tensor([[2.0, 1.9, -5.0]])
    prompt, output = ([0], 1), ([2, 0], 1)
    for sampling, after_prompt in [
        (Sampling(temperature=0, repetition_penalty=2.0), 1),
        (Sampling(temperature=0, presence_penalty=1.0), 0),
        (Sampling(temperature=0, frequency_penalty=1.0), 0),
    ]:
        assert sample(logits, [sequence(*prompt, sampling=sampling)])[0][0] == after_prompt
        assert sample(logits, [sequence(*output, sampling=sampling)])[0][0] == 1


def test_stop_tokens_wait_for_min_tokens():
    logits = torch.tensor([[9.0, 1.0, 8.0]])
    each = sequence(sampling=Sampling(temperature=0), min_tokens=2, stop_ids=[0, 2, 99])
    assert [sample(logits, [each], positions=[n])[0][0] for n in range(4)] == [1, 1, 0, 0]
    every = sequence(sampling=Sampling(temperature=0), min_tokens=2, stop_ids=[0, 1, 2])
    assert sample(logits, [every])[0][0] == 0


def test_logit_bias_forbids_and_forces_tokens():
    logits = torch.tensor([[9.0, 1.0, 8.0, 0.0]]).expand(50, 4)
    forbidden = [sequence(seed=n, sampling=Sampling(logit_bias={0: -100.0, 2: -100.0})) for n in range(50)]
    assert {token for token, _ in sample(logits, forbidden)} == {1, 3}
    forced = [sequence(seed=n, sampling=Sampling(logit_bias={3: 100.0, 99: 100.0})) for n in range(50)]
    assert {token for token, _ in sample(logits, forced)} == {3}


def test_greedy_takes_lowest_id_of_equal_logits():
    logits = torch.zeros(1, 100)
    logits[0, [40, 41, 70]] = 3.0
    assert sample(logits, [sequence(sampling=Sampling(temperature=0))])[0][0] == 40
    assert sample(logits, [sequence(sampling=Sampling(temperature=0, logit_bias={40: -1.0}))])[0][0] == 41


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-38),
        Sampling(temperature=1e-6),
        Sampling(temperature=1e-6, top_k=5, top_p=0.9, min_p=0.1),
        Sampling(temperature=1e-6, typical_p=0.5),
        Sampling(temperature=1e30),
        Sampling(temperature=1e30, top_p=1e-30),
        Sampling(repetition_penalty=1e-38),
        Sampling(repetition_penalty=1e38),
        Sampling(logit_bias={0: math.inf, 1: -math.inf}),
        Sampling(logit_bias={0: 1e300, 1: 1e300}, top_k=1),
        Sampling(frequency_penalty=1e30, presence_penalty=-1e30),
        Sampling(min_p=1.0, top_p=1e-300, top_k=1),
        Sampling(temperature=5e-5, top_p=0.5),
        Sampling(temperature=1e30, typical_p=1e-300),
        Sampling(temperature=5e-5, typical_p=0.5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e38])
def test_extreme_parameters_give_valid_tokens_and_scores(sampling, scale):
    """No parameter breaks a row: the token is in the vocabulary, and its score is not NaN."""
    logits = torch.linspace(-1, 1, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(0))] * scale
    logits[7] = float("-inf")
    sequences = [sequence([0, 1, 2, 2], 2, n, sampling, logprobs=0) for n in range(20)]
    for token, found in sample(logits.expand(20, 40), sequences):
        assert 0 <= token < 40 and token != 7
        assert not math.isnan(found.logprob)


def test_sampler_accepts_an_empty_batch():
    assert Sampler(10, 2).sample(torch.zeros(0, 10), [], []) == []
    assert score(torch.zeros(0, 10), []) == []


def test_reused_sampler_slot_keeps_no_state():
    """Guards against penalties or settings of the previous request in the slot."""
    sampler = Sampler(50, 1)
    sampler.admit(0, sequence(seed=1, sampling=Sampling(temperature=3.0, top_k=3, presence_penalty=2.0), logprobs=2))
    sampler.release(0)
    sampler.admit(0, sequence(seed=2))
    logits = torch.randn(1, 50)
    assert sampler.sample(logits, [0], [0]) == sample(logits, [sequence(seed=2)])
