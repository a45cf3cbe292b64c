"""The stream merge: combines P's part and D's results into one answer for the client, over any number of attempts.

P's part is sent first; frames that D sends earlier are buffered. After a failed attempt the answer continues where it
broke: the engine outputs of the part that the client has are kept, for the instance that computes the rest. Knows the
frames of an answer, and not how instances are scheduled or asked.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable

import msgspec

from parley.coordinator import refusals
from parley.coordinator.proxy.downstream.backpressure import BackpressureBuffer, PauseSender
from parley.coordinator.proxy.downstream.client import DownstreamClient, returned_headers
from parley.coordinator.proxy.generation import prefill_answer
from parley.coordinator.proxy.generation.prefill_answer import BadPrefillAnswer, PrefillAnswer
from parley.disagg.wire import handover
from parley.disagg.wire.result_frames import ResultFrame
from parley.disagg.wire.vouched_client import UsedTokens, read_used_tokens
from parley.errors import MalformedBody
from parley.web.http_client import MAX_COLLECTED_BYTES, CollectedAnswer

MAX_EARLY_BYTES = 16 << 20  # bytes of D's frames that are buffered until P answers


class ResultsCut(Exception):
    """D's results ended before the answer was complete.

    ``decode_stopped``: D reported the end, and has stopped computing; ``final``: another attempt would end in the same
    way.
    """

    def __init__(self, text: str = refusals.TEXTS.decode_failed, *, decode_stopped: bool = False, final: bool = False):
        super().__init__(text)
        self.text = text
        self.decode_stopped, self.final = decode_stopped, final


class RecomputeRequested(Exception):
    """D asks to restart the request with another body."""

    def __init__(self, body: bytes):
        super().__init__()
        self.body = body


class StreamMerge:
    """The answer to one client.

    * ``sent``: the client has received a part of the answer, or is about to.
    * ``answered``: the client has received the whole answer.
    * ``resumable``: the engine outputs of what was sent are known, so that another instance can continue.
    * ``pending_prefill``: the answer of the prefill instance, while it is awaited.
    * ``attempt_done``: the future of this attempt, which raises ResultsCut or RecomputeRequested.
    * ``part_count``: number of parts of this attempt that came from the decode instance.
    * ``last_part_at``: when the last of them came, in seconds of ``clock``.
    """

    __slots__ = (
        "_answer_headers",
        "_client",
        "_clock",
        "_collected_bytes",
        "_collected_parts",
        "_early_bytes",
        "_early_frames",
        "_is_stream",
        "_on_first_part",
        "_out",
        "_output_records",
        "_passes_through",
        "_record_bytes",
        "_status",
        "_used_is_final",
        "_used_tokens",
        "answered",
        "attempt_done",
        "last_part_at",
        "part_count",
        "pending_prefill",
        "resumable",
        "sent",
    )  # fmt: skip

    def __init__(self, client: DownstreamClient, clock: Callable[[], float]):
        self.sent, self.answered, self.resumable = False, False, True
        self._clock = clock
        self._client, self._out = client, BackpressureBuffer(client)
        self._output_records: list[bytes] = []  # engine outputs of the part that the client has, in base64
        self._record_bytes = 0
        self._used_tokens: UsedTokens | None = None  # the last usage that an instance reported
        self._used_is_final = False

    def begin_attempt(self, on_first_part: Callable[[], None]) -> None:
        """Start another attempt. ``on_first_part`` is called when D's first part arrives."""
        if not self.sent:
            self._output_records, self._record_bytes, self.resumable = [], 0, True
        self.pending_prefill: CollectedAnswer | None = None
        self.attempt_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_first_part = on_first_part
        self.part_count, self.last_part_at = 0, 0.0
        self._is_stream = False
        self._passes_through = False  # parts of the stream are passed on to the client unchanged
        self._status, self._answer_headers = 200, prefill_answer.JSON_HEADERS
        self._early_frames: list[ResultFrame] | None = []  # frames buffered until P answers; None after that
        self._early_bytes = 0
        self._collected_parts: list[bytes] = []  # the parts of an answer in one piece
        self._collected_bytes = 0
        self._used_is_final = False
        self._out.change_sender(None)

    @property
    def used_tokens(self) -> UsedTokens | None:
        """The request's token usage, if this coordinator counts it; None if it was not accepted. An answer that was
        cut off counts the tokens that arrived."""
        used_tokens = self._used_tokens
        if used_tokens is None or self._used_is_final:
            return used_tokens
        try:
            records = [binascii.a2b_base64(text, strict_mode=True) for text in self._output_records]
            return msgspec.structs.replace(used_tokens, output_tokens=handover.count_output_tokens(records))
        except (binascii.Error, MalformedBody):
            return used_tokens

    def prior_outputs(self) -> bytes:
        """Return the engine outputs of the part that the client has; empty if it has none. Raises ResultsCut."""
        if not self.sent or not self._output_records:
            return b""
        try:
            return handover.join_records([binascii.a2b_base64(text, strict_mode=True) for text in self._output_records])
        except binascii.Error:
            raise ResultsCut(final=True) from None

    def take_prefill_answer(self, answer: PrefillAnswer, native: bool, pause_sender: PauseSender) -> bool:
        """Accept P's part of the answer, then D's buffered frames; True if P's part is the whole answer.

        ``native``: D sends the engine outputs of its results; ``pause_sender`` can pause D only in that case.
        """
        self.pending_prefill = None
        self.resumable = self.resumable and answer.native and native
        self._out.change_sender(pause_sender if self.resumable else None)
        self._is_stream = answer.is_stream
        if not self._client.status:
            self._status, self._answer_headers = answer.status, returned_headers(answer.headers)
        if answer.record:
            self._keep_record(answer.record)
        if answer.used_tokens is not None and not self._used_is_final:
            self._used_tokens, self._used_is_final = answer.used_tokens, answer.is_final
        if not answer.is_stream:
            if answer.is_final:
                self._client.send_complete(answer.status, answer.headers, answer.output_bytes)
        else:
            output = answer.output_bytes if answer.native else self._without_opening(answer.output_bytes)
            if answer.is_final:
                self.finish_merge(output if answer.native else self._with_done_mark(output))
            else:
                self._send_stream_part(output)
        if not answer.is_final:
            self._flush_early()
        return answer.is_final

    @property
    def decode_finished_first(self) -> bool:
        """Whether D has sent a complete answer in one piece before P answered."""
        return self._early_frames is None

    def finish_merge(self, data: bytes) -> None:
        """Send the last part of the stream."""
        self._start_stream()
        self.answered = True
        self._out.send_last_part(data)

    async def wait_for_client(self) -> None:
        """Wait until a slow client has read the rest of a complete answer; stop sending an incomplete one."""
        await self._out.wait_until_read()

    # -- D's results, as they arrive

    def take_frame(self, frame: ResultFrame) -> None:
        """Handle a frame from D."""
        kind = frame.kind
        if self._passes_through and kind == "data":  # nearly every frame
            self.part_count += 1
            self.last_part_at = self._clock()
            if frame.record is not None:
                self._keep_record(frame.record)
            self._out.send_part(frame.payload)
            return
        if self._early_frames is not None:
            self._buffer_frame(frame)
            return
        if self.attempt_done.done():
            return
        if kind == "data" or kind == "lastData":
            self._take_part(frame)
        elif kind == "head":
            try:
                self._status, self._answer_headers = prefill_answer.parse_answer_head(frame.payload)
            except BadPrefillAnswer:
                self._fail_attempt(ResultsCut())
        elif kind == "used":
            self._used_tokens, self._used_is_final = read_used_tokens(frame.payload), True
        elif kind == "error":
            self._fail_attempt(ResultsCut(frame.payload.decode("utf-8", "replace"), decode_stopped=True))
        elif kind == "retry":
            self._fail_attempt(RecomputeRequested(frame.payload))

    def _take_part(self, frame: ResultFrame) -> None:
        """Handle a part of the answer."""
        if not self.part_count:
            self._on_first_part()
        self.part_count += 1
        self.last_part_at = self._clock()
        if frame.record is not None:
            self._keep_record(frame.record)
        if frame.kind == "lastData":
            self._finish_results(frame.payload)
        elif self._is_stream:
            self._send_stream_part(self._without_opening(frame.payload))
        else:
            self._collect_part(frame.payload)

    def results_lost(self, reason: str) -> None:
        """Fail the attempt: the stream of D's results was lost."""
        self._fail_attempt(ResultsCut())
        if self.pending_prefill is not None:
            self.pending_prefill.drop_answer(reason)  # P's answer is useless without D

    def _keep_record(self, record: bytes) -> None:
        """Keep the engine outputs of a part for later attempts."""
        self._output_records.append(record)
        self._record_bytes += len(record)
        if self._record_bytes > MAX_COLLECTED_BYTES:
            self._fail_attempt(ResultsCut(final=True))

    def _buffer_frame(self, frame: ResultFrame) -> None:
        """Buffer a frame until P answers."""
        assert self._early_frames is not None
        self._early_frames.append(frame)
        self._early_bytes += len(frame.payload) + len(frame.record or b"")
        if self._early_bytes > MAX_EARLY_BYTES:
            self._fail_attempt(ResultsCut())
        elif frame.kind == "lastData" and any(early.kind == "head" for early in self._early_frames):
            self._finish_before_prefill()

    def _finish_before_prefill(self) -> None:
        """Send D's complete answer in one piece, which contains nothing from P, without waiting for P."""
        self._flush_early()
        if self.pending_prefill is not None:
            self.pending_prefill.drop_answer("The answer is complete.")

    def _flush_early(self) -> None:
        """Handle the frames that D sent before P answered."""
        early, self._early_frames = self._early_frames or (), None
        for frame in early:
            self.take_frame(frame)

    def _fail_attempt(self, error: Exception) -> None:
        self._passes_through = False
        if not self.attempt_done.done():
            self.attempt_done.set_exception(error)
            self.attempt_done.exception()  # mark it as retrieved: the future may not be awaited yet

    def _send_stream_part(self, data: bytes) -> None:
        """Send a part of the stream."""
        self._meter_part(data)
        if data:
            self._start_stream()
            self._out.send_part(data)
            # D's first part must reach ``_on_first_part``, so it is not passed through.
            self._passes_through = self.resumable and self.part_count > 0

    def _collect_part(self, data: bytes) -> None:
        """Collect a part of an answer in one piece."""
        self._meter_part(data)
        self._collected_parts.append(data)
        self._collected_bytes += len(data)
        if self._collected_bytes > MAX_COLLECTED_BYTES:
            self._fail_attempt(ResultsCut(final=True))

    def _finish_results(self, payload: bytes) -> None:
        self._passes_through = False
        if self._is_stream:
            self.finish_merge(payload if self.resumable else self._with_done_mark(self._without_opening(payload)))
        else:
            self._collect_part(payload)
            self.sent = self.answered = True
            self._client.send_complete(self._status, self._answer_headers, b"".join(self._collected_parts))
        if not self.attempt_done.done():
            self.attempt_done.set_result(None)

    def _meter_part(self, data: bytes) -> None:
        """Pass a part of an answer that does not report its usage to the client's meter."""
        if self._client.meter is not None and not self.resumable:
            self._client.meter.add_bytes(data)

    def _start_stream(self) -> None:
        """Mark the answer as sent, and send its head before the first part."""
        self.sent = True
        if not self._client.status:
            self._client.begin_answer(self._status, self._answer_headers)

    def _without_opening(self, payload: bytes) -> bytes:
        """Return a part without a stream opening that the client already has."""
        return b"" if self.sent and not self.resumable and prefill_answer.is_stream_opening(payload) else payload

    def _with_done_mark(self, payload: bytes) -> bytes:
        return prefill_answer.append_done_mark(payload, self._client.scope["path"])
