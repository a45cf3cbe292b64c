"""Placement of requests: the documented formulas against a naive reading of them, and parley's own additions."""

import asyncio
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.simulated_cluster import Clock, cluster, lose, up

from parley.coordinator.ports.metrics import Metrics
from parley.coordinator.routing.admission import Refused
from parley.coordinator.routing.health import Unanswered
from parley.coordinator.routing.load import Demand, token_sum
from parley.coordinator.routing.policies import Wanted
from parley.disagg.wire.prompt_hash import Mark, Turns

LOADS = st.lists(st.lists(st.integers(1, 400), max_size=5), min_size=5, max_size=5)


def fill(choice, table, loads):
    """Charge requests of these lengths to each instance, on the side that its role uses."""
    for instance, lengths in zip(table, loads, strict=True):
        for length in lengths:
            blocks = math.ceil(length / instance.block_size)
            side = instance.prefill if instance.role == "prefill" else instance.decode
            side.charge(Demand(1, blocks, length, length))


def naive_tokens(lengths, cores=24, halved=6, fixed=0.22 * 1024):
    left = sorted(lengths)
    total = 0.0
    while len(left) >= cores:
        round = [left.pop() for _ in range(cores)]
        total += max(round) + fixed
    pieces = []
    idle, count = cores - len(left), 0
    while left:
        longest = left.pop()
        if idle > 0 and count < halved:
            pieces += [longest / 2, longest / 2]
            idle, count = idle - 1, count + 1
        else:
            pieces.append(longest)
    return total + (max(pieces) + fixed if pieces else 0)


@given(st.lists(st.integers(1, 5000), max_size=120))
def test_token_sum_matches_the_naive_formula(lengths):
    assert token_sum(lengths, 24, 6, 0.22 * 1024) == pytest.approx(naive_tokens(lengths))


@given(LOADS, st.integers(1, 500), st.lists(st.integers(0, 2), min_size=9, max_size=9), st.lists(st.integers(0, 99)))
@settings(max_examples=60)
async def test_load_balance_picks_the_documented_minimum(loads, length, weights, used):
    a, m, r, b, c = weights[0], *weights[5:]
    coefficient = [a, 0.22, 1024, 24, 6, m, r, b, c]
    roles = ("prefill", "prefill", "decode", "decode", "decode")
    table, choice = cluster(*roles, algorithm_type="load_balance", load_cost_coefficient=coefficient)
    fill(choice, table, loads)
    for instance, count in zip(table, used, strict=False):
        instance.avail_blocks = instance.blocks - count
    p_loads, d_loads = {}, {}
    for each, lengths in zip(table, loads, strict=True):
        blocks = sum(math.ceil(n / 16) for n in [*lengths, length])
        if each.role == "prefill":
            p_loads[each.id] = len(lengths) + 1 + blocks
        else:
            longest = max(lengths, default=0)
            most = lengths.count(longest) + (length >= longest)
            d_loads[each.id] = a * naive_tokens([*lengths, length]) + m * most + r * each.used + b * (len(lengths) + 1)
            d_loads[each.id] += c * blocks
    chosen = await choice.choose(Wanted(length=length))
    assert p_loads[chosen.p.id] == min(p_loads.values())
    assert d_loads[chosen.d.id] == pytest.approx(min(d_loads.values()))
    assert chosen.separate
    chosen.end()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=40))
async def test_cache_affinity_follows_conversations_or_takes_turns(steps):
    """Against a second implementation of the documented scheme; each step adds some turns to conversation k."""
    _, choice = cluster("mixed", "mixed", "mixed", algorithm_type="cache_affinity", cache_size=4)
    counts = dict.fromkeys(range(4), 0)
    held: dict[tuple[int, int], int] = {}
    turn = 0
    for talk, more in steps:
        counts[talk] += more
        count = counts[talk]
        key, before = hash((talk, count)), hash((talk, count - 2))
        chosen = await choice.choose(Wanted(10, turns=Turns(count, key, before)))
        if count > 2 and before in held:
            expected = held.pop(before)
        else:
            expected = turn = turn % 3 + 1
        held.pop(key, None)
        held[key] = expected
        while len(held) > 4:
            del held[next(iter(held))]
        assert chosen.p.id == chosen.d.id == expected
        chosen.end()


async def test_full_instance_loses_its_conversations():
    _, choice = cluster("mixed", "mixed", algorithm_type="cache_affinity")
    first = await choice.choose(Wanted(10, turns=Turns(1, 11, 0)))
    first.p.avail_slots = int(0.05 * first.p.slots)
    second = await choice.choose(Wanted(10, turns=Turns(3, 33, 11)))
    assert second.p is not first.p


async def test_round_robin_skips_removed_instances():
    table, choice = cluster("prefill", "prefill", "prefill", "decode", "decode", scheduler_type="default_scheduler")
    got = []
    for k in range(7):
        if k == 4:
            table.remove(2)
        chosen = await choice.choose(Wanted(10))
        got.append((chosen.p.id, chosen.d.id))
    assert got == [(1, 4), (2, 5), (3, 4), (1, 5), (3, 4), (1, 5), (3, 4)]


async def test_pairs_only_linked_instances_of_one_group_and_layout():
    table, choice = cluster("prefill", "prefill", "decode", "decode", algorithm_type="load_balance")
    one, two, three, four = table
    one.group = three.group = 1
    two.layout, four.layout = "x", "y"
    for _ in range(3):
        chosen = await choice.choose(Wanted(10))
        assert (chosen.p.id, chosen.d.id) == (1, 3)
    four.layout, two.peers = "x", frozenset([3])
    assert {(await choice.choose(Wanted(10))).p.id for _ in range(8)} == {1}


async def test_resumes_only_where_the_layout_is_equal_or_unknown():
    """Tokens of other weights must never continue an answer."""
    table, choice = cluster("mixed", "mixed", "mixed")
    for each, layout in zip(table, ("model=1", "model=2", ""), strict=True):
        up(table, each, layout=layout)
    for _ in range(6):
        chosen = await choice.choose(Wanted(10, layout="model=2", attempt=1, avoid=frozenset([2])))
        assert chosen.p.id == 3
        assert (await choice.choose(Wanted(10, layout="model=1", attempt=1, avoid=frozenset([3])))).p.id == 1
    table.remove(3)
    with pytest.raises(Refused) as refused:
        await choice.choose(Wanted(10, layout="model=3", attempt=1, avoid=frozenset([3])))
    assert refused.value.status == 500


async def test_chooses_instances_with_the_model_or_any_if_none_has_it():
    table, choice = cluster("mixed", "mixed")
    one, two = table
    up(table, one, models=["a"])
    up(table, two, models=["a", "lora"])
    assert {(await choice.choose(Wanted(10, model="lora"))).p.id for _ in range(4)} == {2}
    assert (await choice.choose(Wanted(10, model="unknown"))).p.id in (1, 2)


async def test_flex_instance_divides_its_slots_between_both_roles():
    table, choice = cluster("flex", "decode", algorithm_type="load_balance", select_type=2, res_limit_rate=1.0)
    flex, d = table
    flex.slots, flex.p_percentage = 10, 30
    d.slots = 1
    got = []
    for _ in range(3):
        chosen = await choice.choose(Wanted(1))
        got.append((chosen.p.id, chosen.d.id))
    assert [p for p, _ in got] == [1, 1, 1] and {d for _, d in got} == {1, 2}
    waiting = asyncio.ensure_future(choice.choose(Wanted(1)))
    await asyncio.sleep(0)
    assert choice.waiting == 1 and not waiting.done()  # three of the ten slots are for prefill
    waiting.cancel()


async def test_cached_prefix_attracts_requests_unless_its_queue_is_longer():
    clock = Clock()
    table, choice = cluster("mixed", "mixed", clock=clock)
    _, two = table
    for each in table:
        for tokens in (100, 1000):
            each.prefill.pace.observe(tokens, tokens / 1000)
    marks = [Mark(500, 1), Mark(900, 2)]
    up(table, two, prefix_hash=[1, 2])
    chosen = await choice.choose(Wanted(1000, marks))
    assert chosen.p.id == 2
    busy = await choice.choose(Wanted(5000, [Mark(5000, 9)]))
    busy2 = await choice.choose(Wanted(5000, [Mark(5000, 8)]))
    assert {busy.p.id, busy2.p.id} == {1, 2}
    busy.end() if busy.p.id == 1 else busy2.end()
    chosen = await choice.choose(Wanted(1000, marks))
    assert chosen.p.id == 1  # computing it all takes 1 s here; there 0.1 s, after a queue of 5 s


async def test_short_prompts_stay_on_decode_and_long_ones_are_separated():
    table, choice = cluster("prefill", "decode")
    first = await choice.choose(Wanted(10))
    assert first.separate  # no measurements yet
    p, d = table
    for tokens in (100, 1000):
        p.prefill.pace.observe(tokens, tokens / 1000)
        d.decode.pace.observe(tokens, 0.1)  # a handover takes 0.1 s
    first.end()
    short, long = await choice.choose(Wanted(40)), await choice.choose(Wanted(400))
    assert not short.separate and short.p.id == short.d.id == 2
    assert long.separate
    cached = await choice.choose(Wanted(400, [Mark(390, 7)]))
    assert cached.separate
    up(table, d, prefix_hash=[7])
    short.first()
    assert not (await choice.choose(Wanted(400, [Mark(390, 7)]))).separate
    table, choice = cluster("prefill", "decode", separate="never")
    assert not (await choice.choose(Wanted(4000))).separate


async def test_missing_role_refuses_requests_but_retries_run_whole():
    table, choice = cluster("prefill", "decode")
    table.instances[2].lost = True
    with pytest.raises(Refused) as told:
        await choice.choose(Wanted(10))
    assert (told.value.status, told.value.text) == (503, "MindIE-MS Coordinator is not ready")
    again = await choice.choose(Wanted(10, attempt=1))
    assert again.p is again.d is table.instances[1]
    table, choice = cluster("prefill", "decode", fallback=True)
    table.instances[1].lost = True
    assert not (await choice.choose(Wanted(10))).separate


async def test_refuses_requests_that_would_miss_the_ttft_limit():
    table, choice = cluster("mixed", slo_ttft=2.0)
    (one,) = table
    for tokens in (100, 1000):
        one.prefill.pace.observe(tokens, tokens / 1000)
    held = [await choice.choose(Wanted(900)) for _ in range(2)]
    with pytest.raises(Refused) as told:
        await choice.choose(Wanted(900))  # 0.9 s by itself, after a queue of 1.8 s
    assert (told.value.status, told.value.text) == (429, "Too many requests")
    assert told.value.retry_after is not None and told.value.retry_after >= 1
    for each in held:
        each.end()
    long = await choice.choose(Wanted(4000))  # takes longer than that even without a queue
    assert long.p is one
    with pytest.raises(Refused):
        await choice.choose(Wanted(3000))
    assert choice.tally.refusals.counts["429"] == 2


async def test_refuses_requests_that_would_miss_their_own_deadline():
    table, choice = cluster("mixed")
    (one,) = table
    for tokens in (100, 1000):
        one.prefill.pace.observe(tokens, tokens / 1000)
    await choice.choose(Wanted(1000))
    with pytest.raises(Refused):
        await choice.choose(Wanted(1000, deadline=1.5))
    assert await choice.choose(Wanted(1000, deadline=2.5))


async def test_goodput_is_the_share_of_ended_requests_in_time():
    clock = Clock()
    table, choice = cluster("mixed", clock=clock, slo_ttft=1.0, slo_tpot=0.1)

    async def one(first, each):
        with await choice.choose(Wanted(10)) as chosen:
            clock.now += first
            chosen.first()
            for _ in range(5):
                clock.now += each
                chosen.token()

    assert choice.goodput == 0.0
    await one(0.5, 0.05)
    assert choice.goodput == 1.0
    await one(2.0, 0.05)
    assert choice.goodput == 0.5
    await one(0.5, 0.2)
    open = await choice.choose(Wanted(10))
    assert choice.goodput == pytest.approx(1 / 3)
    open.end(False)
    assert choice.goodput == 1 / 4
    lose(table, table.instances[1])
    with pytest.raises(Refused):
        await choice.choose(Wanted(10))
    assert choice.goodput == 1 / 5


async def test_retry_avoids_failed_instances_if_another_exists():
    table, choice = cluster("mixed", "mixed")
    for _ in range(4):
        assert (await choice.choose(Wanted(10, avoid=frozenset([1]), attempt=1))).p.id == 2
    table.remove(2)
    assert (await choice.choose(Wanted(10, avoid=frozenset([1]), attempt=1))).p.id == 1


async def test_unmeasured_instance_is_not_flooded():
    table, choice = cluster("mixed", "mixed")
    one, _ = table
    for tokens in (100, 1000):
        one.prefill.pace.observe(tokens, tokens / 1000)
    got = [(await choice.choose(Wanted(100))).p.id for _ in range(10)]
    assert got.count(1) == got.count(2) == 5


async def test_chooses_only_ready_instances():
    table, choice = cluster("mixed", "mixed")
    one, two = table
    up(table, one, ready=False)
    assert {(await choice.choose(Wanted(10))).p.id for _ in range(4)} == {2}
    up(table, one, ready=True)
    table.status(two, {"service": {"roleStatus": "RoleSwitching"}, "parley": {"role": "mixed"}})
    assert {(await choice.choose(Wanted(10))).p.id for _ in range(4)} == {1}
    news = []
    table.watchers.append(lambda instance, what: news.append((instance.id, what)))
    up(table, two, ready=False)
    up(table, two, ready=True)
    assert news == [(2, "ready")]
    table.remove(2)
    table.attach(one, False)
    with pytest.raises(Refused):
        await choice.choose(Wanted(10))


MEMBERS = (
    "service resource parley currentRole roleStatus p_percentage epoch role models prefix_hash transfers slots "
    "block_size totalNpuBlockNums prefill_rate peer ready"
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
SAID = st.recursive(
    LEAVES, lambda each: st.lists(each) | st.dictionaries(st.sampled_from(MEMBERS.split()), each), max_leaves=10
)


@given(SAID)
@settings(max_examples=25, deadline=None)
@example({"prefill_rate": 10**400, "transfers": {"bytes": 10**400}})
async def test_placement_survives_arbitrary_status_answers(said):
    table, choice = cluster("mixed", "mixed")
    one, _ = table
    if isinstance(said, dict):
        table.status(one, said)
        for member in ("service", "resource", "parley"):
            table.status(one, {member: said})
    (await choice.choose(Wanted(10, [Mark(10, 1)], model="a"))).end()
    assert Metrics(table, choice, silent).own()


async def silent(url, method="GET", body=b"", timeout=5.0):
    raise Unanswered


async def test_refuses_requests_that_would_miss_the_tpot_limit():
    clock = Clock()
    table, choice = cluster("prefill", "decode", clock=clock, slo_tpot=0.05, separate="always")
    d = table.instances[2].decode
    for tasks in (1, 2, 3, 4, 5):
        d.rhythm.observe(tasks, tasks / 100)  # a fifth request makes it 0.05 s
    d.stay = 10.0
    held = [await choice.choose(Wanted(10)) for _ in range(5)]
    with pytest.raises(Refused) as told:
        await choice.choose(Wanted(10))
    assert (told.value.status, told.value.retry_after) == (429, 2)
    (await choice.choose(Wanted(10, attempt=1))).end()
    for tokens in (100, 1000):
        table.instances[1].prefill.pace.observe(tokens, tokens / 100)
    late = await choice.choose(Wanted(900))  # most requests will have ended when its prefill is done
    late.end()
    held.pop().end()
    assert await choice.choose(Wanted(10))


async def test_times_of_requests_feed_the_cost_models():
    clock = Clock()
    table, choice = cluster("prefill", "decode", clock=clock)
    p, d = table
    for length in (100, 400, 1000):
        with await choice.choose(Wanted(length)) as chosen:
            clock.now += length / 500
            chosen.first()
            clock.now += 0.21
            for _ in range(11):
                chosen.token()
                clock.now += 0.01
    assert p.prefill.pace.predict(500) == pytest.approx(1.0, rel=0.01)
    assert d.decode.pace.predict(500) == pytest.approx(0.21, abs=0.02)
    assert d.decode.cadence == pytest.approx(0.01)
    assert d.decode.stay > 0.3


async def test_tries_handovers_of_short_prompts_from_time_to_time():
    """Without occasional trials, one bad measurement would rule out handovers for good."""
    table, choice = cluster("prefill", "decode")
    p, d = table
    for tokens in (100, 1000):
        p.prefill.pace.observe(tokens, tokens / 1000)
        d.decode.pace.observe(tokens, 100.0)  # measured during a fault
    got = []
    for _ in range(100):
        chosen = await choice.choose(Wanted(50))
        got.append(chosen.separate)
        chosen.end()
    assert 0 < got.count(True) < 10


async def test_decode_that_refuses_handovers_is_paused_longer_each_time():
    clock = Clock()
    table, choice = cluster("prefill", "decode", "decode", clock=clock)

    async def ask(refused=()):
        with await choice.choose(Wanted(10)) as chosen:
            if chosen.separate and chosen.d.id in refused:
                chosen.refused()
            else:
                clock.now += 0.01
                chosen.first()
                chosen.token()
        return chosen.d.id if chosen.separate else 0

    got = [await ask({2}) for _ in range(6)]
    assert got == [2, 2, 2, 3, 3, 3]
    table.remove(3)
    assert await ask({2}) == 0  # unseparated, on one of the two
    waits = []
    for _ in range(600):
        clock.now += 0.1
        if await ask({2}) == 2:
            waits.append(clock.now)
    assert 3 < len(waits) < 10  # each pause is longer than the one before
    clock.now += 60
    assert await ask() == 2 and not table.instances[1].refusals


async def test_only_decode_instance_gets_handovers_despite_refusals():
    table, choice = cluster("prefill", "decode", separate="always")
    for _ in range(9):
        with await choice.choose(Wanted(10)) as chosen:
            assert chosen.separate
            chosen.refused()
    assert table.instances[1].apart(table.instances[2], choice.table.clock())


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
    lack = cluster(*roles, **keys)[0].lack()
    assert bool(lack) == bool(parts) and all(part in lack for part in parts)


def test_names_instances_with_different_kv_layouts():
    table, _ = cluster("prefill", "decode")
    for each, pages in zip(table, ("pages=16 plain", "pages=16 int8"), strict=True):
        up(table, each, layout=f"model=1;{pages}")
    assert not table.ready() and "1 and 2" in table.lack() and "pages 16 plain and 16 int8." in table.lack()
