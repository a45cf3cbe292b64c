"""TCP transport: pages travel on a connection next to their link, so heartbeats never wait for them.

This page channel carries only page bytes, region by region for each list of pages; both sides know the lists from the
link. The bytes go from the sender's arena to the socket and from the socket into the receiver's arena, many pieces in
one call. The sender connects to the address of its link when the first pages are wanted, and sends the link's ticket.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from parley.disagg.kv.arena import Memory, rest
from parley.disagg.kv.transport import Lost, Pace, Transport

PIECES = 256  # views in one call: the kernel takes about one socket buffer, and the rest must be listed again


class Channel:
    """A blocking socket that one thread uses and any other may close, which wakes that thread.

    The file descriptor stays open while it is in use; otherwise a new file could get the same number.
    """

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self._closed = False
        self._lock = threading.Lock()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Use the socket within a ``with`` block. Raises LinkLost if it is closed."""
        try:
            with self._lock:
                if self._closed:
                    raise Lost("The link was closed.")
                yield
        finally:
            if self._closed:  # closed before or meanwhile; meanwhile, the descriptor could not be released
                self.close()

    def close(self) -> None:
        """Shut the connection down; the descriptor is released when no thread uses it."""
        self._closed = True
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # of the raw socket, also with TLS
        if self._lock.acquire(blocking=False):
            self.socket.close()
            self._lock.release()


class Stream(Transport):
    """``open_channel`` opens the sender's channel and blocks; the receiver's comes with ``attach_channel``. ``lease``
    in seconds."""

    name = "tcp"

    def __init__(self, memory: Memory, lease: float, dial: Callable[[], Channel] | None = None):
        self._memory = memory
        self._lease = lease
        self._dial = dial
        self._channel: Channel | None = None
        self._arrived: SimpleQueue[Channel | None] = SimpleQueue()
        self._closed = False

    def offer(self) -> bytes:
        """Return no data: the receiver waits for a connection."""
        return b""

    def reach(self, offer: bytes) -> None:
        """Accept every offer: the sender has already reached this peer."""

    def attach(self, channel: Channel) -> None:
        """Set the receiver's channel. Call it in the thread that calls ``close_transport``."""
        if self._closed or self._channel is not None:
            channel.close()
        else:
            self._arrived.put(channel)

    def send(self, pages: Sequence[int]) -> None:
        """Write pages to the channel. Raises LinkLost, OSError."""
        channel = self._connected()
        sock = channel.socket
        if isinstance(sock, ssl.SSLSocket):
            self._move(channel, pages, 1, lambda views: sock.send(views[0]))
        else:
            self._move(channel, pages, PIECES, sock.sendmsg)

    def fetch(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """Read pages from the channel. Raises LinkLost, OSError."""
        channel = self._connected()
        sock = channel.socket
        if isinstance(sock, ssl.SSLSocket):
            self._move(channel, ours, 1, lambda views: _some(sock.recv_into(views[0])))
        else:
            self._move(channel, ours, PIECES, lambda views: _some(sock.recvmsg_into(views)[0]))

    def _move(
        self, channel: Channel, pages: Sequence[int], pieces: int, call: Callable[[list[memoryview]], int]
    ) -> None:
        """Move all bytes of these pages, ``max_views`` views at a time. ``move_views`` returns how many bytes it has
        moved."""
        pace = Pace(self._lease)
        views = self._memory.views(pages)
        with channel.use():
            for i in range(0, len(views), pieces):
                left = views[i : i + pieces]
                while left:
                    count = call(left)
                    pace.moved(count)
                    left = rest(left, count)

    def _connected(self) -> Channel:
        """Return the channel; open it or wait for it first. Raises LinkLost, OSError."""
        if self._channel is None:
            if self._dial is not None:
                found: Channel | None = self._dial()
            else:
                try:
                    found = self._arrived.get(timeout=self._lease)
                except Empty:
                    raise Lost("The sender opened no connection for its pages.") from None
            if found is None:
                raise Lost("The link was closed.")
            self._channel = found
            found.socket.settimeout(self._lease)
            if self._closed:
                found.close()
        return self._channel

    def close(self) -> None:
        """Close the channel and any that arrives later."""
        self._closed = True
        with suppress(Empty):
            while (waiting := self._arrived.get_nowait()) is not None:
                waiting.close()
        self._arrived.put(None)
        if self._channel is not None:
            self._channel.close()


def _some(count: int) -> int:
    """Return the count. Raises LinkLost if it is 0, the end of the connection."""
    if not count:
        raise Lost("The other side closed its connection for pages.")
    return count
