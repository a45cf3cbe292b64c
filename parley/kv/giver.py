"""A hand-over from the side that computed the prompt: what it holds, tells and lets go of.

The order is begin, filled as often as there is news, give, done. The giver never knows how far pages have come beyond
what the taker says, and it must not let go of any before ``done`` has returned: it answers every Read with Held, and a
taker counts a page only then. That makes it safe to let go at any time without asking, as one does when the taker is
silent: close the link first, and whatever is read afterwards will never be confirmed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from parley.kv.frames import MAX_FRAME, Accept, Begin, End, Give, Got, Held, Pages, Read, Refuse, Settled
from parley.kv.link import Link
from parley.kv.memory import Memory
from parley.kv.transport import BATCH, LinkError, Lost


class Refused(Exception):
    """The taker does not take this hand-over; the message is its reason."""


class Giver:
    """One hand-over. ``again``: another link to the same taker, for one from the pool that turns out to have ended.

    ``end`` is called with the link when it is free for the next hand-over.
    """

    def __init__(
        self,
        link: Link,
        memory: Memory,
        end: Callable[[Link], None],
        again: Callable[[], Awaitable[Link]] | None = None,
    ):
        self.bytes = 0  # of pages that were told to the taker
        self._memory = memory
        self._end = end
        self._again = again
        self._wants: list[tuple[int, int]] | None = None
        self._known: list[int] = []  # how many pages of each part are computed
        self._news: deque[tuple[int, list[int]]] = deque()  # computed and wanted, not yet told
        self._wake = asyncio.Event()
        self._reads: deque[list[int]] = deque()  # told, not yet read
        self._answer: asyncio.Future[Any] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._over = False
        self._use(link)

    @property
    def transport(self) -> str:
        """How pages travel."""
        return self._link.way

    async def begin(self, body: bytes, parts: int) -> None:
        """Ask the taker to take so many prompts; ``body`` is for whoever accepts there.

        Returns when it has accepted. Raises Refused and LinkError, after which the hand-over is over.
        """
        if len(body) > MAX_FRAME - 1024:
            self.close()
            raise LinkError(f"A hand-over of {len(body)} bytes is too large for a link.")
        self._known = [0] * parts
        try:
            try:
                answer = await self._ask(Begin(body, parts))
            except Lost:
                if self._again is None:
                    raise
                link = await self._again()
                if self._again is None:  # closed meanwhile
                    link.fail("The hand-over was closed on this side.")
                self._use(link)
                answer = await self._ask(Begin(body, parts))
            if isinstance(answer, Refuse):
                self._finish()
                raise Refused(answer.reason)
            if not isinstance(answer, Accept) or len(answer.wants) != parts:
                raise Lost(f"{self._link.name} accepted something else than it was asked to.")
        except Refused:
            raise
        except BaseException:
            self.close()
            raise
        self._wants = answer.wants
        self._pump = asyncio.create_task(self._tell())

    def filled(self, part: int, pages: list[int]) -> None:
        """The next whole pages of a prompt are computed. At any time before ``done``, also before ``begin`` returns."""
        if not self._over:
            self._news.append((part, pages))
            self._wake.set()

    async def give(self, body: bytes) -> None:
        """Give what goes with the pages. Returns when the taker has it. Raises LinkError."""
        if len(body) > MAX_FRAME - 1024:
            self.close()
            raise LinkError(f"Outputs of {len(body)} bytes are too large for a link.")
        if not isinstance(await self._ask(Give(body)), Got):
            self._link.fail(f"{self._link.name} spoke out of turn.")
            raise Lost(self._link.reason)

    async def done(self) -> None:
        """Return when the taker has read all that it wants, or never will: then the pages may be let go of.

        The last call: neither pages nor outputs follow it. Never raises, whatever became of the link.
        """
        if self._over:
            return
        try:
            if self._pump is None:
                raise Lost("The hand-over was never accepted.")
            self._news.append((-1, []))
            self._wake.set()
            await self._pump
            if not isinstance(await self._ask(End()), Settled) or self._reads:
                raise Lost(f"{self._link.name} settled what it had not read.")
        except Lost as error:
            self._link.fail(str(error))
        except BaseException:
            self.close()
            raise
        self._finish()

    def close(self) -> None:
        """End the hand-over, at any time; unless it was done, the taker loses it. Twice does no harm."""
        self._again = None
        if not self._over:
            self._over = True
            self._wake.set()
            self._link.fail("The hand-over was closed on this side.")

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            self._wake.set()
            if not self._link.reason:
                self._link.holder = None
                self._end(self._link)

    def _use(self, link: Link) -> None:
        self._link, self._over = link, False
        link.holder = self

    async def _ask(self, frame: Begin | Give | End) -> Any:
        if self._over or self._link.reason:
            raise Lost(self._link.reason or "The hand-over is over.")
        if self._answer is not None:
            raise RuntimeError("one question at a time")
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._link.send(frame)
            return await self._answer
        finally:
            self._answer = None

    async def _tell(self) -> None:
        """Tell the taker of pages as they are computed, and send them, in lists of about BATCH bytes."""
        most = max(1, BATCH // max(1, self._memory.page_bytes))
        try:
            while True:
                while not (self._news or self._over):
                    self._wake.clear()
                    await self._wake.wait()
                if self._over:
                    return
                part, pages = self._news.popleft()
                if part < 0:
                    return
                for i in range(0, len(wanted := self._wanted(part, pages)), most):
                    batch = wanted[i : i + most]
                    self._reads.append(batch)
                    self._link.send(Pages(part, batch))
                    self.bytes += len(batch) * self._memory.page_bytes
                    if self._memory.page_bytes:
                        await self._link.work(self._link.carrier.send, batch)
        except (Lost, OSError) as error:
            self._link.fail(f"{self._link.name} cannot be sent pages: {error}")

    def _wanted(self, part: int, pages: list[int]) -> list[int]:
        """Those of the next computed pages that the taker wants."""
        assert self._wants is not None
        skip, count = self._wants[part]
        first = self._known[part]
        self._known[part] += len(pages)
        return pages[max(skip - first, 0) : max(skip + count - first, 0)]

    async def _check(self, pages: list[int], checksum: int) -> None:
        try:
            if await self._link.work(self._memory.checksum, pages) != checksum:
                raise Lost(f"Pages have another checksum with {self._link.name} than here.")
        except Lost as error:
            self._link.fail(str(error))
        else:
            self._link.send(Held())

    # ----------------------------------------------------------------------------------------- of the link

    def take(self, frame: Any) -> None:
        if isinstance(frame, Read):
            if not self._reads or (frame.checksum is None) == self._link.checksum:
                raise Lost(f"{self._link.name} has read what it was never sent.")
            pages = self._reads.popleft()
            if frame.checksum is None:
                self._link.send(Held())
            else:
                check = asyncio.create_task(self._check(pages, frame.checksum))
                self._checks.add(check)
                check.add_done_callback(self._checks.discard)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(frame)
        else:
            raise Lost(f"{self._link.name} spoke out of turn.")

    def lost(self, reason: str) -> None:
        self._over = True
        self._wake.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Lost(reason))
