"""The opening handshake of a WebSocket: checks what a client offers, and writes the head that accepts it (RFC 6455, 4).

No extension is ever agreed on, so messages are not compressed. A page cannot set headers of a WebSocket, so OpenAI's
SDK sends the API key of one as a subprotocol.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping

from parley.dialects.reply import HeaderList
from parley.errors import BadRequest, UpgradeRequired

UPGRADE_KEY = "parley.upgrade"  # scope key: the function that makes the connection a WebSocket, if its client offers it
PROTOCOL_HEADER = b"sec-websocket-protocol"
KEY_PROTOCOL = b"openai-insecure-api-key."  # an API key follows
VERSION = b"13"
KEY_SIZE = 16  # bytes
KEY_SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
# Of an answer that asks for a WebSocket (RFC 9110, 15.5.22).
UPGRADE_HEADERS: HeaderList = (
    (b"upgrade", b"websocket"),
    (b"connection", b"upgrade"),
    (b"sec-websocket-version", VERSION),
)


def offers_websocket(upgrade_header: bytes) -> bool:
    """Whether an Upgrade header names the protocol, among others maybe."""
    return b"websocket" in [name.strip().lower() for name in upgrade_header.split(b",")]


def check_handshake(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key of a handshake. Raises BadRequest, UpgradeRequired for another version."""
    version = headers.get(b"sec-websocket-version", b"")
    if version.strip() != VERSION:
        raise UpgradeRequired(f"The header Sec-WebSocket-Version must be {VERSION.decode()}.")
    key = headers.get(b"sec-websocket-key", b"").strip()
    try:
        size = len(base64.b64decode(key, validate=True))
    except binascii.Error:
        size = 0
    if size != KEY_SIZE:
        raise BadRequest(f"The header Sec-WebSocket-Key must be {KEY_SIZE} bytes in base64.")
    return key


def offered_protocols(headers: Mapping[bytes, bytes]) -> list[bytes]:
    """Return the subprotocols that a client asks for."""
    return [name.strip() for name in headers.get(PROTOCOL_HEADER, b"").split(b",") if name.strip()]


def agreed_protocol(headers: Mapping[bytes, bytes], known: bytes) -> bytes:
    """Return the subprotocol ``known`` if a client asks for it, otherwise b""."""
    return known if known in offered_protocols(headers) else b""


def key_in_protocols(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the API key among the subprotocols, b"" if there is none."""
    keys = (name for name in offered_protocols(headers) if name.startswith(KEY_PROTOCOL))
    return next(keys, b"").removeprefix(KEY_PROTOCOL)


def accepting_head(key: bytes, headers: HeaderList, protocol: bytes = b"") -> bytes:
    """Return the head of the answer that accepts a handshake with this key. ``headers``: further ones; ``protocol``:
    the subprotocol, if any."""
    token = base64.b64encode(hashlib.sha1(key + KEY_SUFFIX, usedforsecurity=False).digest())
    lines = [
        b"HTTP/1.1 101 Switching Protocols",
        b"upgrade: websocket",
        b"connection: upgrade",
        b"sec-websocket-accept: " + token,
        *([PROTOCOL_HEADER + b": " + protocol] if protocol else []),
        *(b"%b: %b" % header for header in headers),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"
