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
from parley.dialects.triton.rpc.frames import FrameSplitter, StreamFailure
from parley.dialects.triton.rpc.status import GrpcError, grpc_status
from parley.web.http_cycle import CYCLE_KEY

MAX_QUEUED_BYTES = 64 << 10  # bytes that wait for a slow client; above this, senders have to wait too
ANSWERS_UNREAD = "The answers were not read in time."
STREAM_FATAL_CODES = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)  # these end the whole stream

HeaderList = Sequence[tuple[bytes, bytes]]


class GrpcAnswerQueue:
    """The queue of answers to the client of a stream, sent in order.

    ``write`` returns when the client has read enough to accept the message; ``write_timeout``: seconds that this may
    take.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[None]], write_timeout: float):
        self._write, self._write_timeout = write, write_timeout
        self._queue: asyncio.Queue[bytes | GrpcError | None] = asyncio.Queue()
        self._queued_bytes = 0  # bytes in the queue
        self._room_event = asyncio.Event()
        self._room_event.set()

    @property
    def is_full(self) -> bool:
        """Whether more than MAX_QUEUED_BYTES wait to be read."""
        return self._queued_bytes > MAX_QUEUED_BYTES

    def queue_message(self, message: bytes) -> None:
        """Queue a message; never waits."""
        self._queue.put_nowait(message)
        self._queued_bytes += len(message)
        if self.is_full:
            self._room_event.clear()

    def end_stream(self, error: GrpcError | None = None) -> None:
        """End the stream after the messages queued so far, with the error if there is one."""
        self._queue.put_nowait(error)

    async def wait_for_room(self) -> None:
        """Wait until the queue is no longer full."""
        await self._room_event.wait()

    async def write_messages(self) -> None:
        """Write messages until the end of the stream. Raises GrpcError."""
        while isinstance(message := await self._queue.get(), bytes):
            try:
                async with asyncio.timeout(self._write_timeout):
                    await self._write(message)
            except TimeoutError:
                raise GrpcError(grpc.StatusCode.ABORTED, ANSWERS_UNREAD) from None
            self._queued_bytes -= len(message)
            if not self.is_full:
                self._room_event.set()
        if message is not None:
            raise message


class GrpcCycle:
    """One request and its answer, with the interface of ``web.http_cycle.HttpCycle``.

    ``answers``: the queue of the stream that the request belongs to; None for a unary call.
    """

    body_complete = True

    def __init__(self, answers: GrpcAnswerQueue | None = None):
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._answers = answers
        self._request = b""
        self._body: list[bytes] = []
        self._reader = FrameSplitter()
        self._failure: StreamFailure | None = None
        self._complete = self._aborted = False
        self._watchers: set[Callable[[], None]] = set()

    async def run_request(
        self, front: ASGIApp, method: str, path: str, headers: HeaderList, body: bytes = b""
    ) -> bytes:
        """Run a request and return its answer, except for the parts written to the stream. Raises GrpcError."""
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
            CYCLE_KEY: self,
        }
        await front(scope, self._receive_body, self.send_message)
        answer = b"".join(self._body)
        if self._aborted or not self._complete:
            cut_off = refusals.plain_sentence(refusals.TEXTS.decode_failed)
            raise GrpcError(grpc.StatusCode.ABORTED, ANSWERS_UNREAD if self._answers else cut_off)
        if self._failure is not None:
            raise GrpcError(grpc_status(self._failure.status), self._failure.error)
        if self.status != 200:
            wait = self.headers.get(b"retry-after", b"")
            retry_after = float(wait) if wait.isdigit() else None
            raise GrpcError(grpc_status(self.status), _error_message(answer), retry_after=retry_after)
        return answer

    async def _receive_body(self) -> Message:
        return {"type": "http.request", "body": self._request, "more_body": False}

    # -- the interface that the front expects of a connection

    @property
    def response_started(self) -> bool:
        """Whether a status has been set."""
        return self.status != 0

    @property
    def write_blocked(self) -> bool:
        """Whether the client reads too slowly to send more now."""
        return self._answers is not None and self._answers.is_full

    def begin_response(self, status: int, headers: HeaderList) -> None:
        """Set status and headers of the answer."""
        self.status, self.headers = status, dict(headers)

    def write_part(self, data: bytes, *, last: bool = False) -> bool:
        """Accept a part of the answer; False if the sender should wait."""
        if self._aborted:
            return True
        self._complete = last
        if self._answers is None or self.status != 200:
            self._body.append(data)
            return True
        for message in self._reader.split_frames(data):
            if isinstance(message, StreamFailure):
                self._failure = message
            else:
                self._answers.queue_message(message)
        return not self._answers.is_full

    async def send_message(self, message: Message) -> None:
        """Accept an ASGI message, once the stream's queue has room."""
        if self._answers is not None:
            await self._answers.wait_for_room()
        if message["type"] == "http.response.start":
            self.begin_response(message["status"], message["headers"])
        else:
            self.write_part(message.get("body", b""), last=not message.get("more_body", False))

    def abort_connection(self) -> None:
        """Cancel the answer unless it is complete, and notify the watchers."""
        self._aborted = not self._complete
        for on_disconnect in tuple(self._watchers):
            on_disconnect()

    def watch_disconnect(self, on_disconnect: Callable[[], None]) -> bool:
        """Call ``on_disconnect`` when the request is aborted; False if it already is."""
        self._watchers.add(on_disconnect)
        return not self._aborted

    def unwatch_disconnect(self, on_disconnect: Callable[[], None]) -> None:
        """Undo ``watch_disconnect``."""
        self._watchers.discard(on_disconnect)


def _error_message(body: bytes) -> str:
    """Extract the message of an error body: in the API's form, in that of unknown paths, or as MindIE coordinators
    write it."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        return body.decode("utf-8", "replace").strip()
