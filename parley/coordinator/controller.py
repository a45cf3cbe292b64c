"""Assigns roles to instances: to those without one, and anew when prefill and decode loads drift apart. Flex instances
get the prefill share that keeps the loads level.

The number and location of instances are decided elsewhere (``cluster.ray_client``). A role changes in the documented
order: send no new work, let running requests end, send the role to the instance and its peers, wait until it is ready,
send work again. One role changes at a time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from parley.coordinator.ports.management import is_idle
from parley.coordinator.routing.health import AskInstance, Unanswered
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.instance_table import InstanceTable
from parley.coordinator.routing.role_ratio import FlexShares, RoleLoad, RoleRatio, fixed_split

log = logging.getLogger("parley.cluster")

CONTROL_PERIOD = 1.0  # seconds between two control steps
ABSENT_SECONDS = 15.0  # seconds without an answer until an instance's role may go to another
ROLE_CHANGE_TIMEOUT = 60.0  # seconds that an instance may take to change its role
SHARE_PERIOD = 30.0  # seconds that another share must have been better; also the time constant of the load average
NO_ROLE = "none", "unknown", ""


class RoleController:
    """Runs the control loop. ``roles_changed``: the number of roles assigned so far."""

    def __init__(self, table: InstanceTable, scheduler: InstanceScheduler, ask_instance: AskInstance):
        self.table, self._scheduler, self._ask_instance = table, scheduler, ask_instance
        self.ratio = RoleRatio(table.options.ratio_period)
        self.shares = FlexShares(SHARE_PERIOD, SHARE_PERIOD)
        self.roles_changed = 0
        self._change_task: asyncio.Task[None] | None = None
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def is_changing(self) -> bool:
        """Whether an instance is getting another role or another prefill share."""
        return self._change_task is not None and not self._change_task.done()

    def start_loop(self) -> None:
        """Start the control loop."""
        self._loop_task = asyncio.get_running_loop().create_task(self._control_loop())

    async def stop_loop(self) -> None:
        """Stop the control loop, leaving all roles as they are."""
        tasks = [task for task in (self._loop_task, self._change_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _control_loop(self) -> None:
        while True:
            try:
                self.control_step()
            except Exception:
                log.exception("The controller's check of the instances failed.")
            await asyncio.sleep(CONTROL_PERIOD)

    def control_step(self) -> None:
        """Observe the load once, and start a change if one is due."""
        now = self.table.clock()
        dedicated_load, flex_load = self.measured_load("prefill", "decode"), self.measured_load("flex")
        dedicated_load = RoleLoad(dedicated_load.prefill + self._queued_load(), dedicated_load.decode)
        self.ratio.observe_load(now, dedicated_load)
        self.shares.observe_load(
            now, RoleLoad(dedicated_load.prefill + flex_load.prefill, dedicated_load.decode + flex_load.decode)
        )
        if self.is_changing:
            return
        create_task = asyncio.get_running_loop().create_task
        if (change := self._needed_change(now)) is not None:
            self._change_task = create_task(self._change_role(*change))
        elif (division := self._needed_share(now)) is not None:
            self._change_task = create_task(self._change_share(*division))

    # -- roles

    def measured_load(self, *roles: str) -> RoleLoad:
        """Return the load of instances with these roles, in instances: prefill by the time its requests take, decode by
        how full the instances are."""
        options = self.table.options
        prefill = decode = 0.0
        for instance in self.table.usable_instances():
            if instance.role not in roles:
                continue
            if instance.prefill.instance_share:
                prefill += instance.prefill.busy_share(self.table.clock())
            if instance.decode.instance_share:
                full = max(
                    instance.decode.slots / max(1, instance.slots), instance.decode.blocks / max(1, instance.blocks)
                )
                slowness = (
                    instance.decode.token_seconds / options.slo_tpot
                    if options.slo_tpot and instance.decode.tasks
                    else 0.0
                )
                decode += max(full, slowness * instance.decode.instance_share)
        return RoleLoad(prefill, decode)

    def _queued_load(self) -> float:
        """Return the load of queued requests, in instances."""
        slots = [instance.slots for instance in self.table.usable_instances()] or [1]
        return self._scheduler.queued_requests * len(slots) / sum(slots)

    def _needed_change(self, now: float) -> tuple[ClusterInstance, str] | None:
        """Return the instance that needs another role, and the role; None if roles can stay."""
        options = self.table.options
        roleless = [
            instance
            for instance in self.table
            if instance.has_answered and not instance.lost and instance.role in NO_ROLE
        ]
        ps, ds = self._usable_with_role("prefill"), self._usable_with_role("decode")
        if roleless:
            first = roleless[0]
            first_role = first.first_role if first.first_role in ("prefill", "decode", "flex") else ""
            return first, first_role or self._rarer_role(len(ps), len(ds))
        if not options.auto_ratio and not options.default_p_rate:
            return None
        if not ps and len(ds) > 1 and self._role_gone("prefill", now):
            return _least_loaded(ds), "prefill"
        if not ds and len(ps) > 1 and self._role_gone("decode", now):
            return _least_loaded(ps), "decode"
        if not ps or not ds:
            return None
        if options.default_p_rate:
            if self._any_role_lost():
                return None
            best = fixed_split(len(ps) + len(ds), options.default_p_rate, options.default_d_rate)
            step = (best > len(ps)) - (best < len(ps))
        else:
            step = self.ratio.next_role_step(now, len(ps), len(ds))
        return (_least_loaded(ds), "prefill") if step > 0 else (_least_loaded(ps), "decode") if step < 0 else None

    def _needed_share(self, now: float) -> tuple[ClusterInstance, int] | None:
        """Return the flex instance that needs another prefill share, and the share in percent; None if none does."""
        flex = self._usable_with_role("flex")
        if not flex or not self.table.options.auto_ratio:
            return None
        p = len(self._usable_with_role("prefill")) + sum(instance.prefill.instance_share for instance in flex)
        d = len(self._usable_with_role("decode")) + sum(instance.decode.instance_share for instance in flex)
        share_change = self.shares.next_share(now, [instance.p_percentage for instance in flex], p, d)
        return (flex[share_change[0]], share_change[1]) if share_change else None

    async def _change_share(self, instance: ClusterInstance, share: int) -> None:
        """Send a flex instance another share; running requests are not affected."""
        if await self._send_role(instance, "flex", self._group_members(instance), share):
            log.info("Instance %d has %d %% for prefill.", instance.id, share)
            instance.p_percentage = share

    def _group_members(self, instance: ClusterInstance) -> list[ClusterInstance]:
        """Return the usable instances of the same group that only prefill or only decode."""
        roles = ("prefill", "decode")
        return [
            other
            for other in self.table.usable_instances()
            if other is not instance and other.role in roles and other.group == instance.group
        ]

    def _usable_with_role(self, role: str) -> list[ClusterInstance]:
        return [instance for instance in self.table.usable_instances() if instance.role == role]

    def _any_role_lost(self) -> bool:
        """Whether an instance with a role is lost, and may come back."""
        return any(instance.role in ("prefill", "decode") and instance.lost for instance in self.table)

    def _role_gone(self, role: str, now: float) -> bool:
        """Whether all instances of the role have been silent for more than ABSENT_SECONDS."""
        return all(now - instance.last_answer > ABSENT_SECONDS for instance in self.table if instance.role == role)

    def _rarer_role(self, prefill_count: int, decode_count: int) -> str:
        options = self.table.options
        p_rate, d_rate = options.default_p_rate or 1, options.default_d_rate or 1
        return "prefill" if prefill_count * d_rate <= decode_count * p_rate else "decode"

    async def _change_role(self, instance: ClusterInstance, role: str) -> None:
        """Change an instance's role, in the documented order."""
        options, old_role = self.table.options, instance.role
        log.info("Changing instance %d from %s to %s.", instance.id, old_role, role)
        self.table.mark_role_change(instance, True)
        try:
            await self._wait_until_true(lambda: is_idle(instance), options.tasks_end_wait_seconds)
            peers = [member for member in self._group_members(instance) if member.role != role]
            if not await self._send_role(instance, role, peers):
                return
            for peer in peers:
                counterparts = [
                    other
                    for other in self.table.usable_instances()
                    if other is not instance and other.role not in (peer.role, "mixed")
                ]
                await self._send_role(peer, peer.role, [instance, *counterparts])
            has_role = await self._wait_until_true(
                lambda: instance.role == role and not instance.switching, ROLE_CHANGE_TIMEOUT
            )
            self.roles_changed += has_role
            if not has_role:
                log.warning("Instance %d did not become %s in time.", instance.id, role)
        finally:
            self.table.mark_role_change(instance, False)

    async def _wait_until_true(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = self.table.clock() + seconds
        while not condition():
            if self.table.clock() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _send_role(
        self, instance: ClusterInstance, role: str, peers: list[ClusterInstance], share: int | None = None
    ) -> bool:
        """Send a role (and, for flex, the prefill share) to an instance; True if it accepted."""
        try:
            percent = instance.p_percentage if share is None else share
            local: dict[str, Any] = {**role_request_entry(instance), "p_percentage": percent}
            body = msgspec.json.encode({"local": local, "peers": [role_request_entry(peer) for peer in peers]})
            status, answer = await self._ask_instance(f"{instance.management}/v1/role/{quote(role)}", "POST", body)
        except (Unanswered, ValueError) as error:
            log.warning("Cannot give instance %d the role %s: %s", instance.id, role, error)
            return False
        if status != 200:
            log.warning(
                "Instance %d refused the role %s: %s", instance.id, role, answer[:200].decode("utf-8", "replace")
            )
        return status == 200


def _least_loaded(instances: list[ClusterInstance]) -> ClusterInstance:
    """Return the instance with the fewest running requests."""
    return min(instances, key=lambda instance: (instance.tasks, instance.id))


def role_request_entry(instance: ClusterInstance) -> dict[str, Any]:
    """Describe an instance for the body of a role request. Raises ValueError if it has a host name and no address."""
    host, _, port = instance.peer.partition(";")
    host = host.strip("[]") or urlsplit(instance.url).hostname or ""
    if host == "localhost":
        host = "127.0.0.1"
    address = str(ipaddress.ip_address(host))
    entry: dict[str, Any] = {"server_ip": address, "id": instance.id, "host_ip": address, "device": []}
    return entry | {"inter_comm_port": int(port)} if port else entry
