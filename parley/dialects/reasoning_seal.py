"""Reasoning that a client keeps and sends back unchanged, for APIs whose clients replay a model's reasoning.

A sealed text is base64url of an HMAC-SHA256 and the data. It is authenticated and not encrypted: the client has seen
the reasoning anyway, and only has to return it exactly, so that the prompt has the tokens that the model wrote.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

MAC_BYTES = hashlib.sha256().digest_size
KEY_PURPOSE = b"parley reasoning seal"


class ReasoningSeal:
    """Seals data for one tenant, and opens its own seals for that tenant.

    ``secret``: servers with the same secret open each other's seals; empty: a random key, which ends with this object.
    ``key``: the key that was made of it, for other processes of the server.
    """

    def __init__(self, secret: str = "", key: bytes = b""):
        root_key = secret.encode() or secrets.token_bytes(MAC_BYTES)
        self.key = key or hmac.digest(root_key, KEY_PURPOSE, "sha256")

    def seal(self, tenant: str, data: bytes) -> str:
        """Return the data as text that ``open`` accepts for this tenant only. Equal data gives equal text."""
        return base64.urlsafe_b64encode(self._mac(tenant, data) + data).decode()

    def open(self, tenant: str, text: str) -> bytes:
        """Return the data of a sealed text. Raises ValueError if it is foreign, of another tenant, or altered."""
        try:
            sealed = base64.b64decode(text.encode("ascii"), b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise ValueError("The text is not base64url.") from None
        mac, data = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(tenant, data)):
            raise ValueError("The text was not sealed by this server for this tenant.")
        return data

    def _mac(self, tenant: str, data: bytes) -> bytes:
        return hmac.digest(self.key, b"%d:%b" % (len(tenant), tenant.encode()) + data, "sha256")


RANDOM_SEAL = ReasoningSeal()  # where no server has provided one
