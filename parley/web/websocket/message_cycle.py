"""A request that came in a message of a WebSocket, as the application finds it in the ASGI scope.

The application sees an ``HttpCycle``, as with any request. Its answer goes to an ``AnswerReader``, which makes messages
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from starlette.types import Scope

from parley.web.http_cycle import HttpCycle
from parley.web.websocket.protocol import WebSocketProtocol


class AnswerReader(Protocol):
    """Makes messages of an answer."""

    def read_part(self, status: int, data: bytes, *, last: bool) -> list[bytes]:
        """Return the messages that a part of the answer makes. ``status``: of the whole answer."""


class MessageCycle(HttpCycle):
    """A request with this body, and its answer. ``on_begin`` is called once the answer begins."""

    def __init__(
        self,
        scope: Scope,
        websocket: WebSocketProtocol,
        body: bytes,
        answer: AnswerReader,
        on_begin: Callable[[], None],
    ):
        super().__init__(
            scope, websocket, websocket, set(), [], keep_alive=True, expects_continue=False, on_complete=lambda: None
        )
        self._websocket, self._answer, self._on_begin = websocket, answer, on_begin
        self._status = 0
        self.feed_body(body)
        self.end_body()

    def disconnect(self) -> None:
        """End the request: its client has gone."""
        self.mark_disconnected()
        for on_disconnect in tuple(self._watchers):
            on_disconnect()

    def send_continue(self) -> None:
        """Do nothing: the body is here."""

    def begin_response(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Begin the answer; its headers are not sent."""
        if not self.disconnected and not self.response_complete:
            self.response_started, self._status = True, status
            self._on_begin()

    def write_part(self, data: bytes, *, last: bool = False) -> bool:
        """Send the messages that a part makes. Return True if another part may be written in the same way."""
        if self.disconnected or self.response_complete:
            return True
        self.response_complete = last
        for message in self._answer.read_part(self._status, data, last=last):
            self._websocket.send_text(message)
        return not self.write_paused

    @property
    def write_paused(self) -> bool:
        """Whether the client has not read the messages before."""
        return self._websocket.write_paused
