"""Who may call: API keys, and the two headers by which a browser can be turned against a server on its own machine.

Keys are kept and compared as SHA-256 digests, all of them every time, so that the time of a refusal tells nothing about
a key. The file knows headers and nothing of routes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from parley.errors import Forbidden, Unauthorized

KEY_HEADERS = (b"api-key", b"x-api-key")


@functools.lru_cache(64)
def is_loopback(host: str) -> bool:
    """Does only this machine reach a server that listens there?"""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Keys:
    """The keys that let a client in. Without any, everybody is let in.

    ``admins``: those with which alone the server is changed, and clients are let in as with others. Without any,
    whoever is let in may do that.
    """

    def __init__(self, keys: Iterable[str], admins: Iterable[str] = ()):
        self._digests = [_digest(key.encode()) for key in keys]
        self._admins = [_digest(key.encode()) for key in admins]
        if self._digests:
            self._digests += self._admins

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: dict[bytes, bytes]) -> str:
        """Who has the key that the headers carry, under a name that tells nothing of it; empty where nobody needs one.

        Raises Unauthorized if they carry none of them.
        """
        if not self._digests:
            return ""
        key = presented(headers)
        if not key:
            raise Unauthorized(
                "You did not provide an API key. Send it in the header 'Authorization: Bearer KEY'.", code=""
            )
        digest = _digest(key)
        tenant = 0
        for number, candidate in enumerate(self._digests, 1):
            tenant = max(tenant, number * hmac.compare_digest(digest, candidate))
        if not tenant:
            raise Unauthorized(f"Incorrect API key provided: {mask(key)}.")
        return str(tenant)

    def check_admin(self, headers: dict[bytes, bytes]) -> None:
        """Whether the server may be changed. Raises Unauthorized without a key, Forbidden with another one."""
        if not self._admins:
            return
        key = presented(headers)
        if not key:
            raise Unauthorized("This needs an admin key. Send it in the header 'Authorization: Bearer KEY'.", code="")
        digest, found = _digest(key), False
        for candidate in self._admins:
            found |= hmac.compare_digest(digest, candidate)
        if not found:
            raise Forbidden("This API key may not change the server; it needs one of --admin-key-file.")


def presented(headers: dict[bytes, bytes]) -> bytes:
    """The key that a client sent, empty if none."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"basic":
        key = _password(key)
    if scheme.lower() in (b"bearer", b"basic") and key.strip():
        return key.strip()
    return next((headers[name].strip() for name in KEY_HEADERS if headers.get(name)), b"")


def _password(credentials: bytes) -> bytes:
    """That of the user ``token``, as Databricks' clients send a key; empty if it is something else."""
    try:
        user, _, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
    except ValueError:
        return b""
    return password if user == b"token" else b""


def mask(key: bytes) -> str:
    """Enough of a key to recognise it by, and no more."""
    text = "".join(chr(byte) if 0x21 <= byte <= 0x7E else "?" for byte in key[:512])
    return f"{text[:3]}…{text[-4:]}" if len(text) >= 16 else "…"


class Gate:
    """Refuses what a foreign web page makes a browser send to a server without keys.

    Without keys a browser's mere presence on this machine would be the permission. So ``Origin`` is checked, and, when
    listening on a loopback address, ``Host``, against names that were rebound to it.
    """

    def __init__(self, host: str, hosts: Iterable[str], origins: Iterable[str], keys: Keys):
        self._hosts = {name.lower() for name in hosts}
        self._origins = set(origins)
        self._check_host = not keys and is_loopback(host)
        self._check_origin = not keys and "*" not in self._origins
        self._check = functools.lru_cache(64)(self._judge)

    def check(self, headers: dict[bytes, bytes]) -> None:
        """Raises Forbidden."""
        self._check(headers.get(b"host", b""), headers.get(b"origin", b""))

    def _judge(self, named: bytes, page: bytes) -> None:
        """``named``: the header Host. ``page``: the header Origin."""
        host = named.decode("latin-1").lower()
        name = _hostname(host)
        if self._check_host and host and not is_loopback(name) and name not in self._hosts:
            raise Forbidden("The Host header names another machine; the option allow-host lets it in.")
        origin = page.decode("latin-1")
        if self._check_origin and origin and origin not in self._origins and _authority(origin) != host:
            raise Forbidden("Web pages of other origins may not call this server; the option cors-origin lets one in.")


def _hostname(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1 : host.find("]")]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _authority(origin: str) -> str | None:
    """Host and port of an Origin header; None if it cannot be read."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
