"""The result channel of one request, on the way to its coordinator. Knows frames, but no connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from parley.disagg.wire import result_frames

ResponseHead = tuple[int, list[tuple[str, str]]]


class ChannelClient(Protocol):
    """The coordinator of a channel. ``native``: it numbers frames and knows native ones; ``queue_full``: its queue is
    full.
    """

    native: bool
    queue_full: bool

    def queue_frames(self, frames: list[bytes]) -> None:
        """Queue frames for sending."""

    def forget_channel(self, channel: ResultChannel) -> None:
        """Forget a channel; its id is free again."""


class CoordinatorGone(Exception):
    """The coordinator is gone: it did not reconnect, or has lost its requests."""


class ResultChannel:
    """Results of one request. ``recall_request`` makes the request continue on another instance.

    ``write_result`` never waits; it returns whether another write may follow at once. If not, ``wait_until_writable``
    waits for that. ``is_over``: the last frame was written, possibly while paused. When the coordinator is gone, the
    functions passed to ``watch_coordinator`` are called, and further writes are discarded.
    """

    def __init__(self, client: ChannelClient, request_id: str, recall_request: Callable[[], None] = lambda: None):
        self.request_id = request_id
        self.paused = False
        self.coordinator_gone = False
        self.recall_request = recall_request
        self._client = client
        self._held_frames: list[bytes] = []  # frames written while paused
        self.is_over = False
        self._watchers: set[Callable[[], None]] = set()
        self._writable = asyncio.Event()
        self._writable.set()

    def write_result(
        self,
        payload: bytes,
        *,
        last: bool = False,
        record: bytes = b"",
        head: ResponseHead | None = None,
        used_tokens: bytes = b"",
    ) -> bool:
        """Send a result. ``last``: it is the last one of the request.

        ``record``: the encoded outputs that it was rendered from. ``head``: status and headers of a complete answer.
        ``used_tokens``: the request's usage, for a coordinator that counts it. They are sent only to coordinators
        with a name.
        """
        native = self._client.native
        frames = result_frames.encode_result(self.request_id, payload, last=last, native=native)
        if native and record:
            frames.insert(0, result_frames.encode_record_frame(self.request_id, record))
        if native and head is not None:
            frames.insert(0, result_frames.encode_head_frame(self.request_id, *head))
        if native and used_tokens:
            frames.insert(0, result_frames.encode_used_frame(self.request_id, used_tokens))
        return self._write_frames(frames, last)

    def write_error(self, text: str) -> None:
        """Send an error, which ends the request."""
        self._write_frames([result_frames.encode_error_frame(self.request_id, text)], last=True)

    def write_retry(self, body: bytes) -> None:
        """Send a body that continues the request on another instance. The request ends here."""
        self._write_frames([result_frames.encode_retry_frame(self.request_id, body)], last=True)

    @property
    def must_wait(self) -> bool:
        """Whether the next write must wait."""
        return not self._writable.is_set()

    async def wait_until_writable(self) -> None:
        """Wait until more may be written. Raises CoordinatorGone."""
        await self._writable.wait()
        if self.coordinator_gone:
            raise CoordinatorGone

    def watch_coordinator(self, on_gone: Callable[[], None]) -> bool:
        """Call ``on_gone`` once the coordinator is gone. False if it already is."""
        self._watchers.add(on_gone)
        return not self.coordinator_gone

    def unwatch_coordinator(self, on_gone: Callable[[], None]) -> None:
        """Stop calling ``on_gone``."""
        self._watchers.discard(on_gone)

    def close_channel(self) -> None:
        """Close the channel after the request ended in any way; its id is free again. The last frame is still sent."""
        if self.is_over and self.paused:
            return  # until it is resumed
        self._client.forget_channel(self)
        self._held_frames.clear()

    def set_paused(self, paused: bool) -> None:
        """Hold frames back, or send the held ones and continue."""
        self.paused = paused
        if not paused and self._held_frames:
            frames, self._held_frames = self._held_frames, []
            self._client.queue_frames(frames)
        if not paused and self.is_over:
            self.close_channel()
        self.update_writable()

    def update_writable(self) -> None:
        """Update whether more may be written."""
        if self.coordinator_gone or not (self.paused or self._client.queue_full):
            self._writable.set()
        else:
            self._writable.clear()

    def lose_coordinator(self) -> None:
        """Mark the coordinator as gone."""
        self.coordinator_gone = True
        self._held_frames.clear()
        self.update_writable()
        for on_gone in tuple(self._watchers):
            on_gone()

    def _write_frames(self, frames: list[bytes], last: bool) -> bool:
        if self.coordinator_gone or self.is_over:
            return True
        if self.paused:
            self._held_frames += frames
        elif frames:
            self._client.queue_frames(frames)
        if last:
            self.is_over = True
            self.close_channel()
        else:
            self.update_writable()
        return not self.must_wait
