"""Authentication: API keys, and the Host and Origin checks that protect a local server from foreign web pages.

Keys are stored and compared as SHA-256 digests. Every digest is compared each time, so that the time of a refusal
reveals nothing about a key. A key that is known only by its salted hash is found by an id in it. This module
reads headers and does not depend on routes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from parley.errors import Forbidden, Unauthorized
from parley.settings.key_file import NO_KEY, HashedKey, split_key
from parley.settings.option_kinds import UNIX_PREFIX
from parley.types import NO_TENANT, KeyLimits, KeyOwner, Tenant
from parley.web.websocket.handshake import key_in_protocols

KEY_HEADERS = (b"api-key", b"x-api-key")
# Scope key of a request that the server itself sends for a client: the client's ``TenantReference``.
TENANT_REFERENCE_KEY = "parley.tenant_reference"
BATCH_KEY_REFUSED = "The API key of this batch is not accepted any more."
TENANT_ID_LENGTH = 32  # hexadecimal digits of an id
NO_ADMIN_KEYS = (
    "API keys may not change the server. Start it with --admin-key-file FILE; the keys in that file may change it, and "
    "those with `admin = true` in a key file in TOML."
)
NO_ADMIN_KEY = "Only admin keys may do this: those of --admin-key-file, and those with `admin` in a key file in TOML."
NO_OWNERS: Mapping[str, KeyOwner] = {}


@functools.lru_cache(64)
def is_loopback(host: str) -> bool:
    """Whether a server that listens on this host is reachable from this machine only."""
    if host.startswith(UNIX_PREFIX):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


PortReach = Literal["local", "certified", "public"]


def port_reach(host: str, *, certified: bool = False) -> PortReach:
    """Return which clients reach a port: those on this machine, holders of a certificate (``certified``), or all."""
    return "certified" if certified else "local" if is_loopback(host) else "public"


class TenantReference(NamedTuple):
    """A reference to a client's tenant that can be stored, because it does not contain the client's key. ``tenant_id``:
    "" if the server had no keys. ``key_id``: the id of a hashed key, else "".
    """

    tenant_id: str
    key_id: str


class ApiKeys:
    """The accepted API keys. Without any, every client is accepted.

    * ``admin_keys``: keys that may also change the server. They work as ordinary keys, too. Without admin keys, no
      client may change a server that has API keys, and every client may change a server that has none.
    * ``priority_keys``: keys whose requests compete by priority with those of all tenants, besides the admin keys.
    * ``cluster_secret``: see ``tenant_id``.
    * ``owners``: the owner of each key.
    * ``hashed_keys``: further keys, known only by their hashes; None: no file with hashes is used. If that file is
      empty, no client is accepted.
    * ``clock``: returns seconds since the epoch.
    """

    def __init__(
        self,
        keys: Iterable[str],
        admin_keys: Iterable[str] = (),
        priority_keys: Iterable[str] = (),
        cluster_secret: str = "",
        owners: Mapping[str, KeyOwner] = NO_OWNERS,
        hashed_keys: Iterable[HashedKey] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._clock = clock
        self.replace_keys(keys, admin_keys, priority_keys, cluster_secret, owners, hashed_keys)

    def replace_keys(
        self,
        keys: Iterable[str],
        admin_keys: Iterable[str],
        priority_keys: Iterable[str],
        cluster_secret: str,
        owners: Mapping[str, KeyOwner],
        hashed_keys: Iterable[HashedKey] | None = None,
    ) -> None:
        """Accept these keys from now on, and no others."""
        admin_keys = list(admin_keys)
        accepted_keys = list(keys)
        if accepted_keys or hashed_keys is not None:
            accepted_keys += admin_keys
        self._cluster_secret = cluster_secret
        self._key_digests = [_key_digest(key.encode()) for key in accepted_keys]
        self._admin_digests = [_key_digest(key.encode()) for key in admin_keys]
        privileged = {*priority_keys, *admin_keys}
        self._tenants = [
            Tenant(
                tenant_id(key.encode(), cluster_secret),
                key in privileged,
                owners.get(key, KeyOwner()),
                is_admin=key in admin_keys,
            )
            for key in accepted_keys
        ]
        self._key_names = {
            tenant.id: f"{'admin' if key in admin_keys else 'key'}-{number}"
            for number, (key, tenant) in enumerate(zip(accepted_keys, self._tenants, strict=True), 1)
        }
        self._hashed_keys = {key.id: key for key in hashed_keys or ()}
        self._hashed_tenants: dict[str, Tenant] = {}  # of the hashed keys that were sent, by id
        self._has_keys = bool(accepted_keys) or hashed_keys is not None
        self._has_admin_keys = bool(admin_keys) or any(key.admin for key in self._hashed_keys.values())

    def __bool__(self) -> bool:
        return self._has_keys

    @property
    def has_admin_keys(self) -> bool:
        """Whether any key may change the server."""
        return self._has_admin_keys

    def check_key(self, headers: dict[bytes, bytes]) -> Tenant:
        """Return the tenant whose key the headers carry, NO_TENANT if no keys are configured.

        One accepted key is enough, because a client may also send its key for another server. Raises Unauthorized
        if the headers carry no accepted key.
        """
        if not self._has_keys:
            return NO_TENANT
        keys = presented_keys(headers)
        if not keys:
            raise Unauthorized(
                "You did not provide an API key. Send it in the header 'Authorization: Bearer KEY'.", code=""
            )
        expired: HashedKey | None = None
        for key in keys:
            if (tenant := self._find_plain_key(key)) is not None:
                return tenant
            if (hashed_key := self._find_hashed_key(key)) is not None:
                if not self._has_expired(hashed_key):
                    return self._cached_tenant(hashed_key, tenant_id(key, self._cluster_secret))
                expired = hashed_key
        if expired is not None:
            raise Unauthorized(f"The API key {expired.name} has expired on {expired.expires:%Y-%m-%d}.")
        raise Unauthorized(f"Incorrect API key provided: {mask_key(keys[0])}.")

    def _find_plain_key(self, key: bytes) -> Tenant | None:
        """Return the tenant of a key that is known in plain text. All keys are compared, so that the time tells
        nothing.
        """
        if not self._key_digests:
            return None
        digest, number = _key_digest(key), 0
        for candidate_number, candidate in enumerate(self._key_digests, 1):
            number = max(number, candidate_number * hmac.compare_digest(digest, candidate))
        return self._tenants[number - 1] if number else None

    def _find_hashed_key(self, key: bytes) -> HashedKey | None:
        """Return a hashed key. One hash is computed even if no key has the id, so that the time tells nothing."""
        if not self._hashed_keys:
            return None
        key_id, secret = split_key(key.decode("utf-8", "surrogateescape"))
        hashed_key = self._hashed_keys.get(key_id, NO_KEY)
        return hashed_key if hashed_key.matches(secret) and hashed_key is not NO_KEY else None

    def _cached_tenant(self, hashed_key: HashedKey, own_id: str) -> Tenant:
        """Return the tenant of a hashed key that a client sent. ``own_id``: the tenant's id, which is derived from the
        key itself.
        """
        tenant = self._hashed_tenants.get(hashed_key.id)
        if tenant is None:
            tenant = self._hashed_tenants[hashed_key.id] = hashed_tenant(hashed_key, own_id)
            self._key_names[tenant.id] = hashed_key.name
        return tenant

    def tenant_reference(self, tenant: Tenant) -> TenantReference:
        """Return a reference by which ``find_tenant`` finds a tenant again, also in another process."""
        hashed_ids = (key_id for key_id, hashed in self._hashed_tenants.items() if hashed.id == tenant.id)
        return TenantReference(tenant.id, next(hashed_ids, ""))

    def find_tenant(self, reference: TenantReference) -> Tenant | None:
        """Return the tenant of a reference, None if the key of that tenant is not accepted any more."""
        if not self._has_keys:
            return None if reference.tenant_id else NO_TENANT
        hashed_key = self._hashed_keys.get(reference.key_id)
        if hashed_key is not None:
            if self._has_expired(hashed_key):
                return None
            # Not cached: this id comes from a file; the id of the tenant's requests is derived from the key itself
            self._key_names.setdefault(reference.tenant_id, hashed_key.name)
            return hashed_tenant(hashed_key, reference.tenant_id)
        return next((tenant for tenant in self._tenants if tenant.id == reference.tenant_id), None)

    def _has_expired(self, hashed_key: HashedKey) -> bool:
        return hashed_key.expires is not None and self._clock() >= hashed_key.expires.timestamp()

    def name_key(self, tenant: Tenant) -> str:
        """Return a name for a tenant's key in logs: the name in the file with hashes, otherwise its kind and its number
        among all accepted keys, such as key-2."""
        return self._key_names.get(tenant.id, "")

    def check_admin_key(self, headers: dict[bytes, bytes]) -> None:
        """Check that one of the keys in the headers is an admin key.

        Raises Unauthorized without a key, and Forbidden if no key may change the server or those that may have expired.
        """
        if not self._has_admin_keys:
            if self._has_keys:
                raise Forbidden(NO_ADMIN_KEYS)
            return
        keys = presented_keys(headers)
        if not keys:
            raise Unauthorized("This needs an admin key. Send it in the header 'Authorization: Bearer KEY'.", code="")
        matched = False
        for key in keys:
            digest = _key_digest(key)
            for candidate in self._admin_digests:
                matched |= hmac.compare_digest(digest, candidate)
            hashed_key = self._find_hashed_key(key)
            if hashed_key is not None and hashed_key.admin:
                matched |= not self._has_expired(hashed_key)
        if not matched:
            raise Forbidden(NO_ADMIN_KEY)


def hashed_tenant(hashed_key: HashedKey, own_id: str) -> Tenant:
    """Return the tenant of a hashed key. ``own_id``: the tenant's id."""
    return Tenant(
        own_id,
        hashed_key.admin or hashed_key.chooses_priority,
        owner_of(hashed_key),
        is_admin=hashed_key.admin,
        models=hashed_key.models,
        apis=hashed_key.apis,
        limits=KeyLimits(
            hashed_key.requests_per_minute,
            hashed_key.tokens_per_minute,
            hashed_key.tokens_per_day,
            hashed_key.concurrent_requests,
        ),
        priority=hashed_key.priority,
    )


def owner_of(hashed_key: HashedKey) -> KeyOwner:
    """Return the owner of a hashed key."""
    return KeyOwner(hashed_key.name, hashed_key.groups)


def presented_key(headers: dict[bytes, bytes]) -> bytes:
    """Return the first key that a client sent, or b"" if it sent none."""
    return next(iter(presented_keys(headers)), b"")


def presented_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """Return the keys that a client sent: in the header Authorization, those of other APIs, or for a WebSocket."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    scheme = scheme.lower()
    if scheme == b"basic":
        key = _token_password(key)
    elif scheme != b"bearer":
        key = b""
    keys = [key.strip()]
    keys += [headers[name].strip() for name in KEY_HEADERS if name in headers]
    keys.append(key_in_protocols(headers))
    return [key for key in keys if key]


def _token_password(credentials: bytes) -> bytes:
    """Decode Basic credentials and return the password of the user ``token``: Databricks clients send keys this way.

    Return b"" for anything else.
    """
    try:
        user, _, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
    except ValueError:
        return b""
    return password if user == b"token" else b""


def mask_key(key: bytes) -> str:
    """Return the first and last characters of a key: enough to recognize it, too little to use it."""
    text = "".join(chr(byte) if 0x21 <= byte <= 0x7E else "?" for byte in key[:512])
    return f"{text[:3]}…{text[-4:]}" if len(text) >= 16 else "…"


class BrowserGuard:
    """Refuses requests that a foreign web page makes a browser send to a server without keys.

    Without keys, a browser running on this machine would be permission enough. So ``Origin`` is checked, and, when
    listening on a loopback address, ``Host`` too, because a foreign name can be rebound to that address in DNS.
    """

    def __init__(self, host: str, allowed_hosts: Iterable[str], allowed_origins: Iterable[str], api_keys: ApiKeys):
        self._allowed_hosts = {name.lower() for name in allowed_hosts}
        self._allowed_origins = set(allowed_origins)
        self._api_keys = api_keys
        self._checks_host = is_loopback(host)
        self._checks_origin = "*" not in self._allowed_origins
        self._cached_check = functools.lru_cache(64)(self._check_host_and_origin)

    def check_headers(self, headers: dict[bytes, bytes], web_origins: str = "") -> None:
        """Check the Host and Origin headers. ``web_origins``: a regular expression of further origins that may call.

        Raises Forbidden.
        """
        if self._api_keys:
            return
        self._cached_check(headers.get(b"host", b""), headers.get(b"origin", b""), web_origins)

    def _check_host_and_origin(self, host_header: bytes, origin_header: bytes, web_origins: str) -> None:
        """Check one pair of headers. ``host_header``: Host; ``origin_header``: Origin. Raises Forbidden."""
        host = host_header.decode("latin-1").lower()
        name = host_without_port(host)
        if self._checks_host and host and not is_loopback(name) and name not in self._allowed_hosts:
            raise Forbidden("The Host header names another machine; the option allow-host lets it in.")
        origin = origin_header.decode("latin-1")
        if not self._checks_origin or not origin or origin in self._allowed_origins:
            return
        if _origin_authority(origin) != host and not re.fullmatch(web_origins, origin):
            raise Forbidden("Web pages of other origins may not call this server; the option cors-origin lets one in.")


def host_without_port(host: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1 : host.find("]")]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _origin_authority(origin: str) -> str | None:
    """Return host and port of an Origin header, or None if it cannot be parsed."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def tenant_id(key: bytes, cluster_secret: str = "") -> str:
    """Return the id of the tenant with this key; "" without a key.

    Servers of a cluster send each other these ids, and hashes that were made from them. The cluster secret, if there is
    one, keeps others from testing guesses of a key.
    """
    if not key:
        return ""
    return hmac.digest(b"parley tenant " + cluster_secret.encode(), key, "sha256").hex()[:TENANT_ID_LENGTH]


def _key_digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
