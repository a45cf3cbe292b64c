"""IP addresses of hosts, and the networks that an operator trusts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedNetworks:
    """The networks whose hosts are trusted without the cluster's secret; false if there is none."""

    def __init__(self, networks: Iterable[Network] = ()):
        self._networks = tuple(networks)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def contains_host(self, host: str) -> bool:
        """Whether a host is in one of the networks. ``host``: its IP address; a name is in none."""
        address = parse_host(host)
        return address is not None and any(address in network for network in self._networks)


def parse_host(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in a text; None for a name. A socket for both versions shows IPv4 addresses as IPv6."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
