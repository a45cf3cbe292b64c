"""Draft tokens: no draft changes an output, only the number of steps; the n-gram proposer; when drafting pays."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.invariant_ledger import LedgerViolation, LoopHarness, SeededProposer, draw_token, kv_history, run_alone

from parley.core.sequence import Sequence, StepRow
from parley.core.speculative.ngram import MIN_MATCH, NICE_MATCH, NgramProposer
from parley.core.speculative.speculation import FIRST_LENGTH, MAX_PRICE, DecodeCosts, Speculation
from parley.types import EngineOutput, EngineRequest, SamplingOptions


def correct_drafts(sequence: Sequence, length: int) -> list[int]:
    """Return the tokens that the ledger will sample."""
    drafts: list[int] = []
    for ahead in range(length):
        drafts.append(
            draw_token(sequence, kv_history(sequence.request.cache_salt, sequence.tokens + drafts)[-1], ahead)
        )
    return drafts


def harness_with_drafts(guess, **settings) -> LoopHarness:
    """Return a harness whose drafts come from ``guess(sequence, length)``."""
    bench = LoopHarness(guesses=0, **settings)
    assert bench.loop.speculation is not None
    bench.loop.speculation.proposer.propose_drafts = lambda draft_limits: [
        guess(*draft_limit) for draft_limit in draft_limits
    ]  # type: ignore[method-assign]
    return bench


def assert_same_as_alone(actual: EngineOutput, request: EngineRequest, index: int = 0) -> None:
    expected = run_alone(request, index)
    actual.cached_tokens = 0
    assert actual == expected


def make_sequence(tokens: list[int], generated: int = 1) -> Sequence:
    return Sequence("w", 0, EngineRequest("w", tokens, 1000), tokens, len(tokens) - generated, 0, 0, output_limit=1000)


def test_accepted_drafts_save_steps_within_max_tokens() -> None:
    bench = harness_with_drafts(correct_drafts)
    bench.loop.add_request(EngineRequest("w", [1, 2, 3], max_tokens=60, logprobs=0))
    bench.drain()
    assert bench.stats.steps == 1 + 7 + 1  # eight tokens at a time, then the remaining three
    assert [len(part.token_ids) for part in bench.outputs["w", 0]] == [1] + [8] * 7 + [3]
    assert (bench.stats.drafts, bench.stats.draft_tokens, bench.stats.draft_accepted) == (8, 51, [8, 8, 7, 7, 7, 7, 7])
    assert bench.stats.generated_tokens == 60
    assert_same_as_alone(bench.merged_output("w"), EngineRequest("w", [1, 2, 3], max_tokens=60, logprobs=0))


def test_drafted_stop_token_ends_choice() -> None:
    whole = run_alone(EngineRequest("w", [1, 2, 3], max_tokens=60)).token_ids
    for place in (1, 5, 20, 59):
        request = EngineRequest("w", [1, 2, 3], max_tokens=60, stop_ids=[whole[place]])
        bench = harness_with_drafts(correct_drafts)
        bench.loop.add_request(request)
        bench.drain()
        assert bench.merged_output("w").finish_reason == "stop"
        assert_same_as_alone(bench.merged_output("w"), request)


def test_prediction_saves_steps_of_its_own_request_only() -> None:
    request = EngineRequest("w", [1, 2, 3], max_tokens=60, seed=7, n=2, logprobs=0)
    whole = [run_alone(request, index).token_ids for index in range(2)]
    wrong = [*whole[0][:20], 49, 49, 49, *whole[0][25:]]
    for prediction, max_steps in ((whole[0], 18), (wrong, 25), ([49] * 90, 62), ([10**9, -1, 3], 62)):
        bench = LoopHarness(slots=4)
        assert not bench.loop.speculation.is_active
        predicted = msgspec.structs.replace(request, prediction=prediction)
        plain = EngineRequest("plain", [4, 5, 6, 4, 5, 6], max_tokens=20, sampling=SamplingOptions(temperature=0))
        bench.loop.add_request(predicted)
        bench.loop.add_request(plain)
        steps = 0
        while not any(part.finish_reason for part in bench.outputs.get(("w", 0), [])):
            bench.step()
            steps += 1
        assert steps <= max_steps
        bench.drain()
        assert not bench.loop.speculation.is_active and not bench.loop.speculation.history_count
        assert all(len(part.token_ids) == 1 for part in bench.outputs["plain", 0])
        assert_same_as_alone(bench.merged_output("plain"), plain)
        for index in range(2):
            assert_same_as_alone(bench.merged_output("w", index), request, index)


def test_prediction_precedes_other_proposer() -> None:
    bench = harness_with_drafts(lambda sequence, length: [])
    request = EngineRequest("w", [1, 2, 3], max_tokens=60)
    bench = LoopHarness(guesses=0)
    bench.runner.proposer.propose_drafts = lambda draft_limits: [
        next(correct_drafts(*draft_limit) for draft_limit in draft_limits if not draft_limit[0].request.prediction)
    ]
    bench.loop.add_request(msgspec.structs.replace(request, prediction=run_alone(request).token_ids))
    bench.loop.add_request(EngineRequest("other", [3, 2], max_tokens=60))
    bench.drain()
    assert bench.stats.steps < 20
    assert_same_as_alone(bench.merged_output("w"), request)
    assert_same_as_alone(bench.merged_output("other"), EngineRequest("other", [3, 2], max_tokens=60))


def test_pages_are_published_only_after_drafts_are_verified() -> None:
    """A wrong draft fills a page before the right tokens do; the next turn must hit as many pages as without drafts."""
    for guess in (correct_drafts, lambda sequence, length: [0] * length):
        bench = harness_with_drafts(guess)
        first = EngineRequest("turn 1", list(range(20)), max_tokens=30)
        bench.loop.add_request(first)
        bench.drain()
        history = first.token_ids + bench.merged_output("turn 1").token_ids
        bench.loop.add_request(EngineRequest("turn 2", [*history, 1, 2, 3], max_tokens=3))
        bench.drain()
        assert bench.merged_output("turn 2").cached_tokens == 48
        assert_same_as_alone(bench.merged_output("turn 2"), EngineRequest("turn 2", [*history, 1, 2, 3], max_tokens=3))


def test_ledger_detects_page_published_with_unverified_drafts() -> None:
    bench = harness_with_drafts(lambda sequence, length: [0] * length, slots=2)
    original_row = bench.loop.scheduler._add_row  # type: ignore[union-attr]  # private: the defect is inside the step

    def publish_early(step, sequence, count, drafts=()):
        sequence.tokens += drafts
        original_row(step, sequence, count + len(drafts))
        sequence.computed -= len(drafts)
        step.rows[-1].count, step.rows[-1].drafts, step.rows[-1].sample = count, drafts, True
        del sequence.tokens[len(sequence.tokens) - len(drafts) :]

    bench.loop.scheduler._add_row = publish_early  # type: ignore[union-attr, method-assign]
    bench.loop.add_request(EngineRequest("first", list(range(12)), max_tokens=10))
    for _ in range(2):
        bench.step()
    tokens = bench.loop.scheduler.running[0].tokens[:13]
    bench.loop.add_request(EngineRequest("second", tokens + [0] * 7, max_tokens=4))
    with pytest.raises(LedgerViolation):
        bench.drain()


def test_drafts_never_cause_preemption() -> None:
    """Two sequences need all pages of the pool themselves: drafts may use only free pages."""
    plain, drafted = (
        LoopHarness(blocks=8, slots=2),
        harness_with_drafts(lambda sequence, length: [0] * length, blocks=8, slots=2),
    )
    for bench in (plain, drafted):
        for number in range(2):
            bench.loop.add_request(EngineRequest(f"w{number}", [number] * 30, max_tokens=33))
        bench.drain()
        assert bench.stats.preemptions == 0
    assert drafted.stats.drafts > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_with_drafts_does_not_change_outputs(prefix_cache: bool) -> None:
    requests = [
        EngineRequest(
            "scored", list(range(37)), max_tokens=25, prompt_logprobs=0, logprobs=0, min_tokens=3, stop_ids=[5]
        ),
        EngineRequest("plain", list(range(9)), max_tokens=30, n=2, stop_ids=[7]),
    ]
    for moment in range(22):
        bench = LoopHarness(budgets=(16,), prefix_cache=prefix_cache, guesses=moment)
        for request in requests:
            bench.loop.add_request(request)
        for _ in range(moment):
            bench.step()
        for _ in range(min(1 + moment % 3, len(bench.loop.scheduler.running))):
            bench.loop.scheduler.preempt_last()
        bench.drain()
        for request in requests:
            for index in range(request.n):
                assert_same_as_alone(bench.merged_output(request.id, index), request, index)


def test_failed_proposer_is_not_called_again() -> None:
    draft_limits = []

    def fail(sequence: Sequence, length: int) -> list[int]:
        draft_limits.append(length)
        raise RuntimeError("no idea")

    bench = harness_with_drafts(fail)
    bench.loop.add_request(EngineRequest("w", [1, 2, 3], max_tokens=10))
    bench.drain()
    assert len(draft_limits) == 1
    assert_same_as_alone(bench.merged_output("w"), EngineRequest("w", [1, 2, 3], max_tokens=10))


def longest_suffix_match(tokens: list[int]) -> int:
    """Return how many tokens at the end occurred somewhere before, by brute force."""
    match_length = 0
    for place in range(len(tokens) - 1):
        length = 0
        while length <= place and tokens[place - length] == tokens[-1 - length]:
            length += 1
        match_length = max(match_length, length)
    return match_length


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=12), st.integers(1, 9))
def test_ngram_draft_continues_longest_earlier_match(pieces: list[list[int]], length: int) -> None:
    tokens: list[int] = [0]
    repeated, lookup = make_sequence(tokens), NgramProposer()
    for piece in pieces:
        tokens += piece
        (draft,) = lookup.propose_drafts([(repeated, length)])
        match_length = longest_suffix_match(tokens)
        if match_length < MIN_MATCH:
            assert draft == []
        elif len(tokens) <= 16:  # short enough that the proposer looks at every place
            assert len(draft) == min(length, 2 ** (min(match_length, NICE_MATCH) - 1))
            text = tokens + draft
            ends = [
                place
                for place in range(len(tokens) - 1)
                if text[place + 1 : place + 1 + len(draft)] == draft
                and place + 1 >= min(match_length, NICE_MATCH)
                and tokens[place + 1 - min(match_length, NICE_MATCH) : place + 1]
                == tokens[len(tokens) - min(match_length, NICE_MATCH) :]
            ]
            assert ends
    lookup.forget_sequence(repeated)
    lookup.forget_sequence(repeated)


def test_ngram_draft_continues_a_repeating_pattern() -> None:
    lookup = NgramProposer()
    assert lookup.propose_drafts([(make_sequence([9, 1, 2, 1, 2, 1, 2]), 8)]) == [[1, 2, 1, 2, 1, 2, 1, 2]]
    assert lookup.propose_drafts([(make_sequence([1]), 8), (make_sequence([1, 2, 3]), 8)]) == [[], []]


def make_speculation() -> Speculation:
    return Speculation(SeededProposer(0), 7, 50)


def test_rejected_drafts_back_off_until_one_is_accepted() -> None:
    speculation, drafted = make_speculation(), make_sequence([1, 2, 3])
    drafted_at = []
    for _ in range(200):
        if speculation.draft_length(drafted):
            drafted_at.append(drafted.output_length)
            speculation.record_acceptance(StepRow(drafted, 0, 1, True, drafts=(4,)), 0)
        drafted.tokens.append(4)
    gaps = [later - before for before, later in pairwise(drafted_at)]
    assert gaps[:5] == [2, 4, 8, 16, 32] and set(gaps[5:]) == {32}
    drafted.tokens += [4] * 32
    speculation.record_acceptance(StepRow(drafted, 0, 1, True, drafts=(4, 4)), 2)
    assert speculation.draft_length(drafted) > 0
    speculation.forget_sequence(drafted)
    assert not speculation.history_count


def test_drafts_grow_only_after_fully_accepted_drafts() -> None:
    speculation, drafted = Speculation(SeededProposer(0), 20, 50), make_sequence([1, 2, 3])

    def next_length(drafts: int, accepted: int) -> int:
        speculation.record_acceptance(StepRow(drafted, 0, 1, True, drafts=(4,) * drafts), accepted)
        drafted.tokens += [4] * (accepted + 100)  # beyond any pause
        return speculation.draft_length(drafted)

    assert speculation.draft_length(drafted) == FIRST_LENGTH
    assert next_length(5, 5) == FIRST_LENGTH  # shorter than it might have been
    assert [next_length(FIRST_LENGTH, FIRST_LENGTH), next_length(14, 14)] == [14, 20]
    assert [next_length(20, 19), next_length(3, 0)] == [FIRST_LENGTH] * 2
    assert next_length(FIRST_LENGTH, FIRST_LENGTH) == 14


def test_draft_length_follows_measured_row_costs() -> None:
    """Up to 8 rows cost as much as one, further rows an eighth of that each: good drafts fill the free rows."""
    costs = DecodeCosts()
    for _ in range(10):
        for rows in (1, 2, 4, 8, 12, 16, 40):
            costs.observe_rows(rows, 0.040 * max(1, rows / 8))
    assert costs.estimate_seconds(6) == pytest.approx(0.040) and costs.estimate_seconds(14) == pytest.approx(0.070)
    assert [costs.best_draft_count(1, [chance] * 20) for chance in (0.9, 0.05)] == [7, 7]
    assert costs.best_draft_count(8, [0.9] * 20) == costs.best_draft_count(16, [0.9] * 20) == 0
    assert costs.best_draft_count(4, [0.9] * 20) == 4
    assert costs.row_price(1) == 0 and costs.row_price(16) > MAX_PRICE


def test_draft_costs_forget_slow_steps() -> None:
    costs = DecodeCosts()
    for _ in range(20):
        costs.observe_rows(1, 0.040)
    costs.observe_rows(1, 4.0)
    costs.observe_rows(8, 4.0)
    for _ in range(6):
        costs.observe_rows(1, 0.040)
        costs.observe_rows(8, 0.044)
    assert costs.estimate_seconds(1) == pytest.approx(0.040, rel=0.01) and costs.estimate_seconds(8) == pytest.approx(
        0.044, rel=0.05
    )
    assert (
        DecodeCosts().best_draft_count(3, [0.1] * 5) == 5 and DecodeCosts().row_price(3) == 0
    )  # no measurements yet: try
