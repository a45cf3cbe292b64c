"""Where the results of one request go, on their way to its coordinator. Knows frames, and nothing of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from parley.disagg.wire import result_frames

Head = tuple[int, list[tuple[str, str]]]


class Client(Protocol):
    """The coordinator that it is. ``exact``: it counts frames, and knows ours; ``full``: too much waits for it."""

    exact: bool
    full: bool

    def put(self, made: list[bytes]) -> None:
        """Send these frames."""

    def end(self, channel: Channel) -> None:
        """Its id is free again."""


class Gone(Exception):
    """The coordinator is: it has not come back, or has forgotten its requests."""


class Channel:
    """Where the results of one request go. ``recall`` makes the request continue on another instance.

    ``write`` never waits, and says whether another may follow at once; if not, ``drain`` waits for that. ``over``: the
    last frame was written, or is held back. When the coordinator is gone, those who ``watch`` are called, and nothing
    that is written goes anywhere.
    """

    def __init__(self, client: Client, id: str, recall: Callable[[], None] = lambda: None):
        self.id = id
        self.paused = False
        self.gone = False
        self.recall = recall
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
        made = result_frames.results(self.id, payload, last=last, exact=exact)
        if exact and record:
            made.insert(0, result_frames.record(self.id, record))
        if exact and head is not None:
            made.insert(0, result_frames.head(self.id, *head))
        return self._put(made, last)

    def fail(self, text: str) -> None:
        """Send an error: it is the request's end."""
        self._put([result_frames.error(self.id, text)], last=True)

    def retry(self, body: bytes) -> None:
        """Send a body with which the request goes on elsewhere: it ends here."""
        self._put([result_frames.retry(self.id, body)], last=True)

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
