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

from parley.coordinator.ports.management import idle
from parley.coordinator.routing.admission import Choice
from parley.coordinator.routing.health import Ask, Unanswered
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.instance_table import Table
from parley.coordinator.routing.role_ratio import Ratio, Shares, Work, shared

log = logging.getLogger("parley.cluster")

TICK = 1.0  # seconds between two control steps
DEAD = 15.0  # seconds without an answer until an instance's role may go to another
SWITCH = 60.0  # seconds that an instance may take to change its role
HOLD = 30.0  # seconds that another share must have been better; also the time constant of the load average
NOBODY = "none", "unknown", ""


class Controller:
    """Runs the control loop. ``roles_changed``: the number of roles assigned so far."""

    def __init__(self, table: Table, choice: Choice, ask: Ask):
        self.table, self._choice, self._ask = table, choice, ask
        self.ratio = Ratio(table.options.ratio_period)
        self.shares = Shares(HOLD, HOLD)
        self.changes = 0
        self._changing: asyncio.Task[None] | None = None
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the control loop."""
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop the control loop, leaving all roles as they are."""
        left = [task for task in (self._loop, self._changing) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                self.step()
            except Exception:
                log.exception("The controller's check of the instances failed.")
            await asyncio.sleep(TICK)

    def step(self) -> None:
        """Observe the load once, and start a change if one is due."""
        now = self.table.clock()
        own, flex = self._work("prefill", "decode"), self._work("flex")
        own = Work(own.prefill + self._waiting(), own.decode)
        self.ratio.observe(now, own)
        self.shares.observe(now, Work(own.prefill + flex.prefill, own.decode + flex.decode))
        if self._changing is not None and not self._changing.done():
            return
        begin = asyncio.get_running_loop().create_task
        if (change := self._needed(now)) is not None:
            self._changing = begin(self._change(*change))
        elif (division := self._uneven(now)) is not None:
            self._changing = begin(self._divide(*division))

    # -- roles

    def _work(self, *roles: str) -> Work:
        """Return the load of instances with these roles, in instances: prefill by the time its requests take, decode by
        how full the instances are."""
        options = self.table.options
        prefill = decode = 0.0
        for each in self.table.usable():
            if each.role not in roles:
                continue
            if each.prefill.share:
                prefill += each.prefill.busy(self.table.clock())
            if each.decode.share:
                full = max(each.decode.slots / max(1, each.slots), each.decode.blocks / max(1, each.blocks))
                late = each.decode.cadence / options.slo_tpot if options.slo_tpot and each.decode.tasks else 0.0
                decode += max(full, late * each.decode.share)
        return Work(prefill, decode)

    def _waiting(self) -> float:
        """Return the load of queued requests, in instances."""
        slots = [each.slots for each in self.table.usable()] or [1]
        return self._choice.waiting * len(slots) / sum(slots)

    def _needed(self, now: float) -> tuple[Instance, str] | None:
        """Return the instance that needs another role, and the role; None if roles can stay."""
        options = self.table.options
        roleless = [each for each in self.table if each.seen and not each.lost and each.role in NOBODY]
        ps, ds = self._of("prefill"), self._of("decode")
        if roleless:
            first = roleless[0]
            meant = first.meant if first.meant in ("prefill", "decode", "flex") else ""
            return first, meant or self._rarer(len(ps), len(ds))
        if not options.auto_ratio and not options.default_p_rate:
            return None
        if not ps and len(ds) > 1 and self._gone("prefill", now):
            return _least(ds), "prefill"
        if not ds and len(ps) > 1 and self._gone("decode", now):
            return _least(ps), "decode"
        if not ps or not ds:
            return None
        if options.default_p_rate:
            if self._absent():
                return None
            best = shared(len(ps) + len(ds), options.default_p_rate, options.default_d_rate)
            step = (best > len(ps)) - (best < len(ps))
        else:
            step = self.ratio.change(now, len(ps), len(ds))
        return (_least(ds), "prefill") if step > 0 else (_least(ps), "decode") if step < 0 else None

    def _uneven(self, now: float) -> tuple[Instance, int] | None:
        """Return the flex instance that needs another prefill share, and the share in percent; None if none does."""
        flex = self._of("flex")
        if not flex or not self.table.options.auto_ratio:
            return None
        p = len(self._of("prefill")) + sum(each.prefill.share for each in flex)
        d = len(self._of("decode")) + sum(each.decode.share for each in flex)
        found = self.shares.change(now, [each.p_percentage for each in flex], p, d)
        return (flex[found[0]], found[1]) if found else None

    async def _divide(self, instance: Instance, share: int) -> None:
        """Send a flex instance another share; running requests are not affected."""
        if await self._give(instance, "flex", self._others(instance), share):
            log.info("Instance %d has %d %% for prefill.", instance.id, share)
            instance.p_percentage = share

    def _others(self, instance: Instance) -> list[Instance]:
        """Return the usable instances of the same group that only prefill or only decode."""
        roles = ("prefill", "decode")
        return [
            each
            for each in self.table.usable()
            if each is not instance and each.role in roles and each.group == instance.group
        ]

    def _of(self, role: str) -> list[Instance]:
        return [each for each in self.table.usable() if each.role == role]

    def _absent(self) -> bool:
        """Whether an instance with a role is lost, and may come back."""
        return any(each.role in ("prefill", "decode") and each.lost for each in self.table)

    def _gone(self, role: str, now: float) -> bool:
        """Whether all instances of the role have been silent for more than ABSENT_SECONDS."""
        return all(now - each.answered > DEAD for each in self.table if each.role == role)

    def _rarer(self, p: int, d: int) -> str:
        options = self.table.options
        p_rate, d_rate = options.default_p_rate or 1, options.default_d_rate or 1
        return "prefill" if p * d_rate <= d * p_rate else "decode"

    async def _change(self, instance: Instance, role: str) -> None:
        """Change an instance's role, in the documented order."""
        options, before = self.table.options, instance.role
        log.info("Changing instance %d from %s to %s.", instance.id, before, role)
        self.table.change(instance, True)
        try:
            await self._until(lambda: idle(instance), options.tasks_end_wait_seconds)
            peers = [each for each in self._others(instance) if each.role != role]
            if not await self._give(instance, role, peers):
                return
            for peer in peers:
                across = [each for each in self.table.usable() if each.role not in (peer.role, "mixed")]
                await self._give(peer, peer.role, [instance, *(each for each in across if each is not instance)])
            done = await self._until(lambda: instance.role == role and not instance.switching, SWITCH)
            self.changes += done
            if not done:
                log.warning("Instance %d did not become %s in time.", instance.id, role)
        finally:
            self.table.change(instance, False)

    async def _until(self, true: Callable[[], bool], seconds: float) -> bool:
        deadline = self.table.clock() + seconds
        while not true():
            if self.table.clock() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _give(self, instance: Instance, role: str, peers: list[Instance], share: int | None = None) -> bool:
        """Send a role (and, for flex, the prefill share) to an instance; True if it accepted."""
        try:
            percent = instance.p_percentage if share is None else share
            local: dict[str, Any] = {**named(instance), "p_percentage": percent}
            body = msgspec.json.encode({"local": local, "peers": [named(peer) for peer in peers]})
            status, said = await self._ask(f"{instance.management}/v1/role/{quote(role)}", "POST", body)
        except (Unanswered, ValueError) as error:
            log.warning("Cannot give instance %d the role %s: %s", instance.id, role, error)
            return False
        if status != 200:
            log.warning("Instance %d refused the role %s: %s", instance.id, role, said[:200].decode("utf-8", "replace"))
        return status == 200


def _least(instances: list[Instance]) -> Instance:
    """Return the instance with the fewest running requests."""
    return min(instances, key=lambda each: (each.tasks, each.id))


def named(instance: Instance) -> dict[str, Any]:
    """Describe an instance for the body of a role request. Raises ValueError if it has a host name and no address."""
    host, _, port = instance.peer.partition(";")
    host = host.strip("[]") or urlsplit(instance.url).hostname or ""
    if host == "localhost":
        host = "127.0.0.1"
    address = str(ipaddress.ip_address(host))
    made: dict[str, Any] = {"server_ip": address, "id": instance.id, "host_ip": address, "device": []}
    return made | {"inter_comm_port": int(port)} if port else made
