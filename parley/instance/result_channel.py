"""The result channel of one request, on the way to its coordinator. Knows frames, but no connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from parley.disagg.wire import result_frames

Head = tuple[int, list[tuple[str, str]]]


class Client(Protocol):
    """The coordinator of a channel. ``exact``: it numbers frames and knows native ones; ``full``: its queue is full."""

    exact: bool
    full: bool

    def put(self, made: list[bytes]) -> None:
        """Queue frames for sending."""

    def end(self, channel: Channel) -> None:
        """Forget a channel; its id is free again."""


class Gone(Exception):
    """The coordinator is gone: it did not reconnect, or has lost its requests."""


class Channel:
    """Results of one request. ``recall`` makes the request continue on another instance.

    ``write`` never waits; it returns whether another write may follow at once. If not, ``drain`` waits for that.
    ``over``: the last frame was written, possibly while paused. When the coordinator is gone, the functions passed to
    ``watch`` are called, and further writes are discarded.
    """

    def __init__(self, client: Client, id: str, recall: Callable[[], None] = lambda: None):
        self.id = id
        self.paused = False
        self.gone = False
        self.recall = recall
        self._client = client
        self._held: list[bytes] = []  # frames written while paused
        self.over = False
        self._watchers: set[Callable[[], None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def write(self, payload: bytes, *, last: bool = False, record: bytes = b"", head: Head | None = None) -> bool:
        """Send a result. ``last``: it is the last one of the request.

        ``record``: the encoded outputs that it was rendered from. ``head``: status and headers of a complete answer.
        Both are sent only to coordinators with a name.
        """
        exact = self._client.exact
        made = result_frames.results(self.id, payload, last=last, exact=exact)
        if exact and record:
            made.insert(0, result_frames.record(self.id, record))
        if exact and head is not None:
            made.insert(0, result_frames.head(self.id, *head))
        return self._put(made, last)

    def fail(self, text: str) -> None:
        """Send an error, which ends the request."""
        self._put([result_frames.error(self.id, text)], last=True)

    def retry(self, body: bytes) -> None:
        """Send a body that continues the request on another instance. The request ends here."""
        self._put([result_frames.retry(self.id, body)], last=True)

    @property
    def blocked(self) -> bool:
        """Whether the next write must wait."""
        return not self._flowing.is_set()

    async def drain(self) -> None:
        """Wait until more may be written. Raises CoordinatorGone."""
        await self._flowing.wait()
        if self.gone:
            raise Gone

    def watch(self, departed: Callable[[], None]) -> bool:
        """Call ``departed`` once the coordinator is gone. False if it already is."""
        self._watchers.add(departed)
        return not self.gone

    def unwatch(self, departed: Callable[[], None]) -> None:
        """Stop calling ``departed``."""
        self._watchers.discard(departed)

    def close(self) -> None:
        """Close the channel after the request ended in any way; its id is free again. The last frame is still sent."""
        if self.over and self.paused:
            return  # until it is resumed
        self._client.end(self)
        self._held.clear()

    def pause(self, on: bool) -> None:
        """Hold frames back, or send the held ones and continue."""
        self.paused = on
        if not on and self._held:
            held, self._held = self._held, []
            self._client.put(held)
        if not on and self.over:
            self.close()
        self.settle()

    def settle(self) -> None:
        """Update whether more may be written."""
        if self.gone or not (self.paused or self._client.full):
            self._flowing.set()
        else:
            self._flowing.clear()

    def lose(self) -> None:
        """Mark the coordinator as gone."""
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
