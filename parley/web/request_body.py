"""Receives request bodies within limits of size, time and rate, and of the memory that all of them take together.

Memory is counted as bytes arrive, from the first byte of a body until its request needs the body no more. If it runs
out, a body that has been arriving for long makes room, so that slow clients cannot keep others out; without one, the
new body is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.types import Receive

from parley.errors import BodyTimedOut, Overloaded, TooLarge
from parley.web.memory_trim import MemoryTrim

RATE_WINDOW = 10.0  # seconds; the window for measuring the rate of a body
SLOW_SECONDS = 5.0  # a body that takes longer makes room for others if memory runs out
TRIM_SIZE = 1 << 20  # bytes; after larger bodies, freed memory is returned to the system
TRIM_DELAY = 1.0  # seconds until then, because the values of the body are freed a little later

OUT_OF_MEMORY = "The server holds as many bytes of unfinished requests as it may ({} MiB). Try again later."
MADE_ROOM = "The body was still arriving when the server needed the memory for other requests. Try again later."


class ClientGone(Exception):
    """The client closed the connection or stopped reading."""


class BodyBudget:
    """The memory for the bodies that a process holds: ``limit`` bytes."""

    def __init__(self, limit: int = 256 << 20):
        self.limit = limit
        self.held_bytes = 0
        self._arriving: dict[HeldBody, None] = {}  # in order of their start
        self._memory_trim = MemoryTrim(TRIM_DELAY)

    def hold_body(self) -> HeldBody:
        """Begin to count a body."""
        body = HeldBody(self)
        self._arriving[body] = None
        return body

    @contextlib.contextmanager
    def hold_bytes(self, size: int) -> Iterator[None]:
        """Count a body of ``size`` bytes that has arrived. Raises Overloaded."""
        body = HeldBody(self)
        try:
            body.count_bytes(size)
            yield
        finally:
            body.release()

    def make_room(self, newcomer: HeldBody) -> None:
        """End slow bodies until the limit is kept. Raises Overloaded if that is not enough."""
        while self.held_bytes > self.limit:
            slowest = next((body for body in self._arriving if body is not newcomer and body.is_slow), None)
            if slowest is None:
                raise Overloaded(OUT_OF_MEMORY.format(self.limit >> 20))
            slowest.evict()

    def forget_body(self, body: HeldBody) -> None:
        """Stop counting a body, and return its memory to the system soon."""
        self.held_bytes -= body.size
        self._arriving.pop(body, None)
        if body.size >= TRIM_SIZE:
            self._memory_trim.schedule_trim()

    def end_arrival(self, body: HeldBody) -> None:
        """Note that a body has arrived completely, so that it cannot count as slow any more."""
        self._arriving.pop(body, None)


class HeldBody:
    """The share of one body in a budget. ``size``: in bytes. ``evicted``: it has made room for another body."""

    def __init__(self, budget: BodyBudget):
        self.size = 0
        self.evicted = False
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._slow_at = self._loop.time() + SLOW_SECONDS
        self._end_arrival: Callable[[], None] = lambda: None

    @property
    def is_slow(self) -> bool:
        """Whether the body has been arriving for more than ``SLOW_SECONDS``."""
        return self._loop.time() > self._slow_at

    def count_bytes(self, size: int) -> None:
        """Count ``size`` more bytes, or fewer if it is negative. Raises Overloaded."""
        self.size += size
        self._budget.held_bytes += size
        if self._budget.held_bytes > self._budget.limit:
            self._budget.make_room(self)

    def evict(self) -> None:
        """End the reading of this body, because another one needs its memory."""
        self.evicted = True
        self.release()
        self._end_arrival()

    def release(self) -> None:
        """Stop counting. May be called twice."""
        self._budget.forget_body(self)
        self.size = 0

    async def receive(self, receive: Receive, limit: int, seconds: float, rate: int) -> bytes:
        """Return the whole body. Raises TooLarge, BodyTimedOut, Overloaded, ClientGone.

        ``limit``: in bytes. ``seconds``: until its end. ``rate``: bytes per second that have to come in each window.
        """
        deadline = self._loop.time() + seconds
        try:
            async with asyncio.timeout_at(min(deadline, self._loop.time() + RATE_WINDOW)) as time_limit:
                self._end_arrival = lambda: time_limit.reschedule(self._loop.time())
                enough_bytes = rate * RATE_WINDOW
                body_bytes = bytearray()  # a list of small parts would take far more memory than is counted
                more_follows = True
                while more_follows:
                    data, more_follows = await receive_part(receive)
                    body_bytes += data
                    self.count_bytes(len(data))
                    if self.size > limit:
                        raise too_large_error(limit)
                    if self.size >= enough_bytes and not self.evicted:
                        enough_bytes = self.size + rate * RATE_WINDOW
                        time_limit.reschedule(min(deadline, self._loop.time() + RATE_WINDOW))
                self._budget.end_arrival(self)
                return bytes(body_bytes)
        except TimeoutError:
            if self.evicted:
                raise Overloaded(MADE_ROOM) from None
            if self._loop.time() >= deadline:
                raise BodyTimedOut(f"The body did not come within {seconds:g} seconds.") from None
            raise BodyTimedOut(f"The body came too slowly: less than {rate} bytes per second.") from None
        finally:
            self._end_arrival = lambda: None


async def receive_part(receive: Receive) -> tuple[bytes, bool]:
    """Return the next part of a body, and whether more will come. Raises ClientGone."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


def too_large_error(limit: int) -> TooLarge:
    """Return the error for a body above the limit, which is in bytes."""
    return TooLarge(f"The body is larger than the limit of {limit} bytes.")
