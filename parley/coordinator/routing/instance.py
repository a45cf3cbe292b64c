"""One instance of a cluster: its properties, its last status, whether it may receive requests, and which prefixes it
has cached.

The table and the status parser change it; this module only derives facts from its fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from parley.coordinator.routing.circuit_breaker import CircuitBreaker
from parley.coordinator.routing.load import JobSide
from parley.disagg.wire.prompt_hash import MAX_REPORTED_HASHES, PrefixMark
from parley.types import ModelTask

InstancePhase = Literal["joining", "ready", "switching", "offline", "faulty", "lost"]
MAX_REFUSALS = 3  # refusals in a row until handovers between two instances pause
PAUSE_BOUNDS = 0.5, 30.0  # seconds of that pause: the first, and the longest
REPORT_DELAY = 10.0  # seconds until a prompt sent to an instance must appear in its report


class InstanceModel(NamedTuple):
    """A model of an instance: its names with those of its adapters, the main one first, and its tasks; None if the
    instance does not tell them."""

    names: tuple[str, ...]
    tasks: frozenset[ModelTask] | None


@dataclass(eq=False)
class ClusterInstance:
    """One server of the cluster.

    * ``slots``, ``blocks``: its sequences at once and its KV pages; ``avail_…``: the free ones, as it reports them.
    * ``management``, ``metrics``: base URLs of its status and metrics.
    * ``grpc``: its gRPC address, if any.
    * ``native``: it is a parley server, which can also run any request whole.
    * ``has_result_stream``: its results can be received.
    * ``peers``: the only instances it is linked with, if it reports them.
    * ``checks_keys``: it has API keys.
    * ``has_private_prefixes``: requests of different keys share no cached prefixes there.
    * ``first_role``: the first role assigned to it.
    * ``origin``: where the entry comes from.
    * ``polled``: its status is polled; False for an entry of a controller's list that includes its load.
    """

    id: int
    url: str
    role: str = "mixed"
    group: int = 0
    management: str = ""
    metrics: str = ""
    peer: str = ""
    grpc: str = ""
    origin: Literal["file", "list"] = "file"
    polled: bool = True  # poll its status; otherwise a controller's list reports it
    slots: int = 200
    blocks: int = 1024
    block_size: int = 16
    context_length: int = 0  # in tokens; 0 if not reported
    p_percentage: int = 50
    models: frozenset[str] = frozenset()  # all names
    offered_models: tuple[InstanceModel, ...] = ()  # the main model first
    layout: str = ""
    epoch: str = ""
    peers: frozenset[int] = frozenset()
    native: bool = False
    checks_keys: bool = False
    has_private_prefixes: bool = False
    peer_configured: bool = False  # the configuration sets ``peer``; reported values are ignored
    has_result_stream: bool = True
    offline: bool = False  # taken out of service
    switching: bool = False  # its role is changing, as it reports itself
    changing: bool = False  # its role is changing, as the controller set it
    accepts_requests: bool = True  # it accepts requests, as it reports: it is neither loading nor shutting down
    has_answered: bool = False  # it has answered at least once
    missed_checks: int = 0  # status checks without an answer, in a row
    responds: bool = True  # its machine responded to the last status check, if only by refusing the connection
    answers_checks: bool = False  # it answered the status check that ``checked_at`` means
    checked_at: float = 0.0  # when the newest status check with a known outcome began, by time.monotonic
    last_answer: float = 0.0  # time of its last answer
    lost: bool = False
    faulty_until: float = 0.0
    fault_reason: str = ""  # reason of its last fault, empty once its results are received again
    good_checks: int = 0  # answers in a row since its last fault
    avail_slots: int | None = None
    avail_blocks: int | None = None
    waiting: int = 0
    running: int = 0
    pinned: int = 0
    reserved: int = 0
    prefill_rate: float = 0.0  # tokens per second
    decode_rate: float = 0.0
    transfers: dict[str, float] = field(default_factory=dict)  # its own counters of KV transfers
    cached_hashes: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self.management = (self.management or self.url).rstrip("/")
        self.metrics = (self.metrics or self.management).rstrip("/")
        self.first_role = self.role
        self.prefill, self.decode = JobSide(self, "prefill"), JobSide(self, "decode")
        self.breaker = CircuitBreaker()
        self.tasks = 0  # requests placed on it
        # By id of the refusing instance: the number of refusals in a row, and the time until which it is left alone.
        self.handover_refusals: dict[int, tuple[int, float]] = {}
        self.sent_hashes: dict[int, float] = {}  # prefix hashes sent to it, with the time, oldest first

    @property
    def used_blocks(self) -> int:
        """Number of KV blocks in use, as it reports."""
        return 0 if self.avail_blocks is None else max(0, self.blocks - self.avail_blocks)

    def phase_at(self, now: float) -> InstancePhase:
        """Return its state at the time ``now``."""
        if self.lost:
            return "lost"
        if now < self.faulty_until:
            return "faulty"
        if self.offline:
            return "offline"
        if not self.has_answered or not self.accepts_requests:
            return "joining"
        is_known_role = self.role in ("mixed", "prefill", "decode", "flex")
        return "ready" if is_known_role and not self.switching and not self.changing else "switching"

    def is_usable(self, now: float) -> bool:
        """Whether new requests may be sent to it."""
        return self.has_result_stream and self.phase_at(now) == "ready"

    def is_linked(self, other: ClusterInstance) -> bool:
        """Whether one of the two can prefill for the other."""
        if other is self:
            return True
        if self.group != other.group or (self.layout and other.layout and self.layout != other.layout):
            return False
        known_peers = self.peers or other.peers
        return not known_peers or other.id in self.peers or self.id in other.peers

    def record_refusal(self, other: ClusterInstance, now: float) -> None:
        """Record that ``other`` refused a handover from it.

        After MAX_REFUSALS in a row handovers pause, ever longer.
        """
        count = self.handover_refusals.get(other.id, (0, 0.0))[0] + 1
        pause = (
            min(PAUSE_BOUNDS[1], PAUSE_BOUNDS[0] * 2 ** min(count - MAX_REFUSALS, 16)) if count >= MAX_REFUSALS else 0.0
        )
        self.handover_refusals[other.id] = count, now + pause

    def handover_paused(self, other: ClusterInstance, now: float) -> bool:
        """Whether handovers to ``other`` are paused because it has been refusing them."""
        return bool(self.handover_refusals) and now < self.handover_refusals.get(other.id, (0, 0.0))[1]

    def cached_tokens(self, prefix_marks: Iterable[PrefixMark], now: float) -> int:
        """Return how many leading tokens of a prompt are in its prefix cache, by its report and by recent requests."""
        best = 0
        for mark in prefix_marks:
            sent_at = self.sent_hashes.get(mark.prefix_hash)
            if mark.prefix_hash in self.cached_hashes or (
                sent_at is not None and (not self.cached_hashes or now - sent_at < REPORT_DELAY)
            ):
                best = mark.tokens
            elif mark.tokens > best:
                break
        return best

    def note_prompt(self, prefix_marks: Iterable[PrefixMark], now: float) -> None:
        """Record that a prompt with these prefix hashes is being sent to it."""
        for mark in prefix_marks:
            self.sent_hashes.pop(mark.prefix_hash, None)
            self.sent_hashes[mark.prefix_hash] = now
        while len(self.sent_hashes) > MAX_REPORTED_HASHES:
            del self.sent_hashes[next(iter(self.sent_hashes))]


def least_loaded(instances: Iterable[ClusterInstance]) -> list[ClusterInstance]:
    """Return instances, the best one to ask first: those of parley before others, then by their number of requests."""
    return sorted(instances, key=lambda instance: (not instance.native, instance.tasks, instance.id))
