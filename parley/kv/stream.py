"""Pages over TCP: on a connection of their own beside the link, so that heartbeats never wait behind them.

Nothing but pages is on it, region by region for each list of them; both sides know the lists from the link. The bytes
go from the giver's arena to the socket and from the socket into the taker's arena, many pieces in one call. The giver
connects when the first pages are wanted, to where its link goes, and shows the link's ticket.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from parley.kv.memory import Memory, rest
from parley.kv.transport import Lost, Pace, Transport

PIECES = 256  # of one call: the kernel takes about a socket buffer at a time, and what is left has to be listed again


class Channel:
    """A blocking socket that one thread uses and any other may close, which wakes that one.

    Its number is kept while it is in use, or a new file could get it.
    """

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self._closed = False
        self._lock = threading.Lock()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Raises Lost when it is closed."""
        try:
            with self._lock:
                if self._closed:
                    raise Lost("The link was closed.")
                yield
        finally:
            if self._closed:  # by now, or meanwhile, when its number could not be given back
                self.close()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # the socket itself, also where there is TLS
        if self._lock.acquire(blocking=False):
            self.socket.close()
            self._lock.release()


class Stream(Transport):
    """``dial`` gives the giver's connection, blocking; the taker's comes with ``attach``. ``lease`` in seconds."""

    name = "tcp"

    def __init__(self, memory: Memory, lease: float, dial: Callable[[], Channel] | None = None):
        self._memory = memory
        self._lease = lease
        self._dial = dial
        self._channel: Channel | None = None
        self._arrived: SimpleQueue[Channel | None] = SimpleQueue()
        self._closed = False

    def offer(self) -> bytes:
        return b""

    def reach(self, offer: bytes) -> None:
        """Always: the giver has come this way."""

    def attach(self, channel: Channel) -> None:
        """The taker's connection has come. To be called where ``close`` is."""
        if self._closed or self._channel is not None:
            channel.close()
        else:
            self._arrived.put(channel)

    def send(self, pages: Sequence[int]) -> None:
        channel = self._connected()
        sock = channel.socket
        if isinstance(sock, ssl.SSLSocket):
            self._move(channel, pages, 1, lambda views: sock.send(views[0]))
        else:
            self._move(channel, pages, PIECES, sock.sendmsg)

    def fetch(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        channel = self._connected()
        sock = channel.socket
        if isinstance(sock, ssl.SSLSocket):
            self._move(channel, ours, 1, lambda views: _some(sock.recv_into(views[0])))
        else:
            self._move(channel, ours, PIECES, lambda views: _some(sock.recvmsg_into(views)[0]))

    def _move(
        self, channel: Channel, pages: Sequence[int], pieces: int, call: Callable[[list[memoryview]], int]
    ) -> None:
        """Have ``call`` move all bytes of these pages, of so many pieces at a time; it says how many it has moved."""
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
        if self._channel is None:
            if self._dial is not None:
                found: Channel | None = self._dial()
            else:
                try:
                    found = self._arrived.get(timeout=self._lease)
                except Empty:
                    raise Lost("The giver made no connection for its pages.") from None
            if found is None:
                raise Lost("The link was closed.")
            self._channel = found
            found.socket.settimeout(self._lease)
            if self._closed:
                found.close()
        return self._channel

    def close(self) -> None:
        self._closed = True
        with suppress(Empty):
            while (waiting := self._arrived.get_nowait()) is not None:
                waiting.close()
        self._arrived.put(None)
        if self._channel is not None:
            self._channel.close()


def _some(count: int) -> int:
    if not count:
        raise Lost("The other side ended its connection for pages.")
    return count
