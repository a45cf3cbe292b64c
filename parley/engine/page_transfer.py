"""An optional capability of engines: to exchange KV pages with other instances.

``disagg/kv`` transfers the bytes of the pages; the engine reserves, publishes, pins and frees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from parley.engine.messages import (
    FreeReservation,
    FromEngine,
    PagesComputed,
    PagesReceived,
    ReleaseLease,
    ReservePages,
    ReserveResponse,
)
from parley.engine.protocol import Engine
from parley.types import KVPrefix

PageObserver = Callable[[list[int]], None]  # gets the numbers of more full pages

NO_PAGE_TRANSFER = "The engine does not exchange KV pages with other instances."


@runtime_checkable
class PageTransferEngine(Protocol):
    """An engine that exchanges KV pages. ``find_page_transfer`` tells whether an engine is one.

    Unknown keys and ids MUST be ignored.
    """

    async def reserve_pages(self, key: str, prefix: KVPrefix) -> ReserveResponse:
        """Reserve pages for the full pages of a prefix that the prefix cache lacks: see ``messages.ReservePages``.

        ``free_reservation`` must follow, also after an error.
        """

    def publish_received(self, key: str, count: int) -> None:
        """Publish the first ``count`` pages reserved under ``key``, whose content has been received."""

    def free_reservation(self, key: str) -> None:
        """Free the reservation ``key``. No other instance may write into its pages any more."""

    def observe_pages(self, request_id: str, observer: PageObserver) -> None:
        """Report the full pages of a request with a lease to ``observer`` as they are computed.

        Call it before the request is submitted; ``release_lease`` ends it. Pages MUST be reported in order, and before
        the outputs of their step.
        """

    def release_lease(self, request_id: str) -> None:
        """Release the lease of a request, running or finished. No other instance reads its pages any more."""


def find_page_transfer(engine: Engine) -> PageTransferEngine | None:
    """Return ``engine`` if it is ready and exchanges pages, else None."""
    if engine.info is None or "page_transfer" not in engine.info.features:
        return None
    return engine if isinstance(engine, PageTransferEngine) else None


class MessagePageTransfer(Engine):
    """Base class of engines that exchange pages by the messages of parley's own engine."""

    def __init__(self) -> None:
        super().__init__()
        self._page_observers: dict[str, PageObserver] = {}  # by request id

    async def reserve_pages(self, key: str, prefix: KVPrefix) -> ReserveResponse:
        """Ask the engine for the reservation."""
        answer = await self._ask_engine(lambda number: ReservePages(number, key, prefix))
        return answer if isinstance(answer, ReserveResponse) else ReserveResponse(-1, error=self._error_of(answer))

    def publish_received(self, key: str, count: int) -> None:
        """Send PagesReceived."""
        self._send_if_ready(PagesReceived(key, count))

    def free_reservation(self, key: str) -> None:
        """Send FreeReservation."""
        self._send_if_ready(FreeReservation(key))

    def observe_pages(self, request_id: str, observer: PageObserver) -> None:
        """Keep the observer for the request's PagesComputed messages."""
        self._page_observers[request_id] = observer

    def release_lease(self, request_id: str) -> None:
        """Drop the observer, and send ReleaseLease."""
        self._page_observers.pop(request_id, None)
        self._send_if_ready(ReleaseLease(request_id))

    def _handle_message(self, message: FromEngine) -> None:
        match message:
            case PagesComputed():
                self._deliver_pages(message)
            case ReserveResponse():
                self._deliver_answer(message)
            case _:
                super()._handle_message(message)

    def _deliver_pages(self, message: PagesComputed) -> None:
        observer = self._page_observers.get(message.id)
        if observer is not None:
            observer(message.pages)
