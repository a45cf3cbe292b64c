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
from math import inf
from typing import Protocol

from parley.disagg.wire.result_frames import BadFrame, FrameReader, ResultFrame
from parley.web.http_client import (
    ConnectionBroken,
    HeaderPairs,
    HttpClientConnection,
    InstanceHttpClient,
    InstanceUnreachable,
)

SILENCE_TIMEOUT = 12.0  # seconds without a byte (heartbeats included) until a connection counts as dead
RECONNECT_WAIT = 2.0  # seconds that a new request waits for a broken connection to recover
RESUME_WINDOW = 15.0  # seconds until a broken connection can no longer be resumed
EPOCH_WAIT = 0.1  # seconds without an epoch frame until the instance counts as a server other than parley
FLUSH_DELAY = 0.005  # seconds until a payload that may be cut at a NUL byte counts as complete
RECONNECT_DELAYS = (0.05, 0.1, 0.2, 0.5, 1.0)  # seconds between attempts to connect
STALLED_SECONDS = 1.0  # an attempt to connect that lasts longer is not worth waiting for
LASTING_FAILURES = 5  # this many failed attempts in a row are reported, with the reason
MAX_ORPHANS = 4096  # ids of orphaned requests that are remembered


class ResultReceiver(Protocol):
    """Receives the frames of one request."""

    def take_frame(self, frame: ResultFrame) -> None:
        """Handle the next frame of the request."""

    def results_lost(self, reason: str) -> None:
        """The result stream failed: no more frames will come."""


class ResultStreamClient:
    """The result stream of one instance.

    ``coordinator_name``, ``coordinator_id``: identify this coordinator. ``on_attached`` is called with whether results
    can be received and, once a failure lasts, the reason. ``on_orphan`` is called with the id of an orphaned request:
    one that sends results without a receiver.
    """

    def __init__(
        self,
        http_client: InstanceHttpClient,
        coordinator_name: str,
        coordinator_id: str,
        on_attached: Callable[[bool, str], None],
        on_orphan: Callable[[str], None] = lambda request_id: None,
        headers: HeaderPairs = (),
    ):
        self.native = False  # the instance is parley: frames are counted and can be sent again
        self.connected = False
        self.taken_over = False  # another coordinator took over the stream; servers other than parley have only one
        self.received_bytes = 0
        self._http_client = http_client
        self._coordinator_name = coordinator_name
        self._coordinator_id = coordinator_id
        self._headers = headers
        self._on_attached, self._on_orphan = on_attached, on_orphan
        self._receivers: dict[bytes, ResultReceiver] = {}
        self._connected_event = asyncio.Event()  # set while ``connected``
        self._hurry_event = asyncio.Event()  # set while the next attempt to connect must not wait
        self._outcome: asyncio.Future[None] | None = None  # done when the next attempt to connect has an outcome
        self._responds = True  # the last attempt to connect was not in vain for its whole time
        self._attempt_began = inf  # by the loop's clock; infinity between two attempts
        self._orphans: OrderedDict[bytes, None] = OrderedDict()
        self._epoch = b""
        self._frames_received = 0  # frames of this epoch received over earlier connections
        self._last_byte_time = 0.0
        self._accepted = False
        self._reader = FrameReader()
        self._connection: HttpClientConnection | None = None
        self._end_reason: asyncio.Future[str] | None = None  # the reason why the connection ended
        self._flush_timer: asyncio.TimerHandle | None = None

    async def wait_until_ready(self) -> bool:
        """Return whether results can be received; wait up to RECONNECT_WAIT seconds for a broken connection."""
        if not self.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECONNECT_WAIT):
                    await self._connected_event.wait()
        return self.connected

    async def connect_now(self) -> None:
        """Try to connect without a delay, and return when that has succeeded or failed. An attempt that is under way
        may have begun too early, so another one follows it. Do nothing if the last one, or the one under way, finds
        nobody who responds: that takes long."""
        for _ in range(2):
            is_stalled = asyncio.get_running_loop().time() - self._attempt_began > STALLED_SECONDS
            if self.connected or self.taken_over or is_stalled or not self._responds:
                return
            self._hurry_event.set()
            if self._outcome is None:
                self._outcome = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._outcome)

    def register_receiver(self, request_id: str, receiver: ResultReceiver) -> None:
        """Register ``receiver`` for the frames of a request."""
        self._receivers[request_id.encode()] = receiver

    def unregister_receiver(self, request_id: str) -> None:
        """Unregister the receiver of a request."""
        self._receivers.pop(request_id.encode(), None)

    async def keep_connected(self) -> None:
        """Keep the connection open until cancelled."""
        failures, since = 0, 0.0
        try:
            while not self.taken_over:
                self._hurry_event.clear()
                self._attempt_began = asyncio.get_running_loop().time()
                try:
                    reason, self._responds = await self._run_connection(), True
                    if self._accepted:
                        failures, since = 0, time.monotonic()
                except InstanceUnreachable as error:
                    reason, self._responds = str(error), error.refused
                    if error.refused:
                        since = 0.0  # nothing listens there, and a successor of the process could not resume
                self._attempt_began = inf
                failures += 1
                if self._receivers and (not self.native or time.monotonic() - since > RESUME_WINDOW):
                    self.fail_requests(reason)
                if failures > 1 or not self.native:
                    self._on_attached(False, reason if failures >= LASTING_FAILURES or self.taken_over else "")
                self._report_outcome()
                await self._pause(RECONNECT_DELAYS[min(failures, len(RECONNECT_DELAYS)) - 1])
        finally:
            self._drop_connection()
            self._report_outcome()
            self.fail_requests("The instance is not used any more.")

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt to connect, unless it must not wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry_event.wait()

    def _report_outcome(self) -> None:
        """Report that an attempt to connect has succeeded or failed."""
        outcome, self._outcome = self._outcome, None
        if outcome is not None and not outcome.done():
            outcome.set_result(None)

    def fail_requests(self, reason: str) -> None:
        """Fail all requests that wait for results on this stream."""
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.results_lost(reason)

    async def _run_connection(self) -> str:
        """Run one connection from beginning to end; return why it ended. Raises InstanceUnreachable."""
        loop = asyncio.get_running_loop()
        target = b"/dresult?client=%b&seat=%b" % (self._coordinator_name.encode(), self._coordinator_id.encode())
        self._frames_received += self._reader.frame_number
        self._reader = FrameReader()
        if self._epoch:
            target += b"&epoch=%b&from=%d" % (self._epoch, self._frames_received)
        connection = await self._http_client.open_connection()
        self._end_reason, self._connection = loop.create_future(), connection
        self._accepted, self._last_byte_time = False, loop.time()
        connection.send_request(self._http_client.format_request(b"GET", target, self._headers), self)
        try:
            await asyncio.wait((self._end_reason,), timeout=EPOCH_WAIT)
            while not self._end_reason.done():
                self._report_connected()
                await asyncio.wait((self._end_reason,), timeout=SILENCE_TIMEOUT / 4)
                if not self._end_reason.done() and loop.time() - self._last_byte_time > SILENCE_TIMEOUT:
                    return "Nothing was received for too long."
            return self._end_reason.result()
        finally:
            self._drop_connection()

    def _drop_connection(self) -> None:
        self.connected = False
        self._connected_event.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort_silently(self)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None

    # -- the HTTP response, as it arrives

    def receive_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Accept the stream if its status is 200."""
        if status != 200:
            self._end_connection(f"It refused to send results, with status {status}.")
            return
        self._accepted = True

    def _report_connected(self) -> None:
        """Report the stream as connected, if the instance has accepted the request for it."""
        if self._accepted and not self.connected:
            self.connected = True
            self._connected_event.set()
            self._on_attached(True, "")
            self._report_outcome()

    def receive_data(self, data: bytes) -> None:
        """Parse received bytes and hand the frames to their receivers."""
        self._last_byte_time = asyncio.get_running_loop().time()
        self.received_bytes += len(data)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        try:
            frames = self._reader.feed_bytes(data)
        except BadFrame as error:
            self.fail_requests(str(error))
            self._epoch = b"unreadable"  # no valid epoch: the instance will start a new one
            self._end_connection(str(error))
            return
        self._dispatch_frames(frames)
        if self._reader.holds_frame:
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_DELAY, self._flush_reader)

    def receive_end(self, error: ConnectionBroken | None) -> None:
        """The HTTP response ended."""
        self._end_connection("The connection for results ended.")

    def _end_connection(self, reason: str) -> None:
        if self._end_reason is not None and not self._end_reason.done():
            self._end_reason.set_result(reason)

    def _flush_reader(self) -> None:
        self._flush_timer = None
        self._dispatch_frames(self._reader.flush_held())

    def _dispatch_frames(self, frames: list[ResultFrame]) -> None:
        receivers = self._receivers
        for frame in frames:
            receiver = receivers.get(frame.request_id)
            if receiver is not None:
                receiver.take_frame(frame)
            elif frame.request_id:
                self._report_orphan(frame)
            elif frame.kind == "epoch":
                self._begin_epoch(frame.payload)
            elif frame.kind == "close" and not self.native:
                self.taken_over = True
                self._end_connection("Another coordinator has taken the results of this instance.")

    def _begin_epoch(self, epoch: bytes) -> None:
        """Start or resume a stream with frame counting; the same epoch as before continues after the last frame."""
        self.native = True
        if epoch != self._epoch:
            if self._epoch:
                self.fail_requests("It was restarted, or no longer has the results that it sent.")
            self._epoch, self._frames_received = epoch, 0
        self._report_connected()

    def _report_orphan(self, frame: ResultFrame) -> None:
        """Report an orphaned request, once per id."""
        if frame.kind == "data" and frame.request_id not in self._orphans:
            self._orphans[frame.request_id] = None
            if len(self._orphans) > MAX_ORPHANS:
                self._orphans.popitem(last=False)
            self._on_orphan(frame.request_id.decode("latin-1"))
