"""The link between a sender and a receiver: messages in both directions, heartbeats, one thread for blocking transfers.

Heartbeats are the only messages it understands. A side that is silent for a lease counts as dead, and so does one that
sends heartbeats but has not read for that long; end of file says so at once. The holder of the link is notified once of
its end (``handle_lost``), in the event loop's thread, and ``wait_closed`` waits until nothing of it runs any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from parley import wire
from parley.disagg.kv.frames import MAX_FRAME, Beat, Frame
from parley.disagg.kv.listener import Contact
from parley.disagg.kv.transport import Lost, Transport, Unreachable

log = logging.getLogger("parley.kv")

BEATS = 6  # heartbeats in a lease
FAILED = "The link failed on this side."
T = TypeVar("T")


class Holder(Protocol):
    """The user of a link, which gets its messages. Only ``handle_frame`` may raise, and only LinkLost."""

    def take(self, frame: Any) -> None:
        """Handle a message. Raises LinkLost for an unexpected one."""

    def lost(self, reason: str) -> None:
        """Handle the end of the link; no message follows."""


class Link:
    """``frame_types``: message types that the other side may send; ``name``: its name in sentences; ``lease`` in
    seconds."""

    def __init__(self, contact: Contact, kinds: Any, name: str, lease: float):
        self.name = name
        self.lease = lease
        self.reason = ""  # why it ended; empty while it is open
        self.holder: Holder | None = None
        self.transport: Transport | None = None
        self.checksum = False
        self._reader, self._writer = contact.reader, contact.writer
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: list[Callable[[Link], None]] = []
        self._heard = asyncio.get_running_loop().time()
        self._sent = self._echoed = self._theirs = 0  # heartbeat numbers: ours, our last one they read, their last one

    @property
    def carrier(self) -> Transport:
        """The transport, which must have been chosen."""
        assert self.transport is not None
        return self.transport

    @property
    def way(self) -> str:
        """Name of the transport, "none" if pages have no bytes."""
        return self.transport.name if self.transport is not None else "none"

    # ------------------------------------------------------------------------------------------ before use

    async def read(self, limit: int) -> Any:
        """Return the next message of at most ``limit`` bytes. Raises LinkLost."""
        try:
            frame = await wire.read(self._reader, self._decoder, limit)
        except (OSError, wire.BrokenFrame, msgspec.DecodeError) as error:
            raise Lost(f"{self.name} could not be read: {error}.") from None
        if frame is None:
            raise Lost(f"{self.name} closed the connection.")
        return frame

    def on_end(self, action: Callable[[Link], None]) -> None:
        """Call ``action`` when the link has ended."""
        self._ended.append(action)

    def start(self) -> None:
        """Start heartbeats, and pass messages to the holder from now on."""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    # ---------------------------------------------------------------------------------------------- in use

    def send(self, frame: Frame) -> None:
        """Send a message without waiting. Does nothing when the link has ended."""
        if not (self.reason or self._writer.is_closing()):
            self._writer.write(wire.frame(frame))

    async def work(self, action: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking function in the link's thread. Raises LinkLost, OSError and OfferUnusable like the function.

        A caller that is cancelled does not wait for it; ``wait_closed`` does. Any other exception becomes LinkLost, so
        that no caller waits for ever.
        """
        if self.reason:
            raise Lost(self.reason)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "parley-kv")
        done = asyncio.get_running_loop().run_in_executor(self._thread, _attempt, action, arguments)
        result, error = await asyncio.shield(done)
        if error is not None:
            raise error
        return result

    def dismiss(self, frame: Frame) -> None:
        """End the link with a last message, which is still sent."""
        self.send(frame)
        self.reason = "The link was refused."
        self._writer.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def fail(self, reason: str) -> None:
        """End the link now. Only the first reason counts."""
        if self.reason:
            return
        self.reason = reason
        log.debug("%s: %s", self.name, reason)
        self._writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        if self.transport is not None:
            self.transport.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        holder, self.holder = self.holder, None
        if holder is not None:
            holder.lost(reason)
        for ended in self._ended:
            ended(self)

    async def settle(self) -> None:
        """Return when the link has ended and its tasks and thread are finished."""
        me = asyncio.current_task()
        await asyncio.gather(*(task for task in self._tasks if task is not me), return_exceptions=True)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown, True)

    async def _listen(self) -> None:
        """Pass messages to the holder until the link ends."""
        try:
            while True:
                frame = await self.read(MAX_FRAME)
                self._heard = asyncio.get_running_loop().time()
                if isinstance(frame, Beat):
                    if frame.heard > self._sent:
                        raise Lost(f"{self.name} acknowledged a heartbeat that was never sent.")
                    self._theirs, self._echoed = frame.sent, max(self._echoed, frame.heard)
                elif self.holder is not None:
                    self.holder.take(frame)
                else:
                    raise Lost(f"{self.name} sent an unexpected message.")
        except Lost as error:
            self.fail(str(error))
        except Exception:  # a defect on this side; the holder must not wait for ever
            log.exception("a link failed")
            self.fail(FAILED)

    async def _beat(self) -> None:
        """Send heartbeats, and fail the link when the other side is silent or does not read."""
        pause = self.lease / BEATS
        while True:
            self._sent += 1
            self.send(Beat(self._sent, self._theirs))
            await asyncio.sleep(pause)
            if asyncio.get_running_loop().time() - self._heard > self.lease:
                self.fail(f"{self.name} has been silent for {self.lease:g} s.")
            elif self._sent - self._echoed > 2 * BEATS:
                self.fail(f"{self.name} does not read its messages.")


def _attempt(action: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Return the result, or the exception without its traceback: stack frames hold views that keep the pages mapped."""
    try:
        return action(*arguments), None
    except (Lost, OSError, Unreachable) as error:
        error.__context__ = None
        return None, error.with_traceback(None)
    except Exception:
        log.exception("a link failed")
        return None, Lost(FAILED)
