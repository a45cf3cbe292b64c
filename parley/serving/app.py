"""The ASGI application of one port: access checks, routing, and error answers.

Every request passes ``App.__call__``, which checks the limits of its head, its origin and its key, then routes it.
Every exception becomes the error answer that clients of the API know. ``dialects/mounts.py`` says which API is mounted
where; if several APIs share a path, the members of the body decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from parley.dialects.dialect import Dialect
from parley.dialects.mounts import (
    API_NAMES,
    INSTANCE_PLANE,
    ApiMount,
    error_dialect,
    is_api,
    join_name_segments,
    mount_table,
    non_null_members,
    route_scope,
    split_name_segments,
)
from parley.dialects.reply import HeaderList
from parley.dialects.route import Route, RouteKind
from parley.disagg.wire.headers import read_preface_size
from parley.disagg.wire.vouched_client import CLIENT_HEADER, COUNT_HEADER, VouchedClient
from parley.errors import (
    SERVER_ERROR,
    CommandRefused,
    Forbidden,
    NotAllowed,
    NotFound,
    ParleyError,
    Unauthorized,
    excerpt,
)
from parley.serving.handlers.route_table import PROBE_KINDS, SERVER_HANDLERS, RouteHandler
from parley.serving.keys.audit_log import AuditLog
from parley.serving.keys.scopes import check_key_api
from parley.serving.model_registry import ModelRegistry
from parley.serving.route_index import RouteIndex
from parley.serving.server_options import ServerOptions
from parley.serving.trusted_proxies import TrustedProxies, strip_root_path, without_root_path
from parley.web.auth import (
    BATCH_KEY_REFUSED,
    NO_ADMIN_KEY,
    TENANT_REFERENCE_KEY,
    ApiKeys,
    BrowserGuard,
    PortReach,
    port_reach,
)
from parley.web.exchange import Exchange
from parley.web.framing.request_head import raise_head_error
from parley.web.logs import log_access
from parley.web.request_body import ClientGone

log = logging.getLogger("parley.server")

EXCHANGE_KEY = "parley.exchange"


class ClusterView(Protocol):
    """The server's cluster, as far as it affects authorization."""

    def is_coordinator(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a coordinator of the cluster sent the request on its own behalf, which needs no key."""

    def read_command(self, exchange: Exchange) -> object:
        """Return a coordinator's command to do a part of this request, None if there is none. Raises CommandRefused."""

    def vouched_client(
        self, headers: Mapping[bytes, bytes], client_host: str, reach: PortReach, *, has_keys: bool
    ) -> VouchedClient | None:
        """Return the client whose key the sender of a request has checked, if a coordinator of the cluster forwards it
        and says so. ``has_keys``: clients need a key here."""

    def check_client(self, headers: Mapping[bytes, bytes], client_host: str, reach: PortReach) -> None:
        """Check that a client at an IP address may call a port of this reach, where it needs no key. Raises
        Unauthorized."""

    def check_change(self, exchange: Exchange) -> None:
        """Check that a request may change this server, where no admin key is required. Raises Forbidden."""


class NoClusterView:
    """The view of a server that belongs to no cluster."""

    def is_coordinator(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return False: there is no coordinator."""
        return False

    def read_command(self, exchange: Exchange) -> object:
        """Return None: there is no coordinator."""
        return None

    def vouched_client(
        self, headers: Mapping[bytes, bytes], client_host: str, reach: PortReach, *, has_keys: bool
    ) -> VouchedClient | None:
        """Return None: there is no coordinator."""
        return None

    def check_client(self, headers: Mapping[bytes, bytes], client_host: str, reach: PortReach) -> None:
        """Do nothing: clients call the server directly."""

    def check_change(self, exchange: Exchange) -> None:
        """Do nothing: there is no cluster that alone may change the server."""


NO_CLUSTER_VIEW = NoClusterView()


class RouteEndpoint:
    """The ASGI endpoint of one route. Routes that change the server require an administrator's key."""

    def __init__(self, app: App, route: Route, dialect: Dialect, path: str):
        self.app = app
        self.path = path  # the template that requests match
        self.route = route
        self.dialect = dialect
        self.admin_keys = app.keys if route_scope(route) == "admin" else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with its kind's handler. Raises Unauthorized, Forbidden if its key does not allow that."""
        exchange: Exchange = scope[EXCHANGE_KEY]
        exchange.scope, exchange.dialect, exchange.route_path = scope, self.dialect, self.path
        if self.admin_keys is not None:
            exchange.is_admin_call = True
            self._check_admin(self.admin_keys, exchange)
        exchange.log_entry.api = self.dialect.name
        if self.dialect.name in API_NAMES:  # the server's own routes belong to none
            check_key_api(exchange.tenant, self.dialect.name)
        exchange.log_entry.is_probe = self.route.kind in PROBE_KINDS
        await self.app.handlers[self.route.kind](self.app.registry, self.route, exchange)

    def _check_admin(self, admin_keys: ApiKeys, exchange: Exchange) -> None:
        """Check that the client may change the server. Raises Unauthorized, Forbidden."""
        if exchange.limits_counted:  # the coordinator has checked the client's key
            if not exchange.tenant.is_admin:
                raise Forbidden(NO_ADMIN_KEY)
            return
        if self.app.cluster.is_coordinator(exchange.headers):
            return
        admin_keys.check_admin_key(exchange.headers)
        if not admin_keys.has_admin_keys and self.route.kind != "role":  # the handler of roles checks itself
            self.app.cluster.check_change(exchange)


class SharedPathEndpoint:
    """The ASGI endpoint of a path that several APIs share.

    The request goes to the first route that claims it by a header or a member of its body, otherwise to the first route
    that does not yield. Routes for encoders come first if the main model is one, and are left out if it is not.
    """

    def __init__(self, endpoints: Sequence[RouteEndpoint]):
        self.endpoints = [end for end in endpoints if not end.route.for_encoders] or list(endpoints)
        self._encoder_endpoints = [end for end in endpoints if end.route.for_encoders]
        self.default_endpoint = _first_unyielding(self.endpoints)
        self.route = self.default_endpoint.route
        self.dialect = self.default_endpoint.dialect
        self.app = self.default_endpoint.app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the endpoint that claims its body."""
        exchange: Exchange = scope[EXCHANGE_KEY]
        exchange.scope, exchange.dialect, exchange.route_path = scope, self.dialect, self.default_endpoint.path
        if self.route.kind == "generate" and exchange.stage is None and not exchange.counts_tokens:
            self.app.cluster.read_command(exchange)  # report a bad command before any error in the body
        body = await exchange.peek_body()
        member_names = await exchange.to_thread_if_large(len(body), partial(non_null_members, body))
        endpoints, default_endpoint = self.endpoints, self.default_endpoint
        if self._encoder_endpoints and self.app.registry.main_model.is_encoder:
            endpoints = self._encoder_endpoints + self.endpoints
            default_endpoint = _first_unyielding(endpoints)
        claiming = (endpoint for endpoint in endpoints if endpoint.route.claims_request(member_names, exchange.headers))
        await next(claiming, default_endpoint)(scope, receive, send)


def _first_unyielding(endpoints: Sequence[RouteEndpoint]) -> RouteEndpoint:
    return next((end for end in endpoints if not end.route.yields_unclaimed), endpoints[0])


def build_route_table(
    app: App, mounts: Sequence[ApiMount], serves_route: Callable[[Route], bool] = lambda route: True
) -> dict[tuple[str, str], RouteEndpoint | SharedPathEndpoint]:
    """Return the endpoint of each method and path of these mounts. Routes that ``serves_route`` denies are left out."""
    route_table: dict[tuple[str, str], RouteEndpoint | SharedPathEndpoint] = {}
    for method_and_path, routes in mount_table(mounts).items():
        route_endpoints = [
            RouteEndpoint(app, route, mount.dialect, method_and_path[1])
            for route, mount in routes
            if serves_route(route)
        ]
        if not route_endpoints:
            continue
        route_table[method_and_path] = (
            route_endpoints[0] if len(route_endpoints) == 1 else SharedPathEndpoint(route_endpoints)
        )
    return route_table


class App:
    """The application of one port.

    * ``mounts``: the APIs mounted here.
    * ``route_table``: the routes that the index was built from.
    * ``apis``: the names and prefixes of the APIs; ports with equal ``apis`` answer the same requests.
    * ``handlers``: the function that answers each kind of route.
    * ``certified``: the port requires a client's certificate.
    * ``serves_route``: whether the port serves a route of its APIs.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        mounts: Sequence[ApiMount],
        host: str,
        handlers: Mapping[RouteKind, RouteHandler] = SERVER_HANDLERS,
        cluster: ClusterView = NO_CLUSTER_VIEW,
        certified: bool = False,
        serves_route: Callable[[Route], bool] = lambda route: True,
    ):
        options = registry.options
        self.registry = registry
        self.handlers = handlers
        self.cluster = cluster
        self.reach = port_reach(host, certified=certified)
        self.mounts = [mount for mount in mounts if is_api(mount)]
        self.apis = " ".join(f"{mount.prefix}:{mount.dialect.name}" for mount in self.mounts)
        self.keys = ApiKeys(*options.key_sources)
        self._audit_log = AuditLog(options.audit_log or "")
        self.route_table = build_route_table(self, mounts, serves_route)
        self._root_path = options.root_path
        self._proxies = TrustedProxies(options.trusted_proxies, trusts_sockets=options.trusts_socket_proxies)
        self._browser_guard = BrowserGuard(host, options.hosts, options.cors, self.keys)
        self._path_dialects = {path: endpoint.dialect for (_, path), endpoint in reversed(self.route_table.items())}
        guarded_paths = {
            path for (_, path), endpoint in self.route_table.items() if route_scope(endpoint.route) != "open"
        }
        self._keyless_paths = {path for _, path in self.route_table} - guarded_paths
        self._pages = {
            path: RouteEndpoint(self, route, mount.dialect, path)
            for (_, path), routes in mount_table(mounts).items()
            for route, mount in routes
            if route.kind == "page"
        }
        self._page_folders = {path.partition("{")[0]: page for path, page in self._pages.items() if "{" in path}
        self._route_index = RouteIndex(self.route_table.items(), self._answer_unmatched)
        # Most requests have one of these paths and skip the index.
        self._direct_endpoints = {key: endpoint for key, endpoint in self.route_table.items() if "{" not in key[1]}

    def use_options(self, options: ServerOptions) -> None:
        """Accept the keys of other options from now on."""
        self.keys.replace_keys(*options.key_sources)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request. Other ASGI scopes are ignored."""
        if scope["type"] != "http":
            return
        if self._root_path and EXCHANGE_KEY not in scope:  # a message of a WebSocket has the path of its handshake
            strip_root_path(scope, self._root_path)
        exchange = self.make_exchange(scope, receive, send)
        if self._proxies:
            self._proxies.apply_headers(scope, exchange.headers)
        await self.answer_request(exchange)

    def make_exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        """Wrap an ASGI request to this port in an Exchange."""
        exchange = Exchange(scope, receive, send, self.registry.options, self._error_dialect(scope["path"]))
        exchange.preface_size = read_preface_size(exchange.headers)
        exchange.body_limit = self.registry.body_limit
        if self.registry.span_exporter is not None:
            exchange.begin_trace(self.registry.span_exporter)
        return exchange

    async def answer_request(self, exchange: Exchange, *, authorized: bool = False) -> None:
        """Answer a request. ``authorized``: another server of the cluster has already authorized it."""
        scope = exchange.scope
        scope[EXCHANGE_KEY] = exchange
        scope["app"] = self  # makes routes raise, instead of answering, if the method does not fit
        try:
            page = self._find_page(scope, exchange.headers)
            if page is not None:
                raise_head_error(scope, is_probe=False)
                await page(scope, exchange.receive, exchange.raw_send)
                return
            if not authorized:
                self._authorize_request(scope, exchange)
            endpoint = self._direct_endpoints.get((scope["method"], scope["path"]), self._route_index)
            await endpoint(scope, exchange.receive, exchange.raw_send)
        except ClientGone:
            exchange.abort_connection()
        except CommandRefused as refused:
            answer = INSTANCE_PLANE.render_command_refusal(refused)
            await exchange.send_answer(answer)
        except ParleyError as error:
            await self._send_error(exchange, error)
        except HTTPException:
            await self._send_error(exchange, _method_not_allowed(scope), ((b"allow", self._allow_header(scope)),))
        except asyncio.CancelledError:
            exchange.abort_connection()
            raise
        except Exception:
            log.exception("Request %s failed.", exchange.request_id)
            await self._send_error(exchange, ParleyError(SERVER_ERROR))
        finally:
            exchange.release_body()
            exchange.finish_recording()
            if not exchange.is_passed:
                exchange.finish_trace()
            del scope[EXCHANGE_KEY]  # the two refer to each other; without the cycle, memory is freed at once
            if not authorized and not exchange.is_passed:
                self._record_request(exchange)
                if exchange.is_admin_call or (exchange.status == 401 and self._matches_admin_route(scope)):
                    self._audit_log.record_call(exchange)
            if self.registry.options.access_log and not exchange.is_passed:
                log_access(exchange)

    def _record_request(self, exchange: Exchange) -> None:
        self.registry.http_responses.add_count(value=str(exchange.status))
        if not exchange.log_entry.is_probe:
            self.registry.http_requests.record_request(
                exchange.route_path,
                exchange.scope["method"],
                exchange.status,
                time.perf_counter() - exchange.arrived_at,
                exchange.dialect.name,
                exchange.log_entry.key,
            )

    def _matches_admin_route(self, scope: Scope) -> bool:
        """Whether a request that was refused before it was routed is for a route that changes the server."""
        endpoint = next((route for route, match, _ in self._matching_routes(scope) if match is Match.FULL), None)
        return getattr(getattr(endpoint, "app", None), "admin_keys", None) is not None

    def _allow_header(self, scope: Scope) -> bytes:
        """Return the methods that the path allows, as the value of an Allow header."""
        methods = (getattr(route, "methods", ()) for route, _, _ in self._matching_routes(scope))
        return ", ".join(sorted(set(chain.from_iterable(methods)))).encode()

    def _matching_routes(self, scope: Scope) -> list[tuple[BaseRoute, Match, Scope]]:
        """Return the routes that match a path, maybe with other methods. If there are none, the name of a model may
        have slashes."""
        path: str = scope["path"]
        for known_path in (path, join_name_segments(path, self.registry.served_names)):
            if matching := self._route_index.match_routes({**scope, "path": known_path}):
                return matching
        return []

    async def _answer_unmatched(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that the index finds no route for. Raises NotFound, and HTTPException for its method."""
        matching = sorted(self._matching_routes(scope), key=lambda tried_route: tried_route[1] is not Match.FULL)
        if not matching:
            raise NotFound(
                f"Unknown request URL: {scope['method']} {excerpt(scope['path'])}. Please check it for typos."
            )
        route, _, child_scope = matching[0]
        scope.update(child_scope, path_params=split_name_segments(child_scope["path_params"]))
        await route.handle(scope, receive, send)

    def _authorize_request(self, scope: Scope, exchange: Exchange) -> None:
        headers, is_keyless = exchange.headers, scope["path"] in self._keyless_paths
        raise_head_error(scope, is_probe=is_keyless)
        if is_keyless:
            return
        if TENANT_REFERENCE_KEY in scope:
            tenant = self.keys.find_tenant(scope[TENANT_REFERENCE_KEY])
            if tenant is None:
                raise Unauthorized(BATCH_KEY_REFUSED)
            exchange.tenant, exchange.log_entry.key = tenant, self.keys.name_key(tenant)
            return
        self._browser_guard.check_headers(headers, exchange.dialect.web_origins)
        if self.cluster.is_coordinator(headers):
            return
        if CLIENT_HEADER in headers:
            vouched = self.cluster.vouched_client(headers, exchange.client_host, self.reach, has_keys=bool(self.keys))
            if vouched is not None:
                exchange.tenant, exchange.log_entry.key = vouched.tenant, vouched.key_name
                exchange.limits_counted = True
                exchange.counts_tokens = COUNT_HEADER in headers
                return
        if self.keys:
            exchange.tenant = self.keys.check_key(headers)
            exchange.log_entry.key = self.keys.name_key(exchange.tenant)
        else:
            self.cluster.check_client(headers, exchange.client_host, self.reach)

    def _find_page(self, scope: Scope, headers: Mapping[bytes, bytes]) -> RouteEndpoint | None:
        """Return the page that a request is for, None if it is for something else. Pages need no key, also at paths
        whose other routes do."""
        path = scope["path"]
        if not self._pages or scope["method"] not in ("GET", "HEAD"):
            return None
        page = self._pages.get(path)
        if page is not None:
            return page if not page.route.claims or page.route.claims_accept(headers) else None
        if path in self._path_dialects:
            return None
        folder = path[: path.find("/", 1) + 1]
        if (page := self._page_folders.get(folder)) is not None:
            scope["path_params"] = {"file": path.removeprefix(folder)}
        return page

    def web_origins(self, path: str) -> str:
        """Return a regular expression of the origins whose pages may call the API at a path, "" if none may."""
        return self._error_dialect(without_root_path(path, self._root_path)).web_origins

    def _error_dialect(self, path: str) -> Dialect:
        """Return the dialect that words errors raised before the route of a request is known."""
        return self._path_dialects[path] if path in self._path_dialects else error_dialect(self.mounts, path)

    async def _send_error(self, exchange: Exchange, error: ParleyError, extra: HeaderList = ()) -> None:
        if exchange.response_begun:  # too late; a cut connection does at least not look like a proper end
            exchange.abort_connection()
            return
        try:
            await exchange.send_error(error, extra)
        except ClientGone:
            exchange.abort_connection()


def _method_not_allowed(scope: Scope) -> ParleyError:
    return NotAllowed(f"{scope['method']} is not allowed on {excerpt(scope['path'])}.")
