"""Stands in for the connection of a request that runs in the background: keeps its answer instead of sending it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from starlette.types import Message

from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.dialects.records import InlinedRequest
from parley.dialects.reply import HeaderList
from parley.errors import EngineError, ParleyError, ServerStopping
from parley.serving.records.background import KeptEvents
from parley.web.http_cycle import CYCLE_KEY

CUT_OFF = "The answer was cut off."


class BackgroundCycle:
    """The connection of one request, with the interface that a ``DownstreamClient`` expects.

    ``kept_events``: the events of its stream. ``status``, ``headers`` and ``body``: its answer if it is not a stream.
    """

    body_complete, write_blocked = True, False

    def __init__(self, inlined: InlinedRequest):
        self.kept_events = KeptEvents()
        self.status = 0
        self.headers: HeaderList = ()
        self.body = b""
        self._inlined = inlined
        self._error: ParleyError | None = None
        self._begun = asyncio.Event()  # the first state of the answer is known

    def detach_client(self, client: DownstreamClient) -> DownstreamClient:
        """Return the same request, answered here."""
        detached = DownstreamClient(
            {**client.scope, CYCLE_KEY: self},
            client.receive,
            self.send_message,
            replace(client.options, cors=()),
            client.dialect,
        )
        detached.set_request_uuid(client.request_uuid)
        detached.records_inlined, detached.trace = client.records_inlined, client.trace
        detached.tenant, detached.vouched_headers = client.tenant, client.vouched_headers
        detached.account, client.account = client.account, None
        return detached

    async def wait_until_begun(self) -> None:
        """Wait until the request has been accepted or refused. Raises the error that refused it."""
        await self._begun.wait()
        if self._error is not None:
            raise self._error

    def end_with_error(self, error: ParleyError) -> None:
        """End the answer with this error, as its stream does once it has begun."""
        if self._begun.is_set():
            if not self.kept_events.has_ended:
                self.write_part(self._inlined.fail_stream(error) or b"", last=True)
            return
        self._error = error
        self._begun.set()

    def close(self) -> None:
        """End the answer: nothing is added to it any more."""
        self.end_with_error(ServerStopping("The server is shutting down.") if not self.status else EngineError(CUT_OFF))

    # -- the interface that the front expects of a connection

    @property
    def response_started(self) -> bool:
        """Whether a status has been set."""
        return self.status != 0

    def begin_response(self, status: int, headers: HeaderList) -> None:
        """Set status and headers of the answer."""
        self.status, self.headers = status, headers

    def write_part(self, data: bytes, *, last: bool = False) -> bool:
        """Keep a part of the answer. Parts after its end are dropped."""
        if self.kept_events.has_ended:
            return True
        if self.status == 200:
            self.kept_events.add_bytes(self._inlined.watch_stream(data))
        else:
            self.body += data
        if last:
            self.kept_events.end_events()
        if last or self.kept_events.events:
            self._begun.set()
        return True

    async def send_message(self, message: Message) -> None:
        """Accept an ASGI message."""
        if message["type"] == "http.response.start":
            self.begin_response(message["status"], message["headers"])
        else:
            self.write_part(message.get("body", b""), last=not message.get("more_body", False))

    def abort_connection(self) -> None:
        """End an answer that cannot be completed."""
        self.end_with_error(EngineError(CUT_OFF))

    def watch_disconnect(self, on_disconnect: Callable[[], None]) -> bool:
        """Return True: there is no connection that could be lost."""
        return True

    def unwatch_disconnect(self, on_disconnect: Callable[[], None]) -> None:
        """Do nothing."""
