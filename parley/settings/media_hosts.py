"""Hosts that images, videos and audio may be fetched from, and the canonical form of a host.

Options and URLs are both read by ``canonical_host``, so a host in a URL equals the host in an option exactly if both
mean the same one.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

ANY_PUBLIC = "any-public"
INTERNAL = "internal:"
USUAL_PORTS = (80, 443)

LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
HOST_NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*")
NUMERIC_LABEL = re.compile("[0-9]+|0x[0-9a-f]*")
AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{1,5}))?")
MAX_HOST_LENGTH = 253

FORM = "a host such as example.com, *.example.com or example.com:8443, one marked internal:, or any-public"


class MediaHost(NamedTuple):
    """An entry of ``--media-hosts``.

    ``name``: a host name, one with ``*.`` before it for all names below it, an IP address, or ``any-public``. ``port``:
    None for 80 and 443. ``internal``: it may have addresses that are not public.
    """

    name: str
    port: int | None = None
    internal: bool = False

    def includes(self, host: str, port: int) -> bool:
        """Whether this entry is for a host, as ``canonical_host`` writes it, and its port."""
        if port not in (USUAL_PORTS if self.port is None else (self.port,)):
            return False
        if self.name.startswith("*."):
            return host.endswith(self.name[1:])
        return self.name in (host, ANY_PUBLIC)

    def __str__(self) -> str:
        """Return the entry as ``parse_media_host`` reads it."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"{INTERNAL if self.internal else ''}{name}{'' if self.port is None else f':{self.port}'}"


def parse_media_host(text: str) -> MediaHost:
    """Read an entry of ``--media-hosts``. Raises ValueError with a clause that completes "<text> is not …"."""
    entry = text.removeprefix(INTERNAL)
    try:
        host, port = split_port(entry.removeprefix("*."))
        name = canonical_host(host)
    except ValueError:
        raise ValueError(FORM) from None
    if is_address(name):
        if entry.startswith("*."):
            raise ValueError(FORM)
        return MediaHost(name, port, internal=True)  # an operator who writes an address means exactly that one
    if name == ANY_PUBLIC and entry != text:
        raise ValueError("a host: internal: needs the name of one")
    return MediaHost(f"*.{name}" if entry.startswith("*.") else name, port, internal=entry != text)


def split_port(authority: str) -> tuple[str, int | None]:
    """Return host and port of HOST or HOST:PORT; the port is None if there is none. Raises ValueError."""
    match = AUTHORITY.fullmatch(authority)
    if match is None or not 0 < int(match[2] or 80) <= 65_535:
        raise ValueError(f"{authority!r} is not of the form HOST or HOST:PORT")
    return match[1], int(match[2]) if match[2] else None


def canonical_host(text: str) -> str:
    """Return a host in lower case and in ASCII, without a dot at its end; an IPv6 address without brackets.

    Addresses must be in their usual form: 127.1, 0x7f000001 and 2130706433 are refused. Raises ValueError.
    """
    if "%" in text:
        raise ValueError("the host is percent-encoded, or names a network interface")
    if text.startswith("["):
        return str(IPv6Address(text[1:-1]))
    if len(text) > MAX_HOST_LENGTH + 1:
        raise ValueError("the host is too long")
    host = (text.lower() if text.isascii() else _encode_host(text)).removesuffix(".")
    if NUMERIC_LABEL.fullmatch(host.rpartition(".")[2]):
        return str(IPv4Address(host))
    if len(host) > MAX_HOST_LENGTH or not HOST_NAME.fullmatch(host):
        raise ValueError("the host is not a valid name")
    return host


def is_address(host: str) -> bool:
    """Whether a host, as ``canonical_host`` writes it, is an IP address and no name."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def _encode_host(text: str) -> str:
    import idna  # its tables take time to load, and few hosts need them

    return idna.encode(text, uts46=True).decode("ascii").lower()
