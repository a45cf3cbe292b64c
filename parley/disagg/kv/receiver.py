"""Receiver side of a handover: pages arrive in its own arena while the sender still computes others.

The order is accept or refuse; then outputs and end may be awaited in any order. Pages of a part arrive in order;
``on_pages_received`` reports each page count as soon as the sender has confirmed that it still held the pages that were
read. Pages that do not arrive are recomputed by the receiving engine, so a handover that is lost half-way does no
damage.

Own pages may be written until ``wait_settled`` has returned, also after ``close_handover``: do not reuse them before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from parley.disagg.kv.arena import Memory
from parley.disagg.kv.frames import Accept, Begin, End, Give, Got, Held, Pages, Read, Refuse, Settled
from parley.disagg.kv.link import Link
from parley.disagg.kv.transport import Lost


class Taker:
    """One offered handover. ``name``: of its arena; ``body`` and ``parts``: from the sender's begin message.

    ``on_link_free`` is called when the link is free for the next handover.
    """

    def __init__(self, link: Link, memory: Memory, name: str, begin: Begin, end: Callable[[], None]):
        self.name = name
        self.body = begin.body
        self.parts = begin.parts
        self._landed: Callable[[int, int], None] = lambda part, count: None
        self.bytes = 0  # of pages received and confirmed
        self._link = link
        self._memory = memory
        self._free = end
        self._reason = ""
        self._ours: list[list[int]] = []  # pages to fill, for each part
        self._named: list[int] = []  # for each part, how many of them the sender has announced
        self._counts: list[int] = []  # for each part, how many have been received
        self._open = 0  # pages not received yet
        self._queue: deque[tuple[int, list[int], list[int]]] = deque()  # announced, not yet read
        self._reads: deque[tuple[int, int]] = deque()  # read, not yet confirmed: part and count
        self._mover: asyncio.Task[None] | None = None
        self._given: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._given.add_done_callback(lambda given: given.cancelled() or given.exception())  # it may never be awaited
        self._settled = asyncio.Event()
        self._state = "offered"  # then "accepted", "ending", "over"
        link.holder = self

    @property
    def transport(self) -> str:
        """Name of the link's transport."""
        return self._link.way

    async def accept(
        self, wants: list[tuple[int, list[int]]], landed: Callable[[int, int], None] = lambda part, count: None
    ) -> None:
        """Accept the handover. For each part: how many leading full pages to skip, and own pages for those after them.

        ``on_pages_received`` is called with a part number and how many of its own pages are complete.
        Returns at once; pages are read from now on. Raises LinkLost, and ValueError for invalid wants.
        """
        if self._state != "offered":
            raise Lost(self._reason or "The handover has been answered already.")
        ours = [pages for _, pages in wants]
        every = [page for pages in ours for page in pages]
        if len(wants) != self.parts or not self._memory.holds(every) or len(set(every)) < len(every):
            raise ValueError("wants must list each part once, and distinct pages of the arena")
        self._landed = landed
        self._ours, self._named, self._counts = ours, [0] * self.parts, [0] * self.parts
        self._open = len(every)
        self._state = "accepted"
        self._unless_open()
        self._link.send(Accept([(skip, len(pages)) for skip, pages in wants]))

    async def refuse(self, reason: str) -> None:
        """Refuse the handover. No effect if it was answered or lost."""
        if self._state == "offered":
            self._over(reason)
            self._link.send(Refuse(reason[:4096]))

    async def given(self) -> bytes:
        """Return the outputs that the sender sent with the pages. Raises LinkLost."""
        return await asyncio.shield(self._given)

    async def settled(self) -> None:
        """Return when all pages have arrived, or no more will: from then on no own page is written."""
        await self._settled.wait()

    def close(self) -> None:
        """Give the handover up at any time; no effect when it is complete. ``wait_settled`` says when own pages are
        free."""
        if self._state == "offered":
            self._over("The handover was closed on this side.")
            self._link.send(Refuse("The other side gave up the handover."))
        elif self._state == "accepted" and not (self._given.done() and self._settled.is_set()):
            self._link.fail("The handover was closed on this side.")

    def _over(self, reason: str) -> None:
        """End the handover and wake everything that waits for it."""
        self._state, self._reason = "over", reason
        if not self._link.reason:
            self._free()
        if not self._given.done():
            self._given.set_exception(Lost(reason))
        if self._mover is None:
            self._settled.set()

    def _unless_open(self) -> None:
        """Settle the handover if all pages have been received."""
        if not self._open:
            self._settled.set()

    async def _move(self) -> None:
        """Read announced pages until none is left or the link has ended."""
        loop = asyncio.get_running_loop()
        try:
            while self._queue and not self._link.reason:
                if self._memory.page_bytes:
                    await self._link.work(self._fetch, loop)
                else:
                    part, _, ours = self._queue.popleft()
                    self._has_read(part, len(ours), 0 if self._link.checksum else None)
        except (Lost, OSError) as error:
            self._link.fail(f"Pages of {self._link.name} cannot be read: {error}")
        finally:
            self._mover = None
            if self._state == "over":
                self._settled.set()
            elif self._state == "ending":
                self._end()

    def _fetch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fetch all announced lists of pages, in the link's thread, without waiting for the event loop in between."""
        while self._queue:
            part, theirs, ours = self._queue.popleft()
            self._link.carrier.fetch(theirs, ours)
            checksum = self._memory.checksum(ours) if self._link.checksum else None
            loop.call_soon_threadsafe(self._has_read, part, len(ours), checksum)

    def _has_read(self, part: int, count: int, checksum: int | None) -> None:
        """Report a list of pages as read to the sender."""
        self._reads.append((part, count))
        self._link.send(Read(checksum))

    # ------------------------------------------------------------------------------------- called by the link

    def take(self, frame: Any) -> None:
        """Handle a message of the sender. Raises LinkLost for an unexpected one."""
        if self._state == "accepted":
            match frame:
                case Pages(part, pages) if part < self.parts:
                    first = self._named[part]
                    ours = self._ours[part][first : first + len(pages)]
                    if len(ours) == len(pages):
                        self._named[part] += len(pages)
                        self._queue.append((part, pages, ours))
                        if self._mover is None:
                            self._mover = asyncio.create_task(self._move())
                        return
                case Held() if self._reads:
                    self._confirmed(*self._reads.popleft())
                    return
                case Give(body) if not self._given.done():
                    self._given.set_result(body)
                    self._link.send(Got())
                    return
                case End():
                    self._state = "ending"
                    self._end()
                    return
        elif self._state == "ending" and isinstance(frame, Held) and self._reads:
            self._confirmed(*self._reads.popleft())
            self._end()
            return
        raise Lost(f"{self._link.name} sent a message that does not fit the state of the handover.")

    def lost(self, reason: str) -> None:
        """End the handover, because the link has ended."""
        if self._state != "over":
            self._over(reason)

    def _confirmed(self, part: int, count: int) -> None:
        """Count pages that the sender has confirmed."""
        self._counts[part] += count
        self._open -= count
        self.bytes += count * self._memory.page_bytes
        self._landed(part, self._counts[part])
        self._unless_open()

    def _end(self) -> None:
        """End the handover after the sender's end message, once all pages are confirmed."""
        if not (self._queue or self._reads or self._mover):
            self._over("The sender ended the handover and gave nothing.")
            self._link.send(Settled())
