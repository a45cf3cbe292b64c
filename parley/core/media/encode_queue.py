"""Encode queue: sequences that wait for the embeddings of media items, and the item that is being encoded for them.

A sequence runs only while it holds the embeddings of all items that it will compute. Items whose tokens all lie in
cached pages need none. The scheduler asks whenever a sequence is about to get a chunk (``claim_embeddings``), because
pages may have gone since the last time. A sequence that lacks an item waits here, and later ones continue; it
returns to its position in the scheduler's queue when it has all items. It keeps an item's embeddings until it has
computed past the item (``release_computed``), also while it waits for a slot or after a preemption.

Items are encoded one at a time, once for all sequences that wait for them, in the order of a ``WaitQueue``: by
priority, with equal shares for tenants. A sequence here holds no slot and no pages.

**Room.** While held embeddings fill the cache, nothing is encoded for new sequences, as long as some holder does not
wait here and so will release its embeddings. Exempt are sequences that have run and sequences with raised priority,
because others wait for their pages. So held embeddings exceed the cache by the items of few sequences, and any single
request fits.

This module knows sequences and their items; nothing of pages, slots or steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from parley.core.media.embedding_cache import EmbeddingCache
from parley.core.media.encoder_thread import EncodeResult, ItemEncoder
from parley.core.sequence import Sequence
from parley.core.wait_queue import WaitQueue
from parley.types import MediaItem

# The error of a request that only another instance can continue.
FEATURES_ELSEWHERE = (
    "KV pages of the request's media were lost, and this instance cannot compute them, because another one processed "
    "the media."
)


class EncodeQueue:
    """``encoder`` encodes items for sequences; a cache of ``capacity`` bytes keeps the embeddings.

    ``resume_sequence`` is called with a sequence that holds all of its items now, ``fail_sequence`` with one whose item
    cannot be encoded, and the reason. ``has_changes``: an item has been encoded since the loop last cleared this.
    ``queries``: items that sequences looked up; ``hits``: those that were cached or already being waited for.
    """

    def __init__(
        self,
        encoder: ItemEncoder,
        capacity: int,
        resume_sequence: Callable[[Sequence], None],
        fail_sequence: Callable[[Sequence, str], None],
    ):
        self.encoder = encoder
        self.cache = EmbeddingCache(capacity)
        self.waiting = WaitQueue()
        self.has_changes = False
        self.queries = self.hits = 0
        self._resume_sequence = resume_sequence
        self._fail_sequence = fail_sequence
        self._missing: dict[Sequence, dict[bytes, MediaItem]] = {}  # items that waiting sequences lack, by digest
        self._holders: set[Sequence] = set()  # sequences that hold embeddings
        self._current: tuple[Sequence, MediaItem] | None = None  # being encoded, and the sequence that waits for it

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether the sequence waits here."""
        return sequence in self._missing

    def __len__(self) -> int:
        """Number of waiting sequences."""
        return len(self._missing)

    @property
    def is_encoding(self) -> bool:
        """Whether an item is being encoded."""
        return self._current is not None

    @property
    def delays_output(self) -> bool:
        """Whether a sequence that has output already waits here."""
        return any(sequence.output_length > 0 for sequence in self._missing)

    def claim_embeddings(self, sequence: Sequence, start: int) -> bool:
        """Hold the embeddings of all items that end after ``start``. False: some are missing, and the sequence waits
        here."""
        missing: dict[bytes, MediaItem] = {}
        for item in sequence.request.media:
            if item.end > start and item.digest not in sequence.item_embeddings and item.digest not in missing:
                self.queries += 1
                if self._hold_item(sequence, item.digest):
                    self.hits += 1
                else:
                    self.hits += any(item.digest in missing_digests for missing_digests in self._missing.values())
                    missing[item.digest] = item
        if missing:
            self._missing[sequence] = missing
            self.waiting.enqueue(sequence)
        return not missing

    def release_computed(self, sequence: Sequence, computed: int) -> None:
        """Release the items within the sequence's first ``computed`` tokens."""
        needed_digests = {item.digest for item in sequence.request.media if item.end > computed}
        for digest in sequence.item_embeddings.keys() - needed_digests:
            del sequence.item_embeddings[digest]
            self.cache.release_item(digest)
        if not sequence.item_embeddings:
            self._holders.discard(sequence)

    def remove_sequence(self, sequence: Sequence) -> None:
        """Release all items of a sequence, and stop waiting for more. Its item is cancelled if no other needs it."""
        self.release_computed(sequence, len(sequence))
        if self._missing.pop(sequence, None) is not None:
            self.waiting.remove_waiting(sequence)
            if self._current is not None and not self._waiting_for(self._current[1].digest):
                self.encoder.cancel_item()

    def start_next(self) -> None:
        """Start to encode the next item, if none is being encoded."""
        while self._current is None and (sequence := self._next_sequence()) is not None:
            item = next(iter(self._missing[sequence].values()))
            if item.features is None:
                self._fail_sequence(sequence, FEATURES_ELSEWHERE)
                continue
            self._current = sequence, item
            self.waiting.begin_turn(sequence)
            self.waiting.record_service(sequence, item.embedding_count)
            self.encoder.start_item(item, partial(self._on_encoded, item.digest))

    def check_invariants(self, sequences: Collection[Sequence]) -> None:
        """Check conservation of embeddings, for tests; ``sequences``: all that run or wait. Raises AssertionError."""
        self.cache.check_invariants(Counter(digest for sequence in sequences for digest in sequence.item_embeddings))
        assert self._holders == {sequence for sequence in sequences if sequence.item_embeddings}, (
            "a holder that has ended"
        )
        assert set(self.waiting) == self._missing.keys() <= set(sequences)
        assert all(self._missing.values())

    def _next_sequence(self) -> Sequence | None:
        """Return the sequence that the next item is encoded for; None if none waits or there is no room."""
        if not self.waiting:
            return None
        candidates = self.waiting.head_sequence, *self.waiting
        return next((candidate for candidate in candidates if self._has_room_for(candidate)), None)

    def _has_room_for(self, sequence: Sequence) -> bool:
        if self.cache.held_bytes < self.cache.capacity:
            return True
        is_urgent = sequence.priority < sequence.request.priority
        if is_urgent or sequence.admission_number >= 0:
            return True
        return all(holder in self._missing or holder.priority > sequence.priority for holder in self._holders)

    def _on_encoded(self, digest: bytes, result: EncodeResult) -> None:
        """Give the embeddings to all sequences that wait for them, or fail these sequences."""
        assert self._current is not None
        source, self._current, self.has_changes = self._current[0], None, True
        waiting_sequences = self._waiting_for(digest)
        if result is None or (isinstance(result, str) and source not in waiting_sequences):
            return  # cancelled; or its features may have gone with its request, and others have their own
        if isinstance(result, str):
            for sequence in waiting_sequences:
                if sequence in self._missing:  # not ended with another choice
                    self._fail_sequence(sequence, result)
            return
        self.cache.add_item(digest, result)
        for sequence in waiting_sequences:
            self._hold_item(sequence, digest)
            del self._missing[sequence][digest]
            if not self._missing[sequence]:
                del self._missing[sequence]
                self.waiting.remove_waiting(sequence)
                self._resume_sequence(sequence)

    def _hold_item(self, sequence: Sequence, digest: bytes) -> bool:
        """Let the sequence hold an item. False if it is not cached."""
        embeddings = self.cache.hold_item(digest)
        if embeddings is not None:
            sequence.item_embeddings[digest] = embeddings
            self._holders.add(sequence)
        return embeddings is not None

    def _waiting_for(self, digest: bytes) -> list[Sequence]:
        """Return the sequences that wait for an item."""
        return [sequence for sequence, missing in self._missing.items() if digest in missing]
