"""The thread that encodes media items, in slices of the processor time that the engine loop lends it.

An encoder and a model step would compete for the same cores, and a large image takes seconds. So the encoder pauses
between the blocks of its network: it computes while the loop lends it the processor, and the loop runs no step then.
The loop lends the rest of a step's time, and all time while it waits for messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import perf_counter
from typing import Protocol

from parley.core.sequence import ItemEmbeddings, MediaEncoder
from parley.types import MediaItem

log = logging.getLogger("parley.engine")

PostCall = Callable[[Callable[[], None]], None]  # lets the loop's thread call the function soon
EncodeResult = ItemEmbeddings | str | None  # str: why the item cannot be encoded; None: cancelled
OnEncoded = Callable[[EncodeResult], None]


class ItemEncoder(Protocol):
    """Encodes one item at a time. ``encode_seconds``: time spent so far."""

    encode_seconds: float

    def start_item(self, item: MediaItem, on_encoded: OnEncoded) -> None:
        """Start to encode an item; ``on_encoded`` is called in the loop's thread at the end, also after a cancel."""

    def cancel_item(self) -> None:
        """Stop encoding the current item."""

    def lend_processor(self, seconds: float) -> None:
        """Let the encoder compute for this time, and for at least one block. Return when it pauses; with inf, return at
        once."""

    def reclaim_processor(self) -> None:
        """Wait until the encoder pauses."""

    def has_progress(self) -> bool:
        """Whether a block has ended since the last call, or the encoder has nothing to do."""

    def close(self) -> None:
        """Cancel the current item, and end the thread."""


class EncodingCancelled(Exception):
    """The item is no longer needed. Raised between two blocks."""


class EncoderThread:
    """An ``ItemEncoder`` with a thread for each item.

    The thread ends with its item, because its team of OpenMP threads lasts as long: while a process has more such
    threads than processors, libgomp lets all of them sleep sooner, and each step of the model takes a tenth longer.
    """

    def __init__(self, encoder: MediaEncoder, post: PostCall):
        self.encode_seconds = 0.0
        self._encoder = encoder
        self._post = post
        self._turn = threading.Condition()  # guards everything below
        self._has_item = self._is_computing = self._is_cancelled = False
        self._lent_until = self._resumed_at = 0.0  # time.perf_counter
        self._block_count = self._reported_blocks = 0

    def start_item(self, item: MediaItem, on_encoded: OnEncoded) -> None:
        """Start a thread for the item; it waits until it is lent the processor."""
        with self._turn:
            self._has_item, self._is_cancelled = True, False
        threading.Thread(target=self._run_item, args=(item, on_encoded), name="media-encoder", daemon=True).start()

    def cancel_item(self) -> None:
        """Let the thread stop at the end of the current block."""
        with self._turn:
            self._is_cancelled = True
            self._turn.notify_all()

    def lend_processor(self, seconds: float) -> None:
        """Resume the thread; wait until it pauses if the time is limited."""
        with self._turn:
            self._lent_until = perf_counter() + seconds
            if self._has_item and not self._is_computing:
                self._is_computing, self._resumed_at = True, perf_counter()
                self._turn.notify_all()
            if seconds < inf:
                self._turn.wait_for(lambda: not self._is_computing)

    def reclaim_processor(self) -> None:
        """Wait for the end of the current block."""
        with self._turn:
            self._lent_until = -inf
            self._turn.wait_for(lambda: not self._is_computing)

    def has_progress(self) -> bool:
        """Compare the number of blocks with that of the last call."""
        with self._turn:
            progress = not self._is_computing or self._block_count > self._reported_blocks
            self._reported_blocks = self._block_count
            return progress

    def close(self) -> None:
        """End the thread after the current block, without waiting for it."""
        self.cancel_item()

    def _run_item(self, item: MediaItem, on_encoded: OnEncoded) -> None:
        with self._turn:
            self._await_turn()
        result = self._encode_item(item)
        with self._turn:
            if self._is_cancelled:
                result = None
            self._has_item = False
            self._pause()
        self._post(partial(on_encoded, result))

    def _encode_item(self, item: MediaItem) -> EncodeResult:
        try:
            return None if self._is_cancelled else self._encoder.encode_item(item, self._between_blocks)
        except Exception as error:
            if not self._is_cancelled:
                log.exception("an item could not be encoded")
            return str(error)

    def _between_blocks(self) -> None:
        with self._turn:
            self._block_count += 1
            if perf_counter() >= self._lent_until:
                self._pause()
                self._await_turn()
            if self._is_cancelled:
                raise EncodingCancelled

    def _await_turn(self) -> None:
        self._turn.wait_for(lambda: self._is_computing or self._is_cancelled)

    def _pause(self) -> None:
        """Give the processor back to the engine's thread."""
        if self._is_computing:
            self._is_computing = False
            self.encode_seconds += perf_counter() - self._resumed_at
            self._turn.notify_all()


class BlockingEncoder:
    """An ``ItemEncoder`` for loops without an inbox: a step waits until its item is encoded."""

    def __init__(self, encoder: MediaEncoder):
        self.encode_seconds = 0.0
        self._encoder = encoder

    def start_item(self, item: MediaItem, on_encoded: OnEncoded) -> None:
        """Encode the item now."""
        started_at = perf_counter()
        result: EncodeResult
        try:
            result = self._encoder.encode_item(item, lambda: None)
        except Exception as error:
            log.exception("an item could not be encoded")
            result = str(error)
        self.encode_seconds += perf_counter() - started_at
        on_encoded(result)

    def cancel_item(self) -> None:
        """Do nothing: no item is being encoded between two calls."""

    def lend_processor(self, seconds: float) -> None:
        """Do nothing."""

    def reclaim_processor(self) -> None:
        """Do nothing."""

    def has_progress(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing."""
