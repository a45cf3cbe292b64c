"""Decodes texts in base64."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error

from parley.model.media_input.unusable import UnusableMedia


def decode_base64(text: str | bytes) -> bytes:
    """Return the bytes of a text in base64. Raises UnusableMedia."""
    try:
        return b64decode(text, validate=True)
    except (Base64Error, ValueError):
        raise UnusableMedia("is not in base64", "bad_base64") from None
