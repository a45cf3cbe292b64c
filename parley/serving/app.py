"""The ASGI application of one port: access checks, routing, and the answers to errors.

Every request passes ``App.__call__``, which checks the limits of its head, its origin and its key, then routes it.
Every exception becomes the error answer that clients of the API know. ``dialects/mounts.py`` says which API is mounted
where; if several APIs share a path, the members of the body decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.routing import Match, Router
from starlette.routing import Route as Mounted
from starlette.types import Receive, Scope, Send

from parley.dialects.dialect import Dialect, Headers, Kind, Route
from parley.dialects.mounts import INNER, INSTANCE_PLANE, OPEN, Surface, changes, members, table, wording
from parley.disagg.wire.headers import preface
from parley.errors import NotAllowed, NotFound, OrderRefused, ParleyError, excerpt
from parley.serving.handlers import HANDLERS, PROBES, Handle
from parley.serving.registry import Service
from parley.web.auth import Gate, Keys
from parley.web.exchange import ClientGone, Exchange
from parley.web.http_protocol import REFUSED
from parley.web.logs import access
from parley.web.offload import off_loop

log = logging.getLogger("parley.server")

EXCHANGE = "parley.exchange"


class ClusterView(Protocol):
    """The server's cluster, as far as it affects authorization."""

    def member(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a coordinator of the cluster sent the request on its own behalf, which needs no key."""

    def order(self, exchange: Exchange) -> object:
        """Return a coordinator's command to do a part of this request, None if there is none. Raises OrderRefused."""


class NoCluster:
    """The view of a server that belongs to no cluster."""

    def member(self, headers: Mapping[bytes, bytes]) -> bool:
        return False

    def order(self, exchange: Exchange) -> object:
        return None


NO_CLUSTER = NoCluster()


class Endpoint:
    """The ASGI endpoint of one route. Routes that change the server require an administrator's key."""

    def __init__(self, app: App, route: Route, dialect: Dialect):
        self.app = app
        self.route = route
        self.dialect = dialect
        self.admins = app.keys if changes(route) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        exchange.scope, exchange.dialect = scope, self.dialect
        if self.admins is not None and not self.app.cluster.member(exchange.headers):
            self.admins.check_admin(exchange.headers)
        exchange.note.probe = self.route.kind in PROBES
        await self.app.handlers[self.route.kind](self.app.service, self.route, exchange)


class Fork:
    """The ASGI endpoint of a path that several APIs share.

    The body goes to the first route that claims one of its members, otherwise to the first route that does not yield.
    """

    def __init__(self, endpoints: Sequence[Endpoint]):
        self.endpoints = endpoints
        self.default = next((end for end in endpoints if not end.route.yields), endpoints[0])
        self.route, self.dialect, self.app = self.default.route, self.default.dialect, self.default.app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        exchange.scope, exchange.dialect = scope, self.dialect
        if self.route.kind == "generate" and exchange.leg is None:
            self.app.cluster.order(exchange)  # report a bad command before any error in the body
        body = await exchange.peek()
        names = await off_loop(len(body), partial(members, body))
        claiming = (endpoint for endpoint in self.endpoints if not names.isdisjoint(endpoint.route.claims))
        await next(claiming, self.default)(scope, receive, send)


def endpoints(app: App, surfaces: Sequence[Surface]) -> dict[tuple[str, str], Endpoint | Fork]:
    """Return the route table of these mounts: an endpoint for each method and path."""
    made: dict[tuple[str, str], Endpoint | Fork] = {}
    for place, answering in table(surfaces).items():
        ends = [Endpoint(app, route, surface.dialect) for route, surface in answering]
        made[place] = ends[0] if len(ends) == 1 else Fork(ends)
    return made


class App:
    """The application of one port.

    ``surfaces``: the APIs mounted here. ``route_table``: the route table that the router was built from. ``apis``: the
    names and prefixes of the APIs; ports with equal ``apis`` answer the same requests. ``handlers``: the function that
    answers each kind of route.
    """

    def __init__(
        self,
        service: Service,
        surfaces: Sequence[Surface],
        host: str,
        handlers: Mapping[Kind, Handle] = HANDLERS,
        cluster: ClusterView = NO_CLUSTER,
    ):
        options = service.options
        self.service = service
        self.handlers = handlers
        self.cluster = cluster
        self.surfaces = [surface for surface in surfaces if surface not in INNER]
        self.apis = " ".join(f"{surface.prefix}:{surface.dialect.name}" for surface in self.surfaces)
        self.keys = Keys(options.api_keys, options.admin_keys)
        self.endpoints = endpoints(self, surfaces)
        self._gate = Gate(host, options.hosts, options.cors, self.keys)
        self._owners = {path: endpoint.dialect for (_, path), endpoint in reversed(self.endpoints.items())}
        guarded = {path for (_, path), endpoint in self.endpoints.items() if endpoint.route.kind not in OPEN}
        self._open = {path for _, path in self.endpoints} - guarded
        self._router = Router(
            [Mounted(path, endpoint, methods=[method]) for (method, path), endpoint in self.endpoints.items()],
            redirect_slashes=False,
            default=_nowhere,
        )
        # Paths without parameters skip the router, unless it would choose another endpoint for them.
        self._plain = {place: end for place, end in self.endpoints.items() if self._found(place) is end}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await self.answer(self.exchange(scope, receive, send))

    def exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        """Wrap an ASGI request to this port in an Exchange."""
        exchange = Exchange(scope, receive, send, self.service.options, self._dialect(scope["path"]))
        exchange.preface = preface(exchange.headers)
        return exchange

    async def answer(self, exchange: Exchange, *, admitted: bool = False) -> None:
        """Answer a request. ``admitted``: another server of the cluster has already authorized it."""
        scope = exchange.scope
        scope[EXCHANGE] = exchange
        scope["app"] = self  # makes the router raise, instead of answering, if the method does not fit
        try:
            if not admitted:
                self._admit(scope, exchange)
            answering = self._plain.get((scope["method"], scope["path"]), self._router)
            await answering(scope, exchange.receive, exchange.raw_send)
        except ClientGone:
            exchange.abort()
        except OrderRefused as refused:
            answer = INSTANCE_PLANE.refusal(refused)
            await exchange.answer(answer.body, answer.status, answer.type)
        except ParleyError as error:
            await self._refuse(exchange, error)
        except HTTPException:
            await self._refuse(exchange, _not_allowed(scope), ((b"allow", self._allowed(scope)),))
        except asyncio.CancelledError:
            exchange.abort()
            raise
        except Exception:
            log.exception("Request %s failed.", exchange.id)
            await self._refuse(exchange, ParleyError("The server had an error while it processed the request."))
        finally:
            del scope[EXCHANGE]  # the two refer to each other; without the cycle, memory is freed at once
            if not admitted:
                self.service.responses.add(value=str(exchange.status))
            if self.service.options.access_log:
                access(exchange)

    def _allowed(self, scope: Scope) -> bytes:
        """Return the methods that the path allows, as the value of an Allow header."""
        fitting = (route for route in self._router.routes if route.matches(scope)[0] is not Match.NONE)
        return ", ".join(sorted({method for route in fitting for method in getattr(route, "methods", ())})).encode()

    def _found(self, place: tuple[str, str]) -> Any:
        """Return the endpoint that the router finds for a method and path; None if the path has parameters."""
        scope: Scope = {"type": "http", "method": place[0], "path": place[1]}
        fitting = (route for route in self._router.routes if route.matches(scope)[0] is Match.FULL)
        return getattr(next(fitting, None), "app", None) if "{" not in place[1] else None

    def _admit(self, scope: Scope, exchange: Exchange) -> None:
        if REFUSED in scope:
            raise scope[REFUSED]
        if scope["path"] not in self._open:
            self._gate.check(exchange.headers)
            if not self.cluster.member(exchange.headers):
                exchange.tenant = self.keys.check(exchange.headers)

    def _dialect(self, path: str) -> Dialect:
        """Return the dialect that words errors raised before the route of a request is known."""
        return self._owners[path] if path in self._owners else wording(self.surfaces, path)

    async def _refuse(self, exchange: Exchange, error: ParleyError, extra: Headers = ()) -> None:
        if exchange.begun:  # too late for an error answer; a cut connection at least does not look like a proper end
            exchange.abort()
            return
        try:
            await exchange.refuse(error, extra)
        except ClientGone:
            exchange.abort()


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(f"Unknown request URL: {scope['method']} {excerpt(scope['path'])}. Please check it for typos.")


def _not_allowed(scope: Scope) -> ParleyError:
    return NotAllowed(f"{scope['method']} is not allowed on {excerpt(scope['path'])}.")
