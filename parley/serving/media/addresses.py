"""URLs and IP addresses: how a URL is read, and which addresses are public.

A URL is parsed once. The checks and the connection use the same parts, so no second parser can read the URL in another
way.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import quote

from parley.settings.media_hosts import canonical_host, split_port

IpAddress = IPv4Address | IPv6Address
ResolveHost = Callable[[str, int], Awaitable[list[IpAddress]]]  # gets a host name and a port

MAX_URL_LENGTH = 4096
URL_PARTS = re.compile(r"(https?)://([^/?#@]+)((?:[/?][^#]*)?)(?:#.*)?", re.IGNORECASE)
TARGET_CHARACTERS = "!$%&'()*+,/:;=?@[]~"  # stay as they are; others are percent-encoded
DEFAULT_PORTS = {"http": 80, "https": 443}

MAX_LOOKUPS = 3  # concurrent lookups: one of the event loop's four threads for them stays free

GLOBAL_UNICAST = IPv6Network("2000::/3")
NAT64 = IPv6Network("64:ff9b::/96")
NOT_PUBLIC = (
    IPv4Network("192.0.0.0/24"),  # protocol assignments
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv6Network("2001::/23"),  # protocol assignments, with Teredo, which contains IPv4 addresses
    IPv6Network("2002::/16"),  # 6to4, which contains IPv4 addresses
    IPv6Network("3fff::/20"),  # documentation
)


class FetchAddress(NamedTuple):
    """A URL in parts. ``target``: path and query, in ASCII."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """Host and port as the ``Host`` header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL, rebuilt from the parts."""
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_fetch_url(url: str) -> FetchAddress:
    """Read an http or https URL. Raises ValueError with a clause that completes "The URL …".

    User names, spaces, control characters and backslashes are refused: parsers disagree on their meaning.
    """
    if len(url) > MAX_URL_LENGTH:
        raise ValueError(f"has {len(url)} characters; at most {MAX_URL_LENGTH} are allowed")
    if not url.isprintable() or re.search(r"[\s\\]", url):
        raise ValueError("contains a space, a control character or a backslash")
    match = URL_PARTS.fullmatch(url)
    if match is None:
        raise ValueError("is not of the form http://HOST/PATH or https://HOST/PATH, without user and password")
    scheme = match[1].lower()
    try:
        host, port = split_port(match[2])
        host = canonical_host(host)
    except ValueError:
        raise ValueError("does not name a valid host and port") from None
    path, _, query = quote(match[3], safe=TARGET_CHARACTERS).partition("?")
    target = f"{path or '/'}?{query}" if query else path or "/"  # the HTTP client drops an empty query as well
    return FetchAddress(scheme, host, port or DEFAULT_PORTS[scheme], target)


def is_public(address: IpAddress) -> bool:
    """Whether an address belongs to the public internet.

    Private, loopback, link-local, shared, multicast and reserved addresses do not; nor do IPv6 addresses that contain
    such an IPv4 address.
    """
    if isinstance(address, IPv6Address):
        if (mapped := address.ipv4_mapped) is not None:
            return is_public(mapped)
        if address in NAT64:
            return is_public(IPv4Address(address.packed[-4:]))
        if address not in GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and not any(address in network for network in NOT_PUBLIC)


class HostResolver:
    """Looks up the addresses of hosts with the system's resolver, a few at a time."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_LOOKUPS)

    async def resolve_host(self, host: str, port: int) -> list[IpAddress]:
        """Return the addresses of a host. Raises OSError.

        A lookup cannot be stopped. So it keeps its place until it ends, even if its caller waits no more.
        """
        await self._places.acquire()
        lookup = asyncio.ensure_future(asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))
        lookup.add_done_callback(lambda _: self._places.release())
        answers = await asyncio.shield(lookup)
        return [ip_address(socket_address[0]) for *_, socket_address in answers]
