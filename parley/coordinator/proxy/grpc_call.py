"""Runs a gRPC call through the front: each message becomes one HTTP-like request, as for every other API.

This module stands in for the HTTP connection: one message in, its answer out, alone or among others in a stream that
the client may read slowly. Knows no instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
import msgspec
from starlette.types import ASGIApp, Message

from parley.coordinator import refusals
from parley.dialects.triton.rpc.frames import Failure, Reader
from parley.dialects.triton.rpc.status import Refused, status
from parley.web.connection import CYCLE

HOLD = 64 << 10  # bytes waiting for a slow client, above which senders have to wait too
UNREAD = "The answers were not read in time."
FATAL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)  # these end the whole stream

Headers = Sequence[tuple[bytes, bytes]]


class Answers:
    """The queue of answers to the client of a stream, sent in order.

    ``write`` returns when the client has read enough to accept the message; ``write_timeout``: seconds that this may
    take.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[None]], patience: float):
        self._write, self._patience = write, patience
        self._queue: asyncio.Queue[bytes | Refused | None] = asyncio.Queue()
        self._waiting = 0  # bytes in the queue
        self._room = asyncio.Event()
        self._room.set()

    @property
    def full(self) -> bool:
        """Whether more than HOLD bytes wait to be read."""
        return self._waiting > HOLD

    def put(self, message: bytes) -> None:
        """Queue a message; never waits."""
        self._queue.put_nowait(message)
        self._waiting += len(message)
        if self.full:
            self._room.clear()

    def end(self, refused: Refused | None = None) -> None:
        """End the stream after the messages queued so far, with the error if there is one."""
        self._queue.put_nowait(refused)

    async def room(self) -> None:
        """Wait until the queue is no longer full."""
        await self._room.wait()

    async def run(self) -> None:
        """Write messages until the end of the stream. Raises Refused."""
        while isinstance(message := await self._queue.get(), bytes):
            try:
                async with asyncio.timeout(self._patience):
                    await self._write(message)
            except TimeoutError:
                raise Refused(grpc.StatusCode.ABORTED, UNREAD) from None
            self._waiting -= len(message)
            if not self.full:
                self._room.set()
        if message is not None:
            raise message


class Cycle:
    """One request and its answer, with the interface of ``web.connection.Cycle``.

    ``answers``: the queue of the stream that the request belongs to; None for a unary call.
    """

    whole = True

    def __init__(self, answers: Answers | None = None):
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._answers = answers
        self._request = b""
        self._body: list[bytes] = []
        self._reader = Reader()
        self._failure: Failure | None = None
        self._complete = self._aborted = False
        self._watchers: set[Callable[[], None]] = set()

    async def run(self, front: ASGIApp, method: str, path: str, headers: Headers, body: bytes = b"") -> bytes:
        """Run a request and return its answer, except for the parts written to the stream. Raises Refused."""
        self._request = body
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            CYCLE: self,
        }
        await front(scope, self._receive, self.send)
        told = b"".join(self._body)
        if self._aborted or not self._complete:
            raise Refused(grpc.StatusCode.ABORTED, UNREAD if self._answers else refusals.D_FAILED)
        if self._failure is not None:
            raise Refused(status(self._failure.status), self._failure.error)
        if self.status != 200:
            raise Refused(status(self.status), _sentence(told))
        return told

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": self._request, "more_body": False}

    # -- the interface that the front expects of a connection

    @property
    def response_started(self) -> bool:
        """Whether a status has been set."""
        return self.status != 0

    @property
    def blocked(self) -> bool:
        """Whether the client reads too slowly to send more now."""
        return self._answers is not None and self._answers.full

    def begin(self, status: int, headers: Headers) -> None:
        """Set status and headers of the answer."""
        self.status, self.headers = status, dict(headers)

    def part(self, data: bytes, *, last: bool = False) -> bool:
        """Accept a part of the answer; False if the sender should wait."""
        if self._aborted:
            return True
        self._complete = last
        if self._answers is None or self.status != 200:
            self._body.append(data)
            return True
        for each in self._reader.feed(data):
            if isinstance(each, Failure):
                self._failure = each
            else:
                self._answers.put(each)
        return not self._answers.full

    async def send(self, message: Message) -> None:
        """Accept an ASGI message, once the stream's queue has room."""
        if self._answers is not None:
            await self._answers.room()
        if message["type"] == "http.response.start":
            self.begin(message["status"], message["headers"])
        else:
            self.part(message.get("body", b""), last=not message.get("more_body", False))

    def abort(self) -> None:
        """Cancel the answer unless it is complete, and notify the watchers."""
        self._aborted = not self._complete
        for departed in tuple(self._watchers):
            departed()

    def watch(self, departed: Callable[[], None]) -> bool:
        """Call ``departed`` when the request is aborted; False if it already is."""
        self._watchers.add(departed)
        return not self._aborted

    def unwatch(self, departed: Callable[[], None]) -> None:
        """Undo ``watch``."""
        self._watchers.discard(departed)


def _sentence(body: bytes) -> str:
    """Extract the message of an error body: in the API's form, in that of unknown paths, or as MindIE coordinators
    write it."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        return body.decode("utf-8", "replace").strip()
