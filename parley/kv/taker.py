"""A hand-over from the side that goes on with it: pages land in its own arena while the giver still computes others.

The order is accept or refuse, and then given and settled as one likes. Pages of a part land in order; ``landed`` tells
how many have, each as soon as the giver has confirmed that it still held what was read. What does not land is computed
again by whoever took over, so a hand-over that is lost half-way leaves nothing wrong behind.

Own pages may be written until ``settled`` has returned, also after ``close``: they must not be given to others before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from parley.kv.frames import Accept, Begin, End, Give, Got, Held, Pages, Read, Refuse, Settled
from parley.kv.link import Link
from parley.kv.memory import Memory
from parley.kv.transport import Lost


class Taker:
    """One hand-over, offered. ``name``: of the arena that it is for; ``body`` and ``parts``: what the giver said.

    ``end`` is called when the link is free for the next hand-over.
    """

    def __init__(self, link: Link, memory: Memory, name: str, begin: Begin, end: Callable[[], None]):
        self.name = name
        self.body = begin.body
        self.parts = begin.parts
        self._landed: Callable[[int, int], None] = lambda part, count: None
        self.bytes = 0  # of pages that have landed
        self._link = link
        self._memory = memory
        self._free = end
        self._reason = ""
        self._ours: list[list[int]] = []  # pages to fill, of each part
        self._named: list[int] = []  # how many of them the giver has named
        self._counts: list[int] = []  # and how many have landed
        self._open = 0  # pages that have not landed
        self._queue: deque[tuple[int, list[int], list[int]]] = deque()  # named, not yet read
        self._reads: deque[tuple[int, int]] = deque()  # read, not yet confirmed: part and count
        self._mover: asyncio.Task[None] | None = None
        self._given: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._given.add_done_callback(lambda given: given.cancelled() or given.exception())  # nobody has to wait
        self._settled = asyncio.Event()
        self._state = "offered"  # then accepted, ending, over
        link.holder = self

    @property
    def transport(self) -> str:
        """How pages travel."""
        return self._link.way

    async def accept(
        self, wants: list[tuple[int, list[int]]], landed: Callable[[int, int], None] = lambda part, count: None
    ) -> None:
        """Take it. For each part: how many whole pages at its beginning are not wanted, and own pages for those behind.

        ``landed`` is called with a part's number and how many of its own pages are complete.
        Returns at once; pages are read from now on. Raises Lost, and ValueError for wants that cannot be.
        """
        if self._state != "offered":
            raise Lost(self._reason or "The hand-over was answered before.")
        ours = [pages for _, pages in wants]
        every = [page for pages in ours for page in pages]
        if len(wants) != self.parts or not self._memory.holds(every) or len(set(every)) < len(every):
            raise ValueError("each part has a want, and every page is another one of the arena")
        self._landed = landed
        self._ours, self._named, self._counts = ours, [0] * self.parts, [0] * self.parts
        self._open = len(every)
        self._state = "accepted"
        self._unless_open()
        self._link.send(Accept([(skip, len(pages)) for skip, pages in wants]))

    async def refuse(self, reason: str) -> None:
        """Do not take it. Without effect on one that was answered or lost."""
        if self._state == "offered":
            self._over(reason)
            self._link.send(Refuse(reason[:4096]))

    async def given(self) -> bytes:
        """What the giver gave beside the pages. Raises Lost."""
        return await asyncio.shield(self._given)

    async def settled(self) -> None:
        """Return when all pages have landed, or no more will: from then on none of the own pages is written."""
        await self._settled.wait()

    def close(self) -> None:
        """Give it up, at any time; without effect when all is here. ``settled`` says when own pages are free again."""
        if self._state == "offered":
            self._over("The hand-over was closed on this side.")
            self._link.send(Refuse("The other side gave it up."))
        elif self._state == "accepted" and not (self._given.done() and self._settled.is_set()):
            self._link.fail("The hand-over was closed on this side.")

    def _over(self, reason: str) -> None:
        self._state, self._reason = "over", reason
        if not self._link.reason:
            self._free()
        if not self._given.done():
            self._given.set_exception(Lost(reason))
        if self._mover is None:
            self._settled.set()

    def _unless_open(self) -> None:
        if not self._open:
            self._settled.set()

    async def _move(self) -> None:
        """Read what the giver names, until nothing is left or the link has ended."""
        loop = asyncio.get_running_loop()
        try:
            while self._queue and not self._link.reason:
                if self._memory.page_bytes:
                    await self._link.work(self._fetch, loop)
                else:
                    part, _, ours = self._queue.popleft()
                    self._has_read(part, len(ours), 0 if self._link.checksum else None)
        except (Lost, OSError) as error:
            self._link.fail(f"{self._link.name} has pages that cannot be read: {error}")
        finally:
            self._mover = None
            if self._state == "over":
                self._settled.set()
            elif self._state == "ending":
                self._end()

    def _fetch(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the link's thread, which goes from one list to the next without waiting for the event loop."""
        while self._queue:
            part, theirs, ours = self._queue.popleft()
            self._link.carrier.fetch(theirs, ours)
            checksum = self._memory.checksum(ours) if self._link.checksum else None
            loop.call_soon_threadsafe(self._has_read, part, len(ours), checksum)

    def _has_read(self, part: int, count: int, checksum: int | None) -> None:
        self._reads.append((part, count))
        self._link.send(Read(checksum))

    # ----------------------------------------------------------------------------------------- of the link

    def take(self, frame: Any) -> None:
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
        raise Lost(f"{self._link.name} said what makes no sense in a hand-over.")

    def lost(self, reason: str) -> None:
        if self._state != "over":
            self._over(reason)

    def _confirmed(self, part: int, count: int) -> None:
        self._counts[part] += count
        self._open -= count
        self.bytes += count * self._memory.page_bytes
        self._landed(part, self._counts[part])
        self._unless_open()

    def _end(self) -> None:
        """The giver has nothing more; when all is confirmed, so is the taker done."""
        if not (self._queue or self._reads or self._mover):
            self._over("The giver ended the hand-over and gave nothing.")
            self._link.send(Settled())
