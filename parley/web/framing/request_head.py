"""Checks of a request's head that do not depend on the version of HTTP, and how the application gets their errors."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from itertools import chain

from starlette.types import Scope

from parley.errors import HeadersTooLarge, Overloaded
from parley.web.http_options import HttpOptions

HEAD_ERROR_KEY = "parley.refused"  # scope key: an error found in the request head
REQUEST_NUMBER_KEY = "parley.number"  # scope key: number of the request on its connection, from 1
HOST_PATTERN = re.compile(rb"(\[[\w.:%~-]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?", re.ASCII)  # RFC 9110, 7.2
ABSOLUTE_FORM = re.compile(rb"https?://([^/?#]*)(?:[/?#].*)?", re.IGNORECASE | re.DOTALL)  # RFC 9112, 3.2.2
WRONG_TARGET = "The request's target is a URL of another host than the Host header, or is no URL of HTTP."
INVALID_HOST = "The Host header is not a host name or address with an optional port."


class TooManyConnections(Overloaded):
    """The connection is above the limit of connections."""


def raise_head_error(scope: Scope, *, is_probe: bool) -> None:
    """Raise the error in a request's head, if any. Probes are answered on any connection. Raises ParleyError."""
    error = scope.get(HEAD_ERROR_KEY)
    if error is not None and not (is_probe and isinstance(error, TooManyConnections)):
        raise error


def too_many_connections() -> TooManyConnections:
    """Return the error for requests on a connection above the limit."""
    return TooManyConnections("The server has as many connections as it can serve. Try again later.", retry_after=1.0)


@functools.lru_cache(64)  # clients send the same one with every request
def is_valid_host(host: bytes) -> bool:
    """Whether the value of a Host header is a host name or address with an optional port, as far as its characters
    tell, or empty."""
    return HOST_PATTERN.fullmatch(host) is not None


def is_target_of_host(target: bytes, host: bytes | None) -> bool:
    """Whether a request target that is a URL names the host of the Host header. It need not have one in HTTP/1.0."""
    match = ABSOLUTE_FORM.fullmatch(target)
    return match is not None and (host is None or match[1].lower() == host.lower())


def find_oversized_head(
    target: bytes, headers: Sequence[tuple[bytes, bytes]], options: HttpOptions
) -> HeadersTooLarge | None:
    """Return the error if request target and headers together are larger than allowed, or there are too many."""
    size = len(target) + 4 * len(headers) + sum(map(len, chain.from_iterable(headers)))
    if size > options.header_limit:
        return HeadersTooLarge(f"The request's headers have {size} bytes; {options.header_limit} are allowed.")
    if len(headers) > options.header_count:
        return HeadersTooLarge(f"The request has {len(headers)} headers; {options.header_count} are allowed.")
    return None
