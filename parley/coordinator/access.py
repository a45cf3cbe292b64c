"""Access to the admin ports of a coordinator, which are not for clients: to change the cluster, or to see it."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from parley.coordinator.config import CoordinatorOptions
from parley.disagg.wire import headers as pd_headers
from parley.disagg.wire.networks import Network, TrustedNetworks
from parley.errors import Unauthorized
from parley.web.auth import PortReach, port_reach, presented_key

OPEN_MANAGEMENT = (
    "the management port takes the list of instances at {host} port {port}, which anyone can reach. Set secret, or "
    "[tls] clients, or cluster_network, or management_host to an address of this machine alone."
)


class AdminAccess:
    """Who may use an admin port: those who know the cluster's secret, and hosts of the cluster's networks.

    Without both everyone may. The secret comes in the header parley-secret or, as Prometheus and browsers send it, as a
    bearer token or the password of the user ``token``.
    """

    def __init__(self, secret: str = "", networks: Iterable[Network] = ()):
        self._secret, self._networks = secret, TrustedNetworks(networks)

    def check_client(self, headers: dict[bytes, bytes], client_host: str) -> None:
        """Check that a client at an IP address may use the port. Raises Unauthorized."""
        is_allowed = (
            not (self._secret or self._networks)
            or pd_headers.shows_secret(headers, self._secret)
            or self._networks.contains_host(client_host)
            or (bool(self._secret) and hmac.compare_digest(presented_key(headers), self._secret.encode()))
        )
        if not is_allowed:
            raise Unauthorized(pd_headers.WRONG_SECRET)


def coordinator_reach(options: CoordinatorOptions, host: str) -> PortReach:
    """Return which clients reach a port of the coordinator at this host."""
    return port_reach(host, certified=options.tls.clients is not None)


def management_access(options: CoordinatorOptions) -> AdminAccess:
    """Return the access rules of the management port. Client certificates are accepted in place of the secret."""
    return AdminAccess() if options.tls.clients else AdminAccess(options.secret, options.cluster_network)


def reading_access(options: CoordinatorOptions, host: str) -> AdminAccess:
    """Return the access rules of a port that only shows the cluster: on this machine, everyone may use it."""
    public = coordinator_reach(options, host) == "public"
    return AdminAccess(options.secret, options.cluster_network) if public else AdminAccess()


def find_open_management(options: CoordinatorOptions) -> str:
    """Return a sentence with a remedy about a management port where a stranger could change the cluster; "" if there
    is none."""
    host, port = options.management_host or options.host, options.management_port
    closed = options.secret or options.cluster_network or coordinator_reach(options, host) != "public"
    return "" if closed or port is None else OPEN_MANAGEMENT.format(host=host, port=port)
