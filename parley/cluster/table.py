"""The instances of a cluster: what each is, what it last said of itself, and whether requests may go to it.

They come from the configuration or from a controller's list; what is done with them is chosen elsewhere. Who needs to
know when one comes, goes, is lost or was restarted watches the table. Opens no connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from parley.cluster.config import Options, Static
from parley.cluster.load import Side
from parley.cluster.report import take
from parley.instance.prefix import REPORTED, Mark
from parley.kv.layout import difference

State = Literal["joining", "ready", "switching", "offline", "faulty", "lost"]
News = Literal["joined", "ready", "changed", "lost", "faulty", "restarted", "left"]
PROOFS = 3  # answers in a row after which a faulty instance is taken to be well
REFUSALS = 3  # in a row, after which nothing is handed over for a while
APART = 0.5, 30.0  # seconds of it: at first, at most
FRESH = 10.0  # seconds in which what was sent to an instance must show in its report


@dataclass(eq=False)
class Instance:
    """One server. ``slots``, ``blocks``: what it has in all; ``avail_…``: of that free, as it says itself.

    ``management``: where it is asked for its status, ``metrics`` where for its metrics; ``grpc``: where it answers
    that, if it does. ``extended``: it is parley, and runs any request whole as well. ``attached``: its results can be
    received; who receives them says so. ``peers``: the only ones that it is linked with, if it tells. ``meant``: the
    role that it had first, whoever named it. ``found``: its origin. ``asked``: not of those whose load a controller's
    list tells, which are as that says.
    """

    id: int
    url: str
    role: str = "mixed"
    group: int = 0
    management: str = ""
    metrics: str = ""
    peer: str = ""
    grpc: str = ""
    found: Literal["file", "list"] = "file"
    asked: bool = True  # how it does; of others the list tells
    slots: int = 200
    blocks: int = 1024
    block_size: int = 16
    p_percentage: int = 50
    models: frozenset[str] = frozenset()
    layout: str = ""
    epoch: str = ""
    peers: frozenset[int] = frozenset()
    extended: bool = False
    peer_given: bool = False  # by the configuration: what it tells does not count
    attached: bool = True
    offline: bool = False
    switching: bool = False
    loaded: bool = True  # it takes requests, as it says: it is neither loading nor about to end
    seen: bool = False  # it has answered at all
    misses: int = 0  # looks without an answer, in a row
    answered: float = 0.0  # when it last did
    lost: bool = False
    faulty_until: float = 0.0
    fault: str = ""  # why it was called faulty last
    proofs: int = 0  # answers in a row since then
    avail_slots: int | None = None
    avail_blocks: int | None = None
    waiting: int = 0
    running: int = 0
    pinned: int = 0
    reserved: int = 0
    prefill_rate: float = 0.0  # tokens per second
    decode_rate: float = 0.0
    transfers: dict[str, float] = field(default_factory=dict)  # what it counts of them
    hashes: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self.management = (self.management or self.url).rstrip("/")
        self.metrics = (self.metrics or self.management).rstrip("/")
        self.meant = self.role
        self.prefill, self.decode = Side(self, "prefill"), Side(self, "decode")
        self.tasks = 0  # requests that are here
        self.refusals: dict[int, tuple[int, float]] = {}  # of others to take over from it: in a row, and until when
        self.sent: dict[int, float] = {}  # hashes that were sent here and when, oldest first

    @property
    def used(self) -> int:
        """Blocks that are in use, as it says."""
        return 0 if self.avail_blocks is None else max(0, self.blocks - self.avail_blocks)

    def state(self, now: float) -> State:
        if self.lost:
            return "lost"
        if now < self.faulty_until:
            return "faulty"
        if self.offline:
            return "offline"
        if not self.seen or not self.loaded:
            return "joining"
        return "switching" if self.switching or self.role not in ("mixed", "prefill", "decode", "flex") else "ready"

    def usable(self, now: float) -> bool:
        """May new requests go to it?"""
        return self.attached and self.state(now) == "ready"

    def linked(self, other: Instance) -> bool:
        """Can the one prefill for the other?"""
        if other is self:
            return True
        if self.group != other.group or (self.layout and other.layout and self.layout != other.layout):
            return False
        told = self.peers or other.peers
        return not told or other.id in self.peers or self.id in other.peers

    def refused(self, other: Instance, now: float) -> None:
        """The other did not take a request over from it. After some in a row they are left apart, longer each time."""
        count = self.refusals.get(other.id, (0, 0.0))[0] + 1
        pause = min(APART[1], APART[0] * 2 ** min(count - REFUSALS, 16)) if count >= REFUSALS else 0.0
        self.refusals[other.id] = count, now + pause

    def apart(self, other: Instance, now: float) -> bool:
        """Are requests better not handed over to the other now, for it has been refusing them?"""
        return bool(self.refusals) and now < self.refusals.get(other.id, (0, 0.0))[1]

    def cached(self, marks: Iterable[Mark], now: float) -> int:
        """How many of a prompt's first tokens it has computed lately: what it told, or was sent since."""
        best = 0
        for mark in marks:
            sent = self.sent.get(mark.hash)
            if mark.hash in self.hashes or (sent is not None and (not self.hashes or now - sent < FRESH)):
                best = mark.tokens
            elif mark.tokens > best:
                break
        return best

    def note(self, marks: Iterable[Mark], now: float) -> None:
        """A prompt is being sent here."""
        for mark in marks:
            self.sent.pop(mark.hash, None)
            self.sent[mark.hash] = now
        while len(self.sent) > REPORTED:
            del self.sent[next(iter(self.sent))]


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
        """Give it no new requests, or again some."""
        before, instance.offline = instance.offline, offline
        if before and not offline:
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
