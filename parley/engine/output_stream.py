"""Output streams of requests in the API process. A group reads one stream, or several together, step by step.

This module needs only two methods of the engine: to cancel a request, and to finish a beam search (``StreamSource``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from parley.types import EngineOutput, EngineRequest

StepArrivals = dict[int, list[EngineOutput]]  # the new outputs of a step or several, by the number of their stream
ArrivalConsumer = Callable[[StepArrivals], bool]


class StreamSource(Protocol):
    """The source of the outputs."""

    def cancel_stream(self, stream: OutputStream, index: int) -> None:
        """Cancel one choice of a stream, or (-1) all."""

    def finish_search(self, stream: OutputStream, reason: Literal["length", "cancel"]) -> None:
        """Finish a stream's beam search early, with the results so far."""


def split_steps(arrived: StepArrivals) -> list[StepArrivals]:
    """Divide outputs by steps: in each, a choice has one output at most."""
    steps: list[StepArrivals] = []
    for number, outputs in arrived.items():
        choice_steps: dict[int, int] = {}  # the step of each choice's next output
        for output in outputs:
            step_number = choice_steps.get(output.index, 0)
            choice_steps[output.index] = step_number + 1
            if step_number == len(steps):
                steps.append({})
            steps[step_number].setdefault(number, []).append(output)
    return steps


class StreamGroup:
    """Reads the outputs of its streams together. Streams are numbered from 0 in the order of joining.

    Streams refer to their group, and the group does not refer to them: no cycle is left to the garbage collector.
    """

    def __init__(self) -> None:
        self.unread_outputs: StepArrivals = {}  # outputs that have arrived and were not read
        self._stream_count = self._open_streams = 0
        self._waiter: asyncio.Future[bool] | None = None
        self._consumer: ArrivalConsumer | None = None

    @property
    def all_read(self) -> bool:
        """Whether all outputs of all streams have been read."""
        return not self._open_streams and not self.unread_outputs

    async def feed_outputs(self, consumer: ArrivalConsumer) -> bool:
        """Call ``consumer`` with the outputs of each step as they arrive, without waking the caller's task each time.

        Return False as soon as ``consumer`` does, True when every choice has ended. Raises its exceptions.
        """
        self._waiter, self._consumer = asyncio.get_running_loop().create_future(), consumer
        try:
            self.wake_reader()
            return await self._waiter
        finally:
            self._waiter = self._consumer = None

    def add_stream(self) -> int:
        """Count a stream that joins, and return its number; called by the stream."""
        self._stream_count += 1
        self._open_streams += 1
        return self._stream_count - 1

    def end_stream(self) -> None:
        """Note that a stream gets no more outputs; called by the stream."""
        self._open_streams -= 1

    def drop_unread(self, number: int, index: int) -> None:
        """Drop the unread outputs of a cancelled choice or (-1) of all choices; called by their stream."""
        other_outputs = [output for output in self.unread_outputs.pop(number, ()) if -1 < index != output.index]
        if other_outputs:
            self.unread_outputs[number] = other_outputs

    def wake_reader(self) -> None:
        """Pass on the unread outputs; called by the engine after all outputs of a step were added."""
        waiter, consumer = self._waiter, self._consumer
        if waiter is None or consumer is None or waiter.done():
            return
        wants_more = True
        if self.unread_outputs:
            arrived, self.unread_outputs = self.unread_outputs, {}
            try:
                wants_more = consumer(arrived)
            except Exception as error:  # only this reader fails; other readers wait for the same step
                if not waiter.done():
                    waiter.set_exception(error)
                return
        if not (wants_more and self._open_streams) and not waiter.done():
            waiter.set_result(wants_more)


class OutputStream:
    """The outputs of one request, in order, which its group reads."""

    def __init__(self, source: StreamSource, request: EngineRequest, group: StreamGroup):
        self.request_id = request.id
        self.open_choices = set(range(request.n))  # choices whose last output has not arrived
        self.group = group
        self._number = group.add_stream()
        self._source = source

    async def next_outputs(self) -> list[EngineOutput]:
        """Return all outputs that have arrived, at least one, or an empty list once every choice has ended.

        Only for a stream that is alone in its group.
        """
        outputs: list[EngineOutput] = []

        def keep_outputs(arrived: StepArrivals) -> bool:
            outputs.extend(arrived[self._number])
            return False

        await self.group.feed_outputs(keep_outputs)
        return outputs + self.group.unread_outputs.pop(self._number, [])

    def cancel_choice(self, index: int = -1) -> None:
        """Cancel one choice or (-1) all. No further output of them is delivered, also if they have just ended."""
        self.group.drop_unread(self._number, index)
        cancelled = set(self.open_choices) if index < 0 else {index} & self.open_choices
        if not cancelled:
            return
        self.open_choices -= cancelled
        if not self.open_choices:
            self.group.end_stream()
        self._source.cancel_stream(self, -1 if not self.open_choices else index)
        self.group.wake_reader()

    def finish_beam_search(self, reason: Literal["length", "cancel"]) -> None:
        """Finish a beam search early; its results so far become its last outputs."""
        if self.open_choices:
            self._source.finish_search(self, reason)

    def add_output(self, output: EngineOutput) -> None:
        """Add an output; called by the engine, which then wakes the group's reader."""
        if output.index not in self.open_choices:
            return
        self.group.unread_outputs.setdefault(self._number, []).append(output)
        if output.finish_reason is not None:
            self.open_choices.discard(output.index)
            if not self.open_choices:
                self.group.end_stream()
