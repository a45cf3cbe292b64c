"""Placement of requests: the documented formulas against a naive reading of them, and parley's own additions."""

import asyncio
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.simulated_cluster import ManualClock, lose_instance, report_status, simulated_cluster

from parley.coordinator.ports.metrics import MetricsPort
from parley.coordinator.routing.health import Unanswered
from parley.coordinator.routing.instance_scheduler import RequestRefused
from parley.coordinator.routing.load import ResourceDemand, token_sum
from parley.coordinator.routing.policies import SchedulingRequest
from parley.disagg.wire.prompt_hash import ConversationHashes, PrefixMark

REQUEST_LENGTHS = st.lists(st.lists(st.integers(1, 400), max_size=5), min_size=5, max_size=5)


def charge_requests(scheduler, table, loads):
    """Charge requests of these lengths to each instance, on the side that its role uses."""
    for instance, lengths in zip(table, loads, strict=True):
        for length in lengths:
            blocks = math.ceil(length / instance.block_size)
            side = instance.prefill if instance.role == "prefill" else instance.decode
            side.add_demand(ResourceDemand(1, blocks, length, length))


def naive_tokens(lengths, cores=24, halved=6, fixed=0.22 * 1024):
    remaining = sorted(lengths)
    total = 0.0
    while len(remaining) >= cores:
        batch = [remaining.pop() for _ in range(cores)]
        total += max(batch) + fixed
    pieces = []
    idle, count = cores - len(remaining), 0
    while remaining:
        longest = remaining.pop()
        if idle > 0 and count < halved:
            pieces += [longest / 2, longest / 2]
            idle, count = idle - 1, count + 1
        else:
            pieces.append(longest)
    return total + (max(pieces) + fixed if pieces else 0)


@given(st.lists(st.integers(1, 5000), max_size=120))
def test_token_sum_matches_the_naive_formula(lengths):
    assert token_sum(lengths, 24, 6, 0.22 * 1024) == pytest.approx(naive_tokens(lengths))


@given(
    REQUEST_LENGTHS,
    st.integers(1, 500),
    st.lists(st.integers(0, 2), min_size=9, max_size=9),
    st.lists(st.integers(0, 99)),
)
@settings(max_examples=60)
async def test_load_balance_picks_the_documented_minimum(loads, length, weights, used):
    a, m, r, b, c = weights[0], *weights[5:]
    coefficient = [a, 0.22, 1024, 24, 6, m, r, b, c]
    roles = ("prefill", "prefill", "decode", "decode", "decode")
    table, scheduler = simulated_cluster(*roles, algorithm_type="load_balance", load_cost_coefficient=coefficient)
    charge_requests(scheduler, table, loads)
    for instance, count in zip(table, used, strict=False):
        instance.avail_blocks = instance.blocks - count
    p_loads, d_loads = {}, {}
    for candidate, lengths in zip(table, loads, strict=True):
        blocks = sum(math.ceil(n / 16) for n in [*lengths, length])
        if candidate.role == "prefill":
            p_loads[candidate.id] = len(lengths) + 1 + blocks
        else:
            longest = max(lengths, default=0)
            most = lengths.count(longest) + (length >= longest)
            d_loads[candidate.id] = (
                a * naive_tokens([*lengths, length]) + m * most + r * candidate.used_blocks + b * (len(lengths) + 1)
            )
            d_loads[candidate.id] += c * blocks
    placement = await scheduler.place_request(SchedulingRequest(prompt_tokens=length))
    assert p_loads[placement.prefill_instance.id] == min(p_loads.values())
    assert d_loads[placement.decode_instance.id] == pytest.approx(min(d_loads.values()))
    assert placement.separate
    placement.close_placement()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=40))
async def test_cache_affinity_follows_conversations_or_takes_turns(steps):
    """Against a second implementation of the documented scheme; each step adds some turns to conversation k."""
    _, scheduler = simulated_cluster("mixed", "mixed", "mixed", algorithm_type="cache_affinity", cache_size=4)
    counts = dict.fromkeys(range(4), 0)
    expected_places: dict[tuple[int, int], int] = {}
    turn = 0
    for talk, more in steps:
        counts[talk] += more
        count = counts[talk]
        key, before = hash((talk, count)), hash((talk, count - 2))
        placement = await scheduler.place_request(
            SchedulingRequest(10, conversation=ConversationHashes(count, key, before))
        )
        if count > 2 and before in expected_places:
            expected = expected_places.pop(before)
        else:
            expected = turn = turn % 3 + 1
        expected_places.pop(key, None)
        expected_places[key] = expected
        while len(expected_places) > 4:
            del expected_places[next(iter(expected_places))]
        assert placement.prefill_instance.id == placement.decode_instance.id == expected
        placement.close_placement()


async def test_full_instance_loses_its_conversations():
    _, scheduler = simulated_cluster("mixed", "mixed", algorithm_type="cache_affinity")
    first = await scheduler.place_request(SchedulingRequest(10, conversation=ConversationHashes(1, 11, 0)))
    first.prefill_instance.avail_slots = int(0.05 * first.prefill_instance.slots)
    second = await scheduler.place_request(SchedulingRequest(10, conversation=ConversationHashes(3, 33, 11)))
    assert second.prefill_instance is not first.prefill_instance


async def test_round_robin_skips_removed_instances():
    table, scheduler = simulated_cluster(
        "prefill", "prefill", "prefill", "decode", "decode", scheduler_type="default_scheduler"
    )
    pairs = []
    for k in range(7):
        if k == 4:
            table.remove_instance(2)
        placement = await scheduler.place_request(SchedulingRequest(10))
        pairs.append((placement.prefill_instance.id, placement.decode_instance.id))
    assert pairs == [(1, 4), (2, 5), (3, 4), (1, 5), (3, 4), (1, 5), (3, 4)]


async def test_pairs_only_linked_instances_of_one_group_and_layout():
    table, scheduler = simulated_cluster("prefill", "prefill", "decode", "decode", algorithm_type="load_balance")
    one, two, three, four = table
    one.group = three.group = 1
    two.layout, four.layout = "x", "y"
    for _ in range(3):
        placement = await scheduler.place_request(SchedulingRequest(10))
        assert (placement.prefill_instance.id, placement.decode_instance.id) == (1, 3)
    four.layout, two.peers = "x", frozenset([3])
    assert {(await scheduler.place_request(SchedulingRequest(10))).prefill_instance.id for _ in range(8)} == {1}


async def test_resumes_only_where_the_layout_is_equal_or_unknown():
    """Tokens of other weights must never continue an answer."""
    table, scheduler = simulated_cluster("mixed", "mixed", "mixed")
    for instance, layout in zip(table, ("model=1", "model=2", ""), strict=True):
        report_status(table, instance, layout=layout)
    for _ in range(6):
        placement = await scheduler.place_request(
            SchedulingRequest(10, layout="model=2", earlier_attempts=1, failed_instances=frozenset([2]))
        )
        assert placement.prefill_instance.id == 3
        assert (
            await scheduler.place_request(
                SchedulingRequest(10, layout="model=1", earlier_attempts=1, failed_instances=frozenset([3]))
            )
        ).prefill_instance.id == 1
    table.remove_instance(3)
    with pytest.raises(RequestRefused) as refused:
        await scheduler.place_request(
            SchedulingRequest(10, layout="model=3", earlier_attempts=1, failed_instances=frozenset([3]))
        )
    assert refused.value.status == 500


async def test_chooses_instances_with_the_model_or_any_if_none_has_it():
    table, scheduler = simulated_cluster("mixed", "mixed")
    one, two = table
    report_status(table, one, models=["a"])
    report_status(table, two, models=["a", "lora"])
    assert {
        (await scheduler.place_request(SchedulingRequest(10, model="lora"))).prefill_instance.id for _ in range(4)
    } == {2}
    assert (await scheduler.place_request(SchedulingRequest(10, model="unknown"))).prefill_instance.id in (1, 2)


async def test_flex_instance_divides_its_slots_between_both_roles():
    table, scheduler = simulated_cluster(
        "flex", "decode", algorithm_type="load_balance", select_type=2, res_limit_rate=1.0
    )
    flex, d = table
    flex.slots, flex.p_percentage = 10, 30
    d.slots = 1
    pairs = []
    for _ in range(3):
        placement = await scheduler.place_request(SchedulingRequest(1))
        pairs.append((placement.prefill_instance.id, placement.decode_instance.id))
    assert [p for p, _ in pairs] == [1, 1, 1] and {d for _, d in pairs} == {1, 2}
    waiting = asyncio.ensure_future(scheduler.place_request(SchedulingRequest(1)))
    await asyncio.sleep(0)
    assert scheduler.queued_requests == 1 and not waiting.done()  # three of the ten slots are for prefill
    waiting.cancel()


async def test_cached_prefix_attracts_requests_unless_its_queue_is_longer():
    clock = ManualClock()
    table, scheduler = simulated_cluster("mixed", "mixed", clock=clock)
    _, two = table
    for instance in table:
        for tokens in (100, 1000):
            instance.prefill.time_model.add_observation(tokens, tokens / 1000)
    marks = [PrefixMark(500, 1), PrefixMark(900, 2)]
    report_status(table, two, prefix_hash=[1, 2])
    placement = await scheduler.place_request(SchedulingRequest(1000, marks))
    assert placement.prefill_instance.id == 2
    busy = await scheduler.place_request(SchedulingRequest(5000, [PrefixMark(5000, 9)]))
    busy2 = await scheduler.place_request(SchedulingRequest(5000, [PrefixMark(5000, 8)]))
    assert {busy.prefill_instance.id, busy2.prefill_instance.id} == {1, 2}
    busy.close_placement() if busy.prefill_instance.id == 1 else busy2.close_placement()
    placement = await scheduler.place_request(SchedulingRequest(1000, marks))
    assert placement.prefill_instance.id == 1  # computing it all takes 1 s here; there 0.1 s, after a queue of 5 s


async def test_short_prompts_stay_on_decode_and_long_ones_are_separated():
    table, scheduler = simulated_cluster("prefill", "decode")
    first = await scheduler.place_request(SchedulingRequest(10))
    assert first.separate  # no measurements yet
    p, d = table
    for tokens in (100, 1000):
        p.prefill.time_model.add_observation(tokens, tokens / 1000)
        d.decode.time_model.add_observation(tokens, 0.1)  # a handover takes 0.1 s
    first.close_placement()
    short, long = (
        await scheduler.place_request(SchedulingRequest(40)),
        await scheduler.place_request(SchedulingRequest(400)),
    )
    assert not short.separate and short.prefill_instance.id == short.decode_instance.id == 2
    assert long.separate
    cached = await scheduler.place_request(SchedulingRequest(400, [PrefixMark(390, 7)]))
    assert cached.separate
    report_status(table, d, prefix_hash=[7])
    short.report_first_token()
    assert not (await scheduler.place_request(SchedulingRequest(400, [PrefixMark(390, 7)]))).separate
    table, scheduler = simulated_cluster("prefill", "decode", separate="never")
    assert not (await scheduler.place_request(SchedulingRequest(4000))).separate


async def test_missing_role_refuses_requests_but_retries_run_whole():
    table, scheduler = simulated_cluster("prefill", "decode")
    table.instances[2].lost = True
    with pytest.raises(RequestRefused) as refused:
        await scheduler.place_request(SchedulingRequest(10))
    assert (refused.value.status, refused.value.text) == (503, "MindIE-MS Coordinator is not ready")
    retry = await scheduler.place_request(SchedulingRequest(10, earlier_attempts=1))
    assert retry.prefill_instance is retry.decode_instance is table.instances[1]
    table, scheduler = simulated_cluster("prefill", "decode", fallback=True)
    table.instances[1].lost = True
    assert not (await scheduler.place_request(SchedulingRequest(10))).separate


async def test_refuses_requests_that_would_miss_the_ttft_limit():
    table, scheduler = simulated_cluster("mixed", slo_ttft=2.0)
    (one,) = table
    for tokens in (100, 1000):
        one.prefill.time_model.add_observation(tokens, tokens / 1000)
    placements = [await scheduler.place_request(SchedulingRequest(900)) for _ in range(2)]
    with pytest.raises(RequestRefused) as refused:
        await scheduler.place_request(SchedulingRequest(900))  # 0.9 s by itself, after a queue of 1.8 s
    assert (refused.value.status, refused.value.text) == (429, "Too many requests")
    assert refused.value.retry_after is not None and refused.value.retry_after >= 1
    for placement in placements:
        placement.close_placement()
    long_request = await scheduler.place_request(SchedulingRequest(4000))  # takes longer than that even without a queue
    assert long_request.prefill_instance is one
    with pytest.raises(RequestRefused):
        await scheduler.place_request(SchedulingRequest(3000))
    assert scheduler.counters.refusals.by_label["429"] == 2


async def test_refuses_requests_that_would_miss_their_own_deadline():
    table, scheduler = simulated_cluster("mixed")
    (one,) = table
    for tokens in (100, 1000):
        one.prefill.time_model.add_observation(tokens, tokens / 1000)
    await scheduler.place_request(SchedulingRequest(1000))
    with pytest.raises(RequestRefused):
        await scheduler.place_request(SchedulingRequest(1000, deadline=1.5))
    assert await scheduler.place_request(SchedulingRequest(1000, deadline=2.5))


async def test_goodput_is_the_share_of_ended_requests_in_time():
    clock = ManualClock()
    table, scheduler = simulated_cluster("mixed", clock=clock, slo_ttft=1.0, slo_tpot=0.1)

    async def run_request(ttft, token_seconds):
        with await scheduler.place_request(SchedulingRequest(10)) as placement:
            clock.now += ttft
            placement.report_first_token()
            for _ in range(5):
                clock.now += token_seconds
                placement.report_tokens()

    assert scheduler.goodput_share == 0.0
    await run_request(0.5, 0.05)
    assert scheduler.goodput_share == 1.0
    await run_request(2.0, 0.05)
    assert scheduler.goodput_share == 0.5
    await run_request(0.5, 0.2)
    open_request = await scheduler.place_request(SchedulingRequest(10))
    assert scheduler.goodput_share == pytest.approx(1 / 3)
    open_request.close_placement(False)
    assert scheduler.goodput_share == 1 / 4
    lose_instance(table, table.instances[1])
    with pytest.raises(RequestRefused):
        await scheduler.place_request(SchedulingRequest(10))
    assert scheduler.goodput_share == 1 / 5


async def test_retry_avoids_failed_instances_if_another_exists():
    table, scheduler = simulated_cluster("mixed", "mixed")
    for _ in range(4):
        assert (
            await scheduler.place_request(SchedulingRequest(10, failed_instances=frozenset([1]), earlier_attempts=1))
        ).prefill_instance.id == 2
    table.remove_instance(2)
    assert (
        await scheduler.place_request(SchedulingRequest(10, failed_instances=frozenset([1]), earlier_attempts=1))
    ).prefill_instance.id == 1


async def test_unmeasured_instance_is_not_flooded():
    table, scheduler = simulated_cluster("mixed", "mixed")
    one, _ = table
    for tokens in (100, 1000):
        one.prefill.time_model.add_observation(tokens, tokens / 1000)
    placed_ids = [(await scheduler.place_request(SchedulingRequest(100))).prefill_instance.id for _ in range(10)]
    assert placed_ids.count(1) == placed_ids.count(2) == 5


async def test_chooses_only_ready_instances():
    table, scheduler = simulated_cluster("mixed", "mixed")
    one, two = table
    report_status(table, one, ready=False)
    assert {(await scheduler.place_request(SchedulingRequest(10))).prefill_instance.id for _ in range(4)} == {2}
    report_status(table, one, ready=True)
    table.record_status(two, {"service": {"roleStatus": "RoleSwitching"}, "parley": {"role": "mixed"}})
    assert {(await scheduler.place_request(SchedulingRequest(10))).prefill_instance.id for _ in range(4)} == {1}
    news = []
    table.watchers.append(lambda instance, what: news.append((instance.id, what)))
    report_status(table, two, ready=False)
    report_status(table, two, ready=True)
    assert news == [(2, "ready")]
    table.remove_instance(2)
    table.set_result_stream(one, False)
    with pytest.raises(RequestRefused):
        await scheduler.place_request(SchedulingRequest(10))


MEMBERS = (
    "service resource parley currentRole roleStatus p_percentage epoch role models prefix_hash transfers slots "
    "block_size totalNpuBlockNums prefill_rate peer ready"
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
STATUS_BODIES = st.recursive(
    LEAVES, lambda values: st.lists(values) | st.dictionaries(st.sampled_from(MEMBERS.split()), values), max_leaves=10
)


@given(STATUS_BODIES)
@settings(max_examples=25, deadline=None)
@example({"prefill_rate": 10**400, "transfers": {"bytes": 10**400}})
async def test_placement_survives_arbitrary_status_answers(status_body):
    table, scheduler = simulated_cluster("mixed", "mixed")
    one, _ = table
    if isinstance(status_body, dict):
        table.record_status(one, status_body)
        for member in ("service", "resource", "parley"):
            table.record_status(one, {member: status_body})
    (await scheduler.place_request(SchedulingRequest(10, [PrefixMark(10, 1)], model="a"))).close_placement()
    assert MetricsPort(table, scheduler, never_answers).own_series()


async def never_answers(url, method="GET", body=b"", timeout=5.0):
    raise Unanswered


async def test_refuses_requests_that_would_miss_the_tpot_limit():
    clock = ManualClock()
    table, scheduler = simulated_cluster("prefill", "decode", clock=clock, slo_tpot=0.05, separate="always")
    d = table.instances[2].decode
    for tasks in (1, 2, 3, 4, 5):
        d.token_model.add_observation(tasks, tasks / 100)  # a fifth request makes it 0.05 s
    d.stay_seconds = 10.0
    placements = [await scheduler.place_request(SchedulingRequest(10)) for _ in range(5)]
    with pytest.raises(RequestRefused) as refused:
        await scheduler.place_request(SchedulingRequest(10))
    assert (refused.value.status, refused.value.retry_after) == (429, 2)
    (await scheduler.place_request(SchedulingRequest(10, earlier_attempts=1))).close_placement()
    for tokens in (100, 1000):
        table.instances[1].prefill.time_model.add_observation(tokens, tokens / 100)
    late_decode = await scheduler.place_request(
        SchedulingRequest(900)
    )  # most requests will have ended when its prefill is done
    late_decode.close_placement()
    placements.pop().close_placement()
    assert await scheduler.place_request(SchedulingRequest(10))


async def test_times_of_requests_feed_the_cost_models():
    clock = ManualClock()
    table, scheduler = simulated_cluster("prefill", "decode", clock=clock)
    p, d = table
    for length in (100, 400, 1000):
        with await scheduler.place_request(SchedulingRequest(length)) as placement:
            clock.now += length / 500
            placement.report_first_token()
            clock.now += 0.21
            for _ in range(11):
                placement.report_tokens()
                clock.now += 0.01
    assert p.prefill.time_model.predict_cost(500) == pytest.approx(1.0, rel=0.01)
    assert d.decode.time_model.predict_cost(500) == pytest.approx(0.21, abs=0.02)
    assert d.decode.token_seconds == pytest.approx(0.01)
    assert d.decode.stay_seconds > 0.3


async def test_tries_handovers_of_short_prompts_from_time_to_time():
    """Without occasional trials, one bad measurement would rule out handovers for good."""
    table, scheduler = simulated_cluster("prefill", "decode")
    p, d = table
    for tokens in (100, 1000):
        p.prefill.time_model.add_observation(tokens, tokens / 1000)
        d.decode.time_model.add_observation(tokens, 100.0)  # measured during a fault
    separations = []
    for _ in range(100):
        placement = await scheduler.place_request(SchedulingRequest(50))
        separations.append(placement.separate)
        placement.close_placement()
    assert 0 < separations.count(True) < 10


async def test_decode_that_refuses_handovers_is_paused_longer_each_time():
    clock = ManualClock()
    table, scheduler = simulated_cluster("prefill", "decode", "decode", clock=clock)

    async def run_request(refused=()):
        with await scheduler.place_request(SchedulingRequest(10)) as placement:
            if placement.separate and placement.decode_instance.id in refused:
                placement.report_handover_refused()
            else:
                clock.now += 0.01
                placement.report_first_token()
                placement.report_tokens()
        return placement.decode_instance.id if placement.separate else 0

    decode_ids = [await run_request({2}) for _ in range(6)]
    assert decode_ids == [2, 2, 2, 3, 3, 3]
    table.remove_instance(3)
    assert await run_request({2}) == 0  # unseparated, on one of the two
    waits = []
    for _ in range(600):
        clock.now += 0.1
        if await run_request({2}) == 2:
            waits.append(clock.now)
    assert 3 < len(waits) < 10  # each pause is longer than the one before
    clock.now += 60
    assert await run_request() == 2 and not table.instances[1].handover_refusals


async def test_only_decode_instance_gets_handovers_despite_refusals():
    table, scheduler = simulated_cluster("prefill", "decode", separate="always")
    for _ in range(9):
        with await scheduler.place_request(SchedulingRequest(10)) as placement:
            assert placement.separate
            placement.report_handover_refused()
    assert table.instances[1].handover_paused(table.instances[2], scheduler.table.clock())


@pytest.mark.parametrize(
    ("roles", "keys", "parts"),
    [
        (("prefill", "decode"), {}, []),
        (("mixed",), {}, []),
        (("prefill",), {}, ["No instance decodes", "fallback"]),
        (("decode", "decode"), {}, ["No instance prefills"]),
        (("prefill", "decode"), {"deploy_mode": "single_node"}, ["single_node"]),
    ],
)
def test_explains_why_a_cluster_is_not_ready(roles, keys, parts):
    lack = simulated_cluster(*roles, **keys)[0].explain_lack()
    assert bool(lack) == bool(parts) and all(part in lack for part in parts)


def test_names_instances_with_different_kv_layouts():
    table, _ = simulated_cluster("prefill", "decode")
    for instance, pages in zip(table, ("pages=16 plain", "pages=16 int8"), strict=True):
        report_status(table, instance, layout=f"model=1;{pages}")
    assert (
        not table.is_cluster_ready()
        and "1 and 2" in table.explain_lack()
        and "pages 16 plain and 16 int8." in table.explain_lack()
    )
