"""A batch: requests of one client that a server sends to itself, while the client looks at the batch's record.

A dialect reads the requests and words the results; the server sends the requests, and decides how many at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from parley.dialects.records import SILENT_SECONDS, TenantRecords

# Marks each request of a batch, which runs after all requests without it. A client may set it for its own requests.
BATCH_HEADER = b"x-parley-batch"
RUN_PREFIX = "batch-run/"  # begins the names of records that let another server resume a batch
# "completed": every request was answered, or no more results fit. "expired": the deadline has passed. "stopped": the
# client has cancelled it, or the server ends. "failed": the server had an error.
BatchEnd = Literal["completed", "expired", "stopped", "failed"]


class BatchRequest(NamedTuple):
    """A POST request. ``path``: below the prefix of the route that created the batch. ``custom_id``: its client's."""

    path: str
    body: bytes
    custom_id: str


class BatchAnswer(NamedTuple):
    """The answer to a request. ``body``: not JSON if the answer was cut off. ``custom_id``: of the request, so that the
    result can be worded without the input, which may have been deleted."""

    status: int
    request_id: str
    body: bytes
    custom_id: str


class BatchJob(ABC):
    """One batch.

    * ``creation_path``: the path of the route that created it, without a prefix.
    * ``kept_headers``: headers of the creating request that its requests need besides the key, also on another server.
    * ``record_name``: the name of its record.
    * ``input_name``: the name of the record with its requests. Both records are touched while it waits and runs.
    * ``deadline``: in seconds since the epoch, as every ``now``.
    * ``result_expiry``: seconds after which its results expire; None: as other records.
    * ``is_cancelled``: its client cancelled it before it was restored.
    * ``begin`` and ``finish`` may be called in threads, one call at a time.

    To let other batches run, a batch is paused with ``forget_answers``, and resumed with ``begin`` and ``add_answer``
    for every answer so far. It reads its input once.
    """

    creation_path: ClassVar[str]
    kept_headers: ClassVar[tuple[bytes, ...]] = ()
    record_name: str
    input_name: str
    deadline: int
    result_expiry: int | None = None
    is_cancelled: bool = False

    @abstractmethod
    def render_accepted(self) -> bytes:
        """Keep the record of a batch that waits, and return the answer to its creation. Raises NotReady."""

    @abstractmethod
    def begin(self, now: int) -> Sequence[BatchRequest]:
        """Return the requests, and record that they run. If there are none, ``finish`` says why. Raises NotReady."""

    @abstractmethod
    def add_answer(self, number: int, answer: BatchAnswer) -> bool:
        """Add the answer to request ``number``. Return False if no more fit."""

    @abstractmethod
    def forget_answers(self) -> None:
        """Free the memory of all answers."""

    @abstractmethod
    def save_progress(self) -> None:
        """Record how many requests were answered. Raises NotReady."""

    @abstractmethod
    def finish(self, end: BatchEnd, now: int) -> None:
        """Keep the results, and record the end. Raises NotReady."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the record says that the batch has ended. Raises NotReady."""


def has_lost_server(records: TenantRecords, record_name: str, deadline: int, now: int) -> bool:
    """Whether the server of a running batch has ended, and no other server will resume it. ``record_name`` and
    ``deadline``: those of the batch."""
    is_silent = records.record_age(record_name) > SILENT_SECONDS
    return is_silent and (now > deadline or records.find_record(RUN_PREFIX + record_name) is None)


def waits_for_server(records: TenantRecords, record_name: str) -> bool:
    """Whether the server of a running batch has ended, and another server may resume it."""
    is_silent = records.record_age(record_name) > SILENT_SECONDS
    return is_silent and records.find_record(RUN_PREFIX + record_name) is not None
