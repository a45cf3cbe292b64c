"""Handshake: both sides prove that they know the cluster's secret, without revealing it. Knows no sockets.

Each side sends 32 random bytes, then an HMAC-SHA256, keyed with the secret, of its role and the random bytes of both
sides. The role prevents an attacker from reflecting a proof to its author; the other side's bytes prevent replay. The
connecting side sends its proof first, so an unauthenticated client gets no data for guessing the secret offline.

The steps are generators: they yield bytes to send, or the number of bytes to receive next.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size

HandshakeSteps = Generator[bytes | int, bytes, bytes]


class HandshakeFailed(Exception):
    """The other side does not know the secret."""


class UnknownAnswer(HandshakeFailed):
    """The listening side answers with something other than a proof: it is no instance."""


def sender_handshake(secret: bytes) -> HandshakeSteps:
    """Run the handshake of the connecting side (sender); return the link's ticket. Raises UnknownAnswer.

    An instance with another secret hangs up instead of answering.
    """
    our_nonce = secrets.token_bytes(NONCE_BYTES)
    yield our_nonce
    their_nonce = yield NONCE_BYTES
    yield _compute_proof(secret, b"sender", our_nonce, their_nonce)
    answer = yield PROOF_BYTES
    if not hmac.compare_digest(answer, _compute_proof(secret, b"receiver", our_nonce, their_nonce)):
        raise UnknownAnswer
    return _compute_proof(secret, b"ticket", our_nonce, their_nonce)


def receiver_handshake(secret: bytes) -> HandshakeSteps:
    """Run the handshake of the listening side (receiver); return the link's ticket. Raises HandshakeFailed."""
    their_nonce = yield NONCE_BYTES
    our_nonce = secrets.token_bytes(NONCE_BYTES)
    yield our_nonce
    answer = yield PROOF_BYTES
    if not hmac.compare_digest(answer, _compute_proof(secret, b"sender", their_nonce, our_nonce)):
        raise HandshakeFailed
    yield _compute_proof(secret, b"receiver", their_nonce, our_nonce)
    return _compute_proof(secret, b"ticket", their_nonce, our_nonce)


def _compute_proof(secret: bytes, role: bytes, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
    """Return the HMAC of a role and both nonces."""
    key = hashlib.sha256(secret).digest()  # HMAC itself ignores zero bytes at the end of a secret
    return hmac.digest(key, b"parley kv 1 " + role + b" " + sender_nonce + receiver_nonce, "sha256")
