"""The ASGI application: which API is mounted where, who may enter, and how errors leave.

Every request passes ``App.__call__``: limits of its head, origin, key, router. Whatever is raised on the way becomes
the answer that the API's clients know. An API is added by a line in ``SURFACES``.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route as Mounted
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from parley.dialects import openai, triton
from parley.dialects.dialect import Dialect, Route
from parley.errors import NotAllowed, NotFound, ParleyError, excerpt
from parley.server.auth import Gate, Keys
from parley.server.limits import REFUSED
from parley.server.logs import access
from parley.server.operations import HANDLERS, OPEN, OPERATIONS, PROBES
from parley.server.respond import ClientGone, Exchange, Headers
from parley.server.service import Service

log = logging.getLogger("parley.server")


@dataclass(frozen=True)
class Surface:
    """An API below a path."""

    prefix: str
    dialect: Dialect


SURFACES = (
    Surface("", openai.DIALECT),
    Surface("/openai", openai.DIALECT),
    Surface("", triton.DIALECT),
    Surface("/triton", triton.DIALECT),
)

EXCHANGE = "parley.exchange"


class Endpoint:
    """What answers one route."""

    def __init__(self, service: Service, route: Route, dialect: Dialect):
        self.service = service
        self.route = route
        self.dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[EXCHANGE]
        exchange.scope, exchange.dialect = scope, self.dialect
        exchange.note.probe = self.route.kind in PROBES
        await HANDLERS[self.route.kind](self.service, self.route, exchange)


def endpoints(service: Service) -> dict[tuple[str, str], Endpoint]:
    """Every route of the server by method and path. Of two that collide the first surface's counts."""
    table: dict[tuple[str, str], Endpoint] = {}
    for route in OPERATIONS:
        table[route.method, route.path] = Endpoint(service, route, SURFACES[0].dialect)
    for surface in SURFACES:
        for route in surface.dialect.routes:
            table.setdefault((route.method, surface.prefix + route.path), Endpoint(service, route, surface.dialect))
    return table


class App:
    """``endpoints`` is the route table that the router was made of."""

    def __init__(self, service: Service):
        options = service.options
        self.service = service
        self.endpoints = endpoints(service)
        self._keys = Keys(options.api_keys)
        self._gate = Gate(options.host, options.hosts, options.cors, self._keys)
        self._open = {path for (_, path), endpoint in self.endpoints.items() if endpoint.route.kind in OPEN}
        self._router = Router(
            [Mounted(path, endpoint, methods=[method]) for (method, path), endpoint in self.endpoints.items()],
            redirect_slashes=False,
            default=_nowhere,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self.service.options, self._dialect(scope["path"]))
        scope[EXCHANGE] = exchange
        scope["app"] = self  # makes the router raise, rather than answer, when a method does not fit
        try:
            self._admit(scope, exchange)
            await self._router(scope, receive, send)
        except ClientGone:
            exchange.abort()
        except ParleyError as error:
            await self._refuse(exchange, error)
        except HTTPException as error:
            allowed = ((b"allow", (error.headers or {}).get("Allow", "").encode()),)
            await self._refuse(exchange, _not_allowed(scope), allowed)
        except asyncio.CancelledError:
            exchange.abort()
            raise
        except Exception:
            log.exception("Request %s failed.", exchange.id)
            await self._refuse(exchange, ParleyError("The server had an error while it processed the request."))
        finally:
            self.service.metrics.responses.add(value=str(exchange.status))
            if self.service.options.access_log:
                access(exchange)

    def _admit(self, scope: Scope, exchange: Exchange) -> None:
        if REFUSED in scope:
            raise scope[REFUSED]
        if scope["path"] not in self._open:
            self._gate.check(exchange.headers)
            self._keys.check(exchange.headers)

    def _dialect(self, path: str) -> Dialect:
        """The API that words the errors of a path that leads nowhere."""
        roots = [(surface.prefix, surface.dialect) for surface in SURFACES]
        roots += [(surface.prefix + surface.dialect.base, surface.dialect) for surface in SURFACES]
        fitting = [(root, dialect) for root, dialect in roots if path == root or path.startswith(root + "/")]
        return max(fitting, key=lambda pair: len(pair[0]), default=roots[0])[1]

    async def _refuse(self, exchange: Exchange, error: ParleyError, extra: Headers = ()) -> None:
        if exchange.status:  # too late for an answer: a cut connection is at least no false end
            exchange.abort()
            return
        try:
            await exchange.refuse(error, extra)
        except ClientGone:
            exchange.abort()


def build(service: Service) -> ASGIApp:
    """The application, with CORS around it if any origin is allowed."""
    app = App(service)
    origins = service.options.cors
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"]
    )


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(f"Unknown request URL: {scope['method']} {excerpt(scope['path'])}. Please check it for typos.")


def _not_allowed(scope: Scope) -> ParleyError:
    return NotAllowed(f"{scope['method']} is not allowed on {excerpt(scope['path'])}.")
