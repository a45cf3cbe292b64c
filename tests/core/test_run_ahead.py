"""Starting steps before the results of the step before are known: no token, score, page or ending may change."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from core.test_random_schedules import SchedulePlan, compare_with_alone, loop_settings, run_plan, schedule_plans
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.delayed_device import DelayedHarness, EagerHarness

from parley.types import EngineRequest, SamplingOptions

EXAMPLES = 60 if os.environ.get("PARLEY_NIGHTLY") else 12


def plans_without_states(failures: bool) -> st.SearchStrategy[SchedulePlan]:
    """Steps of models with states are not started ahead."""
    return schedule_plans(failures=failures, cancels=True).map(lambda plan: replace(plan, has_states=False))


HARNESSES = pytest.mark.parametrize("harness", [DelayedHarness, EagerHarness])


@HARNESSES
@given(plan=plans_without_states(failures=False))
@settings(loop_settings, max_examples=EXAMPLES)
def test_steps_ahead_change_no_output(harness: type[DelayedHarness], plan: SchedulePlan) -> None:
    """Also with cancels, preemptions and cache resets while a step is on the device."""
    bench, cancelled = run_plan(plan, harness)
    assert all(outputs[-1].finish_reason != "error" for outputs in bench.outputs.values())
    compare_with_alone(plan, bench, cancelled)
    event(f"ahead: {min(bench.run_ahead.steps_ahead, 3)}")


@HARNESSES
@given(plan=plans_without_states(failures=True))
@settings(loop_settings, max_examples=EXAMPLES)
def test_failed_step_ends_only_its_choices(harness: type[DelayedHarness], plan: SchedulePlan) -> None:
    bench, cancelled = run_plan(plan, harness)
    compare_with_alone(plan, bench, cancelled)


def plain_request(name: str, length: int, limit: int, **options) -> EngineRequest:
    return EngineRequest(name, [3 + i % 20 for i in range(length)], limit, SamplingOptions(), **options)


def test_all_decodes_but_the_last_are_started_ahead() -> None:
    bench = DelayedHarness()
    bench.loop.add_request(plain_request("a", 5, 10))
    bench.drain()
    assert len(bench.merged_output("a", 0).token_ids) == 10
    assert bench.stats.steps == 10 and bench.run_ahead.steps_ahead == 8  # the first step is a prompt


def test_arriving_request_waits_for_one_step_at_most() -> None:
    bench = DelayedHarness()
    bench.loop.add_request(plain_request("a", 5, 40))
    for _ in range(4):
        bench.step()
    assert bench.run_ahead.has_started
    bench.loop.add_request(plain_request("b", 5, 3))
    bench.step()
    assert ("b", 0) not in bench.outputs
    bench.step()
    assert len(bench.outputs["b", 0]) == 1
    bench.drain()


def test_steps_start_ahead_even_if_all_slots_are_full() -> None:
    bench = DelayedHarness(slots=1)
    for name in "ab":
        bench.loop.add_request(plain_request(name, 5, 10))
    bench.drain()
    assert bench.run_ahead.steps_ahead == 16


def test_row_on_the_device_of_a_cancelled_sequence_is_ignored() -> None:
    bench = DelayedHarness()
    for name in "ab":
        bench.loop.add_request(plain_request(name, 20, 30))
    for _ in range(5):
        bench.step()
    assert bench.run_ahead.has_started
    before = len(bench.outputs["a", 0])
    bench.loop.cancel_request("a")
    bench.loop.check_invariants()
    bench.loop.add_request(plain_request("c", 40, 20))  # may get the pages of the cancelled one
    bench.drain()
    assert len(bench.outputs["a", 0]) == before
    assert len(bench.merged_output("b", 0).token_ids) == 30 and len(bench.merged_output("c", 0).token_ids) == 20


def test_step_ahead_is_dropped_if_all_its_rows_are_cancelled() -> None:
    bench = DelayedHarness()
    bench.loop.add_request(plain_request("a", 5, 40))
    for _ in range(4):
        bench.step()
    bench.loop.cancel_request("a")
    bench.step()
    assert not bench.run_ahead.has_started and bench.loop.is_idle and bench.stats.used_pages == 0
