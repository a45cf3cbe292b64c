"""In any order of events, requests release all they hold exactly once, and none hangs."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_cluster import Clock, cluster, lose, up

from parley.coordinator.routing.admission import Refused
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.policies import Wanted

ROLES = st.lists(st.sampled_from(["mixed", "prefill", "decode", "flex"]), min_size=1, max_size=5)
NUMBER = st.integers(0, 30)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 3000)),
        st.tuples(st.sampled_from(["cancel", "first", "token", "end", "fail"]), NUMBER),
        st.tuples(st.sampled_from(["lose", "fault", "answer", "restart", "offline", "online", "remove"]), NUMBER),
        st.tuples(st.just("wait"), st.integers(1, 200)),
    ),
    max_size=60,
)
KEYS = st.fixed_dictionaries(
    {
        "algorithm_type": st.sampled_from(["predicted", "load_balance"]),
        "scheduler_type": st.sampled_from(["digs_scheduler", "digs_scheduler", "default_scheduler"]),
        "separate": st.sampled_from(["auto", "always", "never"]),
        "reordering_type": st.integers(1, 3),
        "select_type": st.integers(1, 2),
        "single_node_max_requests": st.integers(1, 5),
        "max_schedule_count": st.integers(1, 5),
        "fallback": st.booleans(),
        "slo_ttft": st.sampled_from([0.001, 1.0]),
    }
)


@given(ROLES, STEPS, KEYS)
@settings(max_examples=150, deadline=None)
async def test_random_schedules_release_everything_once(roles, steps, keys):
    """Cancels, losses, restarts and role changes in random order must not leak slots, blocks or tasks."""
    clock = Clock()
    table, choice = cluster(*roles, clock=clock, **keys)
    everyone: list[Instance] = list(table)
    for each in everyone:
        each.slots, each.blocks = 4, 200
    asked: list[asyncio.Task] = []
    for action, number in steps:
        chosen = [each.result() for each in asked if each.done() and not each.cancelled() and not each.exception()]
        instance = everyone[number % len(everyone)]
        match action:
            case "ask":
                wanted = Wanted(number, attempt=number % 2, avoid=frozenset([1]) if number % 5 == 0 else frozenset())
                asked.append(asyncio.ensure_future(choice.choose(wanted)))
            case "cancel" if asked:
                asked[number % len(asked)].cancel()
            case "first" | "token" if chosen:
                getattr(chosen[number % len(chosen)], action)()
            case "end" | "fail" if chosen:
                chosen[number % len(chosen)].end(action == "end")
            case "lose" if table.get(instance.id) is instance:
                lose(table, instance)
            case "fault":
                table.fault(instance)
            case "answer" | "restart" if table.get(instance.id) is instance:
                up(table, instance, epoch="e1" if action == "answer" else f"e{clock.now}")
            case "offline" | "online":
                table.withhold(instance, action == "offline")
            case "remove":
                table.remove(instance.id)
            case "wait":
                clock.now += number
        if number % 3:
            await asyncio.sleep(0)
        for each in everyone:
            assert each.tasks >= 0 and each.prefill.slots >= 0 and each.decode.blocks >= 0
    await asyncio.sleep(0)
    assert choice.waiting <= choice.options.max_schedule_count
    for each in asked:
        each.cancel()
    ended = await asyncio.gather(*asked, return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException):
            assert isinstance(each, Refused | asyncio.CancelledError)
        else:
            each.end(False)
    assert choice.open == choice.waiting == 0
    for each in everyone:
        assert each.tasks == 0
        for side in (each.prefill, each.decode):
            assert (side.slots, side.blocks, side.tokens, side.lengths) == (0, 0, 0, [])


@pytest.mark.parametrize(("kind", "order"), [(1, [30, 10, 20]), (2, [10, 20, 30]), (3, [30, 20, 10])])
async def test_waiting_requests_are_served_in_the_configured_order(kind, order):
    _, choice = cluster("mixed", reordering_type=kind, single_node_max_requests=1)
    first = await choice.choose(Wanted(5))
    got: list[int] = []

    async def one(length):
        chosen = await choice.choose(Wanted(length))
        got.append(length)
        chosen.end()

    waiting = [asyncio.ensure_future(one(length)) for length in (30, 10, 20)]
    await asyncio.sleep(0)
    first.end()
    await asyncio.gather(*waiting)
    assert got == order


async def test_refuses_requests_that_wait_too_long_or_meet_a_full_queue():
    _, choice = cluster("mixed", single_node_max_requests=1, schedule_timeout=0.05, max_schedule_count=2)
    await choice.choose(Wanted(5))
    tasks = [
        asyncio.ensure_future(choice.choose(wanted)) for wanted in (Wanted(5), Wanted(5, deadline=0.01), Wanted(5))
    ]
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    said = [(each.status, each.text) for each in ended if isinstance(each, Refused)]
    assert said == [(408, "Request schedule timeout"), (429, "Too many requests"), (429, "Too many requests")]
    assert choice.waiting == 0


async def test_busy_model_does_not_delay_requests_for_other_models():
    """A full queue for one model must not block the whole queue."""
    table, choice = cluster("mixed", "mixed", single_node_max_requests=1)
    for each, model in zip(table, ("a", "b"), strict=True):
        up(table, each, models=[model])
    await choice.choose(Wanted(5, model="a"))
    waiting = asyncio.ensure_future(choice.choose(Wanted(5, model="a")))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        assert (await choice.choose(Wanted(5, model="b"))).p.id == 2
    waiting.cancel()


async def test_waiting_requests_are_placed_when_an_instance_returns():
    table, choice = cluster("prefill", "decode")
    lose(table, table.instances[1])
    lose(table, table.instances[2])
    waiting = asyncio.ensure_future(choice.choose(Wanted(5, attempt=1)))
    await asyncio.sleep(0)
    assert choice.waiting == 1
    up(table, table.instances[2])
    async with asyncio.timeout(1):
        assert (await waiting).p.id == 2


async def test_load_is_spread_evenly_and_prefill_is_freed_at_first_token():
    table, choice = cluster("prefill", "prefill", "decode", "decode", "decode", algorithm_type="load_balance")
    got = [await choice.choose(Wanted(100)) for _ in range(12)]
    assert Counter(each.p.id for each in got) == {1: 6, 2: 6}
    assert Counter(each.d.id for each in got) == {3: 4, 4: 4, 5: 4}
    for each in got:
        each.first()
        each.first()
    assert [each.tasks for each in table] == [0, 0, 4, 4, 4]
    for each in got:
        with each:
            each.token()
    assert [each.tasks for each in table] == [0] * 5
    assert choice.tally.ended.counts == {"ok": 12, "failed": 0}
