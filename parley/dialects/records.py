"""Records that a server keeps for its clients between requests, such as the responses that later requests refer to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from parley.errors import InvalidValue, ParleyError

SILENT_SECONDS = 90.0  # seconds without a touch until the server that ran a background request counts as ended
RecordChange = Callable[[bytes], tuple[bytes, Sequence[str]]]  # a record's data -> new data and parts


class RecordTooLarge(InvalidValue):
    """A change would make a record too large to be kept."""

    def __init__(self) -> None:
        super().__init__("The object would be larger than the server's store.")


class TenantRecords(Protocol):
    """The records of one tenant. Records of others are unknown here.

    A record has a ``name`` and the names of its ``parts``; each of them finds it. Old records are dropped when
    the store is full or they have expired.
    """

    @property
    def are_kept(self) -> bool:
        """Whether anything is kept at all."""

    @property
    def are_inlined(self) -> bool:
        """Whether a coordinator keeps them: the body contains those that it refers to (``InlinedRequest``)."""

    def save_record(self, name: str, data: bytes, parts: Sequence[str] = ()) -> bool:
        """Keep a record in place of any other of this name. A part that another record has is this one's from now.
        Return False if it is too large to be kept."""

    def update_record(self, name: str, change: RecordChange) -> bool:
        """Replace a record by the result of ``change``; nothing else changes it meanwhile. Return whether the record
        exists. Raises RecordTooLarge, and the exceptions of ``change``; both leave the record as it is."""

    @property
    def largest_record(self) -> int:
        """The bytes that one record may have; larger ones are not kept."""

    def find_record(self, name: str) -> bytes | None:
        """Return the record of this name, None if there is none."""

    def list_names(self, prefix: str) -> list[str]:
        """Return the names of the records that begin with ``prefix``, in alphabetical order."""

    def find_part(self, part: str) -> bytes | None:
        """Return the record that has this part, None if there is none."""

    def record_age(self, name: str) -> float:
        """Return the seconds since a record was kept, or touched by the run that writes it."""

    def delete_record(self, name: str) -> bool:
        """Drop the record of this name. Return whether there was one."""

    def stop_run(self, name: str) -> bool:
        """Stop the request that is writing this record in the background. Return whether one runs in this process."""


class NoRecords:
    """The records of a server that keeps none."""

    are_kept, are_inlined = False, False
    largest_record = 0

    def save_record(self, name: str, data: bytes, parts: Sequence[str] = ()) -> bool:
        """Return False."""
        return False

    def update_record(self, name: str, change: RecordChange) -> bool:
        """Return False."""
        return False

    def find_record(self, name: str) -> bytes | None:
        """Return None."""
        return None

    def list_names(self, prefix: str) -> list[str]:
        """Return an empty list."""
        return []

    def find_part(self, part: str) -> bytes | None:
        """Return None."""
        return None

    def record_age(self, name: str) -> float:
        """Return 0."""
        return 0.0

    def delete_record(self, name: str) -> bool:
        """Return False."""
        return False

    def stop_run(self, name: str) -> bool:
        """Return False."""
        return False


class InlinedRecords(NoRecords):
    """The records at an instance of a coordinator that keeps them."""

    are_kept, are_inlined = True, True


NO_RECORDS, INLINED_RECORDS = NoRecords(), InlinedRecords()


class InlinedRequest:
    """A request at a coordinator, which keeps the records of its clients, so that any instance can serve the request.

    ``body``: for instances; it contains the records that the client's body refers to. ``background_name``: as in
    ``Reply``; ``is_stream``: the client asks for a stream. The coordinator passes every part of the answer before the
    client gets it, so that the request keeps its own record: a stream in ``watch_stream``, an answer in one piece in
    ``watch_body``. Both return what the client gets.
    """

    background_name, is_stream = "", False

    def __init__(self, body: bytes):
        self.body = body

    def watch_stream(self, data: bytes) -> bytes:
        """Record the state of the answer from a part of its stream, and return the part; an event that is not complete
        may be held until it is."""
        return data

    def watch_body(self, data: bytes) -> bytes:
        """Record a successful answer in one piece, and return it."""
        return data

    def render_accepted(self) -> bytes:
        """Return the answer to a request that runs in the background, once its stream has begun."""
        raise AssertionError("it does not run in the background")

    def fail_stream(self, error: ParleyError) -> bytes | None:
        """Return the last bytes of a stream that has begun and ends with an error. None: as the dialect ends it."""
        return None


@dataclass(frozen=True, slots=True)
class StreamReplay:
    """Asks the server to send a background request's events again, from number ``first_event`` on, and those to come.

    ``name``: of its record. ``refusal``: the error if its events are not kept, or it was not asked for as a stream.
    """

    name: str
    first_event: int
    refusal: ParleyError
