"""The admin ports of a coordinator: a few routes, short bodies, answers in one piece.

Unknown paths are answered as documented for all ports, with 400 and a closed connection. Defines no routes itself.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from parley.coordinator import lenient
from parley.disagg.wire import headers as heads
from parley.errors import ParleyError, Unauthorized
from parley.web.auth import Gate, Keys
from parley.web.http_protocol import REFUSED

log = logging.getLogger("parley.cluster")

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
LIMIT = 64 << 20  # bytes of a body; 4,096 instances with their prefix hashes take about 20 MB
PATIENCE = 60.0  # seconds for a body to arrive
UNKNOWN = b"Invalid request\r\n"


@dataclass(frozen=True)
class Reply:
    """An answer of an admin port. An empty ``content_type`` sends no Content-Type."""

    status: int = 200
    body: bytes = b""
    type: bytes = b""
    close: bool = False

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Reply:
        """Encode a value as a JSON answer."""
        return cls(status, msgspec.json.encode(value), JSON)


class Asked:
    """A request to a route: the path segment matched by the star, if any, the query's pairs, and the body."""

    def __init__(self, rest: str, query: Sequence[tuple[str, str]], body: bytes):
        self.rest, self.query, self.body = rest, query, body

    def members(self) -> dict[str, Any] | None:
        """Parse the body as a JSON object; None if it is none."""
        return lenient.members(self.body)


Route = Callable[[Asked], Reply | Awaitable[Reply]]


class Plane:
    """The ASGI application of one admin port.

    ``routes``: by method and path; a star in a path matches one segment. ``secret``: required as parley-secret for
    every method but GET; empty: not required.
    """

    def __init__(self, routes: Mapping[tuple[str, str], Route], host: str = "127.0.0.1", secret: str = ""):
        self._secret = secret
        self._plain = {place: route for place, route in routes.items() if "*" not in place[1]}
        self._starred = [(place, route) for place, route in routes.items() if "*" in place[1]]
        self._gate = Gate(host, (), (), Keys(()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        reply = await self._answer(scope, receive)
        headers = [(b"content-length", b"%d" % len(reply.body))]
        if reply.type:
            headers.append((b"content-type", reply.type))
        if reply.close:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        try:
            if REFUSED in scope:
                raise scope[REFUSED]
            headers = dict(scope["headers"])
            self._gate.check(headers)
            if scope["method"] != "GET" and not heads.trusted(headers, self._secret):
                raise Unauthorized(heads.SECRET)
        except ParleyError as error:
            return Reply(error.status, f"{error.message}\r\n".encode(), TEXT, close=True)
        route, rest = self._found(scope["method"], scope["path"])
        if route is None:
            return Reply(400, UNKNOWN, TEXT, close=True)
        body = bytearray()
        more = True
        try:
            async with asyncio.timeout(PATIENCE):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return Reply(400, UNKNOWN, TEXT, close=True)
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > LIMIT:
                        return Reply(413, b"The body is too large.\r\n", TEXT, close=True)
        except TimeoutError:
            return Reply(408, b"The body did not come in time.\r\n", TEXT, close=True)
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        try:
            made = route(Asked(rest, pairs, bytes(body)))
            return await made if inspect.isawaitable(made) else made
        except Exception:
            log.exception("%s %s failed.", scope["method"], scope["path"])
            return Reply(500, b"The coordinator had an error.\r\n", TEXT)

    def _found(self, method: str, path: str) -> tuple[Route | None, str]:
        route = self._plain.get((method, path))
        if route is not None:
            return route, ""
        for (wanted, place), starred in self._starred:
            before, _, after = place.partition("*")
            if wanted == method and path.startswith(before) and path.endswith(after):
                rest = path[len(before) : len(path) - len(after)]
                if rest and "/" not in rest:
                    return starred, rest
        return None, ""
