"""Writers for answers whose client is connected to a coordinator. They have the interface of a connection's HTTP cycle.

``RemoteResponseWriter`` writes to a request's result channel. ``PrefillResponseWriter`` first answers the coordinator's
command over its own connection: that answer contains the bytes up to the handover, or the whole answer. Knows no
generations.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Message

from parley.dialects.instance_plane import Origin
from parley.dialects.mounts import INSTANCE_PLANE
from parley.disagg.wire.handover import record
from parley.disagg.wire.headers import Order
from parley.instance.result_channel import Channel, Gone
from parley.types import Batch, Work
from parley.web.connection import Cycle
from parley.web.exchange import ClientGone

LOST = "The server had an error while it processed the request."


class Outlet:
    """Writes an answer to a result channel.

    ``exact``: results carry records; ``recent`` returns the outputs rendered since the last call. ``silent``: discard
    everything. ``response_started``: the client has the beginning of this stream.
    """

    whole = True

    def __init__(self, recent: Callable[[], list[Batch]], exact: bool):
        self.exact = exact
        self.response_started = False
        self.silent = False
        self.channel: Channel | None = None
        self._recent = recent
        self._watchers: set[Callable[[], None]] = set()
        self._gone = False
        self._head: tuple[int, list[tuple[str, str]]] | None = None  # status and headers of a complete answer

    @property
    def blocked(self) -> bool:
        """Whether the next write must wait."""
        return self.channel is not None and self.channel.blocked

    def abort(self) -> None:
        """End an answer that cannot be completed with an error."""
        if self.channel is not None and not self.silent:
            self.channel.fail(LOST)
        self.depart()

    def depart(self) -> None:
        """Discard the rest of the answer, and tell the watchers that the client is gone."""
        self._gone = self.silent = True
        for departed in tuple(self._watchers):
            departed()

    def retry(self, path: str, origin: Origin, first: Work) -> None:
        """End the answer for MindIE's coordinator with a body that continues the request on another instance."""
        if self.channel is not None and not self.silent:
            self.channel.retry(INSTANCE_PLANE.write_resumed(path, origin, first.token_ids, first.seed))
            self.silent = True

    def lose(self) -> None:
        """End the answer with an error. Parley's own coordinator resumes the request elsewhere from its records."""
        if self.channel is not None and not self.silent:
            self.channel.fail(LOST)
            self.silent = True

    def watch(self, departed: Callable[[], None]) -> bool:
        """Call ``departed`` once the client is gone. False if it already is."""
        self._watchers.add(departed)
        return not self._gone and (self.channel is None or self.channel.watch(departed))

    def unwatch(self, departed: Callable[[], None]) -> None:
        """Stop calling ``departed``."""
        self._watchers.discard(departed)
        if self.channel is not None:
            self.channel.unwatch(departed)

    async def send(self, message: Message) -> None:
        """Send one ASGI message. Raises ClientGone."""
        if self.channel is not None:
            try:
                await self.channel.drain()
            except Gone:
                raise ClientGone from None
        if message["type"] == "http.response.start":
            self.start(message["status"], message["headers"])
        else:
            self.part(message.get("body", b""), last=not message.get("more_body", False))

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Keep status and headers until the first data."""
        if not self.response_started:
            self._head = status, [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]

    def part(self, data: bytes, *, last: bool = False) -> bool:
        """Send data, and return whether more can be sent at once."""
        if self.silent or self.channel is None:
            return not self.blocked
        behind = b"" if last or not self.exact else record(self._recent())
        return self.channel.write(data, last=last, record=behind, head=None if self.response_started else self._head)


class Opening(Outlet):
    """Collects the first part of an answer for the answer to the coordinator's command.

    ``answer`` is called when the request continues on another instance or over the channel, or when the answer is
    complete before that. ``ready``: whether the answer may continue over the channel from now on.
    """

    def __init__(self, cycle: Cycle, order: Order, recent: Callable[[], list[Batch]], ready: Callable[[], bool]):
        super().__init__(recent, bool(order.client))
        self.stream = False
        self.answered = False
        self._cycle = cycle
        self._order = order
        self._ready = ready
        self._refusing = False  # the output is an error, not an answer
        self._output: list[bytes] = []

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return self._cycle.whole

    @property
    def blocked(self) -> bool:
        return super().blocked if self.answered else self._cycle.blocked

    def abort(self) -> None:
        if not self.answered:
            self._cycle.abort()
        super().abort()

    def retry(self, path: str, origin: Origin, first: Work) -> None:
        if self.answered:  # else the answer to the command says it
            super().retry(path, origin, first)

    def lose(self) -> None:
        if self.answered:
            super().lose()

    def watch(self, departed: Callable[[], None]) -> bool:
        self._watchers.add(departed)
        return self._cycle.watch(departed) and not self._gone

    def unwatch(self, departed: Callable[[], None]) -> None:
        super().unwatch(departed)
        self._cycle.unwatch(departed)

    async def send(self, message: Message) -> None:
        if self.answered and not self._refusing:
            await super().send(message)
        elif message["type"] == "http.response.start":
            self.start(message["status"], message["headers"])
        else:
            self.part(message.get("body", b""), last=not message.get("more_body", False))

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if not self.answered and status != 200:
            self.answered = self._refusing = True
            self._cycle.begin(status, headers)
        else:
            super().start(status, headers)

    def part(self, data: bytes, *, last: bool = False) -> bool:
        if self._refusing:
            return self._cycle.part(data, last=last)
        if self.answered:
            return super().part(data, last=last)
        self._output.append(data)
        if last or self._ready():
            self.answer(last=last)
        return not self.blocked

    def moved(self) -> None:
        """Switch to the channel if a complete answer has grown enough."""
        if not self.answered and self._ready():
            self.answer()

    def answer(self, *, last: bool = False) -> None:
        """Answer the coordinator's command: the request has ended, or continues after it."""
        told: dict[str, Any] = {"reqId": self._order.id, "isStream": self.stream, "isLastResp": last}
        if self.stream or last:
            told |= _text(b"".join(self._output), self.exact)
        if self.exact:
            told["records"] = b2a_base64(record(self._recent()), newline=False).decode()
            if self._head is not None:
                told["status"], told["headers"] = self._head
        self._output.clear()
        self.answered = True
        self.response_started = self.stream
        data = msgspec.json.encode(told)
        self._cycle.begin(200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))])
        self._cycle.part(data, last=True)
        for departed in self._watchers:
            self._cycle.unwatch(departed)
            if self.channel is not None and not self.channel.watch(departed):
                departed()


def _text(output: bytes, extended: bool) -> dict[str, str]:
    try:
        return {"output": output.decode()}
    except UnicodeDecodeError:
        if extended:
            return {"output": b2a_base64(output, newline=False).decode(), "encoding": "base64"}
        return {"output": output.decode("utf-8", "replace")}
