"""One HTTP exchange: the body in, the answer out, and the news that the client has left.

A client is watched in every phase, also while nothing is sent; the frameworks' own responders notice its leaving only
when they write. The headers of a stream go out with its first bytes, so that everything that fails before that is an
HTTP status. Knows nothing of engines, and of an API only its name for headers.
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
    """The client closed the connection, or stopped reading."""


class StageErrors(Protocol):
    """The error answers of a request that this server answers in part."""

    def refusal(self, error: ParleyError) -> Answer | None:
        """The whole answer, if the error concerns another server and not the client's API."""

    def remarks(self, error: ParleyError) -> Headers:
        """Headers that tell a coordinator what to do next."""


@dataclass
class Exchange:
    """``names`` translate the fields of errors; ``dialect`` words them, unless ``refusal`` does.

    ``extra``: further headers of a stream. ``tenant``: on whose behalf, by the key. ``leg``: which part of the request
    is done here, if it is not done as a whole. ``created``: when the request was, by the clock that its answer shows;
    None: now. ``preface``: how many bytes came ``before`` the client's body.
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
        self.written = 0.0  # when the last part of a stream was
        self._held: bytes | None = None
        self.identify(draw().hex())

    def identify(self, unique: str) -> None:
        """Be the request of this id, 32 hexadecimal digits; what is drawn for its answer comes from that."""
        given = self.headers.get(b"x-request-id", b"")
        self.unique, self.id = unique, given.decode() if REQUEST_ID.fullmatch(given) else f"req_{unique}"

    def divert(self, outlet: Outlet) -> None:
        """Let the answer go somewhere else than to the connection that the request came by."""
        self._cycle, self.raw_send = outlet, outlet.send

    def separate(self) -> None:
        """Have each event be a chunk, if clients of this API count on it."""
        if self.dialect.apart:
            self.scope[APART] = True

    @property
    def begun(self) -> bool:
        """Has whoever waits for the answer got its beginning?"""
        return self._cycle.response_started

    @property
    def path(self) -> Mapping[str, str]:
        """The parts of the path that the route names."""
        return self.scope.get("path_params", {})

    def patience(self) -> float | None:
        """How many seconds the client gives the request in a header, None if it does not say. Raises Invalid."""
        said = self.headers.get(TIMEOUT)
        if said is None:
            return None
        if not SECONDS.fullmatch(said) or not float(said):
            told = "The header X-Request-Timeout must be a number of seconds above 0 and below 1000000000"
            raise Invalid(f"{told}, but is {excerpt(said.decode('latin-1'))}.", field="timeout")
        return float(said)

    async def body(self) -> bytes:
        """The whole request body, decompressed, and no longer held here. Raises what ``peek`` raises."""
        body = await self.peek()
        self._held = None
        return body

    async def peek(self) -> bytes:
        """The whole body, decompressed, to be asked for again. Raises TooLarge, TimedOut, BadRequest, ClientGone."""
        if self._held is None:
            self._held = await self._read()
        return self._held

    def replace(self, body: bytes) -> None:
        """Have this for the body, which has been looked at, from now on."""
        self._held = body

    async def _read(self) -> bytes:
        limit = min(self.options.body_limit, self.dialect.body_limit or self.options.body_limit)
        limit += min(limit, self.preface)  # who says how long that is may be anybody
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
        """Do the work, but stop it the moment the client leaves: then ClientGone is raised."""
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
        """Send an answer in one piece; an empty ``type`` is left out."""
        kind = [(b"content-type", type)] if type else []
        await self._start(status, [*kind, (b"content-length", b"%d" % len(body)), *extra])
        await self._body(body, last=True)

    async def write(self, data: bytes, media_type: str, *, last: bool = False) -> None:
        """Send a part of a stream, behind the headers if it is the first; an empty type is left out of them."""
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
        """``write`` of a part that is not the first, without a coroutine's ceremony. May another follow in this way?
        Not if the client has not read the last ones."""
        self.written = time.perf_counter()
        return self._cycle.part(data)

    async def refuse(self, error: ParleyError, extra: Headers = ()) -> None:
        """Send an error as the whole answer."""
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
        """The error with its neutral field under the API's own name."""
        if isinstance(error, BadRequest) and error.field is not None:
            error.field = self.names.get(error.field, error.field)
        return error

    def abort(self) -> None:
        """Close the connection at once, dropping what is unsent."""
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
        """Send, unless the client has not read for too long: then its connection is cut, and it counts as gone."""
        if not self._cycle.blocked:
            await self.raw_send(message)
            return
        watchdog = asyncio.get_running_loop().call_later(self.options.write_timeout, self.abort)
        try:
            await self.raw_send(message)
        finally:
            watchdog.cancel()
