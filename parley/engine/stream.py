"""Output streams of requests in the API process: one is awaited, several are read together step by step.

Of the engine this module needs only its methods to cancel a request and to finish a beam search.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from parley.types import EngineOutput, EngineRequest

StepArrivals = list[tuple[int, list[EngineOutput]]]  # the new outputs of a step, each with the number of its stream
ArrivalConsumer = Callable[[StepArrivals], bool]


class StreamSource(Protocol):
    """The source of the outputs."""

    def cancel_stream(self, stream: OutputStream, index: int) -> None:
        """Cancel one choice of a stream, or (-1) all."""

    def finish_search(self, stream: OutputStream, reason: Literal["length", "cancel"]) -> None:
        """Finish a stream's beam search early, with the results so far."""


class OutputStream:
    """The outputs of one request, in order. A read returns everything that has arrived since the previous one."""

    def __init__(self, source: StreamSource, request: EngineRequest):
        self.request_id = request.id
        self.open_choices = set(range(request.n))  # choices whose last output has not arrived
        self._source = source
        self.unread_outputs: list[EngineOutput] = []
        self._waiter: asyncio.Future[bool] | None = None
        self._group: StreamGroup | None = None
        self._group_index = 0  # in the group
        self._touched_streams: dict[int, None] = {}  # of the group, which shares it to save a call per token

    def join_group(self, group: StreamGroup, number: int, touched_streams: dict[int, None]) -> None:
        """Join a group. ``touched_streams`` gets this stream's number with each first unread output."""
        self._group, self._group_index, self._touched_streams = group, number, touched_streams

    async def next_outputs(self) -> list[EngineOutput]:
        """Return all outputs that have arrived, at least one, or an empty list once every choice has ended.

        Only for a stream that is in no group.
        """
        while not self.unread_outputs:
            if not self.open_choices:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.drain_outputs()

    def drain_outputs(self) -> list[EngineOutput]:
        """Return the outputs that have arrived and were not read, without waiting."""
        outputs, self.unread_outputs = self.unread_outputs, []
        return outputs

    @property
    def has_unread(self) -> bool:
        """Whether outputs have arrived that were not read."""
        return bool(self.unread_outputs)

    @property
    def fully_read(self) -> bool:
        """Whether all outputs have been read."""
        return not self.open_choices and not self.unread_outputs

    def cancel_choice(self, index: int = -1) -> None:
        """Cancel one choice or (-1) all open ones. No further output of them is delivered."""
        cancelled = set(self.open_choices) if index < 0 else {index} & self.open_choices
        if not cancelled:
            return
        self.open_choices -= cancelled
        self.unread_outputs = [output for output in self.unread_outputs if output.index not in cancelled]
        if self._group is not None and not self.open_choices:
            self._group.end_stream(self._group_index)
        self._source.cancel_stream(self, -1 if not self.open_choices else index)
        self.wake_reader()

    def finish_beam_search(self, reason: Literal["length", "cancel"]) -> None:
        """Finish a beam search early; its results so far become its last outputs."""
        if self.open_choices:
            self._source.finish_search(self, reason)

    def add_output(self, output: EngineOutput) -> None:
        """Add an output; called by the engine, which then calls ``wake_reader``."""
        if output.index not in self.open_choices:
            return
        if not self.unread_outputs:
            self._touched_streams[self._group_index] = None
        self.unread_outputs.append(output)
        if output.finish_reason is not None:
            self.open_choices.discard(output.index)
            if self._group is not None and not self.open_choices:
                self._group.end_stream(self._group_index)

    def wake_reader(self) -> None:
        """Wake the reader; called by the engine after all outputs of a step were added."""
        if self._group is not None:
            self._group.wake_group()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)


class StreamGroup:
    """The streams of one request that are read together. A stream's number is its index in the sequence."""

    def __init__(self, streams: Sequence[OutputStream]):
        self._streams = streams
        self._open_streams = {number for number, stream in enumerate(streams) if stream.open_choices}
        # Streams with unread outputs, ordered by the first of them.
        self._touched_streams = {number: None for number, stream in enumerate(streams) if stream.has_unread}
        self._waiter: asyncio.Future[bool] | None = None
        self._consumer: ArrivalConsumer | None = None
        for number, stream in enumerate(streams):
            stream.join_group(self, number, self._touched_streams)

    @property
    def all_read(self) -> bool:
        """Whether all outputs of all streams have been read."""
        return not self._open_streams and not any(self._streams[number].has_unread for number in self._touched_streams)

    async def feed_outputs(self, consumer: ArrivalConsumer) -> bool:
        """Call ``consumer`` with the outputs of each step as they arrive, without waking the caller's task each time.

        Return False as soon as ``consumer`` does, True when every choice has ended. Raises its exceptions.
        """
        self._waiter, self._consumer = asyncio.get_running_loop().create_future(), consumer
        try:
            self.wake_group()
            return await self._waiter
        finally:
            self._waiter = self._consumer = None

    def end_stream(self, number: int) -> None:
        """Note that a stream gets no more outputs; called by the stream."""
        self._open_streams.discard(number)

    def wake_group(self) -> None:
        """Pass on the new outputs of all streams; called by one of the streams at the end of a step."""
        waiter, consumer = self._waiter, self._consumer
        if waiter is None or consumer is None or waiter.done():
            return
        wants_more = True
        arrived: StepArrivals = []
        for number in self._touched_streams:
            stream = self._streams[number]
            if stream.unread_outputs:  # a cancelled choice takes its outputs back
                arrived.append((number, stream.unread_outputs))
                stream.unread_outputs = []
        self._touched_streams.clear()
        if arrived:
            try:
                wants_more = consumer(arrived)
            except Exception as error:  # only this reader fails; other readers wait for the same step
                if not waiter.done():
                    waiter.set_exception(error)
                return
        if not (wants_more and self._open_streams) and not waiter.done():
            waiter.set_result(wants_more)
