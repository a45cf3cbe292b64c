"""The one long connection over which an instance's results come, for all requests that it decodes.

Who waits for results says under which id. When the connection breaks it is made again; an instance of parley's own
goes on where it broke, with any other the frames in between are lost, and so are its requests. Knows frames, and not
what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from parley.cluster.upstream import Broken, Connection, Headers, Unreachable, Upstream
from parley.instance.frames import BadFrame, Frame, Reader

SILENCE = 12.0  # seconds without a byte, heartbeats included, after which a connection is held to be dead
BACK = 2.0  # seconds that a new request waits for a broken connection
RESUME = 15.0  # seconds in which a broken connection must be back
PLAIN = 0.1  # seconds after which an instance that has not said that it is parley is taken to be another
PAUSE = 0.005  # seconds after which a payload that may have a NUL of its own is taken to have none
AGAIN = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds between attempts to connect
ALARM = 5  # attempts in a row that failed, after which somebody should know
STRANGERS = 4096  # ids whose frames nobody wants that are remembered


class Receiver(Protocol):
    """Who waits for the frames of a request."""

    def take(self, frame: Frame) -> None: ...

    def lost(self, reason: str) -> None:
        """No more frames will come."""


class Feed:
    """``client``: the coordinator's name; ``seat``: where it is. ``attached`` is told whether results can be received,
    and, once that has lasted, why not; ``stray`` of the id of a request that sends results and that nobody knows."""

    def __init__(
        self,
        upstream: Upstream,
        client: str,
        seat: str,
        attached: Callable[[bool, str], None],
        stray: Callable[[str], None] = lambda id: None,
        headers: Headers = (),
    ):
        self.exact = False  # it is parley's: frames are counted, and can be sent again
        self.connected = False
        self.replaced = False  # another coordinator has taken the place that a plain instance has for one
        self.bytes = 0
        self._upstream, self._client, self._seat, self._headers = upstream, client, seat, headers
        self._attached, self._stray = attached, stray
        self._receivers: dict[bytes, Receiver] = {}
        self._up = asyncio.Event()  # as ``connected``
        self._strangers: OrderedDict[bytes, None] = OrderedDict()
        self._epoch = b""
        self._number = 0  # frames of this epoch that were read over earlier connections
        self._heard = 0.0
        self._accepted = False
        self._reader = Reader()
        self._connection: Connection | None = None
        self._ended: asyncio.Future[str] | None = None  # why the connection did
        self._flushing: asyncio.TimerHandle | None = None

    async def ready(self) -> bool:
        """Can results come? If not, wait a moment for the connection to be back."""
        if not self.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BACK):
                    await self._up.wait()
        return self.connected

    def open(self, id: str, receiver: Receiver) -> None:
        """Have ``receiver`` get the frames of a request."""
        self._receivers[id.encode()] = receiver

    def close(self, id: str) -> None:
        """Nobody waits for them any more."""
        self._receivers.pop(id.encode(), None)

    async def run(self) -> None:
        """Keep the connection up until cancelled."""
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
                        since = 0.0  # it is not there, and another in its place would know nothing
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
        """All requests are lost here."""
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.lost(reason)

    async def _live(self) -> str:
        """One connection, from its beginning to its end: why that came. Raises Unreachable."""
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
                    return "Nothing was heard of it."
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

    # -- the answer, as it comes

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if status != 200:
            self._end(f"It refused to send results, with status {status}.")
            return
        self._accepted = True

    def _connect(self) -> None:
        """Results can be received, if the instance has said that it sends them."""
        if self._accepted and not self.connected:
            self.connected = True
            self._up.set()
            self._attached(True, "")

    def data(self, data: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        self.bytes += len(data)
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        try:
            frames = self._reader.feed(data)
        except BadFrame as error:
            self.fail(str(error))
            self._epoch = b"unreadable"  # which it never was: the instance begins another
            self._end(str(error))
            return
        self._give(frames)
        if self._reader.held:
            self._flushing = asyncio.get_running_loop().call_later(PAUSE, self._flush)

    def end(self, error: Broken | None) -> None:
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
        """An exact stream: the same epoch as before goes on where it broke."""
        self.exact = True
        if epoch != self._epoch:
            if self._epoch:
                self.fail("It was restarted, or has forgotten what it had sent.")
            self._epoch, self._number = epoch, 0
        self._connect()

    def _unknown(self, frame: Frame) -> None:
        """A request goes on that nobody waits for."""
        if frame.kind == "data" and frame.id not in self._strangers:
            self._strangers[frame.id] = None
            if len(self._strangers) > STRANGERS:
                self._strangers.popitem(last=False)
            self._stray(frame.id.decode("latin-1"))
