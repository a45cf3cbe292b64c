"""One instance of a cluster: what it is, what it last said of itself, whether requests may go to it, and which of its
cached prefixes are known.

Who changes it is the table and what reads reports; here is only what follows from what is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from parley.cluster.load import Side
from parley.instance.prefix import REPORTED, Mark

State = Literal["joining", "ready", "switching", "offline", "faulty", "lost"]
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
    longest: int = 0  # tokens of a context, 0 if it does not tell
    p_percentage: int = 50
    models: frozenset[str] = frozenset()
    layout: str = ""
    epoch: str = ""
    peers: frozenset[int] = frozenset()
    extended: bool = False
    peer_given: bool = False  # by the configuration: what it tells does not count
    attached: bool = True
    offline: bool = False  # out of service
    switching: bool = False  # its role, as it says
    changing: bool = False  # the same, as who changes it says
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
        known = self.role in ("mixed", "prefill", "decode", "flex")
        return "ready" if known and not self.switching and not self.changing else "switching"

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
