"""A request that the server sends to its own application: it has no connection, and its answer is collected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.types import Scope

from parley.web.http_cycle import HttpCycle


class NoConnection:
    """The transport and the flow control of a request without a connection."""

    write_paused = False

    def write(self, data: bytes) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing: the answer stays incomplete."""

    def is_closing(self) -> bool:
        """Return False."""
        return False

    def get_extra_info(self, name: str) -> Any:
        """Return None."""
        return None

    async def drain(self) -> None:
        """Do nothing."""

    def resume_reading(self) -> None:
        """Do nothing."""


class InnerCycle(HttpCycle):
    """A request with this body. ``status``, ``headers`` and ``answer_body``: its answer, once the application has run.
    ``response_complete``: whether the answer is complete.
    """

    def __init__(self, scope: Scope, body: bytes):
        connection = NoConnection()
        super().__init__(
            scope, connection, connection, set(), [], keep_alive=True, expects_continue=False, on_complete=lambda: None
        )
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.answer_body = bytearray()
        self.feed_body(body)
        self.end_body()

    def send_continue(self) -> None:
        """Do nothing: the body is here."""

    def begin_response(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Begin the answer."""
        self.response_started, self.status, self.headers = True, status, dict(headers)

    def write_part(self, data: bytes, *, last: bool = False) -> bool:
        """Collect a part of the answer."""
        self.answer_body += data
        self.response_complete = last
        return True
