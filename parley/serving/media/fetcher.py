"""Fetches images, videos and audio over HTTP from the hosts that the operator allows, and from no others.

Every redirect is checked like the first URL. Errors are ``BadMedia``; they name the host that the client named,
and quote neither servers nor libraries.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple, NoReturn
from urllib.parse import urljoin
from weakref import WeakValueDictionary

from parley.errors import BadMedia, MediaFault, excerpt
from parley.serving.media.addresses import (
    MAX_URL_LENGTH,
    FetchAddress,
    HostResolver,
    IpAddress,
    ResolveHost,
    is_public,
    parse_fetch_url,
)
from parley.serving.server_options import MediaOptions
from parley.settings.media_hosts import MediaHost, is_address
from parley.types.media import KIND_NAMES, MediaKind
from parley.web.request_body import BodyBudget, HeldBody

if TYPE_CHECKING:
    from parley.serving.media.pinned_connection import FetchedAnswer

LOOKUP_SECONDS = 5.0
MAX_REDIRECTS = 3
REDIRECT_STATUSES = (301, 302, 303, 307, 308)
FETCH_SECONDS = 30.0  # limit of an item with all its redirects, without the wait for other fetches
MAX_CONNECTIONS = 16
TENANT_CONNECTIONS = 8  # connections of all requests of an API key, so that slow hosts named by one key delay no other
HOST_CONNECTIONS = 2  # connections of one request to each host


class Redirect(NamedTuple):
    """An answer that only says where to look instead."""

    location: str


class RequestConnections:
    """Limits the connections of one request: to each host, and with those of its tenant's other requests together."""

    def __init__(self, tenant_places: asyncio.Semaphore):
        self._tenant_places = tenant_places
        self._host_places: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(HOST_CONNECTIONS))

    @asynccontextmanager
    async def hold_place(self, host: str) -> AsyncIterator[None]:
        """Wait until the request may connect to a host, and count the connection until the end of the context."""
        async with self._host_places[host], self._tenant_places:
            yield


class MediaFetcher:
    """Fetches media for all requests to a model. ``resolve_host`` and ``ssl_context`` stand in for the system's."""

    def __init__(
        self,
        options: MediaOptions,
        resolve_host: ResolveHost | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ):
        self.options = options
        self.budget = BodyBudget(options.memory)
        self.resolve_host = resolve_host or HostResolver().resolve_host
        self.connections = asyncio.Semaphore(MAX_CONNECTIONS)
        self._ssl_context = ssl_context
        self._tenant_places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def request_connections(self, tenant: str = "") -> RequestConnections:
        """Return the limits of a request's connections. "" stands for all clients of a server without API keys."""
        places = self._tenant_places.get(tenant)
        if places is None:
            places = asyncio.Semaphore(TENANT_CONNECTIONS if tenant else MAX_CONNECTIONS)
            self._tenant_places[tenant] = places
        return RequestConnections(places)

    async def fetch(
        self, url: str, kind: MediaKind, field: str, request_connections: RequestConnections | None = None
    ) -> bytes:
        """Return the content of a URL. ``request_connections``: shared by the fetches of a request.

        Raises BadMedia; Overloaded if running fetches take all memory.
        """
        held_body = self.budget.hold_body()
        self.budget.end_arrival(held_body)  # it never makes room for others by being slow
        try:
            connections = request_connections or self.request_connections()
            return await ItemFetch(self, kind, field, held_body, connections).fetch(url)
        finally:
            held_body.release()

    def ssl_context(self, address: FetchAddress) -> ssl.SSLContext | None:
        """Return the settings of TLS for a URL; None without TLS."""
        from parley.serving.media.pinned_connection import system_tls_context

        if address.scheme != "https":
            return None
        if self._ssl_context is None:
            self._ssl_context = system_tls_context()
        return self._ssl_context


class ItemFetch:
    """The fetch of one item, with all its redirects."""

    def __init__(
        self,
        fetcher: MediaFetcher,
        kind: MediaKind,
        field: str,
        held_body: HeldBody,
        request_connections: RequestConnections,
    ):
        self._fetcher, self._kind, self._field = fetcher, kind, field
        self._held_body, self._request_connections = held_body, request_connections
        self._size_limit = fetcher.options.sizes[kind]
        self._size = 0
        self._seconds_left = FETCH_SECONDS
        self._named_host = ""  # the host in the client's URL; errors never name a host that is known from a redirect

    async def fetch(self, url: str) -> bytes:
        """Return the content of a URL, after any redirects. Raises BadMedia, Overloaded."""
        try:
            address = parse_fetch_url(url)
        except ValueError as problem:
            self._refuse_url(url, problem)
        self._named_host = address.host
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._send_get(address)
            if isinstance(answer, bytes):
                return answer
            address = self._redirected_address(address, answer)
        self._fail_fetch("unreachable", f"could not be fetched: there are more than {MAX_REDIRECTS} redirects")

    async def _send_get(self, address: FetchAddress) -> bytes | Redirect:
        """Send one request, while there is a connection free for it."""
        from parley.serving.media.pinned_connection import open_answer  # takes time to load, and few servers need it

        rules = self._matching_rules(address)
        loop = asyncio.get_running_loop()
        async with self._request_connections.hold_place(address.host), self._fetcher.connections:
            began_at = loop.time()
            try:
                async with asyncio.timeout(self._seconds_left):
                    ip_addresses = await self._checked_addresses(address, rules)
                    async with open_answer(address, ip_addresses, self._fetcher.ssl_context(address)) as answer:
                        return await self._read_answer(answer)
            except TimeoutError:
                self._fail_fetch("unreachable", "could not be fetched: its server is too slow")
            except OSError:
                self._fail_fetch("unreachable", "could not be fetched: its server cannot be reached, or broke off")
            finally:
                self._seconds_left -= loop.time() - began_at

    def _matching_rules(self, address: FetchAddress) -> list[MediaHost]:
        """Return the entries of the operator's list for a URL's host and port. Raises BadMedia if there is none."""
        rules = [rule for rule in self._fetcher.options.hosts if rule.includes(address.host, address.port)]
        if not rules:
            self._forbid_host("this server's --media-hosts does not include that host")
        return rules

    async def _checked_addresses(self, address: FetchAddress, rules: Sequence[MediaHost]) -> list[IpAddress]:
        """Look up a host once; every address of it must be public, unless the host is internal by a rule."""
        if is_address(address.host):
            ip_addresses = [ip_address(address.host)]
        else:
            async with asyncio.timeout(LOOKUP_SECONDS):
                ip_addresses = await self._fetcher.resolve_host(address.host, address.port)
        if not any(rule.internal for rule in rules) and not all(map(is_public, ip_addresses)):
            self._forbid_host("an address of that host is not public")
        return ip_addresses

    async def _read_answer(self, answer: FetchedAnswer) -> bytes | Redirect:
        """Return the body of an answer with status 200, or where the answer redirects to."""
        if answer.status in REDIRECT_STATUSES and b"location" in answer.headers:
            return Redirect(answer.headers[b"location"].decode("utf-8", "surrogateescape"))
        if answer.status != 200:
            why = f"could not be fetched: the answer of its server has status {answer.status}"
            self._fail_fetch("unreachable", why, status=answer.status)
        if answer.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            self._fail_fetch(
                "unreachable", "could not be fetched: its server compressed the answer without being asked to"
            )
        if answer.size is not None and answer.size > self._size_limit:
            self._refuse_size(size=answer.size)
        return await answer.read_body(self._count_bytes)

    def _redirected_address(self, address: FetchAddress, redirect: Redirect) -> FetchAddress:
        try:
            return parse_fetch_url(urljoin(address.url, redirect.location))
        except ValueError:
            self._fail_fetch("unreachable", "could not be fetched: its server redirects to something that is no URL")

    def _count_bytes(self, size: int) -> None:
        self._size += size
        if self._size > self._size_limit:
            self._refuse_size()
        self._held_body.count_bytes(size)

    def _refuse_size(self, **detail: int) -> NoReturn:
        limit = self._size_limit
        self._fail_fetch("too_large", f"is larger than the limit of {limit} bytes", limit=limit, **detail)

    def _refuse_url(self, url: str, problem: ValueError) -> NoReturn:
        detail = {"size": len(url), "limit": MAX_URL_LENGTH} if len(url) > MAX_URL_LENGTH else {}
        message = f"The URL of the {KIND_NAMES[self._kind]} {problem}."
        raise BadMedia(message, reason="bad_address", kind=self._kind, field=self._field, **detail)

    def _forbid_host(self, why: str) -> NoReturn:
        """Refuse a host. Some APIs list the hosts that are allowed; those of private networks stay private."""
        allowed = [str(rule) for rule in self._fetcher.options.hosts if not rule.internal]
        self._fail_fetch("forbidden_address", f"is not allowed: {why}", allowed=str(allowed))

    def _fail_fetch(self, reason: MediaFault, predicate: str, **detail: int | float | str) -> NoReturn:
        """Raise BadMedia with a sentence about the item from the client's URL."""
        host = self._named_host
        message = f"The {KIND_NAMES[self._kind]} from {excerpt(host)} {predicate}."
        raise BadMedia(message, reason=reason, kind=self._kind, field=self._field, host=host, **detail) from None
