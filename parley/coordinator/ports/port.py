"""The admin ports of a coordinator: a few routes, short bodies, answers in one piece.

Unknown paths are answered as documented for all ports, with 400 and a closed connection. Defines no routes itself.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from parley.coordinator import tolerant_json
from parley.coordinator.access import AdminAccess
from parley.errors import ParleyError
from parley.web.auth import ApiKeys, BrowserGuard
from parley.web.framing.request_head import raise_head_error
from parley.web.http_options import HttpOptions
from parley.web.request_body import BodyBudget, ClientGone

log = logging.getLogger("parley.cluster")

JSON_TYPE = b"application/json"
TEXT_TYPE = b"text/plain; charset=utf-8"
BODY_LIMIT = 64 << 20  # bytes of a body; 4,096 instances with their prefix hashes take about 20 MB
BODY_BUDGET = BodyBudget(2 * BODY_LIMIT)  # all admin ports of a process share it
PATIENCE = 60.0  # seconds for a body to arrive
PASSWORD_CHALLENGE = b'Basic realm="user token, password: the secret of the cluster"'
UNKNOWN_PATH = b"Invalid request\r\n"


@dataclass(frozen=True)
class AdminReply:
    """An answer of an admin port. An empty ``content_type`` sends no Content-Type. ``headers``: further headers."""

    status: int = 200
    body: bytes = b""
    content_type: bytes = b""
    close: bool = False
    headers: Sequence[tuple[bytes, bytes]] = ()

    @classmethod
    def from_json(cls, value: Any, status: int = 200) -> AdminReply:
        """Encode a value as a JSON answer."""
        return cls(status, msgspec.json.encode(value), JSON_TYPE)


class AdminRequest:
    """A request to a route: the path segment matched by the star, if any, the query's pairs, and the body."""

    def __init__(self, matched_segment: str, query: Sequence[tuple[str, str]], body: bytes):
        self.matched_segment, self.query, self.body = matched_segment, query, body

    def json_object(self) -> dict[str, Any] | None:
        """Parse the body as a JSON object; None if it is none."""
        return tolerant_json.parse_object(self.body)


AdminRoute = Callable[[AdminRequest], AdminReply | Awaitable[AdminReply]]


class AdminPort:
    """The ASGI application of one admin port.

    ``routes``: by method and path; a star in a path matches one segment. ``access``: who may use them. ``is_open``:
    whether anyone may read a path, as probes do.
    """

    def __init__(
        self,
        routes: Mapping[tuple[str, str], AdminRoute],
        host: str = "127.0.0.1",
        access: AdminAccess | None = None,
        is_open: Callable[[str], bool] = lambda path: False,
    ):
        self._access, self._is_open = access or AdminAccess(), is_open
        self._exact_routes = {place: route for place, route in routes.items() if "*" not in place[1]}
        self._starred_routes = [(place, route) for place, route in routes.items() if "*" in place[1]]
        self._gate = BrowserGuard(host, (), (), ApiKeys(()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request with its route's reply. Other ASGI scopes are ignored."""
        if scope["type"] != "http":
            return
        reply = await self._run_route(scope, receive)
        headers = [(b"content-length", b"%d" % len(reply.body)), *reply.headers]
        if reply.content_type:
            headers.append((b"content-type", reply.content_type))
        if reply.close:
            headers.append((b"connection", b"close"))
        if reply.status == 401:
            headers.append((b"www-authenticate", PASSWORD_CHALLENGE))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    async def _run_route(self, scope: Scope, receive: Receive) -> AdminReply:
        try:
            raise_head_error(scope, is_probe=False)
            headers = dict(scope["headers"])
            self._gate.check_headers(headers)
            if scope["method"] != "GET" or not self._is_open(scope["path"]):
                self._access.check_client(headers, str((scope.get("client") or ("", 0))[0]))
        except ParleyError as error:
            return AdminReply(error.status, f"{error.message}\r\n".encode(), TEXT_TYPE, close=True)
        route, matched_segment = self._find_route(scope["method"], scope["path"])
        if route is None:
            return AdminReply(400, UNKNOWN_PATH, TEXT_TYPE, close=True)
        held_body = BODY_BUDGET.hold_body()
        try:
            body = b""
            if scope["method"] != "GET":
                body = await held_body.receive(receive, BODY_LIMIT, PATIENCE, HttpOptions.body_rate)
            pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            route_reply = route(AdminRequest(matched_segment, pairs, body))
            return await route_reply if inspect.isawaitable(route_reply) else route_reply
        except ClientGone:
            return AdminReply(400, UNKNOWN_PATH, TEXT_TYPE, close=True)
        except ParleyError as error:
            return AdminReply(error.status, f"{error.message}\r\n".encode(), TEXT_TYPE, close=True)
        except Exception:
            log.exception("%s %s failed.", scope["method"], scope["path"])
            return AdminReply(500, b"The coordinator had an error.\r\n", TEXT_TYPE)
        finally:
            held_body.release()

    def _find_route(self, method: str, path: str) -> tuple[AdminRoute | None, str]:
        route = self._exact_routes.get((method, path))
        if route is not None:
            return route, ""
        for (route_method, pattern), starred in self._starred_routes:
            prefix, _, suffix = pattern.partition("*")
            if route_method == method and path.startswith(prefix) and path.endswith(suffix):
                starred_part = path[len(prefix) : len(path) - len(suffix)]
                if starred_part and "/" not in starred_part:
                    return starred, starred_part
        return None, ""
