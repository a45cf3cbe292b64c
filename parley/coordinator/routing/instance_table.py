"""The table of a cluster's instances and their state.

Instances come from the configuration or from a controller's list; decisions about them are made elsewhere. Watchers are
notified when an instance joins, leaves, is lost, is restarted, or changes otherwise. Opens no connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from parley.coordinator.config import Options, Static
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.status_report import take
from parley.disagg.kv.layout import difference

News = Literal["joined", "ready", "changed", "lost", "faulty", "restarted", "left"]
PROOFS = 3  # answers in a row until a faulty instance counts as healthy


Watcher = Callable[[Instance, News], None]


class Table:
    """All instances, by id. ``clock`` returns monotonic seconds."""

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic):
        self.options = options
        self.clock = clock
        self.instances: dict[int, Instance] = {}
        self.watchers: list[Watcher] = []
        self.listed = False  # a controller's list has been received
        for static in options.instances:
            self.add(known(static))

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self.instances.values()))

    def __len__(self) -> int:
        return len(self.instances)

    def get(self, id: int) -> Instance | None:
        """Return the instance with an id, or None."""
        return self.instances.get(id)

    def usable(self) -> list[Instance]:
        """Return the instances that new requests may be sent to."""
        now = self.clock()
        return [each for each in self.instances.values() if each.usable(now)]

    def add(self, instance: Instance) -> Instance:
        """Add an instance. It replaces one with the same id, whose requests are lost."""
        self.remove(instance.id)
        self.instances[instance.id] = instance
        self.tell(instance, "joined")
        return instance

    def remove(self, id: int) -> None:
        """Remove an instance, if it is present."""
        instance = self.instances.pop(id, None)
        if instance is not None:
            self.tell(instance, "left")

    def tell(self, instance: Instance, news: News) -> None:
        """Notify all watchers."""
        for watcher in tuple(self.watchers):
            watcher(instance, news)

    def fault(self, instance: Instance, reason: str = "") -> None:
        """Mark an instance as faulty for a while: its link broke, or it could not be reached.

        An instance whose status is polled recovers as soon as it answers RECOVERY_CHECKS times in a row, or was
        restarted.
        """
        instance.faulty_until = self.clock() + self.options.fault_seconds
        instance.proofs, instance.fault = 0, reason
        self.tell(instance, "faulty")

    def withhold(self, instance: Instance, offline: bool) -> None:
        """Take an instance out of service, or back into it."""
        before, instance.offline = instance.offline, offline
        if before and not offline:
            self.tell(instance, "ready")

    def change(self, instance: Instance, begun: bool) -> None:
        """Mark the start or end of a role change; meanwhile the instance receives no new requests."""
        instance.changing = begun
        if not begun:
            self.tell(instance, "ready")

    def attach(self, instance: Instance, attached: bool, why: str = "") -> None:
        """Set whether an instance's results can be received. ``reason`` why not: given if it is worth an alarm."""
        before, instance.attached = instance.attached, attached
        if attached and not before:
            self.tell(instance, "ready")
        elif why and not attached:
            instance.fault = f"Its results cannot be received. {why}"
            self.tell(instance, "faulty")

    def missed(self, instance: Instance) -> None:
        """Record a status check without an answer; after too many in a row the instance is lost."""
        instance.misses += 1
        instance.proofs = 0
        if instance.misses >= self.options.misses and not instance.lost and instance.seen:
            instance.lost = True
            instance.waiting = instance.running = instance.pinned = instance.reserved = 0  # no longer known
            self.tell(instance, "lost")

    def heard(self, instance: Instance, epoch: str = "", before: bool | None = None) -> None:
        """Record an answer of an instance.

        A new ``epoch`` means that the instance was restarted and has lost its requests. ``was_usable``: whether it was
        usable before the answer was applied.
        """
        now = self.clock()
        before = instance.usable(now) if before is None else before
        instance.misses, instance.answered, instance.seen = 0, now, True
        restarted = bool(instance.epoch and epoch and epoch != instance.epoch)
        instance.epoch = epoch or instance.epoch
        instance.lost = False
        instance.proofs += 1
        if instance.asked and instance.proofs >= PROOFS:
            instance.faulty_until = 0.0
        if restarted:
            instance.faulty_until = 0.0
            instance.hashes, instance.sent = frozenset(), {}
            self.tell(instance, "restarted")
        if not before and instance.usable(now):
            self.tell(instance, "ready")

    def status(self, instance: Instance, said: Mapping[str, Any]) -> None:
        """Apply the body of a /v1/status answer."""
        role, usable = instance.role, instance.usable(self.clock())
        self.heard(instance, take(instance, said), usable)
        if instance.role != role:
            self.tell(instance, "changed")

    def ready(self, model: str = "") -> bool:
        """Whether the usable instances form a complete cluster, optionally counting only those with ``model``."""
        return self.complete([each for each in self.usable() if not model or model in each.models or not each.models])

    def complete(self, usable: Sequence[Instance]) -> bool:
        """Whether these include a P with a linked D, or an instance that does both."""
        mode = self.options.deploy_mode
        if mode in ("auto", "single_node") and any(each.role == "mixed" for each in usable):
            return True
        if mode == "single_node":
            return False
        ps = [each for each in usable if each.role != "mixed" and each.prefill.share > 0]
        ds = [each for each in usable if each.role != "mixed" and each.decode.share > 0]
        return any(p.linked(d) for p in ps for d in ds)

    def lack(self) -> str:
        """Explain why ready instances cannot serve requests; empty if they can, or if another reason applies."""
        usable, now = self.usable(), self.clock()
        if self.ready():
            return ""
        if deaf := [each for each in self.instances.values() if not each.attached and each.state(now) == "ready"]:
            return f"The results of instance {deaf[0].id} cannot be received."
        if not usable:
            return ""
        if self.options.deploy_mode == "single_node":
            return "With deploy_mode = single_node only instances of role mixed are used."
        ps, ds = [each for each in usable if each.prefill.share > 0], [each for each in usable if each.decode.share > 0]
        if not ps or not ds:
            return f"No instance {'decodes' if ps else 'prefills'}; set fallback = true to let one role do both."
        for p, d in ((p, d) for p in ps for d in ds if p.group == d.group and p.layout and d.layout):
            if unlike := difference(p.layout, d.layout):
                return f"Instances {p.id} and {d.id} cannot work together because they differ: {unlike}."
        return "No prefill instance is linked with a decode instance of its group."


def known(static: Static) -> Instance:
    """Create an instance from its configuration."""
    instance = Instance(
        static.id or 0,
        static.url,
        static.role,
        static.group,
        static.management or "",
        static.metrics or "",
        static.peer or "",
        grpc=static.grpc or "",
        p_percentage=static.p_percentage,
        peer_given=bool(static.peer),
    )
    instance.slots, instance.blocks = static.slots or instance.slots, static.blocks or instance.blocks
    return instance
