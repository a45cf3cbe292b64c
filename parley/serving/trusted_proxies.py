"""Reads a proxy's headers, which name its client and the path prefix under which it shows the server.

Only proxies that the operator trusts are believed, because any client can send these headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from starlette.types import Scope

from parley.disagg.wire.networks import Network, TrustedNetworks, parse_host
from parley.web.auth import host_without_port

FORWARDED_PAIR = re.compile(r'\s*([A-Za-z]+)=(?:"((?:[^"\\]|\\.)*)"|([^";,\s]*))\s*(?:;|$)')
MAX_PROXIES = 32  # names in a header that are read
SCHEMES = ("http", "https")


class TrustedProxies:
    """The proxies whose headers are believed: ``networks``, and with ``trusts_sockets`` those that connect over a Unix
    socket, which have no address."""

    def __init__(self, networks: Iterable[Network], *, trusts_sockets: bool = False):
        self._networks, self._trusts_sockets = TrustedNetworks(networks), trusts_sockets

    def __bool__(self) -> bool:
        return bool(self._networks) or self._trusts_sockets

    def apply_headers(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Set a request's client and scheme to those that a trusted proxy names.

        The client is the last address in the chain that is no trusted proxy; addresses before it may be invented.
        ``Forwarded`` (RFC 7239) goes before ``X-Forwarded-For`` and ``X-Forwarded-Proto``.
        """
        sender = str((scope.get("client") or ("", 0))[0])
        if not (self._networks.contains_host(sender) if sender else self._trusts_sockets):
            return
        if b"forwarded" in headers:
            hosts, scheme = _read_forwarded(headers[b"forwarded"].decode("latin-1"))
        else:
            hosts = _split_list(headers.get(b"x-forwarded-for", b""))
            scheme = next(iter(_split_list(headers.get(b"x-forwarded-proto", b""))[-1:]), "")
        if scheme.lower() in SCHEMES:
            scope["scheme"] = scheme.lower()
        for host in reversed(hosts[-MAX_PROXIES:]):
            address = parse_host(host_without_port(host))
            if address is None:  # "unknown", or a name that stands for an address
                return
            scope["client"] = (str(address), 0)
            if not self._networks.contains_host(str(address)):
                return


def strip_root_path(scope: Scope, root_path: str) -> None:
    """Remove the path below which a proxy shows the server, if the proxy has left it in the request."""
    path: str = scope["path"]
    if (own_path := without_root_path(path, root_path)) != path:
        scope["path"] = own_path
        raw_path: bytes = scope["raw_path"]
        scope["raw_path"] = raw_path[len(root_path) :] or b"/"
    scope["root_path"] = ""


def without_root_path(path: str, root_path: str) -> str:
    """Return a path without the path below which a proxy shows the server, if it begins with it."""
    is_below = path == root_path or path.startswith(root_path + "/")
    return path[len(root_path) :] or "/" if is_below else path


def _split_list(value: bytes) -> list[str]:
    return [part.strip() for part in value.decode("latin-1").split(",") if part.strip()]


def _read_forwarded(value: str) -> tuple[list[str], str]:
    """Return the values of ``for`` in order, and the last of ``proto``, of a header Forwarded.

    Each comma ends an element, even in quotation marks: no proxy writes one there, and a client that opens a quotation
    must not hide the elements that the proxy adds after it.
    """
    hosts, scheme = [], ""
    for element in value.split(","):
        pairs = {name.lower(): quoted or plain for name, quoted, plain in FORWARDED_PAIR.findall(element)}
        hosts.append(pairs.get("for", "unknown"))
        scheme = pairs.get("proto", scheme)
    return hosts, scheme
