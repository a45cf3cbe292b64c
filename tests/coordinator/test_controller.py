"""Roles are assigned in the documented order and follow the load. Instances are simulated."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from support.simulated_cluster import FakeHttp, ManualClock, lose_instance, simulated_cluster, status_body

from parley.coordinator import controller as module
from parley.coordinator.controller import RoleController
from parley.coordinator.routing.policies import SchedulingRequest
from parley.coordinator.routing.role_ratio import RoleLoad


class SimulatedInstances(FakeHttp):
    """Simulated instances that accept every role they are given."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.shares = []
        self.role_requests = []  # instance id, role, its open requests at that time, ids of its peers

    async def __call__(self, url, method="GET", body=b"", timeout=5.0):
        instance = next(instance for instance in self.table if url.startswith(instance.management))
        if method == "POST":
            role, role_body = url.rsplit("/", 1)[1], json.loads(body)
            self.role_requests.append((instance.id, role, instance.tasks, [peer["id"] for peer in role_body["peers"]]))
            self.shares.append(role_body["local"]["p_percentage"])
            new_status = status_body(role)
            new_status["service"]["p_percentage"] = role_body["local"]["p_percentage"]
            self.table.record_status(instance, new_status)
            return 200, b'{"result":"ok"}'
        return await super().__call__(url, method, body, timeout)


async def wait_until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def start_controller(*roles, **keys):
    clock = ManualClock()
    table, scheduler = simulated_cluster(*roles, clock=clock, **keys)
    net = SimulatedInstances(table)
    controller = RoleController(table, scheduler, net)
    try:
        yield controller, table, scheduler, net, clock
    finally:
        await controller.stop_loop()


async def test_controller_gives_roleless_instances_the_scarcer_role():
    async with start_controller("mixed", "mixed", "mixed", default_p_rate=1, default_d_rate=2) as (
        controller,
        table,
        _,
        net,
        _c,
    ):
        for instance in table:
            instance.role = "none"
        table.set_instance_offline(table.instances[2], True)
        for _ in range(3):
            before = len(net.role_requests)
            controller.control_step()
            await wait_until(lambda before=before: len(net.role_requests) > before and not controller.is_changing)
        assert sorted(instance.role for instance in table) == ["decode", "decode", "prefill"]
        assert [instance.offline for instance in table] == [False, True, False]
        table.set_instance_offline(table.instances[2], False)
        assert table.is_cluster_ready()
        controller.control_step()
        assert not controller.is_changing  # the ratio is reached


async def test_controller_changes_a_role_after_its_running_requests_ended():
    roles = ("prefill", "decode", "decode", "decode")
    async with start_controller(*roles, auto_ratio=True, ratio_period=5, separate="always") as (
        controller,
        table,
        scheduler,
        net,
        clock,
    ):
        placements = [await scheduler.place_request(SchedulingRequest(10)) for _ in range(4)]
        for placement in placements:
            placement.report_first_token()
        controller.measured_load = lambda *roles: RoleLoad(3, 0.5)
        for _ in range(7):
            clock.now += 1
            controller.control_step()
        await asyncio.sleep(0)
        (changing,) = [instance for instance in table if instance.changing]
        await asyncio.sleep(0.1)
        assert net.role_requests == []
        later_placements = [await scheduler.place_request(SchedulingRequest(10)) for _ in range(6)]
        assert changing not in [later_placement.decode_instance for later_placement in later_placements]
        table.set_instance_offline(changing, True)  # the end of the role change must not undo this
        for open_placement in placements + later_placements:
            open_placement.close_placement()
        await wait_until(lambda: controller.roles_changed)
        assert net.role_requests[0][:3] == (changing.id, "prefill", 0)
        others = [instance.id for instance in table if instance.role == "decode"]
        assert net.role_requests[0][3] == others and changing.id not in others
        assert sorted(instance_id for instance_id, *_ in net.role_requests[1:]) == others  # its peers get the new list
        assert all(changing.id in peers for *_, peers in net.role_requests[1:])
        await wait_until(lambda: not changing.changing)
        assert changing.offline


async def test_refused_role_change_keeps_the_instance_in_service():
    async with start_controller("prefill", "decode", "decode", default_p_rate=2, default_d_rate=1) as (
        controller,
        table,
        _,
        net,
        _c,
    ):
        net.__class__ = FakeHttp
        controller.control_step()
        await wait_until(lambda: not controller.is_changing)
        assert controller.roles_changed == 0 and not any(instance.changing for instance in table)
        assert table.is_cluster_ready()


async def test_another_instance_takes_over_a_role_whose_instances_died():
    async with start_controller("prefill", "decode", "decode", auto_ratio=True) as (controller, table, _, _n, clock):
        lose_instance(table, table.instances[1])
        controller.control_step()
        assert not controller.is_changing  # it may still come back
        clock.now += module.ABSENT_SECONDS + 1
        controller.control_step()
        await wait_until(lambda: controller.roles_changed)
        assert table.is_cluster_ready() and table.instances[1].role == "prefill"


async def test_controller_measures_work_from_request_times():
    async with start_controller("prefill", "decode", separate="always") as (controller, table, scheduler, _, clock):
        p, d = table
        for tokens in (100, 1000):
            p.prefill.time_model.add_observation(tokens, tokens / 1000)
        p.slots = d.slots = 10
        controller.measured_load("prefill", "decode")
        placements = []
        for _ in range(10):  # one prompt of 0.5 s each second
            clock.now += 1
            placements.append(await scheduler.place_request(SchedulingRequest(500)))
        work = controller.measured_load("prefill", "decode")
        assert work.prefill == pytest.approx(0.5, abs=0.01) and work.decode >= 1.0
        for placement in placements:
            placement.close_placement()


async def test_flex_share_follows_the_work_without_a_role_change():
    keys = {"separate": "always", "auto_ratio": True, "algorithm_type": "load_balance"}
    async with start_controller("flex", "decode", **keys) as (controller, table, scheduler, net, clock):
        flex, d = table
        flex.slots = d.slots = 100
        flex.blocks = d.blocks = 10_000
        flex.prefill_rate = 1000.0
        placements = []
        for second in range(600):
            clock.now += 1
            placements.append(
                await scheduler.place_request(SchedulingRequest(700))
            )  # the load of 0.7 prefill instances
            placements[-1].report_first_token()
            if second >= 20:
                placements.pop(0).close_placement()  # the load of 20 % of a decode instance
            controller.control_step()
            await wait_until(lambda: not controller.is_changing)
        assert (
            net.shares == sorted(net.shares) and net.shares[:3] == [55, 60, 65] and net.shares[-1] == 95
        )  # a decode instance exists as well
        assert flex.p_percentage == 95 and not flex.changing and controller.roles_changed == 0
        assert all(role == "flex" and peers == [d.id] for _, role, _, peers in net.role_requests)


@pytest.mark.parametrize("share", [0, 100])
async def test_flex_share_stays_without_auto_ratio_or_at_0_and_100(share):
    for keys, initial_share in (({"auto_ratio": True}, share), ({}, 50)):
        async with start_controller("flex", "flex", **keys) as (controller, table, _, net, clock):
            for instance in table:
                instance.p_percentage = initial_share
            controller.measured_load = lambda *roles: RoleLoad(3, 0.5)
            for _ in range(100):
                clock.now += 1
                controller.control_step()
            assert net.role_requests == []


async def test_lowest_flex_share_is_raised_first():
    async with start_controller("flex", "flex", auto_ratio=True) as (controller, table, _, net, clock):
        one, other = table
        one.p_percentage, other.p_percentage = 40, 30
        controller.measured_load = lambda *roles: RoleLoad(1, 0.2)
        while len(net.role_requests) < 6:
            clock.now += 1
            controller.control_step()
            await wait_until(lambda: not controller.is_changing)
        assert [instance_id for instance_id, *_ in net.role_requests] == [2, 2, 1, 2, 1, 2]
        assert (one.p_percentage, other.p_percentage) == (50, 50)
