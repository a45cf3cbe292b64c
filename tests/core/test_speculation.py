"""Draft tokens: no draft changes an output, only the number of steps; the n-gram proposer; when drafting pays."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.invariant_ledger import Bench, Guesser, Violation, alone, draw, histories

from parley.core.guess.ngram import ENOUGH, LEAST, Lookup
from parley.core.guess.speculation import DEAR, Costs, Speculation
from parley.core.sequence import Row, Sequence
from parley.types import Output, Sampling, Work


def right(sequence: Sequence, length: int) -> list[int]:
    """Return the tokens that the ledger will sample."""
    guess: list[int] = []
    for ahead in range(length):
        guess.append(draw(sequence, histories(sequence.work.salt, sequence.tokens + guess)[-1], ahead))
    return guess


def guessing(guess, **settings) -> Bench:
    """Return a harness whose drafts come from ``guess(sequence, length)``."""
    bench = Bench(guesses=0, **settings)
    assert bench.loop.speculation is not None
    bench.loop.speculation.proposer.propose = lambda asked: [guess(*each) for each in asked]  # type: ignore[method-assign]
    return bench


def same(got: Output, work: Work, index: int = 0) -> None:
    expected = alone(work, index)
    got.cached_tokens = 0
    assert got == expected


def sequence(tokens: list[int], generated: int = 1) -> Sequence:
    return Sequence("w", 0, Work("w", tokens, 1000), tokens, len(tokens) - generated, 0, 0, limit=1000)


def test_accepted_drafts_save_steps_within_max_tokens() -> None:
    bench = guessing(right)
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=60, logprobs=0))
    bench.drain()
    assert bench.stats.steps == 1 + 7 + 1  # eight tokens at a time, then the remaining three
    assert [len(part.token_ids) for part in bench.outputs["w", 0]] == [1] + [8] * 7 + [3]
    assert (bench.stats.drafts, bench.stats.draft_tokens, bench.stats.draft_accepted) == (8, 51, [8, 8, 7, 7, 7, 7, 7])
    assert bench.stats.generated_tokens == 60
    same(bench.result("w"), Work("w", [1, 2, 3], max_tokens=60, logprobs=0))


def test_drafted_stop_token_ends_choice() -> None:
    whole = alone(Work("w", [1, 2, 3], max_tokens=60)).token_ids
    for place in (1, 5, 20, 59):
        work = Work("w", [1, 2, 3], max_tokens=60, stop_ids=[whole[place]])
        bench = guessing(right)
        bench.loop.add(work)
        bench.drain()
        assert bench.result("w").finish == "stop"
        same(bench.result("w"), work)


def test_prediction_saves_steps_of_its_own_work_only() -> None:
    work = Work("w", [1, 2, 3], max_tokens=60, seed=7, n=2, logprobs=0)
    whole = [alone(work, index).token_ids for index in range(2)]
    wrong = [*whole[0][:20], 49, 49, 49, *whole[0][25:]]
    for prediction, most in ((whole[0], 18), (wrong, 25), ([49] * 90, 62), ([10**9, -1, 3], 62)):
        bench = Bench(slots=4)
        assert not bench.loop.speculation.wanted
        given = msgspec.structs.replace(work, prediction=prediction)
        plain = Work("plain", [4, 5, 6, 4, 5, 6], max_tokens=20, sampling=Sampling(temperature=0))
        bench.loop.add(given)
        bench.loop.add(plain)
        steps = 0
        while not any(part.finish for part in bench.outputs.get(("w", 0), [])):
            bench.step()
            steps += 1
        assert steps <= most
        bench.drain()
        assert not bench.loop.speculation.wanted and not bench.loop.speculation._habits
        assert all(len(part.token_ids) == 1 for part in bench.outputs["plain", 0])
        same(bench.result("plain"), plain)
        for index in range(2):
            same(bench.result("w", index), work, index)


def test_prediction_precedes_other_proposer() -> None:
    bench = guessing(lambda sequence, length: [])
    work = Work("w", [1, 2, 3], max_tokens=60)
    bench = Bench(guesses=0)
    bench.runner.proposer.propose = lambda asked: [next(right(*each) for each in asked if not each[0].work.prediction)]
    bench.loop.add(msgspec.structs.replace(work, prediction=alone(work).token_ids))
    bench.loop.add(Work("other", [3, 2], max_tokens=60))
    bench.drain()
    assert bench.stats.steps < 20
    same(bench.result("w"), work)
    same(bench.result("other"), Work("other", [3, 2], max_tokens=60))


def test_pages_are_published_only_after_drafts_are_verified() -> None:
    """A wrong draft fills a page before the right tokens do; the next turn must hit as many pages as without drafts."""
    for guess in (right, lambda sequence, length: [0] * length):
        bench = guessing(guess)
        first = Work("turn 1", list(range(20)), max_tokens=30)
        bench.loop.add(first)
        bench.drain()
        history = first.token_ids + bench.result("turn 1").token_ids
        bench.loop.add(Work("turn 2", [*history, 1, 2, 3], max_tokens=3))
        bench.drain()
        assert bench.result("turn 2").cached_tokens == 48
        same(bench.result("turn 2"), Work("turn 2", [*history, 1, 2, 3], max_tokens=3))


def test_ledger_detects_page_published_with_unverified_drafts() -> None:
    bench = guessing(lambda sequence, length: [0] * length, slots=2)
    row = bench.loop.scheduler._row  # type: ignore[union-attr]

    def eager(step, sequence, count, drafts=()):
        sequence.tokens += drafts
        row(step, sequence, count + len(drafts))
        sequence.computed -= len(drafts)
        step.rows[-1].count, step.rows[-1].drafts, step.rows[-1].sample = count, drafts, True
        del sequence.tokens[len(sequence.tokens) - len(drafts) :]

    bench.loop.scheduler._row = eager  # type: ignore[union-attr, method-assign]
    bench.loop.add(Work("first", list(range(12)), max_tokens=10))
    for _ in range(2):
        bench.step()
    tokens = bench.loop.scheduler.running[0].tokens[:13]
    bench.loop.add(Work("second", tokens + [0] * 7, max_tokens=4))
    with pytest.raises(Violation):
        bench.drain()


def test_drafts_never_cause_preemption() -> None:
    """Two sequences need all pages of the pool themselves: drafts may use only free pages."""
    plain, drafted = Bench(blocks=8, slots=2), guessing(lambda sequence, length: [0] * length, blocks=8, slots=2)
    for bench in (plain, drafted):
        for number in range(2):
            bench.loop.add(Work(f"w{number}", [number] * 30, max_tokens=33))
        bench.drain()
        assert bench.stats.preemptions == 0
    assert drafted.stats.drafts > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_with_drafts_does_not_change_outputs(prefix_cache: bool) -> None:
    works = [
        Work("scored", list(range(37)), max_tokens=25, prompt_logprobs=0, logprobs=0, min_tokens=3, stop_ids=[5]),
        Work("plain", list(range(9)), max_tokens=30, n=2, stop_ids=[7]),
    ]
    for moment in range(22):
        bench = Bench(budgets=(16,), prefix_cache=prefix_cache, guesses=moment)
        for work in works:
            bench.loop.add(work)
        for _ in range(moment):
            bench.step()
        for _ in range(min(1 + moment % 3, len(bench.loop.scheduler.running))):
            bench.loop.scheduler.preempt()
        bench.drain()
        for work in works:
            for index in range(work.n):
                same(bench.result(work.id, index), work, index)


def test_failed_proposer_is_not_called_again() -> None:
    asked = []

    def fail(sequence: Sequence, length: int) -> list[int]:
        asked.append(length)
        raise RuntimeError("no idea")

    bench = guessing(fail)
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=10))
    bench.drain()
    assert len(asked) == 1
    same(bench.result("w"), Work("w", [1, 2, 3], max_tokens=10))


def longest(tokens: list[int]) -> int:
    """Return how many tokens at the end occurred somewhere before, by brute force."""
    agree = 0
    for place in range(len(tokens) - 1):
        length = 0
        while length <= place and tokens[place - length] == tokens[-1 - length]:
            length += 1
        agree = max(agree, length)
    return agree


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12), st.integers(1, 9))
def test_ngram_draft_continues_longest_earlier_match(pieces: list[list[int]], length: int) -> None:
    tokens: list[int] = [0]
    one, lookup = sequence(tokens), Lookup()
    for piece in pieces:
        tokens += piece
        (guess,) = lookup.propose([(one, length)])
        agree = longest(tokens)
        if agree < LEAST:
            assert guess == []
        elif len(tokens) <= 16:  # short enough that the proposer looks at every place
            assert len(guess) == min(length, 2 ** (min(agree, ENOUGH) - 1))
            text = tokens + guess
            ends = [
                place
                for place in range(len(tokens) - 1)
                if text[place + 1 : place + 1 + len(guess)] == guess
                and place + 1 >= min(agree, ENOUGH)
                and tokens[place + 1 - min(agree, ENOUGH) : place + 1] == tokens[len(tokens) - min(agree, ENOUGH) :]
            ]
            assert ends
    lookup.forget(one)
    lookup.forget(one)


def test_ngram_draft_continues_a_repeating_pattern() -> None:
    lookup = Lookup()
    assert lookup.propose([(sequence([9, 1, 2, 1, 2, 1, 2]), 8)]) == [[1, 2, 1, 2, 1, 2, 1, 2]]
    assert lookup.propose([(sequence([1]), 8), (sequence([1, 2, 3]), 8)]) == [[], []]


def policy() -> Speculation:
    return Speculation(Guesser(0), 7, 50)


def test_rejected_drafts_back_off_until_one_is_accepted() -> None:
    speculation, one = policy(), sequence([1, 2, 3])
    asked = []
    for _ in range(200):
        if speculation.length(one):
            asked.append(one.generated)
            speculation.learn(Row(one, 0, 1, True, drafts=(4,)), 0)
        one.tokens.append(4)
    gaps = [later - before for before, later in pairwise(asked)]
    assert gaps[:5] == [2, 4, 8, 16, 32] and set(gaps[5:]) == {32}
    one.tokens += [4] * 32
    speculation.learn(Row(one, 0, 1, True, drafts=(4, 4)), 2)
    assert speculation.length(one) > 0
    speculation.forget(one)
    assert not speculation._habits


def test_draft_length_follows_measured_row_costs() -> None:
    """Up to 8 rows cost as much as one, further rows an eighth of that each: good drafts fill the free rows."""
    costs = Costs()
    for _ in range(10):
        for rows in (1, 2, 4, 8, 12, 16, 40):
            costs.observe(rows, 0.040 * max(1, rows / 8))
    assert costs.seconds(6) == pytest.approx(0.040) and costs.seconds(14) == pytest.approx(0.070)
    assert [costs.best(1, [chance] * 20) for chance in (0.9, 0.05)] == [7, 7]
    assert costs.best(8, [0.9] * 20) == costs.best(16, [0.9] * 20) == 0
    assert costs.best(4, [0.9] * 20) == 4
    assert costs.price(1) == 0 and costs.price(16) > DEAR


def test_draft_costs_forget_slow_steps() -> None:
    costs = Costs()
    for _ in range(20):
        costs.observe(1, 0.040)
    costs.observe(1, 4.0)
    costs.observe(8, 4.0)
    for _ in range(6):
        costs.observe(1, 0.040)
        costs.observe(8, 0.044)
    assert costs.seconds(1) == pytest.approx(0.040, rel=0.01) and costs.seconds(8) == pytest.approx(0.044, rel=0.05)
    assert Costs().best(3, [0.1] * 5) == 5 and Costs().price(3) == 0  # no measurements yet: try
