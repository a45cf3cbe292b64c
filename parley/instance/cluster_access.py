"""Access to an instance: which coordinators may command it, which clients call it, and where it may hand requests over.

A member of the cluster knows the secret, or has a certificate that its port requires, or calls from a network that the
operator trusts. Without all of these only this machine reaches the ports (``boot.listening_places`` refuses the start
otherwise), and every caller is a member.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from parley.disagg.wire import headers as pd_headers
from parley.disagg.wire.networks import TrustedNetworks
from parley.disagg.wire.role import InstanceAddress
from parley.disagg.wire.vouched_client import CLIENT_HEADER, VouchedClient, read_vouched_client
from parley.errors import Forbidden, Unauthorized
from parley.serving.server_options import ServerOptions
from parley.web.auth import PortReach, is_loopback
from parley.web.exchange import Exchange

MEMBERS_ONLY = (
    "This instance answers its cluster only. Send the request to the coordinator, or the cluster's secret in the "
    "header parley-secret."
)
CHANGES_NEED_A_KEY = (
    "Strangers may not change this server. Start it with --admin-key-file and send one of those keys, or, to an "
    "instance of a cluster, the cluster's secret in the header parley-secret."
)


class ClusterAccess:
    """``secret``: of the cluster, empty for none."""

    def __init__(self, options: ServerOptions):
        self.secret = options.cluster_secret
        self._networks = TrustedNetworks(options.cluster_networks)
        self._is_open = not (options.cluster_secret or options.cluster_networks)

    def is_member(self, headers: Mapping[bytes, bytes], client_host: str, reach: PortReach) -> bool:
        """Whether a member of the cluster sent a request from an IP address to a port of this reach."""
        return (
            self._is_open
            or reach == "certified"
            or pd_headers.shows_secret(headers, self.secret)
            or self._networks.contains_host(client_host)
        )

    def vouched_client(
        self, headers: Mapping[bytes, bytes], client_host: str, reach: PortReach, *, has_keys: bool
    ) -> VouchedClient | None:
        """Return the client that a coordinator names, None if there is none, or the sender may not name any.

        The sender has to prove that it is a member by the secret where clients need keys (``has_keys``), and on a port
        that strangers reach.
        """
        if not pd_headers.shows_secret(headers, self.secret):
            is_stranger = self._is_open and reach == "public"
            if has_keys or is_stranger or not self.is_member(headers, client_host, reach):
                return None
        return read_vouched_client(headers[CLIENT_HEADER])

    def is_from_member(self, exchange: Exchange) -> bool:
        """Whether a member of the cluster sent the request."""
        return self.is_member(exchange.headers, exchange.client_host, exchange.scope["app"].reach)

    def require_member(self, exchange: Exchange) -> None:
        """Check that a member of the cluster sent the request. Raises Unauthorized."""
        if not self.is_from_member(exchange):
            raise Unauthorized(pd_headers.WRONG_SECRET)

    def check_client(self, headers: Mapping[bytes, bytes], client_host: str, reach: PortReach) -> None:
        """Check that a client may call a port of this reach directly, where no keys are required. Raises Unauthorized.

        Such clients reach an instance from other machines through its coordinator only: the coordinator's own port
        decides which clients there are.
        """
        if reach == "public" and not self.is_member(headers, client_host, reach):
            raise Unauthorized(MEMBERS_ONLY)

    def check_change(self, exchange: Exchange) -> None:
        """Check that a request may change a server without keys. Raises Forbidden.

        A coordinator says of a change that it forwards whether strangers reach its port.
        """
        forwarded = exchange.headers.get(pd_headers.FORWARDED_HEADER, b"private")
        public = self._is_open and exchange.scope["app"].reach == "public"
        if public or forwarded != b"private" or not self.is_from_member(exchange):
            raise Forbidden(CHANGES_NEED_A_KEY)

    def knows_target(self, exchange: Exchange, target: InstanceAddress, peers: Container[InstanceAddress]) -> bool:
        """Whether this instance may connect to the one that a command names to continue a request.

        A coordinator that has shown the secret or a certificate may name any. ``peers``: those that came with the role.
        """
        reach: PortReach = exchange.scope["app"].reach
        return (
            reach == "certified"
            or pd_headers.shows_secret(exchange.headers, self.secret)
            or target in peers
            or self._networks.contains_host(target.host)
            or (self._is_open and reach == "local" and is_loopback(target.host))
        )
