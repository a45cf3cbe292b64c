"""The link between a sender and a receiver: messages in both directions, heartbeats, one thread for blocking transfers.

The link itself handles only heartbeats. The other side counts as dead if it is silent for a lease, if it sends
heartbeats but has not read ours for that long, or at end of file. A handover holds the link while it lasts
(``hold_link``, ``release_link``). It gets the other messages and the end of the link, in the event loop's thread.
Between handovers the link is idle. ``wait_closed`` waits until all tasks and the thread of the link have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from parley import wire
from parley.disagg.kv.frames import MAX_FRAME_BYTES, HeartbeatFrame, KVFrame
from parley.disagg.kv.listener import AuthenticatedConnection
from parley.disagg.kv.transport import KVTransport, LinkLost, OfferUnusable

log = logging.getLogger("parley.kv")

HEARTBEATS_PER_LEASE = 6  # heartbeats in a lease
LINK_FAILED = "The link failed on this side."
T = TypeVar("T")


class LinkHolder(Protocol):
    """A handover that holds a link and gets its messages. Only ``handle_frame`` may raise, and only LinkLost."""

    def handle_frame(self, frame: Any) -> None:
        """Handle a message. Raises LinkLost for an unexpected one."""

    def handle_link_end(self, reason: str) -> None:
        """Handle the end of the link; no message follows."""


class KVLink:
    """``frame_types``: message types that the other side may send; ``name``: its name in sentences; ``lease`` in
    seconds."""

    def __init__(self, connection: AuthenticatedConnection, frame_types: Any, name: str, lease: float):
        self.name = name
        self.lease = lease
        self.end_reason = ""  # why it ended; empty while it is open
        self.transport: KVTransport | None = None
        self.checksum = False
        self._reader, self._writer = connection.reader, connection.writer
        self._decoder = msgspec.msgpack.Decoder(frame_types)
        self._holder: LinkHolder | None = None  # None while the link is idle
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._end_callbacks: list[Callable[[KVLink], None]] = []
        self._last_received_at = asyncio.get_running_loop().time()
        # Numbers of the last heartbeats: ours, ours that the peer has read, the peer's.
        self._beats_sent = self._beats_acknowledged = self._beats_received = 0

    @property
    def chosen_transport(self) -> KVTransport:
        """The transport, which must have been chosen."""
        assert self.transport is not None
        return self.transport

    @property
    def transport_name(self) -> str:
        """Name of the transport, "none" if pages have no bytes."""
        return self.transport.name if self.transport is not None else "none"

    # ------------------------------------------------------------------------------------------ before use

    async def read_frame(self, limit: int) -> Any:
        """Return the next message of at most ``limit`` bytes. Raises LinkLost."""
        try:
            frame = await wire.read_frame(self._reader, self._decoder, limit)
        except (OSError, wire.BrokenFrame, msgspec.DecodeError) as error:
            raise LinkLost(f"{self.name} could not be read: {error}.") from None
        if frame is None:
            raise LinkLost(f"{self.name} closed the connection.")
        return frame

    def add_end_callback(self, action: Callable[[KVLink], None]) -> None:
        """Call ``action`` when the link has ended."""
        self._end_callbacks.append(action)

    def start_tasks(self, handle_idle_frame: Callable[[Any], None] | None = None) -> None:
        """Start heartbeats, and pass messages to the holder from now on.

        ``handle_idle_frame`` gets the messages that arrive while the link is idle and may raise LinkLost. Without it,
        such a message ends the link.
        """
        dispatch = self._dispatch_frames(handle_idle_frame or self.reject_frame)
        self._tasks = [asyncio.create_task(dispatch), asyncio.create_task(self._send_heartbeats())]

    # ---------------------------------------------------------------------------------------------- in use

    def hold_link(self, holder: LinkHolder) -> None:
        """Pass the messages and the end of the link to ``holder`` until ``release_link``."""
        self._holder = holder

    def release_link(self) -> None:
        """Make the link idle: its handover is over."""
        self._holder = None

    def reject_frame(self, frame: Any) -> NoReturn:
        """Reject an unexpected message. Raises LinkLost."""
        raise LinkLost(f"{self.name} sent an unexpected message.")

    def send_frame(self, frame: KVFrame) -> None:
        """Send a message without waiting. Does nothing when the link has ended."""
        if not (self.end_reason or self._writer.is_closing()):
            self._writer.write(wire.encode_frame(frame))

    async def run_blocking(self, action: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking function in the link's thread. Raises LinkLost, OSError and OfferUnusable like the function.

        A caller that is cancelled does not wait for it; ``wait_closed`` does. Any other exception becomes LinkLost, so
        that no caller waits for ever.
        """
        if self.end_reason:
            raise LinkLost(self.end_reason)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "parley-kv")
        outcome = asyncio.get_running_loop().run_in_executor(self._thread, _call_catching, action, arguments)
        result, error = await asyncio.shield(outcome)
        if error is not None:
            raise error
        value: T = result
        return value

    def refuse_link(self, frame: KVFrame) -> None:
        """End the link with a last message, which is still sent."""
        self.send_frame(frame)
        self.end_reason = "The link was refused."
        self._writer.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def fail_link(self, reason: str) -> None:
        """End the link now. Only the first reason counts."""
        if self.end_reason:
            return
        self.end_reason = reason
        log.debug("%s: %s", self.name, reason)
        self._writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        if self.transport is not None:
            self.transport.close_transport()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.handle_link_end(reason)
        for end_callback in self._end_callbacks:
            end_callback(self)

    async def wait_closed(self) -> None:
        """Return when the link has ended and its tasks and thread are finished."""
        current = asyncio.current_task()
        await asyncio.gather(*(task for task in self._tasks if task is not current), return_exceptions=True)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown, True)

    async def _dispatch_frames(self, handle_idle_frame: Callable[[Any], None]) -> None:
        """Pass messages to the holder, or to ``handle_idle_frame`` without one, until the link ends."""
        try:
            while True:
                frame = await self.read_frame(MAX_FRAME_BYTES)
                self._last_received_at = asyncio.get_running_loop().time()
                if isinstance(frame, HeartbeatFrame):
                    if frame.heard > self._beats_sent:
                        raise LinkLost(f"{self.name} acknowledged a heartbeat that was never sent.")
                    self._beats_received = frame.sent
                    self._beats_acknowledged = max(self._beats_acknowledged, frame.heard)
                elif self._holder is not None:
                    self._holder.handle_frame(frame)
                else:
                    handle_idle_frame(frame)
        except LinkLost as error:
            self.fail_link(str(error))
        except Exception:  # a defect on this side; the holder must not wait for ever
            log.exception("a link failed")
            self.fail_link(LINK_FAILED)

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, and fail the link when the other side is silent or does not read."""
        pause = self.lease / HEARTBEATS_PER_LEASE
        while True:
            self._beats_sent += 1
            self.send_frame(HeartbeatFrame(self._beats_sent, self._beats_received))
            await asyncio.sleep(pause)
            if asyncio.get_running_loop().time() - self._last_received_at > self.lease:
                self.fail_link(f"{self.name} has been silent for {self.lease:g} s.")
            elif self._beats_sent - self._beats_acknowledged > 2 * HEARTBEATS_PER_LEASE:
                self.fail_link(f"{self.name} does not read its messages.")


def _call_catching(action: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Return the action's result and None, or None and its exception. The exception has no traceback, whose stack
    frames would hold views that keep the pages mapped."""
    try:
        return action(*arguments), None
    except (LinkLost, OSError, OfferUnusable) as error:
        error.__context__ = None
        return None, error.with_traceback(None)
    except Exception:
        log.exception("a link failed")
        return None, LinkLost(LINK_FAILED)
