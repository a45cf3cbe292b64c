"""Output streams of requests in the API process: one is awaited, several are read together step by step.

Of the engine this module needs only its methods to cancel a request and to finish a beam search.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from parley.types import Output, Work

Arrived = list[tuple[int, list[Output]]]  # the new outputs of a step, each with the number of its stream
Take = Callable[[Arrived], bool]


class Engine(Protocol):
    """The source of the outputs."""

    def cancelled(self, stream: Stream, index: int) -> None:
        """Cancel one choice of a stream, or (-1) all."""

    def concluded(self, stream: Stream, reason: Literal["length", "cancel"]) -> None:
        """Finish a stream's beam search early, with the results so far."""


class Stream:
    """The outputs of one request, in order. A read returns everything that has arrived since the previous one.

    ``on_pages_computed``, for a request with a lease, is called with the numbers of more full pages as they are
    computed, before the outputs of their step. Set it in the same turn of the event loop that submits the request.
    """

    def __init__(self, engine: Engine, work: Work):
        self.id = work.id
        self.open = set(range(work.n))  # choices whose last output has not arrived
        self.filled: Callable[[list[int]], None] | None = None
        self._engine = engine
        self._pending: list[Output] = []
        self._waiter: asyncio.Future[bool] | None = None
        self._group: StreamGroup | None = None
        self._number = 0  # in the group

    def join(self, group: StreamGroup, number: int) -> None:
        """Join a group; every output and the end of this stream are reported to it."""
        self._group, self._number = group, number

    async def next(self) -> list[Output]:
        """Return all outputs that have arrived, at least one, or an empty list once every choice has ended."""
        while not self._pending:
            if not self.open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.drain()

    def drain(self) -> list[Output]:
        """Return the outputs that have arrived and were not read, without waiting."""
        outputs, self._pending = self._pending, []
        return outputs

    @property
    def unread(self) -> bool:
        """Whether outputs have arrived that were not read."""
        return bool(self._pending)

    @property
    def ended(self) -> bool:
        """Whether all outputs have been read."""
        return not self.open and not self._pending

    def cancel(self, index: int = -1) -> None:
        """Cancel one choice or (-1) all open ones. No further output of them is delivered."""
        gone = set(self.open) if index < 0 else {index} & self.open
        if not gone:
            return
        self.open -= gone
        self._pending = [output for output in self._pending if output.index not in gone]
        if self._group is not None and not self.open:
            self._group.ended_one(self._number)
        self._engine.cancelled(self, -1 if not self.open else index)
        self.wake()

    def conclude(self, reason: Literal["length", "cancel"]) -> None:
        """Finish a beam search early; its results so far become its last outputs."""
        if self.open:
            self._engine.concluded(self, reason)

    def push(self, output: Output) -> None:
        """Add an output; called by the engine, which then calls ``wake_reader``."""
        if output.index not in self.open:
            return
        if output.finish is not None:
            self.open.discard(output.index)
        self._pending.append(output)
        if self._group is not None:
            self._group.touch(self._number)
            if not self.open:
                self._group.ended_one(self._number)

    def wake(self) -> None:
        """Wake the reader; called by the engine after all outputs of a step were added."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)
        if self._group is not None:
            self._group.wake()


class StreamGroup:
    """The streams of one request that are read together. A stream's number is its index in the sequence."""

    def __init__(self, streams: Sequence[Stream]):
        self._streams = streams
        self._open = {number for number, stream in enumerate(streams) if stream.open}
        # Streams with unread outputs, ordered by the first of them.
        self._touched = {number: None for number, stream in enumerate(streams) if stream.unread}
        self._waiter: asyncio.Future[bool] | None = None
        self._take: Take | None = None
        for number, stream in enumerate(streams):
            stream.join(self, number)

    @property
    def ended(self) -> bool:
        """Whether all outputs of all streams have been read."""
        return not self._open and not any(self._streams[number].unread for number in self._touched)

    async def feed(self, take: Take) -> bool:
        """Call ``consumer`` with the outputs of each step as they arrive, without waking the caller's task each time.

        Return False as soon as ``consumer`` does, True when every choice has ended. Raises its exceptions.
        """
        self._waiter, self._take = asyncio.get_running_loop().create_future(), take
        try:
            self.wake()
            return await self._waiter
        finally:
            self._waiter = self._take = None

    def touch(self, number: int) -> None:
        """Note that a stream has a new output; called by the stream."""
        self._touched[number] = None

    def ended_one(self, number: int) -> None:
        """Note that a stream gets no more outputs; called by the stream."""
        self._open.discard(number)

    def wake(self) -> None:
        """Pass on the new outputs of all streams; called by one of the streams at the end of a step."""
        waiter, take = self._waiter, self._take
        if waiter is None or take is None or waiter.done():
            return
        more = True
        if arrived := self._arrived():
            try:
                more = take(arrived)
            except Exception as error:  # only this reader fails; other readers wait for the same step
                if not waiter.done():
                    waiter.set_exception(error)
                return
        if not (more and self._open) and not waiter.done():
            waiter.set_result(more)

    def _arrived(self) -> Arrived:
        touched, self._touched = self._touched, {}
        return [(number, outputs) for number in touched if (outputs := self._streams[number].drain())]
