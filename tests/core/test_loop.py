"""The whole loop: under random schedules each request gives the output it gives alone, and nothing leaks or hangs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.invariant_ledger import VOCAB, Bench, Violation, alone

from parley.core.search.beam import capacity
from parley.types import Beam, Output, Pooling, Work

COMMON = [(7 * i + 3) % VOCAB for i in range(200)]  # the beginning of prompts with a shared prefix


@st.composite
def works(draw: st.DrawFn, number: int, longest: int) -> Work:
    shared = draw(st.sampled_from([0, 0, 15, 16, 17, 32, 40, 48, 64, 80]))
    own = draw(st.integers(0 if shared else 1, 40))
    tokens = COMMON[:shared] + [(number * 11 + i) % VOCAB for i in range(own)]
    return Work(
        id=f"w{number}",
        token_ids=tokens[:longest],
        max_tokens=draw(st.sampled_from([0, 1, 5, 20, 45, 60, 90])),
        seed=draw(st.sampled_from([0, 1, 2**64 - 1])),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        stop_ids=draw(st.sampled_from([[], [], [5], [5, 6, 7]])),
        logprobs=draw(st.sampled_from([-1, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([-1, -1, 0])),
        salt=draw(st.sampled_from(["", "", "pepper"])),
        costs=draw(st.booleans()),
        pooling=draw(st.sampled_from([None, None, None, Pooling()])),
        priority=draw(st.sampled_from([0, 0, 0, 1, -(2**40)])),
        tenant=draw(st.sampled_from(["", "", "", "a", "b"])),
    )


@st.composite
def searches(draw: st.DrawFn, work: Work, blocks: int, slots: int) -> Work:
    """Turn a work into a beam search now and then, with as many beams as fit."""
    widths = [w for w in (2, 3, 5) if w >= work.n and w <= slots and capacity(blocks, w) > len(work.token_ids)]
    if not widths or work.pooling is not None or draw(st.integers(0, 2)):
        return work
    early: bool | Literal["never"] = draw(st.sampled_from([False, True, "never"]))
    beam = Beam(draw(st.sampled_from(widths)), draw(st.sampled_from([1.0, 0.0, 2.0, -1.0])), early)
    return msgspec.structs.replace(work, beam=beam)


@dataclass
class Plan:
    """A random schedule: works, and the events between steps."""

    blocks: int
    slots: int
    budgets: list[int]
    prefix_cache: bool
    works: list[Work]
    guesses: int | None
    share: float
    # ("add", work) ("step", times) ("cancel", choice number) ("fail", when) ("preempt", how many)
    # ("reset", odd: even while some run) ("divide", quarters of the time for prompts, modulo 5)
    actions: list[tuple[str, int]]


@st.composite
def plans(draw: st.DrawFn, failures: bool, cancels: bool) -> Plan:
    blocks = draw(st.sampled_from([6, 7, 8, 9, 12, 30]))
    slots = draw(st.sampled_from([1, 2, 4, 8, 8]))
    requests = [draw(works(number, blocks * 16)) for number in range(draw(st.integers(2, 6)))]
    requests = [draw(searches(work, blocks, slots)) for work in requests]
    kinds = ["step", "step", "preempt", "reset", "divide"] + ["cancel"] * cancels + ["fail"] * failures
    actions: list[tuple[str, int]] = []
    for number in range(len(requests)):
        actions.append(("add", number))
        for _ in range(draw(st.integers(0, 3))):
            kind = draw(st.sampled_from(kinds))
            actions.append((kind, draw(st.integers(0, 20))))
    for _ in range(draw(st.integers(0, 6)) if failures or cancels else 0):
        actions.append((draw(st.sampled_from(kinds)), draw(st.integers(0, 20))))
    return Plan(
        blocks=blocks,
        slots=slots,
        budgets=draw(st.lists(st.sampled_from([1, 5, 16, 23, 32, 64, 500, 500]), min_size=1, max_size=4)),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        works=requests,
        guesses=draw(st.sampled_from([None, None, 1, 2, 3])),
        share=draw(st.sampled_from([1.0, 1.0, 0.5, 0.05, 0.0])),
        actions=actions,
    )


def play(plan: Plan) -> tuple[Bench, set[tuple[str, int]]]:
    """Run a plan to its end; return the harness and the choices that were cancelled before their end."""
    bench = Bench(
        blocks=plan.blocks,
        slots=plan.slots,
        budgets=tuple(plan.budgets),
        prefix_cache=plan.prefix_cache,
        guesses=plan.guesses,
        share=plan.share,
    )
    cancelled: set[tuple[str, int]] = set()
    added: list[tuple[str, int]] = []
    for kind, value in plan.actions:
        if kind == "add":
            work = plan.works[value]
            bench.loop.add(work)
            added += [(work.id, index) for index in range(work.n)]
        elif kind == "step":
            for _ in range(value):
                bench.step()
        elif kind == "preempt":
            for _ in range(min(value % 3, len(bench.loop.scheduler.running))):
                bench.loop.scheduler.preempt()
            bench.check()
        elif kind == "reset":
            held = bench.loop.pool.used
            done = bench.loop.reset(running=value % 2 == 1)
            assert done == (value % 2 == 1 or held == 0)
            bench.check()
        elif kind == "divide":
            bench.quota.divide(value % 5 / 4)
        elif kind == "fail":
            bench.runner.fail_next = "midway" if value % 2 else "before"
            bench.step()
            bench.runner.fail_next = None
        else:
            id, index = added[value % len(added)]
            everything = value % 3 == 0
            for choice in [choice for choice in added if choice[0] == id] if everything else [(id, index)]:
                outputs = bench.outputs.get(choice, [])
                if not outputs or outputs[-1].finish is None:
                    cancelled.add(choice)
            before = {choice: len(outputs) for choice, outputs in bench.outputs.items()}
            bench.loop.cancel(id, -1 if everything else index)
            bench.check()
            bench.step()
            assert all(len(bench.outputs.get(choice, [])) == before.get(choice, 0) for choice in cancelled)
    bench.drain()
    return bench, cancelled


def check_costs(bench: Bench, works: list[Work]) -> None:
    """Check that the costs in outputs agree with the log of the steps."""
    wanted = {work.id for work in works if work.costs}
    searched = {work.id for work in works if work.beam is not None}
    own: dict[tuple[str, int], float] = {}  # seconds of steps with a row of the choice since its last token
    others: dict[tuple[str, int], float] = {}  # seconds of steps without one, for choices that had a token
    for rows, stats, outputs in bench.log:
        assert len(rows) == stats.step_rows
        for choice in rows:
            own[choice] = own.get(choice, 0.0) + stats.step_seconds
        for choice in others.keys() - set(rows):
            others[choice] += stats.step_seconds
        for output in outputs:
            choice = output.id, output.index
            if output.id in searched:
                assert len(output.costs or []) == len(output.token_ids) * (output.id in wanted)
                continue
            if not output.token_ids or output.id not in wanted:
                assert output.costs is None
                continue
            assert output.costs is not None
            assert len(output.costs) == len(output.token_ids) and all(each == output.costs[0] for each in output.costs)
            cost = output.costs[0]
            assert cost.rows == len(rows) and choice in rows
            assert cost.computed * len(output.costs) == pytest.approx(own.pop(choice), abs=1e-9)
            assert cost.waited * len(output.costs) >= others.get(choice, 0.0) - 1e-9
            others[choice] = 0.0


def same(got: Output, expected: Output) -> None:
    got.cached_tokens = expected.cached_tokens = 0
    assert got == expected


def compare(plan: Plan, bench: Bench, cancelled: set[tuple[str, int]]) -> None:
    context = plan.blocks * 16
    check_costs(bench, plan.works)
    for work in plan.works:
        for index in range(work.n):
            room = context if work.beam is None else capacity(plan.blocks, work.beam.width)
            expected = alone(work, index, max_model_len=room)
            if (work.id, index) in cancelled:
                parts = bench.outputs.get((work.id, index), [])
                assert all(part.finish is None for part in parts)
                tokens = [token for part in parts for token in part.token_ids]
                assert tokens == expected.token_ids[: len(tokens)]
                continue
            got = bench.result(work.id, index)
            if got.finish == "error":
                assert got.token_ids == expected.token_ids[: len(got.token_ids)]
                event("failed")
            else:
                assert got.cached_tokens < max(1, len(work.token_ids))
                same(got, expected)
    event(f"preempted: {bench.stats.preemptions > 0}")
    event(f"held back: {bench.quota.held > 0}")
    event(f"searched: {any(work.beam is not None for work in plan.works)}")
    event(f"hits: {bench.stats.prefix_hits > 0}")


quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@given(plans(failures=False, cancels=False))
@settings(quick, max_examples=150)
def test_random_schedule_does_not_change_outputs(plan: Plan) -> None:
    """Batch, arrival, chunks, cache, preemptions and n change no token, score or finish reason of a request."""
    bench, cancelled = play(plan)
    assert all(outputs[-1].finish != "error" for outputs in bench.outputs.values())
    compare(plan, bench, cancelled)


@given(plans(failures=False, cancels=True))
@settings(quick, max_examples=100)
def test_random_cancels_leak_no_pages_and_change_no_other_output(plan: Plan) -> None:
    bench, cancelled = play(plan)
    assert all(outputs[-1].finish != "error" for outputs in bench.outputs.values())
    compare(plan, bench, cancelled)


@given(plans(failures=True, cancels=True))
@settings(quick, max_examples=150)
def test_failed_step_ends_only_its_choices(plan: Plan) -> None:
    bench, cancelled = play(plan)
    compare(plan, bench, cancelled)


def prompt(number: int, shared: int, own: int) -> list[int]:
    return COMMON[:shared] + [(number * 13 + 1 + i) % VOCAB for i in range(own)]


@pytest.mark.parametrize("budget", [16, 48, 64, 100, 1000])
def test_simultaneous_requests_compute_shared_prefix_once(budget: int) -> None:
    bench = Bench(slots=8, budgets=(budget,))
    for number in range(8):
        bench.loop.add(Work(f"w{number}", prompt(number, 64, 5), max_tokens=1))
    bench.drain()
    assert bench.runner.computed == 64 + 8 * 5
    assert [bench.result(f"w{number}").cached_tokens for number in range(8)] == [0] + [64] * 7
    assert (bench.stats.prefix_queries, bench.stats.prefix_hits) == (8 * 69, 7 * 64)


def test_choices_share_prompt_pages() -> None:
    bench = Bench(slots=8, budgets=(1000,))
    bench.loop.add(Work("w", prompt(0, 64, 5), max_tokens=20, n=8))
    bench.drain()
    assert bench.runner.computed == 69 + 7 * 5 + 8 * 19
    assert len({tuple(bench.result("w", index).token_ids) for index in range(8)}) == 8


def test_fully_cached_prompt_still_computes_its_last_page() -> None:
    bench = Bench()
    for id, expected in (("first", 0), ("second", 48), ("third", 48)):
        bench.loop.add(Work(id, prompt(0, 64, 0), max_tokens=3))
        bench.drain()
        assert bench.result(id).cached_tokens == expected


def test_next_chat_turn_hits_cached_pages_of_last_answer() -> None:
    bench = Bench()
    bench.loop.add(Work("turn 1", prompt(0, 20, 0), max_tokens=30))
    bench.drain()
    history = prompt(0, 20, 0) + bench.result("turn 1").token_ids
    bench.loop.add(Work("turn 2", [*history, 1, 2, 3], max_tokens=3))
    bench.drain()
    assert bench.result("turn 2").cached_tokens == 48  # 50 tokens, but the last of them was never computed


def test_different_salts_share_no_pages() -> None:
    bench = Bench()
    for salt in ("a", "b", "", "a"):
        bench.loop.add(Work("w" + salt, prompt(0, 64, 5), max_tokens=1, salt=salt))
        bench.drain()
    assert bench.stats.prefix_hits == 64


def test_disabled_prefix_cache_is_never_queried() -> None:
    bench = Bench(prefix_cache=False)
    for id in ("first", "second"):
        bench.loop.add(Work(id, prompt(0, 64, 5), max_tokens=2))
        bench.drain()
    assert bench.stats.prefix_queries == bench.stats.prefix_hits == bench.result("second").cached_tokens == 0


def test_prompt_logprobs_recompute_cached_prompt() -> None:
    """Cached pages do not spare a prompt with log-probabilities its computation, and are not replaced by its pages."""
    bench = Bench(budgets=(32,))
    bench.loop.add(Work("first", prompt(0, 64, 5), max_tokens=1))
    bench.drain()
    scoring = Work("scoring", prompt(0, 64, 5), max_tokens=0, prompt_logprobs=0, n=2)
    bench.loop.add(scoring)
    bench.drain()
    first, second = bench.result("scoring", 0), bench.result("scoring", 1)
    assert first.cached_tokens == 0 and second.cached_tokens == 64
    assert first.prompt_scores is not None and len(first.prompt_scores) == 69 and second.prompt_scores is None
    same(first, alone(scoring))
    bench.loop.add(Work("last", prompt(0, 64, 5), max_tokens=1))
    bench.drain()
    assert bench.result("last").cached_tokens == 64


def test_one_token_prompt_has_no_prompt_score() -> None:
    bench = Bench()
    bench.loop.add(Work("w", [4], max_tokens=0, prompt_logprobs=3))
    bench.drain()
    assert bench.result("w") == Output("w", 0, finish="length", prompt_scores=[None])


def test_decodes_run_in_every_step_of_long_prefill() -> None:
    bench = Bench(budgets=(16,))
    bench.loop.add(Work("short", [1, 2, 3], max_tokens=40))
    bench.step()
    bench.loop.add(Work("long", prompt(0, 200, 100), max_tokens=1))
    bench.drain()
    together = [rows for rows in bench.runner.steps if any(id == "long" for id, *_ in rows)]
    assert len(together) == 19
    assert all(any(id == "short" for id, *_ in rows) for rows in together)


def test_max_tokens_reserves_no_pages() -> None:
    bench = Bench(blocks=16, slots=8)
    for number in range(8):
        bench.loop.add(Work(f"w{number}", [number, 1, 2], max_tokens=200))
    bench.step()
    assert bench.stats.running == 8 and bench.stats.blocks_used == 8
    bench.drain()
    assert bench.stats.preemptions > 0
    assert sum(parts[-1].preemptions for parts in bench.outputs.values()) == bench.stats.preemptions
    for number in range(8):
        same(bench.result(f"w{number}"), alone(Work(f"w{number}", [number, 1, 2], max_tokens=200)))


def test_admission_leaves_pages_for_running_sequences() -> None:
    bench = Bench(blocks=4, slots=2)
    bench.loop.add(Work("first", prompt(0, 0, 20), max_tokens=30))
    bench.loop.add(Work("second", prompt(1, 0, 20), max_tokens=30))
    bench.step()
    assert (bench.stats.running, bench.stats.waiting) == (1, 1)
    bench.drain()
    assert bench.stats.preemptions == 0 and len(bench.result("second").token_ids) == 30


def test_preempted_sequence_resumes_from_prefix_cache() -> None:
    """Two sequences grow until one is preempted; its pages that were not overwritten are not computed again."""
    bench = Bench(blocks=10, slots=2)
    for number in range(2):
        bench.loop.add(Work(f"w{number}", prompt(number, 0, 40), max_tokens=60))
    bench.drain()
    assert bench.stats.preemptions > 0
    everything = 2 * (40 + 59)
    assert bench.runner.computed < everything + bench.stats.preemptions * 40
    for number in range(2):
        same(bench.result(f"w{number}"), alone(Work(f"w{number}", prompt(number, 0, 40), max_tokens=60)))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_at_any_step_does_not_change_outputs(prefix_cache: bool) -> None:
    """Preempts one sequence or all, in the middle of the prompt (scored or not) or of the output."""
    requests = [
        Work("scored", prompt(0, 48, 20), max_tokens=12, prompt_logprobs=0, logprobs=0),
        Work("plain", prompt(1, 48, 9), max_tokens=12, n=2),
    ]
    expected = [alone(work, index) for work in requests for index in range(work.n)]
    for moment in range(40):
        for count in (1, 3):
            bench = Bench(budgets=(16,), prefix_cache=prefix_cache)
            for work in requests:
                bench.loop.add(work)
            for _ in range(moment):
                bench.step()
            for _ in range(min(count, len(bench.loop.scheduler.running))):
                bench.loop.scheduler.preempt()
            bench.drain()
            for result in expected:
                same(bench.result(result.id, result.index), result)


def test_cache_reset_forgets_pages_and_keeps_running_work() -> None:
    bench = Bench(budgets=(500,))
    first, again = (Work(id, prompt(0, 48, 20), max_tokens=12) for id in ("first", "again"))
    for moment, running in ((0, False), (3, True)):
        bench.loop.add(first)
        for _ in range(moment):
            bench.step()
        if moment:
            assert not bench.loop.reset()  # its pages are in use
        assert bench.loop.reset(running=running)
        bench.drain()
        same(bench.result("first"), alone(first))
        assert bench.loop.reset()
        bench.loop.add(again)
        bench.drain()
        assert bench.result("again").cached_tokens == 0
        bench.outputs.clear()


def test_page_pool_size_limits_context_length() -> None:
    bench = Bench(blocks=3)
    bench.loop.add(Work("w", prompt(0, 0, 40), max_tokens=1000))
    bench.loop.add(Work("full", prompt(0, 0, 48), max_tokens=1000))
    bench.drain()
    assert bench.result("w").finish == bench.result("full").finish == "length"
    assert len(bench.result("w").token_ids) == 8 and bench.result("full").token_ids == []


@pytest.mark.parametrize(
    ("token_ids", "sentence"),
    [
        ([], "no tokens"),
        ([1] * 49, "49 tokens, but only 48 fit"),
        ([1, VOCAB], "vocabulary (0 to 49)"),
        ([-1], "vocabulary"),
        ([2**70], "vocabulary"),
        ([1.5], "vocabulary"),
    ],
)
def test_invalid_prompt_fails_every_choice_with_reason(token_ids: list[int], sentence: str) -> None:
    bench = Bench(blocks=3)
    bench.loop.add(Work("wrong", token_ids, max_tokens=5, n=2))
    bench.loop.add(Work("right", [1, 2], max_tokens=5))
    bench.drain()
    for index in range(2):
        result = bench.result("wrong", index)
        assert result.finish == "error" and result.error is not None and sentence in result.error
    assert len(bench.result("right").token_ids) == 5


def test_rejected_work_can_be_cancelled_before_its_error() -> None:
    bench = Bench()
    bench.loop.add(Work("w", [], max_tokens=5, n=2))
    bench.loop.cancel("w", 1)
    bench.drain()
    assert list(bench.outputs) == [("w", 0)]


def test_cancel_frees_pages_at_once_and_reports_it() -> None:
    bench = Bench()
    bench.loop.add(Work("w", prompt(0, 0, 40), max_tokens=50, n=2))
    bench.step()
    bench.step()
    assert bench.stats.blocks_used > 0
    bench.loop.cancel("unknown")
    bench.loop.cancel("w", 7)
    bench.loop.cancel("w")
    bench.loop.cancel("w")
    assert bench.loop.pool.used == 0 and not bench.loop.idle
    before = {choice: len(outputs) for choice, outputs in bench.outputs.items()}
    bench.drain()
    assert bench.stats.blocks_used == 0
    assert before == {choice: len(outputs) for choice, outputs in bench.outputs.items()}


def test_work_id_can_be_reused_after_cancel() -> None:
    bench = Bench()
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=5))
    bench.step()
    bench.loop.cancel("w")
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=1))
    bench.drain()
    assert bench.outputs["w", 0][-1].finish == "length"


@pytest.mark.parametrize("failure", ["before", "midway"])
def test_pages_of_failed_step_are_not_reused(failure: str) -> None:
    bench = Bench(budgets=(32,))
    bench.loop.add(Work("first", prompt(0, 64, 5), max_tokens=3))
    bench.step()
    bench.runner.fail_next = failure
    bench.step()
    result = bench.result("first")
    assert result.finish == "error" and result.error == "The engine failed while computing this request."
    bench.loop.add(Work("second", prompt(0, 64, 5), max_tokens=3))
    bench.drain()
    assert bench.result("second").cached_tokens == 32  # the step before did not fail
    same(bench.result("second"), alone(Work("second", prompt(0, 64, 5), max_tokens=3)))


def test_failed_row_ends_only_its_choice_and_is_not_cached() -> None:
    bench = Bench()
    bench.runner.poison.add(("bad", 2))
    bench.loop.add(Work("good", prompt(1, 0, 40), max_tokens=30))
    bench.loop.add(Work("bad", prompt(0, 0, 40), max_tokens=30))
    bench.drain()
    bad = bench.result("bad")
    assert (bad.finish, bad.error, len(bad.token_ids)) == ("error", "This row is not a number.", 2)
    assert len(bench.result("good").token_ids) == 30
    bench.loop.add(Work("again", prompt(0, 0, 40), max_tokens=1))
    bench.drain()
    assert bench.result("again").cached_tokens == 0


def test_failed_admission_ends_only_its_choice() -> None:
    bench = Bench()
    bench.runner.refuse.add("bad")
    for id in ("good", "bad", "other"):
        bench.loop.add(Work(id, [1, 2, 3], max_tokens=4))
    bench.drain()
    assert bench.result("bad").finish == "error"
    assert len(bench.result("good").token_ids) == len(bench.result("other").token_ids) == 4


def test_runner_with_missing_results_fails_step() -> None:
    bench = Bench()
    run = bench.runner.run
    bench.runner.run = lambda step: run(step)[1:]  # type: ignore[method-assign]
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=4))
    bench.drain()
    assert bench.result("w").finish == "error"


def test_ledger_detects_unwritten_page() -> None:
    """Checks the check itself: without ``abandon`` a failed step must poison the next request and be noticed."""
    bench = Bench(budgets=(32,))
    bench.loop.scheduler.abandon = lambda step: None  # type: ignore[method-assign]
    bench.loop.add(Work("first", prompt(0, 64, 5), max_tokens=3))
    bench.runner.fail_next = "before"
    bench.step()
    bench.loop.add(Work("second", prompt(0, 64, 5), max_tokens=3))
    with pytest.raises(Violation):
        bench.drain()


def test_embedding_finishes_while_generation_continues() -> None:
    """An embedding is computed in chunks, from cached pages, and survives a preemption."""
    bench = Bench(blocks=12, slots=4, budgets=(16,))
    bench.loop.add(Work("text", prompt(0, 32, 5), max_tokens=30))
    for id in ("first", "again"):
        bench.loop.add(Work(id, prompt(1, 64, 5), max_tokens=9, pooling=Pooling()))
    for _ in range(3):
        bench.step()
    bench.loop.scheduler.preempt()
    bench.drain()
    first, again = bench.result("first"), bench.result("again")
    assert first.vector == again.vector == alone(Work("w", prompt(1, 64, 5), max_tokens=0, pooling=Pooling())).vector
    assert first.finish == "stop" and not first.token_ids and again.cached_tokens == 64
    assert len(bench.result("text").token_ids) == 30


@pytest.mark.parametrize(("generates", "dimensions", "good"), [(True, 0, "text"), (False, 2, "vector")])
def test_loop_rejects_tasks_the_model_cannot_do(generates: bool, dimensions: int, good: str) -> None:
    bench = Bench()
    bench.runner.generates, bench.runner.dimensions = generates, dimensions
    bench.loop.add(Work("text", [1, 2], max_tokens=0))
    bench.loop.add(Work("vector", [1, 2], max_tokens=0, pooling=Pooling(dimensions=dimensions or None)))
    bench.loop.add(Work("wide", [1, 2], max_tokens=0, pooling=Pooling(dimensions=3)))
    bench.drain()
    ends = {id: bench.result(id).finish for id in ("text", "vector", "wide")}
    assert [id for id, end in ends.items() if end != "error"] == [good]


def test_loop_counts_tokens_and_steps() -> None:
    bench = Bench()
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=4, n=2))
    bench.drain()
    assert (bench.stats.prompt_tokens, bench.stats.generated_tokens, bench.stats.steps) == (3, 8, 4)
    assert bench.stats.blocks_total == 64


def test_queue_time_is_reported_once_with_first_output():
    bench = Bench(slots=1)
    for number in range(2):
        bench.loop.add(Work(f"w{number}", COMMON[:5], 4))
    bench.drain()
    first, second = ([part.waited for part in bench.outputs[f"w{number}", 0]] for number in range(2))
    assert 0 < first[0] < second[0]
    assert first[1:] == second[1:] == [0.0] * 3


def test_unprepared_work_does_not_block_others() -> None:
    bench = Bench()
    ready = {}
    bench.loop.intake._prepare = lambda work, done: done() if work.id == "b" else ready.update({work.id: done})
    a = Work("a", COMMON[:40], 5, n=3)
    for work in (a, Work("b", COMMON[:40], 5), Work("c", COMMON[:40], 5), Work("d", COMMON[:9], 5, beam=Beam(2))):
        bench.loop.add(work)
    while bench.step():
        assert bench.stats.waiting == 3
    assert bench.result("b").finish == "length" and set(bench.outputs) == {("b", 0)}
    bench.loop.cancel("a", 1)
    bench.loop.cancel("c")
    for done in ready.values():
        done()
    assert not bench.loop.idle
    bench.drain()
    assert set(bench.outputs) == {("a", 0), ("a", 2), ("b", 0), ("d", 0)}
    assert bench.result("a", 2).token_ids == alone(a, 2).token_ids
