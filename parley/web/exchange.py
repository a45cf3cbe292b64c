"""One HTTP exchange: reads the request body, writes the response, and detects that the client disconnects.

The client is watched in every phase, also while nothing is sent; the responders of the frameworks notice a disconnect
only when they write. The headers of a stream are sent with its first bytes, so that every earlier failure can still set
the HTTP status. This module does not depend on engines, and on an API only for its headers and its error format.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from parley.dialects.dialect import Answer, Dialect, Headers
from parley.errors import BadRequest, Invalid, ParleyError, TimedOut, TooLarge, UnknownCoding, excerpt
from parley.web.connection import APART, CYCLE, Outlet
from parley.web.content_coding import inflate
from parley.web.logs import Note
from parley.web.options import HttpOptions
from parley.web.random_ids import draw

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:=+@/-]{1,128}")
TIMEOUT = b"x-request-timeout"
SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
JSON = b"application/json"


class ClientGone(Exception):
    """The client closed the connection or stopped reading."""


class StageErrors(Protocol):
    """The error responses of a request stage, for requests that are split between servers."""

    def refusal(self, error: ParleyError) -> Answer | None:
        """Return the whole response if the error concerns another server rather than the client's API, else None."""

    def remarks(self, error: ParleyError) -> Headers:
        """Return headers that say to a coordinator how to proceed."""


@dataclass
class Exchange:
    """One request and its response.

    ``field_names``: maps neutral field names in errors to the API's own. ``dialect`` formats errors unless
    ``api_refusal`` does. ``extra_headers``: further headers of a stream. ``tenant``: the number of the client's API
    key. ``stage``: set if this server runs only one stage of the request. ``created_at``: creation time that the
    response shows, in seconds since the epoch; None: now. ``preface_size``: number of bytes before the client's body;
    they are stored in ``preface_bytes``.
    """

    scope: Scope
    receive: Receive
    raw_send: Send
    options: HttpOptions
    dialect: Dialect
    names: Mapping[str, str] = field(default_factory=dict)
    note: Note = field(default_factory=Note)
    extra: Headers = ()
    refusal: Callable[[ParleyError], Answer | None] = lambda error: None
    tenant: str = ""
    leg: StageErrors | None = None
    created: int | None = None
    preface: int = 0
    before: bytes = b""
    status: int = 0  # 0: nothing was sent yet
    complete: bool = False

    def __post_init__(self) -> None:
        self.arrived = time.perf_counter()
        self.headers: dict[bytes, bytes] = dict(self.scope["headers"])
        self._cycle: Outlet = self.scope[CYCLE]
        self.written = 0.0  # time of the last write, by `perf_counter`
        self._held: bytes | None = None
        self.identify(draw().hex())

    def identify(self, unique: str) -> None:
        """Set the request's id, 32 hexadecimal digits. Ids in the response are derived from it."""
        given = self.headers.get(b"x-request-id", b"")
        self.unique, self.id = unique, given.decode() if REQUEST_ID.fullmatch(given) else f"req_{unique}"

    def divert(self, outlet: Outlet) -> None:
        """Redirect the response from the request's own connection to another writer."""
        self._cycle, self.raw_send = outlet, outlet.send

    def separate(self) -> None:
        """Send each event as a chunk of its own if the dialect's clients rely on that."""
        if self.dialect.apart:
            self.scope[APART] = True

    @property
    def begun(self) -> bool:
        """Whether the receiver of the response already has its beginning."""
        return self._cycle.response_started

    @property
    def path(self) -> Mapping[str, str]:
        """The parameters in the path, by the names in the route."""
        return self.scope.get("path_params", {})

    def patience(self) -> float | None:
        """Return the client's timeout from the request header in seconds, None if there is none. Raises Invalid."""
        said = self.headers.get(TIMEOUT)
        if said is None:
            return None
        if not SECONDS.fullmatch(said) or not float(said):
            told = "The header X-Request-Timeout must be a number of seconds above 0 and below 1000000000"
            raise Invalid(f"{told}, but is {excerpt(said.decode('latin-1'))}.", field="timeout")
        return float(said)

    async def body(self) -> bytes:
        """Return the whole decompressed body and drop it here. Raises the same errors as ``peek_body``."""
        body = await self.peek()
        self._held = None
        return body

    async def peek(self) -> bytes:
        """Return the whole decompressed body and keep it. Raises TooLarge, TimedOut, BadRequest, ClientGone."""
        if self._held is None:
            self._held = await self._read()
        return self._held

    def replace(self, body: bytes) -> None:
        """Replace the body that ``peek_body`` returned."""
        self._held = body

    async def _read(self) -> bytes:
        limit = min(self.options.body_limit, self.dialect.body_limit or self.options.body_limit)
        limit += min(limit, self.preface)  # bounded, because any sender may announce a preface
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > limit:
            raise TooLarge(f"The body has {int(announced)} bytes; {limit} are allowed.")
        if self._cycle.whole:
            body = await self._receive(limit)
        else:
            try:
                async with asyncio.timeout(self.options.body_timeout):
                    body = await self._receive(limit)
            except TimeoutError:
                raise TimedOut(f"The body did not come within {self.options.body_timeout:g} seconds.") from None
        self.before, body = body[: self.preface], body[self.preface :]
        coding = self.headers.get(b"content-encoding", b"")
        return await asyncio.to_thread(inflate, body, coding, limit) if coding else body

    async def _receive(self, limit: int) -> bytes:
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise TooLarge(f"The body is larger than the limit of {limit} bytes.")
            more = message.get("more_body", False)
        return b"".join(chunks)

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, and cancel it as soon as the client disconnects. Raises ClientGone in that case."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def departed() -> None:
            nonlocal gone
            if not gone and not self.complete:
                gone = True
                task.cancel()

        try:
            if not self._cycle.watch(departed):
                work.close()
                raise ClientGone
            await work
        except asyncio.CancelledError:
            if gone and not task.uncancel():
                raise ClientGone from None
            raise
        finally:
            self._cycle.unwatch(departed)

    async def answer(self, body: bytes, status: int = 200, type: bytes = JSON, extra: Headers = ()) -> None:
        """Send a response in one piece; an empty ``content_type`` is left out."""
        kind = [(b"content-type", type)] if type else []
        await self._start(status, [*kind, (b"content-length", b"%d" % len(body)), *extra])
        await self._body(body, last=True)

    async def write(self, data: bytes, media_type: str, *, last: bool = False) -> None:
        """Send a part of a stream, after the headers if it is the first one; an empty media type is left out."""
        if not self.status:
            kind = [(b"content-type", media_type.encode())] if media_type else []
            await self._start(
                200,
                [
                    *kind,
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *self.extra,
                ],
            )
        await self._body(data, last=last)

    def part(self, data: bytes) -> bool:
        """Write a part that is not the first one, without a coroutine.

        Return True if another part may be written in this way, False if the client has not read the previous ones.
        """
        self.written = time.perf_counter()
        return self._cycle.part(data)

    async def refuse(self, error: ParleyError, extra: Headers = ()) -> None:
        """Send an error as the whole response."""
        error = self.translate(error)
        own = self.leg.refusal(error) if self.leg is not None else None
        answer = own or self.refusal(error) or self.dialect.error(error)
        headers = [*extra, *(self.leg.remarks(error) if self.leg is not None else ())]
        after = getattr(error, "retry_after", None)
        if after is not None and self.dialect.hints:
            headers += [(b"retry-after", b"%d" % max(1, round(after))), (b"retry-after-ms", b"%d" % (after * 1000))]
        if isinstance(error, UnknownCoding):
            headers.append((b"accept-encoding", b"gzip, deflate"))
        if answer.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.answer(answer.body, answer.status, answer.type, headers)

    def translate(self, error: ParleyError) -> ParleyError:
        """Replace the neutral field name in the error by the API's own, and return the error."""
        if isinstance(error, BadRequest) and error.field is not None:
            error.field = self.names.get(error.field, error.field)
        return error

    def abort(self) -> None:
        """Close the connection at once and drop unsent data."""
        self._cycle.abort()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.separate()
        headers.append((b"x-request-id", self.id.encode()))
        if self.dialect.id_header:
            headers.append((self.dialect.id_header, self.unique.encode()))
        headers += self.dialect.headers(time.perf_counter() - self.arrived)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, last: bool) -> None:
        self.written = time.perf_counter()
        if self._cycle.blocked:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        else:
            self._cycle.part(data, last=last)
        self.complete = last

    async def _send(self, message: Message) -> None:
        """Send a message. A client that has not read anything for ``write_timeout`` seconds is disconnected."""
        if not self._cycle.blocked:
            await self.raw_send(message)
            return
        watchdog = asyncio.get_running_loop().call_later(self.options.write_timeout, self.abort)
        try:
            await self.raw_send(message)
        finally:
            watchdog.cancel()
