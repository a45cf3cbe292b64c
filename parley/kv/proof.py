"""Who may link: both sides prove that they know the cluster's secret, and neither learns it. Knows no sockets.

Each side sends 32 random bytes, and then HMAC-SHA256 under the secret of its role and both sides' bytes. The role is in
it so that a proof sent back to its maker is none, the other side's bytes so that an overheard one is of no use again.
The side that came proves first: who merely knocks gets nothing that it could try secrets on.

The steps are generators: they yield bytes to send, or the number of bytes that they need next.
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
    """The steps of the side that came; returns the link's ticket. Raises Unproved."""
    ours = secrets.token_bytes(NONCE)
    yield ours
    theirs = yield NONCE
    yield _proof(secret, b"giver", ours, theirs)
    answer = yield PROOF
    if not hmac.compare_digest(answer, _proof(secret, b"taker", ours, theirs)):
        raise Unproved
    return _proof(secret, b"ticket", ours, theirs)


def taker(secret: bytes) -> Steps:
    """The steps of the side that listens; returns the link's ticket. Raises Unproved."""
    theirs = yield NONCE
    ours = secrets.token_bytes(NONCE)
    yield ours
    answer = yield PROOF
    if not hmac.compare_digest(answer, _proof(secret, b"giver", theirs, ours)):
        raise Unproved
    yield _proof(secret, b"taker", theirs, ours)
    return _proof(secret, b"ticket", theirs, ours)


def _proof(secret: bytes, role: bytes, giver: bytes, taker: bytes) -> bytes:
    key = hashlib.sha256(secret).digest()  # HMAC itself takes zeros at a secret's end for none
    return hmac.digest(key, b"parley kv 1 " + role + b" " + giver + taker, "sha256")
