"""Random schedules of the whole loop: each request gives the output it gives alone, and nothing leaks or hangs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Literal

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.invariant_ledger import COMMON_TOKENS, VOCAB, LoopHarness, assert_same_output, run_alone
from support.placed_items import place_items

from parley.core.beam_search.beam import beam_capacity
from parley.types import BeamOptions, EngineRequest, PoolingOptions

SCHEDULES = 200 if os.environ.get("PARLEY_NIGHTLY") else 60  # random schedules for each test


@st.composite
def draw_request(draw: st.DrawFn, number: int, longest: int, flags: dict[str, bool]) -> EngineRequest:
    shared = draw(st.sampled_from([0, 0, 15, 16, 17, 32, 40, 48, 64, 80]))
    own = draw(st.integers(0 if shared else 1, 40))
    tokens = (COMMON_TOKENS[:shared] + [(number * 11 + i) % VOCAB for i in range(own)])[:longest]
    has_media = draw(st.booleans())
    choose = partial(_choose, draw)
    return EngineRequest(
        id=f"w{number}",
        token_ids=tokens,
        media=place_items(len(tokens), choose, **flags) if has_media else [],
        max_tokens=draw(st.sampled_from([0, 1, 5, 20, 45, 60, 90])),
        seed=draw(st.sampled_from([0, 1, 2**64 - 1])),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        stop_ids=draw(st.sampled_from([[], [], [5], [5, 6, 7]])),
        logprobs=draw(st.sampled_from([-1, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([-1, -1, 0])),
        cache_salt=draw(st.sampled_from(["", "", "pepper"])),
        token_costs=draw(st.booleans()),
        pooling=draw(st.sampled_from([None, None, None, PoolingOptions()])),
        priority=draw(st.sampled_from([0, 0, 0, 1, -(2**40)])),
        tenant_priority=draw(st.sampled_from([0, 0, 1, -(2**40)])),
        tenant=draw(st.sampled_from(["", "", "", "a", "b"])),
    )


def _choose(draw: st.DrawFn, numbers: list[int]) -> int:
    return draw(st.sampled_from(numbers))


@st.composite
def maybe_beam_search(draw: st.DrawFn, request: EngineRequest, blocks: int, slots: int) -> EngineRequest:
    """Turn a request into a beam search now and then, with as many beams as fit."""
    widths = [
        w for w in (2, 3, 5) if w >= request.n and w <= slots and beam_capacity(blocks, w) > len(request.token_ids)
    ]
    if not widths or request.pooling is not None or draw(st.integers(0, 2)):
        return request
    early: bool | Literal["never"] = draw(st.sampled_from([False, True, "never"]))
    beam = BeamOptions(draw(st.sampled_from(widths)), draw(st.sampled_from([1.0, 0.0, 2.0, -1.0])), early)
    return msgspec.structs.replace(request, beam=beam)


@dataclass
class SchedulePlan:
    """A random schedule: requests, and the events between steps."""

    blocks: int
    slots: int
    budgets: list[int]
    prefix_cache: bool
    requests: list[EngineRequest]
    draft_seed: int | None
    prefill_share: float
    long_rope_after: float
    step_ms: float
    media_cache: int
    has_states: bool
    snapshots: int  # slots for them, if it has states
    # ("add", request) ("step", times) ("cancel", choice number) ("fail", when) ("preempt", how many)
    # ("reset", odd: even while some run) ("divide", quarters of the time for prompts, modulo 5)
    # ("encoder", odd: the encoder fails from now on)
    actions: list[tuple[str, int]]


@st.composite
def schedule_plans(draw: st.DrawFn, failures: bool, cancels: bool) -> SchedulePlan:
    blocks = draw(st.sampled_from([6, 7, 8, 9, 12, 30]))
    slots = draw(st.sampled_from([1, 2, 4, 8, 8]))
    flags = draw(st.sampled_from([{}, {"sees_both_ways": True}, {"prompt_sees_both_ways": True}]))
    requests = [draw(draw_request(number, blocks * 16, flags)) for number in range(draw(st.integers(2, 6)))]
    requests = [draw(maybe_beam_search(request, blocks, slots)) for request in requests]
    kinds = ["step", "step", "preempt", "reset", "divide"] + ["cancel"] * cancels + ["fail", "encoder"] * failures
    actions: list[tuple[str, int]] = []
    for number in range(len(requests)):
        actions.append(("add", number))
        for _ in range(draw(st.integers(0, 3))):
            kind = draw(st.sampled_from(kinds))
            actions.append((kind, draw(st.integers(0, 20))))
    for _ in range(draw(st.integers(0, 6)) if failures or cancels else 0):
        actions.append((draw(st.sampled_from(kinds)), draw(st.integers(0, 20))))
    return SchedulePlan(
        blocks=blocks,
        slots=slots,
        budgets=draw(st.lists(st.sampled_from([1, 5, 16, 23, 32, 64, 500, 500]), min_size=1, max_size=4)),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        requests=requests,
        draft_seed=draw(st.sampled_from([None, None, 1, 2, 3])),
        prefill_share=draw(st.sampled_from([1.0, 1.0, 0.5, 0.05, 0.0])),
        long_rope_after=draw(st.sampled_from([inf, inf, 16, 37, 70])),
        step_ms=draw(st.sampled_from([0, 250])),
        media_cache=draw(st.sampled_from([0, 200, 1000, 1000])),
        has_states=draw(st.sampled_from([False, True])),
        snapshots=draw(st.sampled_from([0, 1, 2, 7, 30])),
        actions=actions,
    )


def run_plan(plan: SchedulePlan, harness: type[LoopHarness] = LoopHarness) -> tuple[LoopHarness, set[tuple[str, int]]]:
    """Run a plan to its end; return the harness and the choices that were cancelled before their end."""
    bench = harness(
        blocks=plan.blocks,
        slots=plan.slots,
        budgets=tuple(plan.budgets),
        prefix_cache=plan.prefix_cache,
        guesses=plan.draft_seed,
        prefill_share=plan.prefill_share,
        long_rope_after=plan.long_rope_after,
        step_ms=plan.step_ms,
        media_cache=plan.media_cache,
        has_states=plan.has_states,
        snapshots=plan.snapshots,
    )
    cancelled: set[tuple[str, int]] = set()
    added: list[tuple[str, int]] = []
    for kind, value in plan.actions:
        if kind == "add":
            request = plan.requests[value]
            bench.loop.add_request(request)
            added += [(request.id, index) for index in range(request.n)]
        elif kind == "step":
            for _ in range(value):
                bench.step()
        elif kind == "preempt":
            for _ in range(min(value % 3, len(bench.loop.scheduler.running))):
                bench.loop.scheduler.preempt_last()
            bench.check()
        elif kind == "reset":
            is_in_use = any(
                sequence.block_table for sequence in bench.loop.scheduler.running
            )  # not only held by a copy
            done = bench.loop.reset_prefix_cache(running=value % 2 == 1)
            assert done == (value % 2 == 1 or not is_in_use)
            bench.check()
        elif kind == "divide":
            bench.prefill_share.set_share(value % 5 / 4)
        elif kind == "encoder":
            digests = {item.digest for request in plan.requests for item in request.media}
            bench.encoder.failing = digests if value % 2 else set()
        elif kind == "fail":
            bench.runner.fail_next = "midway" if value % 2 else "before"
            bench.step()
            bench.runner.fail_next = None
        else:
            request_id, index = added[value % len(added)]
            cancels_all = value % 3 == 0
            for choice in (
                [choice for choice in added if choice[0] == request_id] if cancels_all else [(request_id, index)]
            ):
                outputs = bench.outputs.get(choice, [])
                if not outputs or outputs[-1].finish_reason is None:
                    cancelled.add(choice)
            before = {choice: len(outputs) for choice, outputs in bench.outputs.items()}
            bench.loop.cancel_request(request_id, -1 if cancels_all else index)
            bench.check()
            bench.step()
            assert all(len(bench.outputs.get(choice, [])) == before.get(choice, 0) for choice in cancelled)
    bench.drain()
    return bench, cancelled


def check_costs(bench: LoopHarness, requests: list[EngineRequest]) -> None:
    """Check that the costs in outputs agree with the log of the steps."""
    with_costs = {request.id for request in requests if request.token_costs}
    beam_ids = {request.id for request in requests if request.beam is not None}
    own_seconds: dict[tuple[str, int], float] = {}  # seconds of steps with a row of the choice since its last token
    other_seconds: dict[tuple[str, int], float] = {}  # seconds of steps without one, for choices that had a token
    for rows, stats, outputs in bench.step_log:
        assert len(rows) == stats.step_rows
        for choice in rows:
            own_seconds[choice] = own_seconds.get(choice, 0.0) + stats.step_seconds
        for choice in other_seconds.keys() - set(rows):
            other_seconds[choice] += stats.step_seconds
        for output in outputs:
            choice = output.id, output.index
            if output.id in beam_ids:
                assert len(output.token_costs or []) == len(output.token_ids) * (output.id in with_costs)
                continue
            if not output.token_ids or output.id not in with_costs:
                assert output.token_costs is None
                continue
            assert output.token_costs is not None
            assert len(output.token_costs) == len(output.token_ids) and all(
                token_cost == output.token_costs[0] for token_cost in output.token_costs
            )
            cost = output.token_costs[0]
            assert cost.batch_rows == len(rows) and choice in rows
            assert cost.compute_seconds * len(output.token_costs) == pytest.approx(own_seconds.pop(choice), abs=1e-9)
            assert cost.wait_seconds * len(output.token_costs) >= other_seconds.get(choice, 0.0) - 1e-9
            other_seconds[choice] = 0.0


def compare_with_alone(plan: SchedulePlan, bench: LoopHarness, cancelled: set[tuple[str, int]]) -> None:
    context = plan.blocks * 16
    check_costs(bench, plan.requests)
    for request in plan.requests:
        for index in range(request.n):
            context_limit = context if request.beam is None else beam_capacity(plan.blocks, request.beam.width)
            expected = run_alone(request, index, context_limit, plan.long_rope_after)
            if (request.id, index) in cancelled:
                parts = bench.outputs.get((request.id, index), [])
                assert all(part.finish_reason is None for part in parts)
                tokens = [token for part in parts for token in part.token_ids]
                assert tokens == expected.token_ids[: len(tokens)]
                continue
            actual = bench.merged_output(request.id, index)
            if actual.finish_reason == "error":
                assert actual.token_ids == expected.token_ids[: len(actual.token_ids)]
                event("failed")
            else:
                assert actual.cached_tokens < max(1, len(request.token_ids))
                assert_same_output(actual, expected)
    event(f"encoded: {len(bench.encoder.encoded_digests)}")
    event(f"preempted: {bench.stats.preemptions > 0}")
    event(f"held back: {bench.prefill_share.closed_steps > 0}")
    event(f"searched: {any(request.beam is not None for request in plan.requests)}")
    event(f"hits: {bench.stats.prefix_hits > 0}")


loop_settings = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@given(schedule_plans(failures=False, cancels=False))
@settings(loop_settings, max_examples=SCHEDULES)
def test_random_schedule_does_not_change_outputs(plan: SchedulePlan) -> None:
    """Batch, arrival, chunks, cache, preemptions and n change no token, score or finish reason of a request."""
    bench, cancelled = run_plan(plan)
    assert all(outputs[-1].finish_reason != "error" for outputs in bench.outputs.values())
    compare_with_alone(plan, bench, cancelled)


@given(schedule_plans(failures=False, cancels=True))
@settings(loop_settings, max_examples=SCHEDULES)
def test_random_cancels_leak_no_pages_and_change_no_other_output(plan: SchedulePlan) -> None:
    bench, cancelled = run_plan(plan)
    assert all(outputs[-1].finish_reason != "error" for outputs in bench.outputs.values())
    compare_with_alone(plan, bench, cancelled)


@given(schedule_plans(failures=True, cancels=True))
@settings(loop_settings, max_examples=SCHEDULES)
def test_failed_step_ends_only_its_choices(plan: SchedulePlan) -> None:
    bench, cancelled = run_plan(plan)
    compare_with_alone(plan, bench, cancelled)
