"""The stream merge: combines P's part and D's results into one answer for the client, over any number of attempts.

P's part is sent first; frames that D sends earlier are buffered. After a failed attempt the answer continues where it
broke: the engine outputs of the part that the client has are kept, for the instance that computes the rest. Knows the
frames of an answer, and not how instances are scheduled or asked.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable, Coroutine
from typing import Any

from parley.coordinator import refusals
from parley.coordinator.proxy import prefill_answer
from parley.coordinator.proxy.backpressure import Outflow
from parley.coordinator.proxy.client import Caller, returned
from parley.coordinator.proxy.http_client import LARGEST, Whole
from parley.coordinator.proxy.prefill_answer import BadAnswer, First
from parley.disagg.wire import handover
from parley.disagg.wire.result_frames import Frame

EARLY = 16 << 20  # bytes of D's frames that are buffered until P answers


class Cut(Exception):
    """D's results ended before the answer was complete.

    ``decode_stopped``: D reported the end, and has stopped computing; ``final``: another attempt would end in the same
    way.
    """

    def __init__(self, text: str = refusals.D_FAILED, *, over: bool = False, final: bool = False):
        super().__init__(text)
        self.text = text
        self.over, self.final = over, final


class Recompute(Exception):
    """D asks to restart the request with another body."""

    def __init__(self, body: bytes):
        super().__init__()
        self.body = body


class Splice:
    """The answer to one client.

    ``sent``: the client has received a part of the answer, or is about to; ``exact``: the engine outputs of all of it
    are known, so that it can be resumed. ``asking``: the pending answer of P. ``done``: the future of this attempt,
    which raises ResultsCut or RecomputeRequested.
    """

    __slots__ = ("_caller", "_early", "_early_size", "_flowing", "_head", "_out", "_parts", "_records", "_size",
                 "_status", "_stream", "_token", "asking", "done", "exact", "sent")  # fmt: skip

    def __init__(self, caller: Caller):
        self.sent, self.exact = False, True
        self._caller, self._out = caller, Outflow(caller)
        self._records: list[bytes] = []  # engine outputs of the part that the client has, in base64

    def anew(self, token: Callable[[], None]) -> None:
        """Start another attempt. ``on_token`` is called for each part that arrives."""
        if not self.sent:
            self._records, self.exact = [], True
        self.asking: Whole | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._token = token
        self._stream = False
        self._flowing = False  # parts of the stream are passed on to the client unchanged
        self._status, self._head = 200, prefill_answer.WHOLE
        self._early: list[Frame] | None = []  # frames buffered until P answers; None after that
        self._early_size = 0
        self._parts: list[bytes] = []  # of an answer in one piece
        self._size = 0
        self._out.hold = None

    def given(self) -> bytes:
        """Return the engine outputs of the part that the client has; empty if it has none. Raises ResultsCut."""
        if not self.sent or not self._records:
            return b""
        try:
            return handover.join([binascii.a2b_base64(each, strict_mode=True) for each in self._records])
        except binascii.Error:
            raise Cut(final=True) from None

    def begin(self, first: First, exact: bool, hold: Callable[[bool], Coroutine[Any, Any, None]]) -> bool:
        """Accept P's part of the answer, then D's buffered frames; True if P's part is the whole answer.

        ``native``: D sends the engine outputs of its results; ``pause_sender`` can pause D only in that case.
        """
        self.asking = None
        self.exact = self.exact and first.exact and exact
        self._out.hold = hold if self.exact else None
        self._stream = first.stream
        if not self._caller.status:
            self._status, self._head = first.status, returned(first.headers)
        if first.record:
            self._records.append(first.record)
        if not first.stream:
            if first.last:
                self._caller.whole(first.status, first.headers, first.output)
        else:
            output = first.output if first.exact else self._mended(first.output)
            if first.last:
                self.finish(output if first.exact else self._closed(output))
            else:
                self._put(output)
        if not first.last:
            self._flush()
        return first.last

    @property
    def overtaken(self) -> bool:
        """Whether D has sent a complete answer in one piece before P answered."""
        return self._early is None

    def finish(self, data: bytes) -> None:
        """Send the last part of the stream."""
        self._start()
        self._out.finish(data)

    async def settle(self) -> None:
        """Wait until a slow client has read the rest of a complete answer; stop sending an incomplete one."""
        await self._out.settle()

    # -- D's results, as they arrive

    def take(self, frame: Frame) -> None:
        """Handle a frame from D."""
        if self._early is not None:
            self._wait(frame)
            return
        if self.done.done():
            return
        kind = frame.kind
        if kind == "data" or kind == "lastData":
            self._token()
            if frame.record is not None:
                self._records.append(frame.record)
            if kind == "lastData":
                self._end(frame.payload)
            elif self._flowing:
                self._out.put(frame.payload)
            elif self._stream:
                self._put(self._mended(frame.payload))
            else:
                self._gather(frame.payload)
        elif kind == "head":
            try:
                self._status, self._head = prefill_answer.head(frame.payload)
            except BadAnswer:
                self._fail(Cut())
        elif kind == "error":
            self._fail(Cut(frame.payload.decode("utf-8", "replace"), over=True))
        elif kind == "retry":
            self._fail(Recompute(frame.payload))

    def lost(self, reason: str) -> None:
        """Fail the attempt: the stream of D's results was lost."""
        self._fail(Cut())
        if self.asking is not None:
            self.asking.give_up(reason)  # P's answer is useless without D

    def _wait(self, frame: Frame) -> None:
        """Buffer a frame until P answers."""
        assert self._early is not None
        self._early.append(frame)
        self._early_size += len(frame.payload) + len(frame.record or b"")
        if self._early_size > EARLY:
            self._fail(Cut())
        elif frame.kind == "lastData" and any(each.kind == "head" for each in self._early):
            self._overtake()

    def _overtake(self) -> None:
        """Send D's complete answer in one piece, which contains nothing from P, without waiting for P."""
        self._flush()
        if self.asking is not None:
            self.asking.give_up("The answer is complete.")

    def _flush(self) -> None:
        """Handle the frames that D sent before P answered."""
        early, self._early = self._early or (), None
        for frame in early:
            self.take(frame)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # mark it as retrieved: the future may not be awaited yet

    def _put(self, data: bytes) -> None:
        """Send a part of the stream."""
        if data:
            self._start()
            self._out.put(data)
            self._flowing = self.exact

    def _gather(self, data: bytes) -> None:
        """Collect a part of an answer in one piece."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > LARGEST:
            self._fail(Cut(final=True))

    def _end(self, payload: bytes) -> None:
        if self._stream:
            self.finish(payload if self.exact else self._closed(self._mended(payload)))
        else:
            self._gather(payload)
            self.sent = True
            self._caller.whole(self._status, self._head, b"".join(self._parts))
        if not self.done.done():
            self.done.set_result(None)

    def _start(self) -> None:
        """Mark the answer as sent, and send its head before the first part."""
        self.sent = True
        if not self._caller.status:
            self._caller.begin(self._status, self._head)

    def _mended(self, payload: bytes) -> bytes:
        """Return a part without a stream opening that the client already has."""
        return b"" if self.sent and not self.exact and prefill_answer.opening(payload) else payload

    def _closed(self, payload: bytes) -> bytes:
        return prefill_answer.closed(payload, self._caller.scope["path"])
