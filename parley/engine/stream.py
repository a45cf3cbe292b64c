"""The outputs of one work, as they are read in the API process: by waiting for them, or by being fed.

Knows one work, and of its engine only that it can be told of cancels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from parley.types import Output, Work

Take = Callable[[list[Output]], bool]


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
        self._take: Take | None = None

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
        outputs, self._pending = self._pending, []
        return outputs

    async def feed(self, take: Take) -> bool:
        """Let ``take`` have the outputs of each step when they arrive, without waking the caller's task for them.

        False as soon as it returned False, True when every choice has ended. Raises what it raises.
        """
        self._waiter, self._take = asyncio.get_running_loop().create_future(), take
        try:
            self.wake()
            return await self._waiter
        finally:
            self._waiter = self._take = None

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

    def wake(self) -> None:
        """The engine: whoever reads is to have what has come."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._take is None:
            waiter.set_result(True)
            return
        more = True
        if self._pending:
            outputs, self._pending = self._pending, []
            try:
                more = self._take(outputs)
            except Exception as error:  # of one reader; others wait for the same step
                if not waiter.done():
                    waiter.set_exception(error)
                return
        if not (more and self.open) and not waiter.done():
            waiter.set_result(more)
