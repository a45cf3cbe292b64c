"""Reads the head of an HTTP/2 request, and refuses heads that an HTTP/1.1 server might read differently.

It takes the place of h2's own checks, which look at each character in Python: headers that cost a client a few bytes,
since they are compressed, would take a processor for milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from parley.errors import BadRequest, ParleyError
from parley.web.framing.request_head import INVALID_HOST, find_oversized_head, is_valid_host
from parley.web.http_options import HttpOptions

NAME_PATTERN = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")  # RFC 9113, 8.2.1; capitals are not allowed
VALUE_PATTERN = re.compile(rb"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")
METHOD_PATTERN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
PATH_PATTERN = re.compile(rb"/[!\"$-~]*|\*")  # the target of a request line, without a fragment
LENGTH_PATTERN = re.compile(rb"[0-9]{1,18}")
REQUEST_FIELDS = {b":method", b":scheme", b":path", b":authority"}
# Fields of HTTP/1.1 connections, which must not be sent (RFC 9113, 8.2.2)
CONNECTION_FIELDS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})

HeaderFields = list[tuple[bytes, bytes]]


class MalformedHead(Exception):
    """A request has to be refused with its stream (RFC 9113, 8.1.1)."""


@dataclass(frozen=True)
class Http2Head:
    """The head of a request. ``target``: path and query as they came. ``headers``: with Host from ``:authority``."""

    method: bytes
    target: bytes
    headers: HeaderFields

    @property
    def scope_members(self) -> dict[str, object]:
        """The members of the ASGI scope that the head determines."""
        raw_path, _, query = self.target.partition(b"?")
        return {
            "method": self.method.decode("ascii"),
            "path": unquote(raw_path.decode("ascii")),
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
        }

    def find_error(self, options: HttpOptions) -> ParleyError | None:
        """Return an error that the client gets in the format of the request's API; None if the head is good."""
        if (oversized := find_oversized_head(self.target, self.headers, options)) is not None:
            return oversized
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) != 1:
            return BadRequest(f"The request has {len(hosts)} Host headers; it must have one.")
        if not is_valid_host(hosts[0]):
            return BadRequest(INVALID_HOST)
        lengths = [value for name, value in self.headers if name == b"content-length"]
        if len(lengths) > 1 or not all(map(LENGTH_PATTERN.fullmatch, lengths)):
            return BadRequest("The Content-Length header must be one number of bytes.")
        return None


def read_head(fields: Iterable[tuple[bytes, bytes]]) -> Http2Head:
    """Read the fields of a request: the pseudo-fields, whose names begin with a colon, and the headers.

    Raises MalformedHead. CONNECT is refused, because it has no path.
    """
    pseudo_fields: dict[bytes, bytes] = {}
    headers: HeaderFields = []
    for name, value in fields:
        if not VALUE_PATTERN.fullmatch(value):
            raise MalformedHead("a value has a control character, or white space around it")
        if name[:1] == b":":
            if headers or name in pseudo_fields or name not in REQUEST_FIELDS:
                raise MalformedHead("a pseudo-field is unknown, repeated or out of place")
            pseudo_fields[bytes(name)] = bytes(value)
            continue
        if not NAME_PATTERN.fullmatch(name):
            raise MalformedHead("a name is not a token in lower case")
        if name in CONNECTION_FIELDS or (name == b"te" and value.lower() != b"trailers"):
            raise MalformedHead("a field belongs to connections of HTTP/1.1")
        headers.append((bytes(name), bytes(value)))
    method, target = pseudo_fields.get(b":method", b""), pseudo_fields.get(b":path", b"")
    if not METHOD_PATTERN.fullmatch(method) or not PATH_PATTERN.fullmatch(target) or b":scheme" not in pseudo_fields:
        raise MalformedHead("method, path or scheme is missing or malformed")
    authority = pseudo_fields.get(b":authority")
    if authority is not None:
        hosts = [value for name, value in headers if name == b"host"]
        if not hosts:
            headers.insert(0, (b"host", authority))
        elif hosts != [authority]:
            raise MalformedHead("the Host header differs from the authority")
    return Http2Head(method, target, headers)
