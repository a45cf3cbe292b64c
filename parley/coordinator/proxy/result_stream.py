"""The result stream: one long connection that carries the results of all requests an instance decodes.

Callers register the request id they wait for. A broken connection is opened again; a parley instance then continues
after the last frame received, while other servers lose the frames in between, and their requests fail. Knows frames,
not their meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from parley.coordinator.proxy.http_client import Broken, Connection, Headers, Unreachable, Upstream
from parley.disagg.wire.result_frames import BadFrame, Frame, Reader

SILENCE = 12.0  # seconds without a byte (heartbeats included) until a connection counts as dead
BACK = 2.0  # seconds that a new request waits for a broken connection to recover
RESUME = 15.0  # seconds until a broken connection can no longer be resumed
PLAIN = 0.1  # seconds without an epoch frame until the instance counts as a server other than parley
PAUSE = 0.005  # seconds until a payload that may be cut at a NUL byte counts as complete
AGAIN = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds between attempts to connect
ALARM = 5  # failed attempts in a row until an alarm is raised
STRANGERS = 4096  # ids of orphaned requests that are remembered


class Receiver(Protocol):
    """Receives the frames of one request."""

    def take(self, frame: Frame) -> None:
        """Handle the next frame of the request."""

    def lost(self, reason: str) -> None:
        """The result stream failed: no more frames will come."""


class Feed:
    """The result stream of one instance.

    ``coordinator_name``, ``coordinator_id``: identify this coordinator. ``on_attached`` is called with whether results
    can be received and, once a failure lasts, the reason. ``on_orphan`` is called with the id of an orphaned request:
    one that sends results without a receiver.
    """

    def __init__(
        self,
        upstream: Upstream,
        client: str,
        seat: str,
        attached: Callable[[bool, str], None],
        stray: Callable[[str], None] = lambda id: None,
        headers: Headers = (),
    ):
        self.exact = False  # the instance is parley: frames are counted and can be sent again
        self.connected = False
        self.replaced = False  # another coordinator took over the stream; servers other than parley have only one
        self.bytes = 0
        self._upstream, self._client, self._seat, self._headers = upstream, client, seat, headers
        self._attached, self._stray = attached, stray
        self._receivers: dict[bytes, Receiver] = {}
        self._up = asyncio.Event()  # set while ``connected``
        self._strangers: OrderedDict[bytes, None] = OrderedDict()
        self._epoch = b""
        self._number = 0  # frames of this epoch received over earlier connections
        self._heard = 0.0
        self._accepted = False
        self._reader = Reader()
        self._connection: Connection | None = None
        self._ended: asyncio.Future[str] | None = None  # the reason why the connection ended
        self._flushing: asyncio.TimerHandle | None = None

    async def ready(self) -> bool:
        """Return whether results can be received; wait up to RECONNECT_WAIT seconds for a broken connection."""
        if not self.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BACK):
                    await self._up.wait()
        return self.connected

    def open(self, id: str, receiver: Receiver) -> None:
        """Register ``receiver`` for the frames of a request."""
        self._receivers[id.encode()] = receiver

    def close(self, id: str) -> None:
        """Unregister the receiver of a request."""
        self._receivers.pop(id.encode(), None)

    async def run(self) -> None:
        """Keep the connection open until cancelled."""
        failures, since = 0, 0.0
        try:
            while not self.replaced:
                try:
                    reason = await self._live()
                    if self._accepted:
                        failures, since = 0, time.monotonic()
                except Unreachable as error:
                    reason = str(error)
                    if error.refused:
                        since = 0.0  # nothing listens there, and a successor of the process could not resume
                failures += 1
                if self._receivers and (not self.exact or time.monotonic() - since > RESUME):
                    self.fail(reason)
                if failures > 1 or not self.exact:
                    self._attached(False, reason if failures == ALARM or self.replaced else "")
                await asyncio.sleep(AGAIN[min(failures, len(AGAIN)) - 1])
        finally:
            self._drop()
            self.fail("The instance is not used any more.")

    def fail(self, reason: str) -> None:
        """Fail all requests that wait for results on this stream."""
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.lost(reason)

    async def _live(self) -> str:
        """Run one connection from beginning to end; return why it ended. Raises InstanceUnreachable."""
        loop = asyncio.get_running_loop()
        target = b"/dresult?client=%b&seat=%b" % (self._client.encode(), self._seat.encode())
        self._number += self._reader.number
        self._reader = Reader()
        if self._epoch:
            target += b"&epoch=%b&from=%d" % (self._epoch, self._number)
        connection = await self._upstream.connect()
        self._ended, self._connection = loop.create_future(), connection
        self._accepted, self._heard = False, loop.time()
        connection.send(self._upstream.request(b"GET", target, self._headers), self)
        try:
            await asyncio.wait((self._ended,), timeout=PLAIN)
            while not self._ended.done():
                self._connect()
                await asyncio.wait((self._ended,), timeout=SILENCE / 4)
                if not self._ended.done() and loop.time() - self._heard > SILENCE:
                    return "Nothing was received for too long."
            return self._ended.result()
        finally:
            self._drop()

    def _drop(self) -> None:
        self.connected = False
        self._up.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None

    # -- the HTTP response, as it arrives

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Accept the stream if its status is 200."""
        if status != 200:
            self._end(f"It refused to send results, with status {status}.")
            return
        self._accepted = True

    def _connect(self) -> None:
        """Report the stream as connected, if the instance has accepted the request for it."""
        if self._accepted and not self.connected:
            self.connected = True
            self._up.set()
            self._attached(True, "")

    def data(self, data: bytes) -> None:
        """Parse received bytes and hand the frames to their receivers."""
        self._heard = asyncio.get_running_loop().time()
        self.bytes += len(data)
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        try:
            frames = self._reader.feed(data)
        except BadFrame as error:
            self.fail(str(error))
            self._epoch = b"unreadable"  # no valid epoch: the instance will start a new one
            self._end(str(error))
            return
        self._give(frames)
        if self._reader.held:
            self._flushing = asyncio.get_running_loop().call_later(PAUSE, self._flush)

    def end(self, error: Broken | None) -> None:
        """The HTTP response ended."""
        self._end("The connection for results ended.")

    def _end(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    def _flush(self) -> None:
        self._flushing = None
        self._give(self._reader.flush())

    def _give(self, frames: list[Frame]) -> None:
        receivers = self._receivers
        for frame in frames:
            receiver = receivers.get(frame.id)
            if receiver is not None:
                receiver.take(frame)
            elif frame.id:
                self._unknown(frame)
            elif frame.kind == "epoch":
                self._begin(frame.payload)
            elif frame.kind == "close" and not self.exact:
                self.replaced = True
                self._end("Another coordinator has taken the results of this instance.")

    def _begin(self, epoch: bytes) -> None:
        """Start or resume a stream with frame counting; the same epoch as before continues after the last frame."""
        self.exact = True
        if epoch != self._epoch:
            if self._epoch:
                self.fail("It was restarted, or no longer has the results that it sent.")
            self._epoch, self._number = epoch, 0
        self._connect()

    def _unknown(self, frame: Frame) -> None:
        """Report an orphaned request, once per id."""
        if frame.kind == "data" and frame.id not in self._strangers:
            self._strangers[frame.id] = None
            if len(self._strangers) > STRANGERS:
                self._strangers.popitem(last=False)
            self._stray(frame.id.decode("latin-1"))
