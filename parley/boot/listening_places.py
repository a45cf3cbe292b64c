"""The addresses where a server listens, each with its APIs and certificates. Refuses ports that strangers could
abuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from parley.dialects.mounts import (
    ADMIN_PLANES,
    DEDICATED_APIS,
    SERVER_ROUTES,
    ApiMount,
    dedicated_mounts,
    route_scope,
    universal_mounts,
)
from parley.dialects.route import Route
from parley.serving.server_options import ListenAddress, ServerOptions
from parley.settings.option_kinds import UNIX_PREFIX
from parley.web.auth import PortReach, is_loopback, port_reach
from parley.web.tls.files import TlsFiles

UNPROTECTED_PORT = (
    "the role {role} takes {what} at {host} port {port}, which {whom}. Set --cluster-secret for all instances and "
    "coordinators, or {tls_option}, or name the cluster's networks with --cluster-network."
)
ANYONE, ANYONE_HERE = "anyone can reach", "anyone on this machine can reach without an API key"


def is_unix_socket(host: str) -> bool:
    """Whether a host is the path of a Unix socket."""
    return host.startswith(UNIX_PREFIX)


class ListeningPlace(NamedTuple):
    """An address to listen on, the APIs mounted there, and the TLS settings."""

    host: str
    port: int
    mounts: Sequence[ApiMount]
    tls: TlsFiles | None = None
    is_admin: bool = False  # only management planes are mounted here
    title: str = ""  # of a port that has some routes of the server, and no API of its own
    serves_route: Callable[[Route], bool] = lambda route: True  # whether it has a route of these APIs

    @property
    def is_certified(self) -> bool:
        """Whether clients must present a certificate."""
        return self.tls is not None and bool(self.tls.client_authorities)


def listening_places(options: ServerOptions) -> list[ListeningPlace]:
    """Return the listening places: first the port shared by all APIs, then the ports of single APIs.

    APIs that were given the same port share a place.
    """
    places = []
    serves_client_route = partial(_is_client_route, options)
    shared = universal_mounts(options.strict, options.tgi_compat, pages=options.ui)
    if options.port is not None:
        places.append(ListeningPlace(options.host, options.port, shared, options.tls, serves_route=serves_client_route))
    dialects = {**DEDICATED_APIS, **options.apis}
    by_address: dict[tuple[str, int], list[ListenAddress]] = {}
    for number, address in enumerate(options.listen):
        unix = is_unix_socket(address.host)
        by_address.setdefault((address.host, address.port or (0 if unix else -number)), []).append(address)
    for first, *other_options in by_address.values():
        is_admin = all(address.api in ADMIN_PLANES for address in (first, *other_options))
        mounts = dedicated_mounts(first.api, *(address.api for address in other_options), apis=dialects)
        serves_route = _any_route if is_admin else serves_client_route
        tls = first.tls or options.tls
        places.append(ListeningPlace(first.host, first.port, mounts, tls, is_admin=is_admin, serves_route=serves_route))
    for host, port, title, serves_route in (
        (
            "127.0.0.1" if is_unix_socket(options.host) else options.host,
            options.metrics_port,
            "metrics",
            _is_metrics_route,
        ),
        (options.admin_host, options.admin_port, "admin", _is_admin_route),
    ):
        if port is not None:
            places.append(
                ListeningPlace(host, port, shared, options.tls, is_admin=True, title=title, serves_route=serves_route)
            )
    return places


def _any_route(route: Route) -> bool:
    return True


def _is_metrics_route(route: Route) -> bool:
    """Whether the metrics port has a route: the server's own metrics, and its probes."""
    return route in SERVER_ROUTES and (route.kind == "metrics" or route_scope(route) == "open")


def _is_admin_route(route: Route) -> bool:
    """Whether the admin port has a route: those that change the server, and its probes."""
    return route_scope(route) == "admin" or (route in SERVER_ROUTES and route_scope(route) == "open")


def _is_client_route(options: ServerOptions, route: Route) -> bool:
    """Whether the ports for clients have a route: not those that have a port of their own."""
    if options.metrics_port is not None and route.kind == "metrics":
        return False
    return options.admin_port is None or route_scope(route) != "admin"


def find_unprotected_port(options: ServerOptions, places: Sequence[ListeningPlace]) -> str:
    """Return a sentence with a remedy about a port where a stranger could act for the cluster; "" if there is none.

    A mixed server takes no commands that could change or move anything. Without keys a port of this machine alone has
    no strangers; with keys, those without one are.
    """
    if options.role == "mixed" or options.cluster_secret or options.cluster_networks:
        return ""
    for place in places:
        if _is_open(options, port_reach(place.host, certified=place.is_certified)):
            return _describe_unprotected_port(options, "commands", place.host, place.port)
    if options.peer_tls is None and _is_open(options, port_reach(places[0].host)):
        return _describe_unprotected_port(options, "handovers", places[0].host, options.peer_port)
    return ""


def _is_open(options: ServerOptions, reach: PortReach) -> bool:
    """Whether strangers reach a port of an instance whose cluster has neither a secret nor networks."""
    return reach == "public" or (reach == "local" and options.has_keys)


def _describe_unprotected_port(options: ServerOptions, what: str, host: str, port: int | None) -> str:
    """Return the sentence about an open port. ``what``: "commands" or "handovers", which it takes."""
    tls_option = (
        "--tls-cert, --tls-key and --tls-client-ca"
        if what == "commands"
        else "--cluster-cert, --cluster-key and --cluster-ca"
    )
    whom = ANYONE_HERE if is_loopback(host) else ANYONE
    return UNPROTECTED_PORT.format(role=options.role, what=what, host=host, port=port, whom=whom, tls_option=tls_option)
