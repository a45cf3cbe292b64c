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

from parley.disagg.kv.arena import MappedArena, remaining_views
from parley.disagg.kv.transport import KVTransport, LinkLost, ProgressMonitor

MAX_VIEWS = 256  # views in one call: the kernel copies about one socket buffer, and the rest must be passed again


class PageChannel:
    """A blocking socket that one thread uses and any other may close, which wakes that thread.

    The file descriptor stays open while it is in use; otherwise a new file could get the same number.
    """

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self._closed = False
        self._lock = threading.Lock()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the socket within a ``with`` block. Raises LinkLost if it is closed."""
        try:
            with self._lock:
                if self._closed:
                    raise LinkLost("The link was closed.")
                yield
        finally:
            if self._closed:  # another thread closed it, and could not release the descriptor while it was in use
                self.close_channel()

    def close_channel(self) -> None:
        """Shut the connection down; the descriptor is released when no thread uses it."""
        self._closed = True
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # shuts the raw socket down, also with TLS
        if self._lock.acquire(blocking=False):
            self.socket.close()
            self._lock.release()


class TCPTransport(KVTransport):
    """``open_channel`` opens the sender's channel and blocks; the receiver's comes with ``attach_channel``. ``lease``
    in seconds."""

    name = "tcp"

    def __init__(self, mapped_arena: MappedArena, lease: float, open_channel: Callable[[], PageChannel] | None = None):
        self._arena = mapped_arena
        self._lease = lease
        self._open_channel = open_channel
        self._channel: PageChannel | None = None
        self._arrived_channels: SimpleQueue[PageChannel | None] = SimpleQueue()
        self._closed = False

    def make_offer(self) -> bytes:
        """Return no data: the receiver waits for a connection."""
        return b""

    def use_offer(self, offer: bytes) -> None:
        """Accept every offer: the sender has already reached this peer."""

    def attach_channel(self, channel: PageChannel) -> None:
        """Set the receiver's channel. Call it in the thread that calls ``close_transport``."""
        if self._closed or self._channel is not None:
            channel.close_channel()
        else:
            self._arrived_channels.put(channel)

    def send_pages(self, pages: Sequence[int]) -> None:
        """Write pages to the channel. Raises LinkLost, OSError."""
        channel = self._connected_channel()
        sock = channel.socket
        if isinstance(sock, ssl.SSLSocket):
            self._move_bytes(channel, pages, 1, lambda views: sock.send(views[0]))
        else:
            self._move_bytes(channel, pages, MAX_VIEWS, sock.sendmsg)

    def fetch_pages(self, sender_pages: Sequence[int], own_pages: Sequence[int]) -> None:
        """Read pages from the channel. Raises LinkLost, OSError."""
        channel = self._connected_channel()
        sock = channel.socket
        if isinstance(sock, ssl.SSLSocket):
            self._move_bytes(channel, own_pages, 1, lambda views: _require_bytes(sock.recv_into(views[0])))
        else:
            self._move_bytes(channel, own_pages, MAX_VIEWS, lambda views: _require_bytes(sock.recvmsg_into(views)[0]))

    def _move_bytes(
        self, channel: PageChannel, pages: Sequence[int], max_views: int, move_views: Callable[[list[memoryview]], int]
    ) -> None:
        """Move all bytes of these pages, ``max_views`` views at a time. ``move_views`` returns how many bytes it has
        moved."""
        progress = ProgressMonitor(self._lease)
        views = self._arena.page_views(pages)
        with channel.in_use():
            for i in range(0, len(views), max_views):
                remaining = views[i : i + max_views]
                while remaining:
                    count = move_views(remaining)
                    progress.count_moved(count)
                    remaining = remaining_views(remaining, count)

    def _connected_channel(self) -> PageChannel:
        """Return the channel; open it or wait for it first. Raises LinkLost, OSError."""
        if self._channel is None:
            if self._open_channel is not None:
                channel: PageChannel | None = self._open_channel()
            else:
                try:
                    channel = self._arrived_channels.get(timeout=self._lease)
                except Empty:
                    raise LinkLost("The sender opened no connection for its pages.") from None
            if channel is None:
                raise LinkLost("The link was closed.")
            self._channel = channel
            channel.socket.settimeout(self._lease)
            if self._closed:
                channel.close_channel()
        return self._channel

    def close_transport(self) -> None:
        """Close the channel and any that arrives later."""
        self._closed = True
        with suppress(Empty):
            while (channel := self._arrived_channels.get_nowait()) is not None:
                channel.close_channel()
        self._arrived_channels.put(None)
        if self._channel is not None:
            self._channel.close_channel()


def _require_bytes(count: int) -> int:
    """Return the count. Raises LinkLost if it is 0, the end of the connection."""
    if not count:
        raise LinkLost("The other side closed its connection for pages.")
    return count
