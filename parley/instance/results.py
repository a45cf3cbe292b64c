"""Results on their way to coordinators: one connection per coordinator carries the frames of all its requests.

A coordinator without a name is MindIE's: it gets every frame once, and there is only one of them. For a coordinator
with a name, frames are numbered, kept for a while after sending, and sent again from the point where a connection
broke. ``ResultChannel`` belongs to a request and ``ResultConnection`` to a connection; ``ResultClient`` joins them and
outlives both. Knows no HTTP.
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

WAITING = 8 << 20  # bytes of unsent frames above which requests must wait


class Client:
    """A coordinator: its requests, its connection if any, the queued frames, and the frames it may request again.
    ``exact``: it has a name; frames are numbered within its ``epoch``."""

    def __init__(self, name: str, remove: Callable[[Client], None]):
        self.name = name
        self.exact = bool(name)
        self.seat = ""
        self.epoch = secrets.token_hex(8)
        self.full = False  # the queue is full
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
        """Whether the coordinator has a connection."""
        return self._line is not None

    # -- requests

    def open(self, id: str, recall: Callable[[], None] = lambda: None) -> Channel:
        """Open a channel for a request. Raises InUse."""
        if id in self.channels:
            raise InUse(f"Another request is running under the id {excerpt(id)}.")
        channel = self.channels[id] = Channel(self, id, recall)
        channel.settle()
        return channel

    def end(self, channel: Channel) -> None:
        """Forget a channel; its id is free again."""
        if self.channels.get(channel.id) is channel:
            del self.channels[channel.id]

    def put(self, made: list[bytes]) -> None:
        """Queue frames; all frames of one turn of the event loop are sent together."""
        self._waiting += made
        self._waiting_size += sum(map(len, made))
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        if self._waiting_size > WAITING:
            self.full = True

    # -- connections

    def attach(self, sink: Sink, epoch: str = "", number: int | None = None) -> tuple[Line, bytes]:
        """Replace the coordinator's connection, and return the new one and the data to send over it first.

        ``number``: the first frame in ``epoch`` that the coordinator lacks. If that frame is no longer kept, or the
        epoch is another one, a new epoch begins and the requests of the old one are lost.
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
        """Forget a connection that has ended, and wait for the coordinator to reconnect."""
        if self._line is line:
            self._line = None
            self._rent()

    def flush(self) -> None:
        """Send the queued frames if the connection accepts them."""
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
        """Drop sent frames that need not be kept any longer."""
        self._history.forget()

    def recall(self) -> None:
        """Let its requests continue on other instances, as far as they can."""
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
        """End its requests: the coordinator is gone or has lost them."""
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
        """Give it as much time to reconnect as sent frames are kept."""
        self._lease = asyncio.get_running_loop().call_later(KEEP, self._expire)

    def _expire(self) -> None:
        self.lose()
        self._remove(self)


class Results:
    """All coordinators that get results from this instance."""

    def __init__(self) -> None:
        self.clients: dict[str, Client] = {}

    def client(self, name: str = "") -> Client:
        """Return the coordinator of this name, adding it if it is new."""
        if name not in self.clients:
            self.clients[name] = Client(name, self._remove)
        return self.clients[name]

    def channel(self, client: str, id: str, recall: Callable[[], None] = lambda: None) -> Channel:
        """Open the result channel of a request, which ``recall`` makes continue elsewhere. Raises InUse."""
        return self.client(client).open(id, recall)

    async def serve(self, client: str, sink: Sink, epoch: str = "", number: int | None = None, seat: str = "") -> None:
        """Make a connection the coordinator's current one, and send results over it until it is replaced or ends.

        ``number``: see ``ResultClient.attach``. ``seat``: the coordinator's id, the same after a restart. A coordinator
        that starts (and does not just reconnect) ends the requests of unconnected predecessors with its id.
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
        """Pause or resume the results of one request. False if the request is unknown."""
        known = self.clients.get(client)
        channel = known.channels.get(id) if known is not None else None
        if channel is None:
            return False
        channel.pause(on)
        return True

    def drop(self, id: str) -> bool:
        """Drop the held results of a request that has ended. False if there are none."""
        ended = [found for client in self.clients.values() if (found := client.channels.get(id)) and found.over]
        for channel in ended:
            channel.pause(False)
        return bool(ended)

    def close(self) -> None:
        """End all connections and all requests that still wait for one, as the server ends."""
        for client in list(self.clients.values()):
            client.close()

    def _remove(self, client: Client) -> None:
        if self.clients.get(client.name) is client:
            del self.clients[client.name]
