"""Describes how vLLM's connector moves KV pages to another instance, as data in ``EngineOutput.transfer``.

The instance that computes a prompt asks its vLLM to keep the pages for another one. vLLM's last output then has a
dictionary, ``kv_transfer_params``, that the other vLLM needs to fetch the pages. The pages are kept for a lease, which
the other vLLM prolongs once it has the request. Pages whose lease has ended must not be read: they may belong to
another prompt by then, and nothing would show it. So the transfer includes the time when the lease ends, which is
compared with a margin for clock differences. A lease that seems to begin later than now shows that a clock was set.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import msgspec

log = logging.getLogger("parley.engine")

KEEP_PAGES: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
DEFAULT_LEASE_SECONDS = 30.0  # vLLM's
CLOCK_MARGIN = 10.0  # seconds
NOT_USED = "KV pages of another instance are not used: %s."


class PageMove(msgspec.Struct, array_like=True):
    """``params``: vLLM's dictionary. ``ends_at``: when the lease of the pages ends, in seconds of time.time.
    ``lease_seconds``: how long it lasts; earlier versions do not say."""

    params: dict[str, Any]
    ends_at: float
    lease_seconds: float = math.inf


_DECODER = msgspec.msgpack.Decoder(PageMove)


def write_transfer(params: dict[str, Any], lease_seconds: float) -> bytes:
    """Return the transfer of pages that vLLM keeps from now on."""
    return msgspec.msgpack.encode(PageMove(params, time.time() + lease_seconds, lease_seconds))


def read_transfer(transfer: bytes) -> dict[str, Any] | None:
    """Return vLLM's dictionary of a transfer, None if the pages may be gone by now, or it cannot be read."""
    if (move := _read_move(transfer)) is None:
        log.warning(NOT_USED, "their description cannot be read")
        return None
    if CLOCK_MARGIN < (seconds_left := move.ends_at - time.time()) <= move.lease_seconds + CLOCK_MARGIN:
        return move.params
    if seconds_left > CLOCK_MARGIN:
        start = seconds_left - move.lease_seconds
        log.warning(NOT_USED, f"their lease seems to begin {start:.1f} s from now; compare the clocks of the machines")
    else:
        log.warning(NOT_USED, f"their lease ends in {seconds_left:.1f} s, by this machine's clock")
    return None


def rejected_params(transfer: bytes) -> dict[str, Any] | None:
    """Return vLLM's dictionary of a transfer that will not be used, None if the other instance need not know."""
    move = _read_move(transfer)
    return move.params if move is not None and move.ends_at > time.time() else None


def _read_move(transfer: bytes) -> PageMove | None:
    """Return the content of a transfer, None if it cannot be read."""
    try:
        return _DECODER.decode(transfer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
