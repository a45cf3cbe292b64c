"""The connection between a giver and a taker: frames both ways, heartbeats, its end, and a thread for its pages.

It must not know what the frames mean beyond heartbeats. A side that is silent for a lease is dead, and so is one that
says it lives but has not read for so long; end of file says it at once. Whoever has the link is told once why it ended
(``lost``), in the event loop's thread, and ``settle`` waits until nothing of it runs any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from parley import wire
from parley.kv.frames import MAX_FRAME, Beat, Frame
from parley.kv.gate import Contact
from parley.kv.transport import Lost, Transport, Unreachable

log = logging.getLogger("parley.kv")

BEATS = 6  # heartbeats in a lease
FAILED = "The link failed on this side."
T = TypeVar("T")


class Holder(Protocol):
    """Who has a link. Neither method may raise."""

    def take(self, frame: Any) -> None:
        """A frame has come. Raises Lost when it makes no sense."""

    def lost(self, reason: str) -> None:
        """The link has ended; nothing comes any more."""


class Link:
    """``kinds``: the frames that the other side may send; ``name``: its name in sentences; ``lease`` in seconds."""

    def __init__(self, contact: Contact, kinds: Any, name: str, lease: float):
        self.name = name
        self.lease = lease
        self.reason = ""  # why it ended; empty while it has not
        self.holder: Holder | None = None
        self.transport: Transport | None = None
        self.checksum = False
        self._reader, self._writer = contact.reader, contact.writer
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: list[Callable[[Link], None]] = []
        self._heard = asyncio.get_running_loop().time()
        self._sent = self._echoed = self._theirs = 0  # numbers of heartbeats: ours, ours that they read, theirs

    @property
    def carrier(self) -> Transport:
        """What brings pages that have bytes."""
        assert self.transport is not None
        return self.transport

    @property
    def way(self) -> str:
        """How pages travel."""
        return self.transport.name if self.transport is not None else "none"

    # ---------------------------------------------------------------------------------- before anybody has it

    async def read(self, limit: int) -> Any:
        """The next frame. Raises Lost."""
        try:
            frame = await wire.read(self._reader, self._decoder, limit)
        except (OSError, wire.BrokenFrame, msgspec.DecodeError) as error:
            raise Lost(f"{self.name} could not be understood: {error}.") from None
        if frame is None:
            raise Lost(f"{self.name} ended the connection.")
        return frame

    def on_end(self, action: Callable[[Link], None]) -> None:
        """Call this when the link has ended."""
        self._ended.append(action)

    def start(self) -> None:
        """From here on frames go to the holder."""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    # ---------------------------------------------------------------------------------------------- in use

    def send(self, frame: Frame) -> None:
        """Without waiting. Nothing when the link has ended."""
        if not (self.reason or self._writer.is_closing()):
            self._writer.write(wire.frame(frame))

    async def work(self, action: Callable[..., T], *arguments: Any) -> T:
        """Do something that blocks in the link's thread. Raises Lost, OSError and Unreachable, as it does.

        A caller that is cancelled does not wait for it, ``settle`` does. Its defects are Lost as well, or somebody
        would wait for what never comes.
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
        """End it with a last frame, which is still sent."""
        self.send(frame)
        self.reason = "The link was refused."
        self._writer.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def fail(self, reason: str) -> None:
        """End it, now. The first reason counts."""
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
        """Return when it has ended and nothing of it is left."""
        me = asyncio.current_task()
        await asyncio.gather(*(task for task in self._tasks if task is not me), return_exceptions=True)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown, True)

    async def _listen(self) -> None:
        try:
            while True:
                frame = await self.read(MAX_FRAME)
                self._heard = asyncio.get_running_loop().time()
                if isinstance(frame, Beat):
                    if frame.heard > self._sent:
                        raise Lost(f"{self.name} has heard what was never said.")
                    self._theirs, self._echoed = frame.sent, max(self._echoed, frame.heard)
                elif self.holder is not None:
                    self.holder.take(frame)
                else:
                    raise Lost(f"{self.name} spoke out of turn.")
        except Lost as error:
            self.fail(str(error))
        except Exception:  # a defect of this side; whoever waits must not do so for ever
            log.exception("a link failed")
            self.fail(FAILED)

    async def _beat(self) -> None:
        pause = self.lease / BEATS
        while True:
            self._sent += 1
            self.send(Beat(self._sent, self._theirs))
            await asyncio.sleep(pause)
            if asyncio.get_running_loop().time() - self._heard > self.lease:
                self.fail(f"{self.name} has been silent for {self.lease:g} s.")
            elif self._sent - self._echoed > 2 * BEATS:
                self.fail(f"{self.name} does not read what it is sent.")


def _attempt(action: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """The result, or what was raised, without its frames: they have views of pages, which would keep the memory."""
    try:
        return action(*arguments), None
    except (Lost, OSError, Unreachable) as error:
        error.__context__ = None
        return None, error.with_traceback(None)
    except Exception:
        log.exception("a link failed")
        return None, Lost(FAILED)
