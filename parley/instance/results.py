"""Results on their way to coordinators: one connection each, over which the frames of all its requests go.

A coordinator has a name here, or none: without one it is *plain*, gets every frame once and is the only such one. With
a name, frames are counted, kept for a while after they were sent, and sent again from where a broken connection ended.
``Channel`` is a request's side, a ``Line`` a connection's; what joins them, ``Client``, outlives both. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from parley.errors import InUse, excerpt
from parley.instance import frames
from parley.instance.line import Line, Sink

KEEP = 30.0  # seconds that sent frames are kept, and that requests go on without a connection
KEPT = 32 << 20  # bytes of them: more than the buffers of a connection hold, and so more than a break can lose
WAITING = 8 << 20  # bytes of unsent frames from which requests have to wait


Head = tuple[int, list[tuple[str, str]]]


class Gone(Exception):
    """The coordinator is: it has not come back, or has forgotten its requests."""


class Channel:
    """Where the results of one request go.

    ``write`` never waits, and says whether another may follow at once; if not, ``drain`` waits for that. ``over``: the
    last frame was written, or is held back. When the coordinator is gone, those who ``watch`` are called, and nothing
    that is written goes anywhere.
    """

    def __init__(self, client: Client, id: str):
        self.id = id
        self.paused = False
        self.gone = False
        self.recall: Callable[[], None] = lambda: None  # has the request go on elsewhere
        self._client = client
        self._held: list[bytes] = []  # frames while it is paused
        self.over = False
        self._watchers: set[Callable[[], None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def write(self, payload: bytes, *, last: bool = False, record: bytes = b"", head: Head | None = None) -> bool:
        """Send a result, the ``last`` one of the request or not.

        ``record``: what stands behind it. ``head``: status and headers of an answer in one piece. Only coordinators
        with a name get these.
        """
        exact = self._client.exact
        made = frames.results(self.id, payload, last=last, exact=exact)
        if exact and head is not None:
            made.insert(0, frames.head(self.id, *head))
        if exact and record:
            made.insert(0, frames.record(self.id, record))
        return self._put(made, last)

    def fail(self, text: str) -> None:
        """Send an error: it is the request's end."""
        self._put([frames.error(self.id, text)], last=True)

    def retry(self, body: bytes) -> None:
        """Send a body with which the request goes on elsewhere: it ends here."""
        self._put([frames.retry(self.id, body)], last=True)

    @property
    def blocked(self) -> bool:
        """Must the next write wait?"""
        return not self._flowing.is_set()

    async def drain(self) -> None:
        """Wait until more may be written. Raises Gone."""
        await self._flowing.wait()
        if self.gone:
            raise Gone

    def watch(self, departed: Callable[[], None]) -> bool:
        """Have ``departed`` called when the coordinator is gone. False if it already is."""
        self._watchers.add(departed)
        return not self.gone

    def unwatch(self, departed: Callable[[], None]) -> None:
        self._watchers.discard(departed)

    def close(self) -> None:
        """The request is over, however it ended; its id may be used again. Its last frame is sent if there is one."""
        if self.over and self.paused:
            return  # until it is told to go on
        self._client.end(self)
        self._held.clear()

    def pause(self, on: bool) -> None:
        """Send nothing, or all that was not sent, and go on."""
        self.paused = on
        if not on and self._held:
            held, self._held = self._held, []
            self._client.put(held)
        if not on and self.over:
            self.close()
        self.settle()

    def settle(self) -> None:
        """Find out whether more may be written."""
        if self.gone or not (self.paused or self._client.full):
            self._flowing.set()
        else:
            self._flowing.clear()

    def lose(self) -> None:
        """The coordinator is gone."""
        self.gone = True
        self._held.clear()
        self.settle()
        for departed in tuple(self._watchers):
            departed()

    def _put(self, made: list[bytes], last: bool) -> bool:
        if self.gone or self.over:
            return True
        if self.paused:
            self._held += made
        elif made:
            self._client.put(made)
        if last:
            self.over = True
            self.close()
        else:
            self.settle()
        return not self.blocked


class Sent(NamedTuple):
    """Frames that were sent together: the number of the first, they, their bytes, when."""

    first: int
    frames: list[bytes]
    size: int
    time: float


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
        self._number = 0  # of the next frame to be sent
        self._sent: deque[Sent] = deque()
        self._sent_size = 0
        self._waiting: list[bytes] = []
        self._waiting_size = 0
        self._scheduled = False
        self._lease: asyncio.TimerHandle | None = None
        self._rent()

    @property
    def connected(self) -> bool:
        return self._line is not None

    # -- requests

    def open(self, id: str) -> Channel:
        """Raises InUse."""
        if id in self.channels:
            raise InUse(f"Another request is running under the id {excerpt(id)}.")
        channel = self.channels[id] = Channel(self, id)
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
            self._line.end(frames.CLOSE)
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        first = b""
        if self.exact:
            again = self._again(0 if number is None else number) if epoch in ("", self.epoch) else None
            if again is None:
                self._renew()
                again = b""
            first = frames.epoch(self.epoch) + again
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
            self._sent.append(Sent(self._number, made, size, time.monotonic()))
            self._sent_size += size
            self._number += len(made)
            self.forget()
        line.send(b"".join(made))
        if self.full:
            self.full = False
            for channel in tuple(self.channels.values()):
                channel.settle()

    def forget(self) -> None:
        """Keep no more than is to be kept."""
        old = time.monotonic() - KEEP
        while self._sent and (self._sent_size > KEPT or self._sent[0].time < old):
            self._sent_size -= self._sent.popleft().size

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

    def _again(self, number: int) -> bytes | None:
        """What was sent from this frame on, None if that is not known any more (or not yet)."""
        begin = self._sent[0].first if self._sent else self._number
        if not begin <= number <= self._number:
            return None
        parts: list[bytes] = []
        for sent in self._sent:
            parts += sent.frames[max(0, number - sent.first) :]
        return b"".join(parts)

    def _renew(self) -> None:
        """Begin a new epoch."""
        self.lose()
        self.epoch, self._number = secrets.token_hex(8), 0
        self._sent.clear()
        self._waiting.clear()
        self._sent_size = self._waiting_size = 0
        self.full = False

    def _rent(self) -> None:
        """Give it a while to come back."""
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

    def channel(self, client: str, id: str) -> Channel:
        """Where the results of a request go. Raises InUse."""
        return self.client(client).open(id)

    async def serve(self, client: str, sink: Sink, epoch: str = "", number: int | None = None, seat: str = "") -> None:
        """Make a connection the client's, and send over it what there is until it is not any more.

        ``number``: see ``Client.attach``. ``seat``: where the coordinator is, the same whenever it is started there; of
        those that were there before and have no connection, the requests are ended.
        """
        known = self.client(client)
        line, first = known.attach(sink, epoch, number)
        known.seat = seat
        for other in list(self.clients.values()):
            if seat and other.seat == seat and not other.connected:
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
