"""Handshake: both sides prove that they know the cluster's secret, without revealing it. Knows no sockets.

Each side sends 32 random bytes, then an HMAC-SHA256, keyed with the secret, of its role and the random bytes of both
sides. The role prevents reflecting a proof to its author, the other side's bytes prevent replay. The connecting side
proves first, so an unauthenticated connection gets no data for guessing the secret offline.

The steps are generators: they yield bytes to send, or the number of bytes to receive next.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator

NONCE = 32
PROOF = hashlib.sha256().digest_size

Steps = Generator[bytes | int, bytes, bytes]


class Unproved(Exception):
    """The other side does not know the secret."""


def giver(secret: bytes) -> Steps:
    """Run the handshake of the connecting side (sender); return the link's ticket. Raises HandshakeFailed."""
    ours = secrets.token_bytes(NONCE)
    yield ours
    theirs = yield NONCE
    yield _proof(secret, b"giver", ours, theirs)
    answer = yield PROOF
    if not hmac.compare_digest(answer, _proof(secret, b"taker", ours, theirs)):
        raise Unproved
    return _proof(secret, b"ticket", ours, theirs)


def taker(secret: bytes) -> Steps:
    """Run the handshake of the listening side (receiver); return the link's ticket. Raises HandshakeFailed."""
    theirs = yield NONCE
    ours = secrets.token_bytes(NONCE)
    yield ours
    answer = yield PROOF
    if not hmac.compare_digest(answer, _proof(secret, b"giver", theirs, ours)):
        raise Unproved
    yield _proof(secret, b"taker", theirs, ours)
    return _proof(secret, b"ticket", theirs, ours)


def _proof(secret: bytes, role: bytes, giver: bytes, taker: bytes) -> bytes:
    """Return the HMAC of a role and both nonces."""
    key = hashlib.sha256(secret).digest()  # HMAC itself ignores zero bytes at the end of a secret
    return hmac.digest(key, b"parley kv 1 " + role + b" " + giver + taker, "sha256")
