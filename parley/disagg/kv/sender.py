"""Sender side of a handover: the instance that computed the prompt announces, sends and finally frees its pages.

Begin the handover, add pages as they are computed, send the outputs, finish. Pages must not be freed before
``finish_handover`` has returned, because only the receiver knows which it has read. It reports them (ReadFrame), the
sender confirms that it still held them (HeldFrame), and only then does the receiver count them. So pages may be freed
early after all if the link is closed first, for example when the receiver is silent: later reads are never confirmed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from parley.disagg.kv.arena import MappedArena
from parley.disagg.kv.frames import (
    MAX_FRAME_BYTES,
    AcceptFrame,
    BeginFrame,
    EndFrame,
    GotOutputsFrame,
    HeldFrame,
    OutputsFrame,
    PagesFrame,
    ReadFrame,
    RefuseFrame,
    SettledFrame,
)
from parley.disagg.kv.link import KVLink
from parley.disagg.kv.transport import BATCH_BYTES, LinkError, LinkLost


class HandoverRefused(Exception):
    """The receiver refused this handover; the message is its reason."""


class KVSender:
    """One handover. ``reconnect``: opens another link to the same receiver, in case a pooled link turns out to have
    ended.

    ``on_link_free`` is called with the link when it is free for the next handover.
    """

    def __init__(
        self,
        link: KVLink,
        memory: MappedArena,
        on_link_free: Callable[[KVLink], None],
        reconnect: Callable[[], Awaitable[KVLink]] | None = None,
    ):
        self.sent_bytes = 0  # bytes of pages that were announced to the receiver
        self._memory = memory
        self._on_link_free = on_link_free
        self._reconnect = reconnect
        self._wants: list[tuple[int, int]] | None = None
        self._computed_counts: list[int] = []  # number of computed pages of each part
        self._unannounced: deque[tuple[int, list[int]]] = deque()  # computed, not yet announced
        self._wake = asyncio.Event()
        self._unread: deque[list[int]] = deque()  # announced, not yet read
        self._pending_answer: asyncio.Future[Any] | None = None
        self._pages_task: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._adopt_link(link)

    @property
    def transport_name(self) -> str:
        """Name of the link's transport."""
        return self._link.transport_name

    async def begin_handover(self, body: bytes, parts: int) -> None:
        """Ask the receiver to accept ``parts`` prompts; ``body`` goes to its accept callback.

        Returns when it has accepted. Raises HandoverRefused and LinkError; both end the handover.
        """
        if len(body) > MAX_FRAME_BYTES - 1024:
            self.close_handover()
            raise LinkError(f"A handover of {len(body)} bytes is too large for a link.")
        self._computed_counts = [0] * parts
        try:
            try:
                answer = await self._request_answer(BeginFrame(body, parts))
            except LinkLost:
                if self._reconnect is None:
                    raise
                link = await self._reconnect()
                if self._reconnect is None:  # closed meanwhile
                    link.fail_link("The handover was closed on this side.")
                self._adopt_link(link)
                answer = await self._request_answer(BeginFrame(body, parts))
            if isinstance(answer, RefuseFrame):
                self._release_link()
                raise HandoverRefused(answer.reason)
            if not isinstance(answer, AcceptFrame) or len(answer.wants) != parts:
                raise LinkLost(f"{self._link.name} did not accept the prompts that were offered.")
        except HandoverRefused:
            raise
        except BaseException:
            self.close_handover()
            raise
        self._wants = answer.wants
        self._pages_task = asyncio.create_task(self._send_computed_pages())

    def add_computed_pages(self, part: int, pages: list[int]) -> None:
        """Add the next full pages of a prompt; also before ``begin_handover`` returns, until ``finish_handover``."""
        if not self._is_over:
            self._unannounced.append((part, pages))
            self._wake.set()

    async def send_outputs(self, body: bytes) -> None:
        """Send the outputs that go with the pages. Returns when the receiver has them. Raises LinkError."""
        if len(body) > MAX_FRAME_BYTES - 1024:
            self.close_handover()
            raise LinkError(f"Outputs of {len(body)} bytes are too large for a link.")
        if not isinstance(await self._request_answer(OutputsFrame(body)), GotOutputsFrame):
            self._link.fail_link(f"{self._link.name} sent an unexpected message.")
            raise LinkLost(self._link.end_reason)

    async def finish_handover(self) -> None:
        """Return when the receiver has read all pages it wants, or never will: then the pages may be freed.

        This is the last call. It does not raise if the link fails.
        """
        if self._is_over:
            return
        try:
            if self._pages_task is None:
                raise LinkLost("The handover was never accepted.")
            self._unannounced.append((-1, []))
            self._wake.set()
            await self._pages_task
            if not isinstance(await self._request_answer(EndFrame()), SettledFrame) or self._unread:
                raise LinkLost(f"{self._link.name} ended the handover with unread pages.")
        except LinkLost as error:
            self._link.fail_link(str(error))
        except BaseException:
            self.close_handover()
            raise
        self._release_link()

    def close_handover(self) -> None:
        """End the handover at any time. Unless it was finished, the receiver loses it. May be called twice."""
        self._reconnect = None
        if not self._is_over:
            self._is_over = True
            self._wake.set()
            self._link.fail_link("The handover was closed on this side.")

    def _release_link(self) -> None:
        """Free the link for its next handover, unless it has ended."""
        if not self._is_over:
            self._is_over = True
            self._wake.set()
            if not self._link.end_reason:
                self._link.release_link()
                self._on_link_free(self._link)

    def _adopt_link(self, link: KVLink) -> None:
        """Use this link for the handover."""
        self._link, self._is_over = link, False
        link.hold_link(self)

    async def _request_answer(self, frame: BeginFrame | OutputsFrame | EndFrame) -> Any:
        """Send a message and return the answer. Raises LinkLost."""
        if self._is_over or self._link.end_reason:
            raise LinkLost(self._link.end_reason or "The handover is over.")
        if self._pending_answer is not None:
            raise RuntimeError("only one message may wait for an answer")
        self._pending_answer = asyncio.get_running_loop().create_future()
        try:
            self._link.send_frame(frame)
            return await self._pending_answer
        finally:
            self._pending_answer = None

    async def _send_computed_pages(self) -> None:
        """Announce pages as they are computed, and send them, in lists of about BATCH_BYTES."""
        try:
            while True:
                while not (self._unannounced or self._is_over):
                    self._wake.clear()
                    await self._wake.wait()
                if self._is_over:
                    return
                part, pages = self._unannounced.popleft()
                if part < 0:
                    return
                for batch in self._memory.divide_pages(self._select_wanted(part, pages), BATCH_BYTES):
                    self._unread.append(batch)
                    self._link.send_frame(PagesFrame(part, batch))
                    self.sent_bytes += self._memory.count_bytes(batch)
                    if self._memory.sizes:
                        await self._link.run_blocking(self._link.chosen_transport.send_pages, batch)
        except (LinkLost, OSError) as error:
            self._link.fail_link(f"{self._link.name} cannot be sent pages: {error}")

    def _select_wanted(self, part: int, pages: list[int]) -> list[int]:
        """Return those of the next computed pages that the receiver wants."""
        assert self._wants is not None
        skip, count = self._wants[part]
        first = self._computed_counts[part]
        self._computed_counts[part] += len(pages)
        return pages[max(skip - first, 0) : max(skip + count - first, 0)]

    async def _verify_checksum(self, pages: list[int], checksum: int) -> None:
        """Confirm pages if the receiver's checksum is right; else fail the link."""
        try:
            if await self._link.run_blocking(self._memory.page_checksum, pages) != checksum:
                raise LinkLost(f"The checksum of pages at {self._link.name} differs from the one here.")
        except LinkLost as error:
            self._link.fail_link(str(error))
        else:
            self._link.send_frame(HeldFrame())

    # ------------------------------------------------------------------------------------- called by the link

    def handle_frame(self, frame: Any) -> None:
        """Handle a message of the receiver. Raises LinkLost for an unexpected one."""
        if isinstance(frame, ReadFrame):
            if not self._unread or (frame.checksum is None) == self._link.checksum:
                raise LinkLost(f"{self._link.name} has read pages that were never sent.")
            pages = self._unread.popleft()
            if frame.checksum is None:
                self._link.send_frame(HeldFrame())
            else:
                check = asyncio.create_task(self._verify_checksum(pages, frame.checksum))
                self._checks.add(check)
                check.add_done_callback(self._checks.discard)
        elif self._pending_answer is not None and not self._pending_answer.done():
            self._pending_answer.set_result(frame)
        else:
            self._link.reject_frame(frame)

    def handle_link_end(self, reason: str) -> None:
        """Fail the message that waits for an answer, because the link has ended."""
        self._is_over = True
        self._wake.set()
        if self._pending_answer is not None and not self._pending_answer.done():
            self._pending_answer.set_exception(LinkLost(reason))
