"""The loop as a whole: random schedules give what each request gives alone, and nothing leaks or hangs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from ledger import VOCAB, Bench, Violation, alone

from parley.core.beam import capacity
from parley.types import Beam, Output, Pooling, Work

COMMON = [(7 * i + 3) % VOCAB for i in range(200)]  # what prompts with a shared prefix begin with


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
    """The work, sometimes with as many beams as fit."""
    widths = [w for w in (2, 3, 5) if w >= work.n and w <= slots and capacity(blocks, w) > len(work.token_ids)]
    if not widths or work.pooling is not None or draw(st.integers(0, 2)):
        return work
    early: bool | Literal["never"] = draw(st.sampled_from([False, True, "never"]))
    beam = Beam(draw(st.sampled_from(widths)), draw(st.sampled_from([1.0, 0.0, 2.0, -1.0])), early)
    return msgspec.structs.replace(work, beam=beam)


@dataclass
class Plan:
    """A random schedule: works, and what happens between steps."""

    blocks: int
    slots: int
    budgets: list[int]
    prefix_cache: bool
    works: list[Work]
    guesses: int | None
    share: float
    # ("add", work) ("step", times) ("cancel", choice number) ("fail", when) ("preempt", how many)
    # ("reset", odd: also if some run) ("divide", percent of the time for prompts)
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
    """Run a plan to its end; returns the bench and the choices that were cancelled before their end."""
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
    """What outputs tell of their tokens' costs is what the log of the steps has."""
    wanted = {work.id for work in works if work.costs}
    searched = {work.id for work in works if work.beam is not None}
    own: dict[tuple[str, int], float] = {}  # seconds of steps with a row of the choice, since its last token
    others: dict[tuple[str, int], float] = {}  # and without, of choices that had a token
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
def test_schedule_never_shows_in_the_output(plan: Plan) -> None:
    """Whatever the batch, arrival, chunks, cache, preemptions and n: tokens, scores and ends as if alone."""
    bench, cancelled = play(plan)
    assert all(outputs[-1].finish != "error" for outputs in bench.outputs.values())
    compare(plan, bench, cancelled)


@given(plans(failures=False, cancels=True))
@settings(quick, max_examples=100)
def test_cancels_leak_nothing_and_disturb_nobody(plan: Plan) -> None:
    bench, cancelled = play(plan)
    assert all(outputs[-1].finish != "error" for outputs in bench.outputs.values())
    compare(plan, bench, cancelled)


@given(plans(failures=True, cancels=True))
@settings(quick, max_examples=150)
def test_failed_steps_end_their_choices_only(plan: Plan) -> None:
    bench, cancelled = play(plan)
    compare(plan, bench, cancelled)


def prompt(number: int, shared: int, own: int) -> list[int]:
    return COMMON[:shared] + [(number * 13 + 1 + i) % VOCAB for i in range(own)]


@pytest.mark.parametrize("budget", [16, 48, 64, 100, 1000])
def test_requests_that_arrive_together_compute_their_prefix_once(budget: int) -> None:
    bench = Bench(slots=8, budgets=(budget,))
    for number in range(8):
        bench.loop.add(Work(f"w{number}", prompt(number, 64, 5), max_tokens=1))
    bench.drain()
    assert bench.runner.computed == 64 + 8 * 5
    assert [bench.result(f"w{number}").cached_tokens for number in range(8)] == [0] + [64] * 7
    assert (bench.stats.prefix_queries, bench.stats.prefix_hits) == (8 * 69, 7 * 64)


def test_choices_share_their_prompt() -> None:
    bench = Bench(slots=8, budgets=(1000,))
    bench.loop.add(Work("w", prompt(0, 64, 5), max_tokens=20, n=8))
    bench.drain()
    assert bench.runner.computed == 69 + 7 * 5 + 8 * 19
    assert len({tuple(bench.result("w", index).token_ids) for index in range(8)}) == 8


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    bench = Bench()
    for id, expected in (("first", 0), ("second", 48), ("third", 48)):
        bench.loop.add(Work(id, prompt(0, 64, 0), max_tokens=3))
        bench.drain()
        assert bench.result(id).cached_tokens == expected


def test_the_next_turn_of_a_chat_finds_the_answer_of_the_last() -> None:
    bench = Bench()
    bench.loop.add(Work("turn 1", prompt(0, 20, 0), max_tokens=30))
    bench.drain()
    history = prompt(0, 20, 0) + bench.result("turn 1").token_ids
    bench.loop.add(Work("turn 2", [*history, 1, 2, 3], max_tokens=3))
    bench.drain()
    assert bench.result("turn 2").cached_tokens == 48  # 50 tokens, the last of which was never computed


def test_salts_never_share() -> None:
    bench = Bench()
    for salt in ("a", "b", "", "a"):
        bench.loop.add(Work("w" + salt, prompt(0, 64, 5), max_tokens=1, salt=salt))
        bench.drain()
    assert bench.stats.prefix_hits == 64


def test_without_prefix_cache_nothing_is_looked_up() -> None:
    bench = Bench(prefix_cache=False)
    for id in ("first", "second"):
        bench.loop.add(Work(id, prompt(0, 64, 5), max_tokens=2))
        bench.drain()
    assert bench.stats.prefix_queries == bench.stats.prefix_hits == bench.result("second").cached_tokens == 0


def test_scoring_computes_every_row_of_the_prompt() -> None:
    """Even when the prompt is cached, and its duplicate pages do not push out the first ones."""
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


def test_one_token_prompt_is_scored_with_nothing() -> None:
    bench = Bench()
    bench.loop.add(Work("w", [4], max_tokens=0, prompt_logprobs=3))
    bench.drain()
    assert bench.result("w") == Output("w", 0, finish="length", prompt_scores=[None])


def test_decodes_have_a_row_in_every_step_of_a_long_prefill() -> None:
    bench = Bench(budgets=(16,))
    bench.loop.add(Work("short", [1, 2, 3], max_tokens=40))
    bench.step()
    bench.loop.add(Work("long", prompt(0, 200, 100), max_tokens=1))
    bench.drain()
    together = [rows for rows in bench.runner.steps if any(id == "long" for id, *_ in rows)]
    assert len(together) == 19
    assert all(any(id == "short" for id, *_ in rows) for rows in together)


def test_max_tokens_reserves_nothing() -> None:
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


def test_admission_leaves_running_sequences_room_to_grow() -> None:
    bench = Bench(blocks=4, slots=2)
    bench.loop.add(Work("first", prompt(0, 0, 20), max_tokens=30))
    bench.loop.add(Work("second", prompt(1, 0, 20), max_tokens=30))
    bench.step()
    assert (bench.stats.running, bench.stats.waiting) == (1, 1)
    bench.drain()
    assert bench.stats.preemptions == 0 and len(bench.result("second").token_ids) == 30


def test_a_preempted_sequence_resumes_from_the_cache() -> None:
    """Two grow until one has to leave; what of it was not overwritten is not computed again."""
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
def test_preemption_at_any_step_changes_nothing(prefix_cache: bool) -> None:
    """Of one sequence or all, in the middle of the prompt (being scored, too) or of the output."""
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


def test_after_a_reset_nothing_is_found_and_what_ran_goes_on() -> None:
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


def test_the_context_ends_a_choice_where_the_pool_does() -> None:
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
def test_a_wrong_prompt_ends_every_choice_with_a_sentence(token_ids: list[int], sentence: str) -> None:
    bench = Bench(blocks=3)
    bench.loop.add(Work("wrong", token_ids, max_tokens=5, n=2))
    bench.loop.add(Work("right", [1, 2], max_tokens=5))
    bench.drain()
    for index in range(2):
        result = bench.result("wrong", index)
        assert result.finish == "error" and result.error is not None and sentence in result.error
    assert len(bench.result("right").token_ids) == 5


def test_a_refused_work_can_be_cancelled_before_it_is_told() -> None:
    bench = Bench()
    bench.loop.add(Work("w", [], max_tokens=5, n=2))
    bench.loop.cancel("w", 1)
    bench.drain()
    assert list(bench.outputs) == [("w", 0)]


def test_cancel_gives_pages_back_at_once_and_says_so() -> None:
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


def test_an_id_can_be_used_again_after_its_end() -> None:
    bench = Bench()
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=5))
    bench.step()
    bench.loop.cancel("w")
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=1))
    bench.drain()
    assert bench.outputs["w", 0][-1].finish == "length"


@pytest.mark.parametrize("failure", ["before", "midway"])
def test_pages_of_a_failed_step_are_found_by_nobody(failure: str) -> None:
    bench = Bench(budgets=(32,))
    bench.loop.add(Work("first", prompt(0, 64, 5), max_tokens=3))
    bench.step()
    bench.runner.fail_next = failure
    bench.step()
    result = bench.result("first")
    assert result.finish == "error" and result.error == "The engine failed while computing this request."
    bench.loop.add(Work("second", prompt(0, 64, 5), max_tokens=3))
    bench.drain()
    assert bench.result("second").cached_tokens == 32  # the step before was fine
    same(bench.result("second"), alone(Work("second", prompt(0, 64, 5), max_tokens=3)))


def test_a_failed_row_ends_its_choice_only_and_is_not_reused() -> None:
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


def test_a_failed_admission_ends_its_choice_only() -> None:
    bench = Bench()
    bench.runner.refuse.add("bad")
    for id in ("good", "bad", "other"):
        bench.loop.add(Work(id, [1, 2, 3], max_tokens=4))
    bench.drain()
    assert bench.result("bad").finish == "error"
    assert len(bench.result("good").token_ids) == len(bench.result("other").token_ids) == 4


def test_a_runner_that_gives_too_little_fails_the_step() -> None:
    bench = Bench()
    run = bench.runner.run
    bench.runner.run = lambda step: run(step)[1:]  # type: ignore[method-assign]
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=4))
    bench.drain()
    assert bench.result("w").finish == "error"


def test_the_ledger_notices_a_page_that_was_never_written() -> None:
    """The check behind all of the above is alive: without ``abandon`` a failed step poisons the next request."""
    bench = Bench(budgets=(32,))
    bench.loop.scheduler.abandon = lambda step: None  # type: ignore[method-assign]
    bench.loop.add(Work("first", prompt(0, 64, 5), max_tokens=3))
    bench.runner.fail_next = "before"
    bench.step()
    bench.loop.add(Work("second", prompt(0, 64, 5), max_tokens=3))
    with pytest.raises(Violation):
        bench.drain()


def test_a_vector_ends_its_prompt_beside_others_that_go_on() -> None:
    """In chunks, from cached pages, and however often it has to start again."""
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
def test_a_model_is_asked_only_for_what_it_can_do(generates: bool, dimensions: int, good: str) -> None:
    bench = Bench()
    bench.runner.generates, bench.runner.dimensions = generates, dimensions
    bench.loop.add(Work("text", [1, 2], max_tokens=0))
    bench.loop.add(Work("vector", [1, 2], max_tokens=0, pooling=Pooling(dimensions=dimensions or None)))
    bench.loop.add(Work("wide", [1, 2], max_tokens=0, pooling=Pooling(dimensions=3)))
    bench.drain()
    ends = {id: bench.result(id).finish for id in ("text", "vector", "wide")}
    assert [id for id, end in ends.items() if end != "error"] == [good]


def test_counters_count() -> None:
    bench = Bench()
    bench.loop.add(Work("w", [1, 2, 3], max_tokens=4, n=2))
    bench.drain()
    assert (bench.stats.prompt_tokens, bench.stats.generated_tokens, bench.stats.steps) == (3, 8, 4)
    assert bench.stats.blocks_total == 64


def test_waiting_is_told_once_and_lasts_until_somebody_leaves():
    bench = Bench(slots=1)
    for number in range(2):
        bench.loop.add(Work(f"w{number}", COMMON[:5], 4))
    bench.drain()
    first, second = ([part.waited for part in bench.outputs[f"w{number}", 0]] for number in range(2))
    assert 0 < first[0] < second[0]
    assert first[1:] == second[1:] == [0.0] * 3


def test_a_work_that_is_not_ready_holds_up_nobody() -> None:
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
