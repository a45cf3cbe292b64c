"""Results on their way to coordinators: one connection each, over which the frames of all its requests go.

A coordinator has a name here, or none: without one it is *plain*, gets every frame once and is the only such one. With
a name, frames are counted, kept for a while after they were sent, and sent again from where a broken connection ended.
A ``Channel`` is a request's side, a ``Line`` a connection's; what joins them, ``Client``, outlives both. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from parley.disagg.wire import result_frames
from parley.disagg.wire.replay_buffer import KEEP, History
from parley.errors import InUse, excerpt
from parley.instance.result_channel import Channel
from parley.instance.result_connection import Line, Sink

WAITING = 8 << 20  # bytes of unsent frames from which requests have to wait


class Client:
    """A coordinator: its requests, its connection if there is one, the frames that wait for it, and those it may ask
    for again. ``exact``: it has a name; frames are counted within its ``epoch``."""

    def __init__(self, name: str, remove: Callable[[Client], None]):
        self.name = name
        self.exact = bool(name)
        self.seat = ""
        self.epoch = secrets.token_hex(8)
        self.full = False  # too much waits
        self.channels: dict[str, Channel] = {}
        self._remove = remove
        self._line: Line | None = None
        self._history = History()
        self._waiting: list[bytes] = []
        self._waiting_size = 0
        self._scheduled = False
        self._lease: asyncio.TimerHandle | None = None
        self._rent()

    @property
    def connected(self) -> bool:
        return self._line is not None

    # -- requests

    def open(self, id: str, recall: Callable[[], None] = lambda: None) -> Channel:
        """Raises InUse."""
        if id in self.channels:
            raise InUse(f"Another request is running under the id {excerpt(id)}.")
        channel = self.channels[id] = Channel(self, id, recall)
        channel.settle()
        return channel

    def end(self, channel: Channel) -> None:
        if self.channels.get(channel.id) is channel:
            del self.channels[channel.id]

    def put(self, made: list[bytes]) -> None:
        """Send these frames with all others of this moment."""
        self._waiting += made
        self._waiting_size += sum(map(len, made))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        if self._waiting_size > WAITING:
            self.full = True

    # -- connections

    def attach(self, sink: Sink, epoch: str = "", number: int | None = None) -> tuple[Line, bytes]:
        """Make this the client's connection in place of another, and what is to be sent over it first.

        ``number``: of the first frame in ``epoch`` that the client has not got. If those are not here any more, or it
        does not know the epoch, a new one begins, and the requests of the old one are lost.
        """
        if self._line is not None:
            self._line.end(result_frames.CLOSE)
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        first = b""
        if self.exact:
            again = self._history.since(number or 0) if epoch in ("", self.epoch) else None
            if again is None:
                self._renew()
                again = b""
            first = result_frames.epoch(self.epoch) + again
        self._line = Line(self, sink)
        return self._line, first

    def detach(self, line: Line) -> None:
        """The connection has ended."""
        if self._line is line:
            self._line = None
            self._rent()

    def flush(self) -> None:
        """Send what waits, if that can be done at once."""
        line = self._line
        if not self._waiting or line is None or not line.flowing:
            return
        made, size = self._waiting, self._waiting_size
        self._waiting, self._waiting_size = [], 0
        if self.exact:
            self._history.add(made, size)
        line.send(b"".join(made))
        if self.full:
            self.full = False
            for channel in tuple(self.channels.values()):
                channel.settle()

    def forget(self) -> None:
        """Keep no more of what was sent than is to be kept."""
        self._history.forget()

    def recall(self) -> None:
        """Its requests go on elsewhere, as far as they can."""
        for channel in list(self.channels.values()):
            channel.recall()

    def close(self) -> None:
        """End its connection and its requests."""
        if self._line is not None:
            self.flush()
            self._line.end()
        if self._lease is not None:
            self._lease.cancel()
        self._expire()

    def lose(self) -> None:
        """It is gone, or has forgotten: its requests end."""
        channels, self.channels = list(self.channels.values()), {}
        for channel in channels:
            channel.lose()

    def _flush(self) -> None:
        self._scheduled = False
        self.flush()

    def _renew(self) -> None:
        """Begin a new epoch."""
        self.lose()
        self.epoch, self._history = secrets.token_hex(8), History()
        self._waiting.clear()
        self._waiting_size = 0
        self.full = False

    def _rent(self) -> None:
        """Give it a while to come back: as long as what it needs for that is kept."""
        self._lease = asyncio.get_running_loop().call_later(KEEP, self._expire)

    def _expire(self) -> None:
        self.lose()
        self._remove(self)


class Results:
    """All coordinators that get results from this instance."""

    def __init__(self) -> None:
        self.clients: dict[str, Client] = {}

    def client(self, name: str = "") -> Client:
        """The one of this name; it is known from now on."""
        if name not in self.clients:
            self.clients[name] = Client(name, self._remove)
        return self.clients[name]

    def channel(self, client: str, id: str, recall: Callable[[], None] = lambda: None) -> Channel:
        """Where the results of a request go, which ``recall`` makes continue elsewhere. Raises InUse."""
        return self.client(client).open(id, recall)

    async def serve(self, client: str, sink: Sink, epoch: str = "", number: int | None = None, seat: str = "") -> None:
        """Make a connection the client's, and send over it what there is until it is not any more.

        ``number``: see ``Client.attach``. ``seat``: where the coordinator is, the same whenever it is started there.
        One that begins, and is not only back, ends the requests of those that had its seat and have no connection.
        """
        known = self.client(client)
        begins = bool(seat) and not known.seat and not epoch
        line, first = known.attach(sink, epoch, number)
        known.seat = seat
        for other in list(self.clients.values()) if begins else ():
            if other.seat == seat and not other.connected:
                other.close()
        await line.run(first)

    def pause(self, client: str, id: str, on: bool) -> bool:
        """Hold the results of one request back, or no longer. Is there such a request?"""
        known = self.clients.get(client)
        channel = known.channels.get(id) if known is not None else None
        if channel is None:
            return False
        channel.pause(on)
        return True

    def drop(self, id: str) -> bool:
        """Nobody wants what is held back of a request that has ended. Was there any?"""
        ended = [found for client in self.clients.values() if (found := client.channels.get(id)) and found.over]
        for channel in ended:
            channel.pause(False)
        return bool(ended)

    def close(self) -> None:
        """The server ends: so do all connections and what still waits for one."""
        for client in list(self.clients.values()):
            client.close()

    def _remove(self, client: Client) -> None:
        if self.clients.get(client.name) is client:
            del self.clients[client.name]
