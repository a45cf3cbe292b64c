"""A batch: requests of one client that a server sends to itself, while the client looks at the batch's record.

A dialect reads the requests and words the results; the server sends the requests, and decides how many at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

# On each request of a batch, which waits for all that lack it. A client that sends it itself waits as well.
BATCH_HEADER = b"x-parley-batch"
# "completed": every request was answered, or no more results fit. "expired": the deadline has passed. "stopped": the
# client has cancelled it, or the server ends. "failed": the server had an error.
BatchEnd = Literal["completed", "expired", "stopped", "failed"]


class BatchRequest(NamedTuple):
    """A POST request. ``path``: below the prefix of the route that created the batch."""

    path: str
    body: bytes


class BatchAnswer(NamedTuple):
    """The answer to a request. ``body``: not JSON if the answer was cut off."""

    status: int
    request_id: str
    body: bytes


class BatchJob(ABC):
    """One batch.

    ``creation_path``: the route that created it, without a prefix. ``record_name``: of its record, which is touched
    while it waits and runs. ``deadline``: in seconds since the epoch, as every ``now``. ``begin`` and ``finish`` may be
    called in threads, one call at a time.
    """

    creation_path: ClassVar[str]
    record_name: str
    deadline: int

    @abstractmethod
    def render_accepted(self) -> bytes:
        """Keep the record of a batch that waits, and return the answer to its creation. Raises NotReady."""

    @abstractmethod
    def begin(self, now: int) -> Sequence[BatchRequest]:
        """Return the requests, and record that they run. If there are none, the record says why. Raises NotReady."""

    @abstractmethod
    def add_answer(self, number: int, answer: BatchAnswer) -> bool:
        """Add the answer to request ``number``. Return False if no more fit."""

    @abstractmethod
    def save_progress(self) -> None:
        """Record how many requests were answered. Raises NotReady."""

    @abstractmethod
    def finish(self, end: BatchEnd, now: int) -> None:
        """Keep the results, and record the end. Raises NotReady."""
