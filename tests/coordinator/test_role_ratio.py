"""The split between prefill and decode, in simulated time: it reaches the best one and stays there."""

import random
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from parley.coordinator.routing.role_ratio import (
    BETTER_BELOW,
    SHARE_STEP,
    FlexShares,
    RoleLoad,
    RoleRatio,
    best_split,
    fixed_split,
)

AMOUNT = st.floats(0, 50)


@given(st.integers(2, 40), AMOUNT, AMOUNT)
def test_split_minimizes_the_load_of_the_busiest_role(instances, prefill, decode):
    work = RoleLoad(prefill, decode)
    p = best_split(instances, work)
    assert 1 <= p < instances
    least = min(max(prefill / k, decode / (instances - k)) for k in range(1, instances))
    assert max(prefill / p, decode / (instances - p)) <= least + 1e-6


def test_configured_ratio_is_rounded_to_whole_instances():
    assert [fixed_split(n, 1, 3) for n in (2, 3, 4, 8, 9)] == [1, 1, 1, 2, 2]
    assert fixed_split(4, 100, 1) == 3


def simulate(ratio, p, d, work, seconds, now=0.0, noise=0.0, seed=0):
    """Let time pass with the load ``work(now)``. Returns the split and the changes with their times."""
    draw, changes = random.Random(seed), []
    for _ in range(int(seconds)):
        now += 1
        amounts = work(now)
        ratio.observe_load(now, RoleLoad(*(max(0.0, value * (1 + draw.uniform(-noise, noise))) for value in amounts)))
        step = ratio.next_role_step(now, p, d)
        if step:
            p, d = p + step, d - step
            changes.append((now, step))
        assert p >= 1 and d >= 1
    return p, d, changes


@given(st.integers(3, 16), st.integers(0, 14), st.floats(0.5, 15), st.floats(0.5, 15), st.integers(0, 2**32))
@example(7, 4, 11.0, 4.5, 676)  # the first measurements are far off
@settings(max_examples=20, deadline=None)
def test_role_ratio_converges_without_oscillation(instances, first, prefill, decode, seed):
    before = p = 1 + first % (instances - 1)
    work = RoleLoad(prefill, decode)
    p, d, changes = simulate(RoleRatio(30), p, instances - p, lambda now: work, 4000, noise=0.5, seed=seed)
    assert len({step for _, step in changes}) <= 1  # never there and back
    best = best_split(instances, work)
    assert len(changes) <= abs(best - before) + 1  # with noisy measurements two splits may look alike
    if work.busier_utilization(p, d) >= 0.5:  # the rest of the way to the best is worth less than a change
        near = (best > p) - (best < p)
        assert not near or work.busier_utilization(p + near, d - near) > 0.9 * BETTER_BELOW * work.busier_utilization(
            p, d
        )


def test_role_ratio_changes_at_most_once_per_period():
    *_, changes = simulate(RoleRatio(300), 1, 7, lambda now: RoleLoad(6, 1), 4000)
    times = [now for now, _ in changes]
    assert times and times[0] >= 300
    assert all(later - earlier >= 300 for earlier, later in pairwise(times))


def test_role_ratio_follows_lasting_but_not_flickering_load():
    def day(now):
        return RoleLoad(4, 1) if now < 5000 else RoleLoad(1, 4)

    p, d, changes = simulate(RoleRatio(120), 3, 3, day, 10_000)
    assert p < d and {step for _, step in changes} == {1, -1}
    assert (
        simulate(RoleRatio(120), 3, 3, lambda now: RoleLoad(4, 1) if now % 100 < 50 else RoleLoad(1, 4), 10_000)[2]
        == []
    )


def test_role_ratio_keeps_roles_at_low_load_and_the_last_of_each():
    assert simulate(RoleRatio(10), 1, 5, lambda now: RoleLoad(0.2, 0), 1000)[2] == []
    assert simulate(RoleRatio(10), 1, 1, lambda now: RoleLoad(9, 0), 1000)[2] == []


def simulate_share(shares, p, d, share, work, seconds, noise=0.0, seed=0):
    """Simulate one flex instance next to ``p`` and ``d`` others with the load ``work(now, share)``.

    Returns all shares it had.
    """
    draw, history = random.Random(seed), [share]
    shares.observe_load(0, RoleLoad(0, 0))
    for now in range(1, int(seconds) + 1):
        amounts = work(now, history[-1] / 100)
        shares.observe_load(now, RoleLoad(*(value * (1 + draw.uniform(-noise, noise)) for value in amounts)))
        change = shares.next_share(now, [history[-1]], p + history[-1] / 100, d + 1 - history[-1] / 100)
        if change is not None:
            history.append(change[1])
    return history


@given(
    st.integers(0, 3), st.integers(0, 3), st.integers(1, 99), st.floats(0.2, 5), st.floats(0.2, 5), st.booleans(),
    st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_flex_shares_balance_both_roles_without_oscillation(p, d, initial_share, prefill, decode, slows, seed):
    """This also holds if answers take longer when decode gets less time."""

    def work(now, part):
        return RoleLoad(prefill, decode / (d + 1 - part) if slows else decode)

    history = simulate_share(FlexShares(30, 30), p, d, initial_share, work, 1500, noise=0.3, seed=seed)
    steps = [after - before for before, after in pairwise(history)]
    assert all(0 < abs(step) <= SHARE_STEP for step in steps)
    turns = sum(before * after < 0 for before, after in pairwise(steps))
    assert turns <= slows and len(steps) <= 19 + turns  # once: how long answers take is known late
    last = history[-1] / 100

    def prefill_excess(part):
        """Return by how much prefill is busier than decode."""
        return work(0, part).prefill / (p + part) / (work(0, part).decode / (d + 1 - part))

    if work(0, last).busier_utilization(p + last, d + 1 - last) >= 0.4:
        assert (
            prefill_excess(last) <= 1.1
            or prefill_excess(min(0.999, last + 2 * SHARE_STEP / 100)) < 1.1
            or history[-1] + SHARE_STEP > 100 - SHARE_STEP
        )
        assert (
            prefill_excess(last) >= 0.9
            or prefill_excess(max(0.001, last - 2 * SHARE_STEP / 100)) > 0.9
            or history[-1] - SHARE_STEP < SHARE_STEP
        )


def test_flex_share_follows_lasting_but_not_flickering_work():
    def day(now, part):
        return RoleLoad(0.6, 0.1) if now < 1000 else RoleLoad(0.1, 0.6)

    history = simulate_share(FlexShares(30, 30), 0, 0, 50, day, 3000)
    top = history.index(max(history))
    assert history[: top + 1] == sorted(history[: top + 1]) and history[top:] == sorted(history[top:], reverse=True)
    assert history[top] >= 80 and history[-1] <= 20
    flicker = simulate_share(
        FlexShares(30, 30), 0, 0, 50, lambda now, part: RoleLoad(0.6, 0.3) if now % 10 < 5 else RoleLoad(0.3, 0.6), 3000
    )
    assert flicker == [50]
    assert simulate_share(FlexShares(30, 30), 0, 0, 50, lambda now, part: RoleLoad(0.1, 0.01), 1000) == [
        50
    ]  # too little load to matter


def test_flex_share_never_moves_to_0_or_100():
    for work, initial_share, end in (
        (RoleLoad(9, 0), 50, 95),
        (RoleLoad(0, 9), 50, 5),
        (RoleLoad(9, 0), 99, 99),
        (RoleLoad(0, 9), 1, 1),
    ):
        assert (
            simulate_share(FlexShares(1, 30), 0, 0, initial_share, lambda now, part, work=work: work, 1000)[-1] == end
        )
