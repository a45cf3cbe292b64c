"""Roles are assigned in the documented order and follow the load. Instances are simulated."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from support.simulated_cluster import Clock, Net, cluster, lose, status

from parley.coordinator import controller as module
from parley.coordinator.controller import Controller
from parley.coordinator.routing.policies import Wanted
from parley.coordinator.routing.role_ratio import Work


class Played(Net):
    """Simulated instances that accept every role they are given."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.shares = []
        self.given = []  # instance id, role, its open requests at that time, ids of its peers

    async def __call__(self, url, method="GET", body=b"", timeout=5.0):
        instance = next(each for each in self.table if url.startswith(each.management))
        if method == "POST":
            role, said = url.rsplit("/", 1)[1], json.loads(body)
            self.given.append((instance.id, role, instance.tasks, [each["id"] for each in said["peers"]]))
            self.shares.append(said["local"]["p_percentage"])
            told = status(role)
            told["service"]["p_percentage"] = said["local"]["p_percentage"]
            self.table.status(instance, told)
            return 200, b'{"result":"ok"}'
        return await super().__call__(url, method, body, timeout)


async def until(true):
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def controlled(*roles, **keys):
    clock = Clock()
    table, choice = cluster(*roles, clock=clock, **keys)
    net = Played(table)
    controller = Controller(table, choice, net)
    try:
        yield controller, table, choice, net, clock
    finally:
        await controller.close()


async def test_controller_gives_roleless_instances_the_scarcer_role():
    async with controlled("mixed", "mixed", "mixed", default_p_rate=1, default_d_rate=2) as (
        controller,
        table,
        _,
        net,
        _c,
    ):
        for each in table:
            each.role = "none"
        table.withhold(table.instances[2], True)
        for _ in range(3):
            before = len(net.given)
            controller.step()
            await until(lambda before=before: len(net.given) > before and controller._changing.done())
        assert sorted(each.role for each in table) == ["decode", "decode", "prefill"]
        assert [each.offline for each in table] == [False, True, False]
        table.withhold(table.instances[2], False)
        assert table.ready()
        controller.step()
        assert controller._changing.done()  # the ratio is reached


async def test_controller_changes_a_role_after_its_running_requests_ended():
    roles = ("prefill", "decode", "decode", "decode")
    async with controlled(*roles, auto_ratio=True, ratio_period=5, separate="always") as (
        controller,
        table,
        choice,
        net,
        clock,
    ):
        held = [await choice.choose(Wanted(10)) for _ in range(4)]
        for each in held:
            each.first()
        controller._work = lambda *roles: Work(3, 0.5)
        for _ in range(7):
            clock.now += 1
            controller.step()
        await asyncio.sleep(0)
        (changing,) = [each for each in table if each.changing]
        await asyncio.sleep(0.1)
        assert net.given == []
        more = [await choice.choose(Wanted(10)) for _ in range(6)]
        assert changing not in [each.d for each in more]
        table.withhold(changing, True)  # the end of the role change must not undo this
        for each in held + more:
            each.end()
        await until(lambda: controller.changes)
        assert net.given[0][:3] == (changing.id, "prefill", 0)
        others = [each.id for each in table if each.role == "decode"]
        assert net.given[0][3] == others and changing.id not in others
        assert sorted(id for id, *_ in net.given[1:]) == others  # its peers get the new list
        assert all(changing.id in peers for *_, peers in net.given[1:])
        await until(lambda: not changing.changing)
        assert changing.offline


async def test_refused_role_change_keeps_the_instance_in_service():
    async with controlled("prefill", "decode", "decode", default_p_rate=2, default_d_rate=1) as (
        controller,
        table,
        _,
        net,
        _c,
    ):
        net.__class__ = Net
        controller.step()
        await until(lambda: controller._changing.done())
        assert controller.changes == 0 and not any(each.changing for each in table)
        assert table.ready()


async def test_another_instance_takes_over_a_role_whose_instances_died():
    async with controlled("prefill", "decode", "decode", auto_ratio=True) as (controller, table, _, _n, clock):
        lose(table, table.instances[1])
        controller.step()
        assert controller._changing is None  # it may still come back
        clock.now += module.DEAD + 1
        controller.step()
        await until(lambda: controller.changes)
        assert table.ready() and table.instances[1].role == "prefill"


async def test_controller_measures_work_from_request_times():
    async with controlled("prefill", "decode", separate="always") as (controller, table, choice, _, clock):
        p, d = table
        for tokens in (100, 1000):
            p.prefill.pace.observe(tokens, tokens / 1000)
        p.slots = d.slots = 10
        controller._work("prefill", "decode")
        held = []
        for _ in range(10):  # one prompt of 0.5 s each second
            clock.now += 1
            held.append(await choice.choose(Wanted(500)))
        work = controller._work("prefill", "decode")
        assert work.prefill == pytest.approx(0.5, abs=0.01) and work.decode >= 1.0
        for each in held:
            each.end()


async def test_flex_share_follows_the_work_without_a_role_change():
    keys = {"separate": "always", "auto_ratio": True, "algorithm_type": "load_balance"}
    async with controlled("flex", "decode", **keys) as (controller, table, choice, net, clock):
        flex, d = table
        flex.slots = d.slots = 100
        flex.blocks = d.blocks = 10_000
        flex.prefill_rate = 1000.0
        held = []
        for second in range(600):
            clock.now += 1
            held.append(await choice.choose(Wanted(700)))  # the load of 0.7 prefill instances
            held[-1].first()
            if second >= 20:
                held.pop(0).end()  # the load of 20 % of a decode instance
            controller.step()
            if controller._changing is not None:
                await controller._changing
        assert (
            net.shares == sorted(net.shares) and net.shares[:3] == [55, 60, 65] and net.shares[-1] == 95
        )  # a decode instance exists as well
        assert flex.p_percentage == 95 and not flex.changing and controller.changes == 0
        assert all(role == "flex" and peers == [d.id] for _, role, _, peers in net.given)


@pytest.mark.parametrize("share", [0, 100])
async def test_flex_share_stays_without_auto_ratio_or_at_0_and_100(share):
    for keys, begun in (({"auto_ratio": True}, share), ({}, 50)):
        async with controlled("flex", "flex", **keys) as (controller, table, _, net, clock):
            for each in table:
                each.p_percentage = begun
            controller._work = lambda *roles: Work(3, 0.5)
            for _ in range(100):
                clock.now += 1
                controller.step()
            assert net.given == []


async def test_lowest_flex_share_is_raised_first():
    async with controlled("flex", "flex", auto_ratio=True) as (controller, table, _, net, clock):
        one, other = table
        one.p_percentage, other.p_percentage = 40, 30
        controller._work = lambda *roles: Work(1, 0.2)
        while len(net.given) < 6:
            clock.now += 1
            controller.step()
            if controller._changing is not None:
                await controller._changing
        assert [id for id, *_ in net.given] == [2, 2, 1, 2, 1, 2]
        assert (one.p_percentage, other.p_percentage) == (50, 50)
