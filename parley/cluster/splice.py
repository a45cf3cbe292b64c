"""One answer for a client, made of P's part and D's results, in as many attempts as it takes.

P's part goes first; what D sends before that waits. The answer goes on where an attempt broke: what stands behind all
that the client has got is kept, for whoever computes the rest. Knows the frames of an answer, and neither how instances
are chosen nor how they are asked.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable, Coroutine
from typing import Any

from parley.cluster import answers, words
from parley.cluster.answers import BadAnswer, First
from parley.cluster.caller import Caller, returned
from parley.cluster.outflow import Outflow
from parley.cluster.upstream import LARGEST, Whole
from parley.instance import handover
from parley.instance.frames import Frame

EARLY = 16 << 20  # bytes of D's that wait for P's answer


class Cut(Exception):
    """D's results have ended before the answer. ``over``: D has said so, and does nothing more for it; ``final``:
    another attempt would end alike."""

    def __init__(self, text: str = words.D_FAILED, *, over: bool = False, final: bool = False):
        super().__init__(text)
        self.text = text
        self.over, self.final = over, final


class Recompute(Exception):
    """D wants the request to begin anew with another body."""

    def __init__(self, body: bytes):
        super().__init__()
        self.body = body


class Splice:
    """``sent``: the client has got a part of its answer, or will; ``exact``: it is known what stands behind all of it.

    ``asking``: P's answer, while it is waited for. ``done``: of this attempt; it raises Cut, Recompute.
    """

    __slots__ = ("_caller", "_early", "_early_size", "_flowing", "_head", "_out", "_parts", "_records", "_size",
                 "_status", "_stream", "_token", "asking", "done", "exact", "sent")  # fmt: skip

    def __init__(self, caller: Caller):
        self.sent, self.exact = False, True
        self._caller, self._out = caller, Outflow(caller)
        self._records: list[bytes] = []  # of what the client has got, in base64

    def anew(self, token: Callable[[], None]) -> None:
        """Another attempt begins. ``token`` is to be told of each part that comes."""
        if not self.sent:
            self._records, self.exact = [], True
        self.asking: Whole | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._token = token
        self._stream = False
        self._flowing = False  # parts of a stream go on to the client as they are
        self._status, self._head = 200, answers.WHOLE
        self._early: list[Frame] | None = []  # frames that wait for P's answer
        self._early_size = 0
        self._parts: list[bytes] = []  # of an answer in one piece
        self._size = 0
        self._out.hold = None

    def given(self) -> bytes:
        """What stands behind all that the client has got; none if that is nothing. Raises Cut."""
        if not self.sent or not self._records:
            return b""
        try:
            return handover.join([binascii.a2b_base64(each, strict_mode=True) for each in self._records])
        except binascii.Error:
            raise Cut(final=True) from None

    def begin(self, first: First, exact: bool, hold: Callable[[bool], Coroutine[Any, Any, None]]) -> bool:
        """Take P's part of the answer, and what D sent before it. Was P's all?

        ``exact``: D says what stands behind its results; only then ``hold`` can have it wait.
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
        """Has D given all of an answer in one piece before P has answered?"""
        return self._early is None

    def finish(self, data: bytes) -> None:
        """The last part of the stream."""
        self._start()
        self._out.finish(data)

    async def settle(self) -> None:
        """Wait until a slow client has read the rest of an answer that is complete, or stop sending it."""
        await self._out.settle()

    # -- D's results, as they come

    def take(self, frame: Frame) -> None:
        """A frame of D's."""
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
                self._status, self._head = answers.head(frame.payload)
            except BadAnswer:
                self._fail(Cut())
        elif kind == "error":
            self._fail(Cut(frame.payload.decode("utf-8", "replace"), over=True))
        elif kind == "retry":
            self._fail(Recompute(frame.payload))

    def lost(self, reason: str) -> None:
        """D's results are."""
        self._fail(Cut())
        if self.asking is not None:
            self.asking.give_up(reason)  # what P answers is of no use without D

    def _wait(self, frame: Frame) -> None:
        """Keep a frame until P has answered."""
        assert self._early is not None
        self._early.append(frame)
        self._early_size += len(frame.payload) + len(frame.record or b"")
        if self._early_size > EARLY:
            self._fail(Cut())
        elif frame.kind == "lastData" and any(each.kind == "head" for each in self._early):
            self._overtake()

    def _overtake(self) -> None:
        """D has sent an answer in one piece, which has nothing of P's: it goes out, whatever becomes of P."""
        self._flush()
        if self.asking is not None:
            self.asking.give_up("The answer is complete.")

    def _flush(self) -> None:
        """Take what D sent before P's answer."""
        early, self._early = self._early or (), None
        for frame in early:
            self.take(frame)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # it may be that nobody waits for it yet

    def _put(self, data: bytes) -> None:
        """A part of the stream."""
        if data:
            self._start()
            self._out.put(data)
            self._flowing = self.exact

    def _gather(self, data: bytes) -> None:
        """A part of an answer in one piece."""
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
        """A part of the stream follows; its head, if nothing was sent yet."""
        self.sent = True
        if not self._caller.status:
            self._caller.begin(self._status, self._head)

    def _mended(self, payload: bytes) -> bytes:
        """A part without the opening that the client has already."""
        return b"" if self.sent and not self.exact and answers.opening(payload) else payload

    def _closed(self, payload: bytes) -> bytes:
        return answers.closed(payload, self._caller.scope["path"])
