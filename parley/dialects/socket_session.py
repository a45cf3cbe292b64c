"""Turns the messages of a WebSocket's client into requests, and their answers into messages.

Requests are POST requests of the WebSocket's own path, or of one next to it. Requests of one *lane* are answered one
after another, and different lanes concurrently. Other messages are answered at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from parley.errors import ParleyError


class ConnectionRecords(Protocol):
    """Records that are kept in memory, no longer than their connection. Old ones are dropped if memory is scarce."""

    def save_record(self, name: str, data: bytes) -> None:
        """Keep a record in place of any other of this name."""

    def find_record(self, name: str) -> bytes | None:
        """Return the record of this name, None if there is none."""

    def delete_record(self, name: str) -> None:
        """Drop the record of this name, if there is one."""


@dataclass(frozen=True, slots=True)
class SocketOpening:
    """The facts about a connection that its session gets. ``records``: keeps its records; ``query``: the parameters of
    its path."""

    records: ConnectionRecords
    query: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SocketRequest:
    """A request that was read from a message. ``lane``: its lane, "" for that of requests which name none."""

    lane: str


@dataclass(frozen=True, slots=True)
class LaneEnd:
    """A message that ends all requests of a lane, as if their client had left. ``messages``: the answer to it."""

    lane: str
    messages: Sequence[bytes]


class SocketAnswer(ABC):
    """The answer to a request. ``body``, ``headers``: of the request, the latter besides those of its connection.

    ``sibling``: the path of the request below the parent of the connection's own path; "": the own path.
    """

    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = ()
    sibling: str = ""

    @abstractmethod
    def read_part(self, status: int, data: bytes, *, last: bool) -> list[bytes]:
        """Return the messages that the next part of the answer makes. ``status``: of the whole answer."""


class SocketSession(ABC):
    """The messages of one connection.

    * ``max_lanes``: the most named lanes that have requests at a time.
    * ``max_waiting``: the most requests of a lane that wait for the one before.
    * ``max_seconds``: how long the connection may last; requests that run by then are answered.
    * ``max_idle``: the connection ends after this many seconds without a message and without a request; None: no limit.
    * ``max_per_client``: the most connections that one API key may have at a time; None: no limit.
    * ``subprotocol``: the subprotocol that clients may ask for.
    """

    max_lanes: ClassVar[int]
    max_waiting: ClassVar[int]
    max_seconds: ClassVar[float]
    max_idle: ClassVar[float | None] = None
    max_per_client: ClassVar[int | None] = None
    subprotocol: ClassVar[bytes] = b""

    def opening_messages(self) -> list[bytes]:
        """Return the messages that begin the connection."""
        return []

    @abstractmethod
    def read_message(self, data: bytes) -> SocketRequest | LaneEnd | list[bytes]:
        """Return the request in a message, or the messages that answer it or refuse it."""

    def acknowledge(self, request: SocketRequest) -> list[bytes]:
        """Return the messages that say that a request was read, before any that refuses it."""
        return []

    @abstractmethod
    def count_earlier_bytes(self, request: SocketRequest) -> int:
        """Return the bytes besides its message that ``start_request`` has to read for a request."""

    @abstractmethod
    def start_request(self, request: SocketRequest) -> SocketAnswer:
        """Return the answer to a request, which has no parts yet. All requests before it in its lane have ended."""

    @abstractmethod
    def refuse_request(self, request: SocketRequest, error: ParleyError) -> bytes:
        """Return the message that refuses a request."""

    @abstractmethod
    def refuse_lane(self, request: SocketRequest) -> bytes:
        """Return the message that refuses a request because too many lanes have requests."""

    @abstractmethod
    def render_expiry(self, lane: str) -> bytes:
        """Return the message that ends a connection after ``max_seconds``, or refuses a request of a lane then."""
