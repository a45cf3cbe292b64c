"""Ports for the servers that tests start as processes, which learn their port before they listen on it.

Every test process draws from a block of its own, so that processes that run at the same time never draw the same port.
The blocks lie below the system's ephemeral ports: no connection and no server on port 0 takes a port in between.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import socket

FIRST, LAST, BLOCK = 10_000, 32_000, 500

_positions = itertools.count()


def free_port() -> int:
    """Returns a port on which nothing listens."""
    return free_port_range(1)


def free_port_range(count: int) -> int:
    """Returns the first of ``count`` consecutive ports on which nothing listens."""
    block = _claim_block()
    places = (BLOCK - 1) // count
    for position in itertools.islice(_positions, places):
        first = block + 1 + position % places * count
        if all(map(_is_free, range(first, first + count))):
            return first
    raise RuntimeError("no ports are free")


@functools.cache
def _claim_block() -> int:
    """Returns the first port of a block, which this process holds until it ends, and with it the block."""
    for block in range(FIRST, LAST, BLOCK):
        claim = socket.socket()
        with contextlib.suppress(OSError):
            claim.bind(("127.0.0.1", block))
            atexit.register(claim.close)
            return block
        claim.close()
    raise RuntimeError("every block of ports is in use")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does
        probe.bind(("127.0.0.1", port))
        return True
    return False
