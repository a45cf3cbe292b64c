"""The split between prefill and decode, in a simulated clock: it gets where it should and stays there."""

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from parley.cluster.ratio import BETTER, Ratio, Work, shared, split

AMOUNT = st.floats(0, 50)


@given(st.integers(2, 40), AMOUNT, AMOUNT)
def test_no_other_split_is_less_busy(instances, prefill, decode):
    work = Work(prefill, decode)
    p = split(instances, work)
    assert 1 <= p < instances
    least = min(max(prefill / k, decode / (instances - k)) for k in range(1, instances))
    assert max(prefill / p, decode / (instances - p)) <= least + 1e-6


def test_a_given_ratio_is_kept_as_well_as_numbers_allow():
    assert [shared(n, 1, 3) for n in (2, 3, 4, 8, 9)] == [1, 1, 1, 2, 2]
    assert shared(4, 100, 1) == 3


def simulate(ratio, p, d, work, seconds, now=0.0, noise=0.0, seed=0):
    """Let time pass: ``work`` gives what there is to do at a time. The changes that were made, by when."""
    draw, changes = random.Random(seed), []
    for _ in range(int(seconds)):
        now += 1
        each = work(now)
        ratio.observe(now, Work(*(max(0.0, value * (1 + draw.uniform(-noise, noise))) for value in each)))
        step = ratio.change(now, p, d)
        if step:
            p, d = p + step, d - step
            changes.append((now, step))
        assert p >= 1 and d >= 1
    return p, d, changes


@given(st.integers(3, 16), st.floats(0.5, 15), st.floats(0.5, 15), st.integers(0, 2**32), st.data())
@settings(max_examples=20, deadline=None)
def test_it_converges_and_does_not_swing(instances, prefill, decode, seed, data):
    before = p = data.draw(st.integers(1, instances - 1))
    work = Work(prefill, decode)
    p, d, changes = simulate(Ratio(30), p, instances - p, lambda now: work, 4000, noise=0.5, seed=seed)
    assert len({step for _, step in changes}) <= 1  # never there and back
    best = split(instances, work)
    assert len(changes) <= abs(best - before) + 1  # measurements are not exact: two splits may be alike
    if work.utilisation(p, d) >= 0.5:  # short of the best by less than would be worth a change
        near = (best > p) - (best < p)
        assert not near or work.utilisation(p + near, d - near) > 0.9 * BETTER * work.utilisation(p, d)


def test_each_change_was_wanted_for_the_whole_period():
    *_, changes = simulate(Ratio(300), 1, 7, lambda now: Work(6, 1), 4000)
    times = [now for now, _ in changes]
    assert times and times[0] >= 300
    assert all(later - earlier >= 300 for earlier, later in pairwise(times))


def test_it_follows_a_load_that_changes_for_good_and_not_one_that_flickers():
    def day(now):
        return Work(4, 1) if now < 5000 else Work(1, 4)

    p, d, changes = simulate(Ratio(120), 3, 3, day, 10_000)
    assert p < d and {step for _, step in changes} == {1, -1}
    assert simulate(Ratio(120), 3, 3, lambda now: Work(4, 1) if now % 100 < 50 else Work(1, 4), 10_000)[2] == []


def test_nobody_changes_for_little_work_or_the_last_of_a_kind():
    assert simulate(Ratio(10), 1, 5, lambda now: Work(0.2, 0), 1000)[2] == []
    assert simulate(Ratio(10), 1, 1, lambda now: Work(9, 0), 1000)[2] == []
