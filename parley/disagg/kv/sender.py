"""Sender side of a handover: the instance that computed the prompt announces, sends and finally frees its pages.

The order is begin, add pages as they are computed, send outputs, finish. The sender knows the progress of pages only
from the receiver, and it must not free any before ``finish_handover`` has returned: it answers every read message with
a held message, and the receiver counts a page only then. So it is also safe to free pages at any time without asking,
for example when the receiver is silent: close the link first, and later reads will never be confirmed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from parley.disagg.kv.arena import Memory
from parley.disagg.kv.frames import MAX_FRAME, Accept, Begin, End, Give, Got, Held, Pages, Read, Refuse, Settled
from parley.disagg.kv.link import Link
from parley.disagg.kv.transport import BATCH, LinkError, Lost


class Refused(Exception):
    """The receiver refused this handover; the message is its reason."""


class Giver:
    """One handover. ``reconnect``: opens another link to the same receiver, in case a pooled link turns out to have
    ended.

    ``on_link_free`` is called with the link when it is free for the next handover.
    """

    def __init__(
        self,
        link: Link,
        memory: Memory,
        end: Callable[[Link], None],
        again: Callable[[], Awaitable[Link]] | None = None,
    ):
        self.bytes = 0  # of pages announced to the receiver
        self._memory = memory
        self._end = end
        self._again = again
        self._wants: list[tuple[int, int]] | None = None
        self._known: list[int] = []  # number of computed pages of each part
        self._news: deque[tuple[int, list[int]]] = deque()  # computed, not yet announced
        self._wake = asyncio.Event()
        self._reads: deque[list[int]] = deque()  # announced, not yet read
        self._answer: asyncio.Future[Any] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._over = False
        self._use(link)

    @property
    def transport(self) -> str:
        """Name of the link's transport."""
        return self._link.way

    async def begin(self, body: bytes, parts: int) -> None:
        """Ask the receiver to accept ``parts`` prompts; ``body`` goes to its accept callback.

        Returns when it has accepted. Raises HandoverRefused and LinkError; both end the handover.
        """
        if len(body) > MAX_FRAME - 1024:
            self.close()
            raise LinkError(f"A handover of {len(body)} bytes is too large for a link.")
        self._known = [0] * parts
        try:
            try:
                answer = await self._ask(Begin(body, parts))
            except Lost:
                if self._again is None:
                    raise
                link = await self._again()
                if self._again is None:  # closed meanwhile
                    link.fail("The handover was closed on this side.")
                self._use(link)
                answer = await self._ask(Begin(body, parts))
            if isinstance(answer, Refuse):
                self._finish()
                raise Refused(answer.reason)
            if not isinstance(answer, Accept) or len(answer.wants) != parts:
                raise Lost(f"{self._link.name} did not accept the prompts that were offered.")
        except Refused:
            raise
        except BaseException:
            self.close()
            raise
        self._wants = answer.wants
        self._pump = asyncio.create_task(self._tell())

    def filled(self, part: int, pages: list[int]) -> None:
        """Add the next full pages of a prompt; also before ``begin_handover`` returns, until ``finish_handover``."""
        if not self._over:
            self._news.append((part, pages))
            self._wake.set()

    async def give(self, body: bytes) -> None:
        """Send the outputs that go with the pages. Returns when the receiver has them. Raises LinkError."""
        if len(body) > MAX_FRAME - 1024:
            self.close()
            raise LinkError(f"Outputs of {len(body)} bytes are too large for a link.")
        if not isinstance(await self._ask(Give(body)), Got):
            self._link.fail(f"{self._link.name} sent an unexpected message.")
            raise Lost(self._link.reason)

    async def done(self) -> None:
        """Return when the receiver has read all pages it wants, or never will: then the pages may be freed.

        This is the last call. It does not raise if the link fails.
        """
        if self._over:
            return
        try:
            if self._pump is None:
                raise Lost("The handover was never accepted.")
            self._news.append((-1, []))
            self._wake.set()
            await self._pump
            if not isinstance(await self._ask(End()), Settled) or self._reads:
                raise Lost(f"{self._link.name} ended the handover with unread pages.")
        except Lost as error:
            self._link.fail(str(error))
        except BaseException:
            self.close()
            raise
        self._finish()

    def close(self) -> None:
        """End the handover at any time. Unless it was finished, the receiver loses it. May be called twice."""
        self._again = None
        if not self._over:
            self._over = True
            self._wake.set()
            self._link.fail("The handover was closed on this side.")

    def _finish(self) -> None:
        """Free the link for its next handover, unless it has ended."""
        if not self._over:
            self._over = True
            self._wake.set()
            if not self._link.reason:
                self._link.holder = None
                self._end(self._link)

    def _use(self, link: Link) -> None:
        """Use this link for the handover."""
        self._link, self._over = link, False
        link.holder = self

    async def _ask(self, frame: Begin | Give | End) -> Any:
        """Send a message and return the answer. Raises LinkLost."""
        if self._over or self._link.reason:
            raise Lost(self._link.reason or "The handover is over.")
        if self._answer is not None:
            raise RuntimeError("only one message may wait for an answer")
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._link.send(frame)
            return await self._answer
        finally:
            self._answer = None

    async def _tell(self) -> None:
        """Announce pages as they are computed, and send them, in lists of about BATCH_BYTES."""
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
        """Return those of the next computed pages that the receiver wants."""
        assert self._wants is not None
        skip, count = self._wants[part]
        first = self._known[part]
        self._known[part] += len(pages)
        return pages[max(skip - first, 0) : max(skip + count - first, 0)]

    async def _check(self, pages: list[int], checksum: int) -> None:
        """Confirm pages if the receiver's checksum is right; else fail the link."""
        try:
            if await self._link.work(self._memory.checksum, pages) != checksum:
                raise Lost(f"The checksum of pages at {self._link.name} differs from the one here.")
        except Lost as error:
            self._link.fail(str(error))
        else:
            self._link.send(Held())

    # ------------------------------------------------------------------------------------- called by the link

    def take(self, frame: Any) -> None:
        """Handle a message of the receiver. Raises LinkLost for an unexpected one."""
        if isinstance(frame, Read):
            if not self._reads or (frame.checksum is None) == self._link.checksum:
                raise Lost(f"{self._link.name} has read pages that were never sent.")
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
            raise Lost(f"{self._link.name} sent an unexpected message.")

    def lost(self, reason: str) -> None:
        """Fail the message that waits for an answer, because the link has ended."""
        self._over = True
        self._wake.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Lost(reason))
