"""One instance of a cluster: its properties, its last status, whether it may receive requests, and which prefixes it
has cached.

The table and the status parser change it; this module only derives facts from its fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from parley.coordinator.routing.load import Side
from parley.disagg.wire.prompt_hash import REPORTED, Mark

State = Literal["joining", "ready", "switching", "offline", "faulty", "lost"]
REFUSALS = 3  # refusals in a row until handovers between two instances pause
APART = 0.5, 30.0  # seconds of that pause: the first, and the longest
FRESH = 10.0  # seconds until a prompt sent to an instance must appear in its report


@dataclass(eq=False)
class Instance:
    """One server of the cluster.

    ``slots``, ``blocks``: its totals; ``avail_…``: the free part, as it reports itself. ``management``, ``metrics``:
    base URLs of its status and metrics; ``grpc``: its gRPC address, if any. ``native``: it is parley, and can also
    run any request whole. ``attached``: its results can be received, as reported by the result stream. ``peers``: the
    only instances it is linked with, if it reports them. ``first_role``: the first role assigned to it. ``origin``: the
    source of the entry. ``polled``: its status is polled; False for an entry of a controller's list that includes its
    load.
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
    asked: bool = True  # poll its status; otherwise a controller's list reports it
    slots: int = 200
    blocks: int = 1024
    block_size: int = 16
    longest: int = 0  # context length in tokens; 0 if not reported
    p_percentage: int = 50
    models: frozenset[str] = frozenset()
    layout: str = ""
    epoch: str = ""
    peers: frozenset[int] = frozenset()
    extended: bool = False
    peer_given: bool = False  # the configuration sets ``peer``; reported values are ignored
    attached: bool = True
    offline: bool = False  # taken out of service
    switching: bool = False  # its role is changing, as it reports itself
    changing: bool = False  # its role is changing, as the controller set it
    loaded: bool = True  # it accepts requests, as it reports: it is neither loading nor shutting down
    seen: bool = False  # it has answered at least once
    misses: int = 0  # status checks without an answer, in a row
    answered: float = 0.0  # time of its last answer
    lost: bool = False
    faulty_until: float = 0.0
    fault: str = ""  # reason of its last fault
    proofs: int = 0  # answers in a row since its last fault
    avail_slots: int | None = None
    avail_blocks: int | None = None
    waiting: int = 0
    running: int = 0
    pinned: int = 0
    reserved: int = 0
    prefill_rate: float = 0.0  # tokens per second
    decode_rate: float = 0.0
    transfers: dict[str, float] = field(default_factory=dict)  # its own counters of KV transfers
    hashes: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self.management = (self.management or self.url).rstrip("/")
        self.metrics = (self.metrics or self.management).rstrip("/")
        self.meant = self.role
        self.prefill, self.decode = Side(self, "prefill"), Side(self, "decode")
        self.tasks = 0  # requests placed on it
        self.refusals: dict[int, tuple[int, float]] = {}  # by id of the refusing instance: count in a row, pause until
        self.sent: dict[int, float] = {}  # prefix hashes sent to it, with the time, oldest first

    @property
    def used(self) -> int:
        """Number of KV blocks in use, as it reports."""
        return 0 if self.avail_blocks is None else max(0, self.blocks - self.avail_blocks)

    def state(self, now: float) -> State:
        """Return its state at the time ``now``."""
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
        """Whether new requests may be sent to it."""
        return self.attached and self.state(now) == "ready"

    def linked(self, other: Instance) -> bool:
        """Whether one of the two can prefill for the other."""
        if other is self:
            return True
        if self.group != other.group or (self.layout and other.layout and self.layout != other.layout):
            return False
        told = self.peers or other.peers
        return not told or other.id in self.peers or self.id in other.peers

    def refused(self, other: Instance, now: float) -> None:
        """Record that ``other`` refused a handover from it.

        After MAX_REFUSALS in a row handovers pause, ever longer.
        """
        count = self.refusals.get(other.id, (0, 0.0))[0] + 1
        pause = min(APART[1], APART[0] * 2 ** min(count - REFUSALS, 16)) if count >= REFUSALS else 0.0
        self.refusals[other.id] = count, now + pause

    def apart(self, other: Instance, now: float) -> bool:
        """Whether handovers to ``other`` are paused because it has been refusing them."""
        return bool(self.refusals) and now < self.refusals.get(other.id, (0, 0.0))[1]

    def cached(self, marks: Iterable[Mark], now: float) -> int:
        """Return how many leading tokens of a prompt are in its prefix cache, by its report and by recent requests."""
        best = 0
        for mark in marks:
            sent = self.sent.get(mark.hash)
            if mark.hash in self.hashes or (sent is not None and (not self.hashes or now - sent < FRESH)):
                best = mark.tokens
            elif mark.tokens > best:
                break
        return best

    def note(self, marks: Iterable[Mark], now: float) -> None:
        """Record that a prompt with these prefix hashes is being sent to it."""
        for mark in marks:
            self.sent.pop(mark.hash, None)
            self.sent[mark.hash] = now
        while len(self.sent) > REPORTED:
            del self.sent[next(iter(self.sent))]
