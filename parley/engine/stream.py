"""The outputs of works, as the API process reads them: those of one by waiting, those of several step by step.

Knows of the engine only that it takes cancels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from parley.types import Output, Work

Arrived = list[tuple[int, list[Output]]]  # of a step: the number of a stream, and the outputs that it has got
Take = Callable[[Arrived], bool]


class Engine(Protocol):
    """Where the outputs come from."""

    def cancelled(self, stream: Stream, index: int) -> None:
        """A choice is not wanted any more."""

    def concluded(self, stream: Stream, reason: Literal["length", "cancel"]) -> None:
        """All choices are to end with what there is."""


class Stream:
    """The outputs of one work, in order. Reading drains whatever has arrived since the last read.

    ``filled``, of a work with a lease, is called with the numbers of more whole pages as they are computed, before the
    outputs of their step. It is to be set in the turn of the event loop that submits the work.
    """

    def __init__(self, engine: Engine, work: Work):
        self.id = work.id
        self.open = set(range(work.n))  # choices whose last output has not been seen
        self.filled: Callable[[list[int]], None] | None = None
        self._engine = engine
        self._pending: list[Output] = []
        self._waiter: asyncio.Future[bool] | None = None
        self._group: StreamGroup | None = None
        self._number = 0  # in its group

    def join(self, group: StreamGroup, number: int) -> None:
        """Belong to a group, and report every output and the end to it."""
        self._group, self._number = group, number

    async def next(self) -> list[Output]:
        """All outputs that have arrived, at least one; an empty list once every choice has ended."""
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
        """All outputs that have arrived and were not read."""
        outputs, self._pending = self._pending, []
        return outputs

    @property
    def unread(self) -> bool:
        """Whether outputs have arrived that were not read."""
        return bool(self._pending)

    @property
    def ended(self) -> bool:
        """Have all outputs been read?"""
        return not self.open and not self._pending

    def cancel(self, index: int = -1) -> None:
        """Stop one choice or (-1) all that are still open. No output of them is delivered any more."""
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
        """Have a search give what it has found by now, as its last outputs."""
        if self.open:
            self._engine.concluded(self, reason)

    def push(self, output: Output) -> None:
        """The engine: an output has come. ``wake`` follows."""
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
        """The engine: the reader may have all outputs now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)
        if self._group is not None:
            self._group.wake()


class StreamGroup:
    """Streams that are read together: those of one request. A stream's number is its place among them."""

    def __init__(self, streams: Sequence[Stream]):
        self._streams = streams
        self._open = {number for number, stream in enumerate(streams) if stream.open}
        # Streams with outputs that were not read, ordered by their first one.
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
        """Give ``take`` the outputs of each step when they arrive, without waking the caller's task for them.

        Returns False as soon as ``take`` does, True when every choice has ended. Raises what ``take`` raises.
        """
        self._waiter, self._take = asyncio.get_running_loop().create_future(), take
        try:
            self.wake()
            return await self._waiter
        finally:
            self._waiter = self._take = None

    def touch(self, number: int) -> None:
        """A stream: it has got an output."""
        self._touched[number] = None

    def ended_one(self, number: int) -> None:
        """A stream: nothing more comes."""
        self._open.discard(number)

    def wake(self) -> None:
        """A stream: the outputs of a step have arrived, of this stream and of all others."""
        waiter, take = self._waiter, self._take
        if waiter is None or take is None or waiter.done():
            return
        more = True
        if arrived := self._arrived():
            try:
                more = take(arrived)
            except Exception as error:  # of one reader; others wait for the same step
                if not waiter.done():
                    waiter.set_exception(error)
                return
        if not (more and self._open) and not waiter.done():
            waiter.set_result(more)

    def _arrived(self) -> Arrived:
        touched, self._touched = self._touched, {}
        return [(number, outputs) for number in touched if (outputs := self._streams[number].drain())]
