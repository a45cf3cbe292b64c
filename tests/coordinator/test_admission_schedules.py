"""In any order of events, requests release all they hold exactly once, and none hangs."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_cluster import ManualClock, lose_instance, report_status, simulated_cluster

from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import RequestRefused
from parley.coordinator.routing.policies import SchedulingRequest

ROLES = st.lists(st.sampled_from(["mixed", "prefill", "decode", "flex"]), min_size=1, max_size=5)
EVENT_NUMBER = st.integers(0, 30)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 3000)),
        st.tuples(st.sampled_from(["cancel", "first token", "token", "end", "fail"]), EVENT_NUMBER),
        st.tuples(st.sampled_from(["lose", "fault", "answer", "restart", "offline", "online", "remove"]), EVENT_NUMBER),
        st.tuples(st.just("wait"), st.integers(1, 200)),
    ),
    max_size=60,
)
OPTION_KEYS = st.fixed_dictionaries(
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


@given(ROLES, EVENTS, OPTION_KEYS)
@settings(max_examples=150, deadline=None)
async def test_random_schedules_release_everything_once(roles, steps, keys):
    """Cancels, losses, restarts and role changes in random order must not leak slots, blocks or tasks."""
    clock = ManualClock()
    table, scheduler = simulated_cluster(*roles, clock=clock, **keys)
    instances: list[ClusterInstance] = list(table)
    for placed_instance in instances:
        placed_instance.slots, placed_instance.blocks = 4, 200
    placement_tasks: list[asyncio.Task] = []
    for action, number in steps:
        placements = [
            placement_task.result()
            for placement_task in placement_tasks
            if placement_task.done() and not placement_task.cancelled() and not placement_task.exception()
        ]
        instance = instances[number % len(instances)]
        match action:
            case "ask":
                request = SchedulingRequest(
                    number,
                    earlier_attempts=number % 2,
                    failed_instances=frozenset([1]) if number % 5 == 0 else frozenset(),
                    tenant=("", "a", "b")[number % 3],
                )
                placement_tasks.append(asyncio.ensure_future(scheduler.place_request(request)))
            case "cancel" if placement_tasks:
                placement_tasks[number % len(placement_tasks)].cancel()
            case "first token" if placements:
                placements[number % len(placements)].report_first_token()
            case "token" if placements:
                placements[number % len(placements)].report_tokens()
            case "end" | "fail" if placements:
                placements[number % len(placements)].close_placement(action == "end")
            case "lose" if table.get_instance(instance.id) is instance:
                lose_instance(table, instance)
            case "fault":
                table.mark_faulty(instance)
            case "answer" | "restart" if table.get_instance(instance.id) is instance:
                report_status(table, instance, epoch="e1" if action == "answer" else f"e{clock.now}")
            case "offline" | "online":
                table.set_instance_offline(instance, action == "offline")
            case "remove":
                table.remove_instance(instance.id)
            case "wait":
                clock.now += number
        if number % 3:
            await asyncio.sleep(0)
        for placed_instance in instances:
            assert (
                placed_instance.tasks >= 0 and placed_instance.prefill.slots >= 0 and placed_instance.decode.blocks >= 0
            )
    await asyncio.sleep(0)
    tenants = scheduler.queue.tenant_count  # a tenant below its share is accepted by a full queue
    assert scheduler.queued_requests <= scheduler.options.max_schedule_count * max(1, tenants)
    for placement_task in placement_tasks:
        placement_task.cancel()
    results = await asyncio.gather(*placement_tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            assert isinstance(result, RequestRefused | asyncio.CancelledError)
        else:
            result.close_placement(False)
    assert scheduler.open_requests == scheduler.queued_requests == 0
    for placed_instance in instances:
        assert placed_instance.tasks == 0
        for side in (placed_instance.prefill, placed_instance.decode):
            assert (side.slots, side.blocks, side.tokens, side.lengths) == (0, 0, 0, [])


@pytest.mark.parametrize(("kind", "order"), [(1, [30, 10, 20]), (2, [10, 20, 30]), (3, [30, 20, 10])])
async def test_waiting_requests_are_served_in_the_configured_order(kind, order):
    _, scheduler = simulated_cluster("mixed", reordering_type=kind, single_node_max_requests=1)
    first = await scheduler.place_request(SchedulingRequest(5))
    served_lengths: list[int] = []

    async def place_and_end(length):
        placement = await scheduler.place_request(SchedulingRequest(length))
        served_lengths.append(length)
        placement.close_placement()

    waiting = [asyncio.ensure_future(place_and_end(length)) for length in (30, 10, 20)]
    await asyncio.sleep(0)
    first.close_placement()
    await asyncio.gather(*waiting)
    assert served_lengths == order


async def test_refuses_requests_that_wait_too_long_or_meet_a_full_queue():
    _, scheduler = simulated_cluster("mixed", single_node_max_requests=1, schedule_timeout=0.05, max_schedule_count=2)
    await scheduler.place_request(SchedulingRequest(5))
    tasks = [
        asyncio.ensure_future(scheduler.place_request(request))
        for request in (SchedulingRequest(5), SchedulingRequest(5, deadline=0.01), SchedulingRequest(5))
    ]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refusals = [
        (result.status, result.text, result.retry_after) for result in results if isinstance(result, RequestRefused)
    ]
    assert refusals == [(408, "Request schedule timeout", 1)] + 2 * [(429, "Too many requests", 1)]
    assert scheduler.queued_requests == 0


async def test_busy_model_does_not_delay_requests_for_other_models():
    """A full queue for one model must not block the whole queue."""
    table, scheduler = simulated_cluster("mixed", "mixed", single_node_max_requests=1)
    for instance, model in zip(table, ("a", "b"), strict=True):
        report_status(table, instance, models=[model])
    await scheduler.place_request(SchedulingRequest(5, model="a"))
    waiting = asyncio.ensure_future(scheduler.place_request(SchedulingRequest(5, model="a")))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        assert (await scheduler.place_request(SchedulingRequest(5, model="b"))).prefill_instance.id == 2
    waiting.cancel()


async def test_waiting_requests_are_placed_when_an_instance_returns():
    table, scheduler = simulated_cluster("prefill", "decode")
    lose_instance(table, table.instances[1])
    lose_instance(table, table.instances[2])
    waiting = asyncio.ensure_future(scheduler.place_request(SchedulingRequest(5, earlier_attempts=1)))
    await asyncio.sleep(0)
    assert scheduler.queued_requests == 1
    report_status(table, table.instances[2])
    async with asyncio.timeout(1):
        assert (await waiting).prefill_instance.id == 2


async def test_load_is_spread_evenly_and_prefill_is_freed_at_first_token():
    table, scheduler = simulated_cluster(
        "prefill", "prefill", "decode", "decode", "decode", algorithm_type="load_balance"
    )
    placements = [await scheduler.place_request(SchedulingRequest(100)) for _ in range(12)]
    assert Counter(placement.prefill_instance.id for placement in placements) == {1: 6, 2: 6}
    assert Counter(placement.decode_instance.id for placement in placements) == {3: 4, 4: 4, 5: 4}
    for placement in placements:
        placement.report_first_token()
        placement.report_first_token()
    assert [instance.tasks for instance in table] == [0, 0, 4, 4, 4]
    for placement in placements:
        with placement:
            placement.report_tokens()
    assert [instance.tasks for instance in table] == [0] * 5
    assert scheduler.counters.ended.by_label == {"ok": 12, "failed": 0, "cancelled": 0}


async def serve_in_turn(scheduler, tenants: str, length: int = 10) -> str:
    """Queue a request of each tenant on a cluster with room for one; return the tenants in the order of service."""
    first = await scheduler.place_request(SchedulingRequest(5))
    server: list[str] = []

    async def place_and_end(tenant: str) -> None:
        with await scheduler.place_request(SchedulingRequest(length, tenant=tenant)):
            server.append(tenant)

    waiting = [asyncio.ensure_future(place_and_end(tenant)) for tenant in tenants]
    await asyncio.sleep(0)
    assert scheduler.queued_requests == len(tenants)
    first.close_placement()
    await asyncio.gather(*waiting)
    return "".join(server)


async def test_tenants_take_turns_in_the_queue():
    _, scheduler = simulated_cluster("mixed", single_node_max_requests=1)
    for tenant in "ab":
        scheduler.queue.accept_tenant(tenant)
    assert await serve_in_turn(scheduler, "aaaaabbb") == "abababaa"
    assert await serve_in_turn(scheduler, "aaaaaa") == "aaaaaa"
    assert await serve_in_turn(scheduler, "aaabbb") == "bababa"  # b gets no credit for the time without requests
    assert not scheduler.queue.tenant_count


async def test_a_tenant_with_long_prompts_gets_fewer_turns():
    _, scheduler = simulated_cluster("mixed", single_node_max_requests=1)
    for tenant in "ab":
        scheduler.queue.accept_tenant(tenant)
    first = await scheduler.place_request(SchedulingRequest(5))
    server: list[str] = []

    async def place_and_end(tenant: str, length: int) -> None:
        with await scheduler.place_request(SchedulingRequest(length, tenant=tenant)):
            server.append(tenant)

    lengths = [*[("a", 40)] * 3, *[("b", 10)] * 6]
    waiting = [asyncio.ensure_future(place_and_end(*tenant_length)) for tenant_length in lengths]
    await asyncio.sleep(0)
    first.close_placement()
    await asyncio.gather(*waiting)
    assert "".join(server) == "abbbbabba"


async def test_keys_that_no_instance_has_accepted_share_one_queue():
    _, scheduler = simulated_cluster("mixed", single_node_max_requests=1)
    scheduler.queue.accept_tenant("b")
    assert await serve_in_turn(scheduler, "uvwxyzbb") == "bubvwxyz"
    placement = await scheduler.place_request(SchedulingRequest(5, tenant="u"))
    placement.report_first_token()  # an instance has begun to answer
    placement.close_placement()
    assert scheduler.queue.line_of("u") == "u" and scheduler.queue.line_of("v") == ""


async def test_a_full_queue_accepts_a_tenant_below_its_share():
    _, scheduler = simulated_cluster("mixed", single_node_max_requests=1, max_schedule_count=4)
    for tenant in "ab":
        scheduler.queue.accept_tenant(tenant)
    await scheduler.place_request(SchedulingRequest(5))
    tasks = [asyncio.ensure_future(scheduler.place_request(SchedulingRequest(5, tenant="a"))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused):
        await scheduler.place_request(SchedulingRequest(5, tenant="a"))
    tasks += [asyncio.ensure_future(scheduler.place_request(SchedulingRequest(5, tenant="b"))) for _ in range(2)]
    await asyncio.sleep(0)
    assert scheduler.queued_requests == 6
    with pytest.raises(RequestRefused):
        await scheduler.place_request(SchedulingRequest(5, tenant="b"))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert scheduler.queued_requests == 0 and not scheduler.queue.tenant_count
