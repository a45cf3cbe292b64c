"""Models with layers that keep a state: which states are kept, and what later sequences need not compute.

``test_random_schedules`` checks that a row finds the state of its own tokens and that no slot leaks.
"""

from __future__ import annotations

import pytest
from support.invariant_ledger import COMMON_TOKENS, VOCAB, LoopHarness, run_alone

from parley.core.pages import state_slots
from parley.types import EngineRequest


def make_prompt(number: int, shared: int, own: int) -> list[int]:
    return COMMON_TOKENS[:shared] + [(number * 13 + 1 + i) % VOCAB for i in range(own)]


def make_bench(snapshots: int = 16, **options) -> LoopHarness:
    return LoopHarness(has_states=True, snapshots=snapshots, **({"slots": 8} | options))


def serve(bench: LoopHarness, request_id: str, tokens: list[int], **options) -> int:
    """Serve a request alone; return how many tokens of its prompt were cached."""
    bench.loop.add_request(EngineRequest(request_id, tokens, **({"max_tokens": 2} | options)))
    bench.drain()
    return bench.merged_output(request_id).cached_tokens


@pytest.mark.parametrize("budget", [16, 48, 64, 100, 1000])
def test_simultaneous_requests_compute_shared_prefix_once(budget: int) -> None:
    """Later requests wait until the first one has saved the state where they diverge."""
    bench = make_bench(budgets=(budget,))
    for number in range(8):
        bench.loop.add_request(EngineRequest(f"w{number}", make_prompt(number, 64, 5), max_tokens=1))
    bench.drain()
    assert bench.runner.computed_tokens == 64 + 8 * 5
    assert [bench.merged_output(f"w{number}").cached_tokens for number in range(8)] == [0] + [64] * 7


def test_choices_compute_their_prompt_once() -> None:
    bench = make_bench(budgets=(1000,))
    bench.loop.add_request(EngineRequest("w", make_prompt(0, 64, 5), max_tokens=20, n=8))
    bench.drain()
    assert bench.runner.computed_tokens == 69 + 7 * 5 + 8 * 19


def test_requests_do_not_wait_for_a_state_that_has_no_slot() -> None:
    """Without a slot for the state, waiting for it would be in vain."""
    bench = make_bench(snapshots=0, budgets=(1000,))
    bench.loop.add_request(EngineRequest("w", make_prompt(0, 64, 5), max_tokens=2, n=4))
    bench.drain()
    assert bench.runner.computed_tokens == 4 * 70 and len(bench.runner.steps) == 2


def test_next_turn_continues_from_the_end_of_the_answer() -> None:
    bench = make_bench()
    first = EngineRequest("turn 1", make_prompt(0, 20, 0), max_tokens=30)
    bench.loop.add_request(first)
    bench.drain()
    history = first.token_ids + bench.merged_output("turn 1").token_ids
    assert serve(bench, "turn 2", [*history, 1, 2, 3]) == 48
    assert serve(bench, "turn 1 again", [*first.token_ids, 9, 9]) == 16


def test_decoding_keeps_one_state_of_a_sequence_if_slots_suffice() -> None:
    for snapshots, kept in ((4, 2), (3, 1)):
        bench = make_bench(snapshots=snapshots)
        for number in range(2):
            bench.loop.add_request(EngineRequest(f"w{number}", make_prompt(number, 0, 20), max_tokens=100))
        bench.drain()
        turns = []
        for number in range(2):
            history = make_prompt(number, 0, 20) + bench.merged_output(f"w{number}").token_ids
            turns.append(serve(bench, f"turn {number}", [*history, 1, 2]))
        assert turns == ([112, 112] if kept == 2 else [16, 16])


def test_a_third_prompt_continues_where_the_second_branched_off() -> None:
    bench = make_bench()
    cached = [serve(bench, f"w{number}", make_prompt(number, 64, 40)) for number in range(4)]
    assert cached == [0, 0, 64, 64]


def test_long_prompts_keep_states_at_equal_distances(monkeypatch) -> None:
    """There are few of them, so that one prompt does not evict the states of all others."""
    monkeypatch.setattr(state_slots, "MIN_DISTANCE", 32)
    for snapshots, expected in ((64, 160), (16, 128), (8, 128)):
        bench = make_bench(snapshots, budgets=(50,), blocks=200)
        serve(bench, "long", make_prompt(1, 190, 0))
        assert serve(bench, "other", make_prompt(2, 170, 20)) == expected


def test_state_is_freed_with_its_page() -> None:
    bench = make_bench(blocks=8)
    assert serve(bench, "first", make_prompt(0, 64, 5)) == 0
    assert serve(bench, "again", make_prompt(0, 64, 5)) == 64
    serve(bench, "other", make_prompt(1, 0, 110))
    states = bench.loop.scheduler._block_tables._states  # type: ignore[union-attr]
    assert states is not None and states.pool._cache.keys() <= bench.loop.pool._cache.keys()
    assert serve(bench, "third", make_prompt(0, 64, 5)) == 0
    assert bench.loop.reset_prefix_cache() and not states.pool._cache


def test_salts_share_no_state() -> None:
    bench = make_bench()
    cached = [serve(bench, f"w{i}", make_prompt(0, 64, 5), cache_salt=salt) for i, salt in enumerate("abxa")]
    assert cached == [0, 0, 0, 64]


def test_preempted_sequence_continues_from_its_last_state() -> None:
    bench = make_bench()
    request = EngineRequest("w", make_prompt(0, 40, 0), max_tokens=60)
    bench.loop.add_request(request)
    for _ in range(41):
        bench.step()
    bench.loop.scheduler.preempt_last()
    before = bench.runner.computed_tokens
    bench.drain()
    assert bench.runner.computed_tokens - before < 20 + 16
    assert bench.merged_output("w").token_ids == run_alone(request).token_ids


@pytest.mark.parametrize("failure", ["before", "midway"])
def test_states_of_failed_step_are_not_used(failure: str) -> None:
    bench = make_bench(budgets=(32,))
    bench.loop.add_request(EngineRequest("first", make_prompt(0, 64, 0), max_tokens=3))
    bench.step()
    bench.runner.fail_next = failure
    bench.step()
    assert bench.merged_output("first").finish_reason == "error"
    assert serve(bench, "second", make_prompt(0, 64, 0)) == 0
    assert serve(bench, "third", make_prompt(0, 64, 0)) == 48


def test_states_of_failed_row_are_not_used() -> None:
    bench = make_bench()
    bench.runner.failing_rows.add(("bad", 2))
    assert serve(bench, "bad", make_prompt(0, 40, 0), max_tokens=30) == 0
    assert serve(bench, "again", make_prompt(0, 40, 0)) == 0


@pytest.mark.parametrize("snapshots", [1, 3, 16])
def test_states_after_drafts_have_their_own_slots(snapshots: int) -> None:
    """Drafts are limited by the free slots; half of the slots are kept for snapshots."""
    bench = make_bench(snapshots, guesses=1)
    request = EngineRequest("w", make_prompt(0, 40, 0), max_tokens=90)
    bench.loop.add_request(request)
    bench.drain()
    assert bench.merged_output("w").token_ids == run_alone(request).token_ids
    assert sum(bench.stats.draft_accepted) > 20 and bench.stats.steps < 60
    assert bench.stats.draft_tokens <= (snapshots + 1) // 2 * bench.stats.steps
    history = request.token_ids + bench.merged_output("w").token_ids
    if snapshots > 3:
        assert serve(bench, "turn 2", [*history, 1]) >= 96
