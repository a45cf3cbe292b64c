"""The instances of a cluster, and what becomes known of them.

They come from the configuration or from a controller's list; what is done with them is chosen elsewhere. Who needs to
know when one comes, goes, is lost or was restarted watches the table. Opens no connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from parley.cluster.config import Options, Static
from parley.cluster.instance import Instance
from parley.cluster.report import take
from parley.kv.layout import difference

News = Literal["joined", "ready", "changed", "lost", "faulty", "restarted", "left"]
PROOFS = 3  # answers in a row after which a faulty instance is taken to be well


Watcher = Callable[[Instance, News], None]


class Table:
    """All instances, by id. ``clock`` gives seconds that only grow."""

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic):
        self.options = options
        self.clock = clock
        self.instances: dict[int, Instance] = {}
        self.watchers: list[Watcher] = []
        self.listed = False  # a controller's list has come
        for static in options.instances:
            self.add(known(static))

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self.instances.values()))

    def __len__(self) -> int:
        return len(self.instances)

    def get(self, id: int) -> Instance | None:
        return self.instances.get(id)

    def usable(self) -> list[Instance]:
        now = self.clock()
        return [each for each in self.instances.values() if each.usable(now)]

    def add(self, instance: Instance) -> Instance:
        """Have it, in place of one with its id, whose requests are lost to it."""
        self.remove(instance.id)
        self.instances[instance.id] = instance
        self.tell(instance, "joined")
        return instance

    def remove(self, id: int) -> None:
        instance = self.instances.pop(id, None)
        if instance is not None:
            self.tell(instance, "left")

    def tell(self, instance: Instance, news: News) -> None:
        for watcher in tuple(self.watchers):
            watcher(instance, news)

    def fault(self, instance: Instance, reason: str = "") -> None:
        """It broke its link or could not be reached: it is not chosen for a while.

        One that is asked for its status is back as soon as it answered some times in a row, or was restarted.
        """
        instance.faulty_until = self.clock() + self.options.fault_seconds
        instance.proofs, instance.fault = 0, reason
        self.tell(instance, "faulty")

    def withhold(self, instance: Instance, offline: bool) -> None:
        """Somebody takes it out of service, or back."""
        before, instance.offline = instance.offline, offline
        if before and not offline:
            self.tell(instance, "ready")

    def change(self, instance: Instance, begun: bool) -> None:
        """Somebody gives it another role, and no new requests go to it meanwhile; or that is over."""
        instance.changing = begun
        if not begun:
            self.tell(instance, "ready")

    def attach(self, instance: Instance, attached: bool, why: str = "") -> None:
        """Whether its results can be received. ``why`` not, if that is worth an alarm."""
        before, instance.attached = instance.attached, attached
        if attached and not before:
            self.tell(instance, "ready")
        elif why and not attached:
            instance.fault = f"Its results cannot be received. {why}"
            self.tell(instance, "faulty")

    def missed(self, instance: Instance) -> None:
        """It did not answer a look."""
        instance.misses += 1
        instance.proofs = 0
        if instance.misses >= self.options.misses and not instance.lost and instance.seen:
            instance.lost = True
            instance.waiting = instance.running = instance.pinned = instance.reserved = 0  # nobody knows
            self.tell(instance, "lost")

    def heard(self, instance: Instance, epoch: str = "", before: bool | None = None) -> None:
        """It answered. Another ``epoch`` than before: it was restarted in between, and knows none of its requests.
        ``before``: was it usable before what it said was taken in?"""
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
        """Take in what /v1/status answered."""
        role, usable = instance.role, instance.usable(self.clock())
        self.heard(instance, take(instance, said), usable)
        if instance.role != role:
            self.tell(instance, "changed")

    def ready(self, model: str = "") -> bool:
        """Is there a P and a linked D, or one that does both? ``model``: that have it."""
        return self.complete([each for each in self.usable() if not model or model in each.models or not each.models])

    def complete(self, usable: Sequence[Instance]) -> bool:
        """Are a P and a linked D among these, or one that does both?"""
        mode = self.options.deploy_mode
        if mode in ("auto", "single_node") and any(each.role == "mixed" for each in usable):
            return True
        if mode == "single_node":
            return False
        ps = [each for each in usable if each.role != "mixed" and each.prefill.share > 0]
        ds = [each for each in usable if each.role != "mixed" and each.decode.share > 0]
        return any(p.linked(d) for p in ps for d in ds)

    def lack(self) -> str:
        """Why nobody can be served though instances are ready; empty if there is another reason, or none."""
        usable, now = self.usable(), self.clock()
        if self.ready():
            return ""
        if deaf := [each for each in self.instances.values() if not each.attached and each.state(now) == "ready"]:
            return f"The results of instance {deaf[0].id} cannot be received."
        if not usable:
            return ""
        if self.options.deploy_mode == "single_node":
            return "Instances are of role mixed only where deploy_mode is single_node."
        ps, ds = [each for each in usable if each.prefill.share > 0], [each for each in usable if each.decode.share > 0]
        if not ps or not ds:
            return f"No instance {'decodes' if ps else 'prefills'}; with fallback = true one alone would do all."
        for p, d in ((p, d) for p in ps for d in ds if p.group == d.group and p.layout and d.layout):
            if unlike := difference(p.layout, d.layout):
                return f"Instances {p.id} and {d.id} cannot work together, for they are not alike: {unlike}."
        return "No prefill instance has a decode instance of its group that it is linked with."


def known(static: Static) -> Instance:
    """An instance of the configuration."""
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
