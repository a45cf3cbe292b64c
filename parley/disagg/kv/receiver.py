"""Receiver side of a handover: pages arrive in its own arena while the sender still computes others.

First accept or refuse the handover; then await the outputs and the end, in any order. A *part* is one prompt of the
handover. Its pages arrive in order; ``on_pages_received`` reports their number whenever the sender has confirmed that
it still held the pages that were read. The receiving engine recomputes pages that do not arrive, so a handover that
breaks off does no damage.

Own pages may be written until ``wait_settled`` has returned, also after ``close_handover``: do not reuse them before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from parley.disagg.kv.arena import MappedArena
from parley.disagg.kv.frames import (
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
from parley.disagg.kv.transport import LinkLost


class KVReceiver:
    """One offered handover, which holds the link until it is over.

    ``name``: of its arena; ``body`` and ``parts``: from the sender's begin message.
    """

    def __init__(self, link: KVLink, memory: MappedArena, name: str, begin: BeginFrame):
        self.name = name
        self.body = begin.body
        self.parts = begin.parts
        self._on_pages_received: Callable[[int, int], None] = lambda part, count: None
        self.received_bytes = 0  # bytes of pages that were received and confirmed
        self._link = link
        self._memory = memory
        self._end_reason = ""
        self._own_pages: list[list[int]] = []  # pages to fill, for each part
        self._announced_counts: list[int] = []  # number of pages that the sender has announced, for each part
        self._received_counts: list[int] = []  # number of received pages, for each part
        self._missing_pages = 0  # pages not received yet
        self._unread: deque[tuple[int, list[int], list[int]]] = deque()  # announced, not yet read
        self._unconfirmed: deque[tuple[int, int]] = deque()  # read, not yet confirmed: part and count
        self._fetch_task: asyncio.Task[None] | None = None
        self._outputs: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        # It may never be awaited.
        self._outputs.add_done_callback(lambda outputs: outputs.cancelled() or outputs.exception())
        self._settled_event = asyncio.Event()
        self._state = "offered"  # then "accepted", "ending", "over"
        link.hold_link(self)

    @property
    def transport_name(self) -> str:
        """Name of the link's transport."""
        return self._link.transport_name

    async def accept_handover(
        self,
        wants: list[tuple[int, list[int]]],
        on_pages_received: Callable[[int, int], None] = lambda part, count: None,
    ) -> None:
        """Accept the handover. ``wants``: for each part, the number of leading full pages to skip, and the own pages to
        fill with those after them.

        ``on_pages_received`` is called with a part number and how many of its own pages are complete.
        Returns at once; pages are read from now on. Raises LinkLost, and ValueError for invalid wants.
        """
        if self._state != "offered":
            raise LinkLost(self._end_reason or "The handover has been answered already.")
        own_pages = [pages for _, pages in wants]
        all_pages = [page for pages in own_pages for page in pages]
        if (
            len(wants) != self.parts
            or not self._memory.contains_pages(all_pages)
            or len(set(all_pages)) < len(all_pages)
        ):
            raise ValueError("wants must list each part once, and distinct pages of the arena")
        self._on_pages_received = on_pages_received
        self._own_pages, self._announced_counts, self._received_counts = own_pages, [0] * self.parts, [0] * self.parts
        self._missing_pages = len(all_pages)
        self._state = "accepted"
        self._settle_if_complete()
        self._link.send_frame(AcceptFrame([(skip, len(pages)) for skip, pages in wants]))

    async def refuse_handover(self, reason: str) -> None:
        """Refuse the handover. No effect if it was answered or lost."""
        if self._state == "offered":
            self._end_handover(reason)
            self._link.send_frame(RefuseFrame(reason[:4096]))

    async def wait_outputs(self) -> bytes:
        """Return the outputs that the sender sent with the pages. Raises LinkLost."""
        return await asyncio.shield(self._outputs)

    async def wait_settled(self) -> None:
        """Return when all pages have arrived, or no more will: from then on no own page is written."""
        await self._settled_event.wait()

    def close_handover(self) -> None:
        """Abort the handover, at any time; no effect if it is complete. Own pages may be reused when ``wait_settled``
        has returned."""
        if self._state == "offered":
            self._end_handover("The handover was closed on this side.")
            self._link.send_frame(RefuseFrame("The other side gave up the handover."))
        elif self._state == "accepted" and not (self._outputs.done() and self._settled_event.is_set()):
            self._link.fail_link("The handover was closed on this side.")

    def _end_handover(self, reason: str) -> None:
        """End the handover and wake everything that waits for it."""
        self._state, self._end_reason = "over", reason
        self._link.release_link()
        if not self._outputs.done():
            self._outputs.set_exception(LinkLost(reason))
        if self._fetch_task is None:
            self._settled_event.set()

    def _settle_if_complete(self) -> None:
        """Settle the handover if all pages have been received."""
        if not self._missing_pages:
            self._settled_event.set()

    async def _fetch_announced(self) -> None:
        """Read announced pages until none is left or the link has ended."""
        loop = asyncio.get_running_loop()
        try:
            while self._unread and not self._link.end_reason:
                if self._memory.sizes:
                    await self._link.run_blocking(self._fetch_in_thread, loop)
                else:
                    part, _, own_pages = self._unread.popleft()
                    self._report_read(part, len(own_pages), 0 if self._link.checksum else None)
        except (LinkLost, OSError) as error:
            self._link.fail_link(f"Pages of {self._link.name} cannot be read: {error}")
        finally:
            self._fetch_task = None
            if self._state == "over":
                self._settled_event.set()
            elif self._state == "ending":
                self._end_if_drained()

    def _fetch_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fetch all announced lists of pages, in the link's thread, without waiting for the event loop in between."""
        while self._unread:
            part, sender_pages, own_pages = self._unread.popleft()
            self._link.chosen_transport.fetch_pages(sender_pages, own_pages)
            checksum = self._memory.page_checksum(own_pages) if self._link.checksum else None
            loop.call_soon_threadsafe(self._report_read, part, len(own_pages), checksum)

    def _report_read(self, part: int, count: int, checksum: int | None) -> None:
        """Report a list of pages as read to the sender."""
        self._unconfirmed.append((part, count))
        self._link.send_frame(ReadFrame(checksum))

    # ------------------------------------------------------------------------------------- called by the link

    def handle_frame(self, frame: Any) -> None:
        """Handle a message of the sender. Raises LinkLost for an unexpected one."""
        if self._state == "accepted":
            match frame:
                case PagesFrame(part, pages) if part < self.parts:
                    first = self._announced_counts[part]
                    own_pages = self._own_pages[part][first : first + len(pages)]
                    if len(own_pages) == len(pages):
                        self._announced_counts[part] += len(pages)
                        self._unread.append((part, pages, own_pages))
                        if self._fetch_task is None:
                            self._fetch_task = asyncio.create_task(self._fetch_announced())
                        return
                case HeldFrame() if self._unconfirmed:
                    self._count_confirmed(*self._unconfirmed.popleft())
                    return
                case OutputsFrame(body) if not self._outputs.done():
                    self._outputs.set_result(body)
                    self._link.send_frame(GotOutputsFrame())
                    return
                case EndFrame():
                    self._state = "ending"
                    self._end_if_drained()
                    return
        elif self._state == "ending" and isinstance(frame, HeldFrame) and self._unconfirmed:
            self._count_confirmed(*self._unconfirmed.popleft())
            self._end_if_drained()
            return
        raise LinkLost(f"{self._link.name} sent a message that does not fit the state of the handover.")

    def handle_link_end(self, reason: str) -> None:
        """End the handover, because the link has ended."""
        if self._state != "over":
            self._end_handover(reason)

    def _count_confirmed(self, part: int, count: int) -> None:
        """Count pages that the sender has confirmed."""
        first = self._received_counts[part]
        self.received_bytes += self._memory.count_bytes(self._own_pages[part][first : first + count])
        self._received_counts[part] += count
        self._missing_pages -= count
        self._on_pages_received(part, self._received_counts[part])
        self._settle_if_complete()

    def _end_if_drained(self) -> None:
        """End the handover after the sender's end message, once all pages are confirmed."""
        if not (self._unread or self._unconfirmed or self._fetch_task):
            self._end_handover("The sender ended the handover and gave nothing.")
            self._link.send_frame(SettledFrame())
