"""Messages between coordinator and instance about a client whose API key the coordinator has checked.

The coordinator enforces the limits of the key and keeps its usage. So it names the client to the instances, asks them
how many tokens a request may use, and gets the number that it used. Pure: values in, bytes out.
"""

from __future__ import annotations

import binascii
import functools
from typing import Annotated

import msgspec

from parley.disagg.wire.headers import NATIVE_PREFIX
from parley.types import NO_LIMITS, Tenant

# In a request: the client, as base64 of MessagePack. Its key is checked, and its limits are counted.
CLIENT_HEADER = NATIVE_PREFIX + b"client"
# In a request with CLIENT_HEADER: answer with the tokens that the request would reserve, and do not run it.
COUNT_HEADER = NATIVE_PREFIX + b"count-tokens"
# In an answer to a request with CLIENT_HEADER: the tokens that it has used.
USED_HEADER = NATIVE_PREFIX + b"used-tokens"


# bounded, because a key is charged for the count that an instance reports
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class VouchedClient(msgspec.Struct, frozen=True):
    """A client that the coordinator has let in. ``key_name``: of its key in logs."""

    tenant: Tenant
    key_name: str


class ReservedTokens(msgspec.Struct, frozen=True):
    """The tokens that a request would reserve: those of its prompts, and the largest number that its answer may have;
    None if the client names no limit."""

    prompt_tokens: TokenCount
    output_tokens: TokenCount | None


class UsedTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a request of a model has used. ``cached_tokens``: those of ``prompt_tokens`` that were found in
    the prefix cache."""

    model: str
    prompt_tokens: TokenCount
    cached_tokens: TokenCount
    output_tokens: TokenCount


_CLIENT_DECODER = msgspec.msgpack.Decoder(VouchedClient)
_RESERVED_DECODER = msgspec.json.Decoder(ReservedTokens)
_USED_DECODER = msgspec.json.Decoder(UsedTokens)


@functools.lru_cache(1024)
def write_vouched_client(tenant: Tenant, key_name: str) -> bytes:
    """Return the value of ``CLIENT_HEADER``. Limits are left out: the coordinator counts."""
    client = VouchedClient(msgspec.structs.replace(tenant, limits=NO_LIMITS), key_name)
    return binascii.b2a_base64(msgspec.msgpack.encode(client), newline=False)


def read_vouched_client(value: bytes) -> VouchedClient | None:
    """Return the client in the value of ``CLIENT_HEADER``; None if the value holds no client."""
    try:
        return _CLIENT_DECODER.decode(binascii.a2b_base64(value, strict_mode=True))
    except (msgspec.MsgspecError, binascii.Error, UnicodeError):
        return None


def read_reserved_tokens(body: bytes) -> ReservedTokens | None:
    """Return the counts in the answer to a request with ``COUNT_HEADER``; None if the answer holds no counts."""
    try:
        return _RESERVED_DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def read_used_tokens(text: bytes) -> UsedTokens | None:
    """Return the counts in a frame, or in the value of ``USED_HEADER``; None if it holds no counts."""
    try:
        return _USED_DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeError):
        return None
