"""Block tables: the pages of each sequence, from prefix hit to release.

A table grows by cached pages that continue its content (``find_prefix``, ``attach_pages``) and by fresh ones
(``append_pages``); full pages are published in the prefix cache (``publish_pages``). A forked sequence shares the full
pages of its parent and copies the last one. The copy is made with the next step that has rows; until then both of its
pages are held, because pages allocated for other instances in between are written at once.

Knows pages of sequences; nothing of slots, order or budgets.
"""

from __future__ import annotations

from collections.abc import Collection

from parley.core.pages.block_pool import BlockPool, extend, pages
from parley.core.sequence import BLOCK_SIZE, Sequence, Step


class Tables:
    """Block tables over ``pool``. With ``prefix_cache`` False nothing is looked up or published.

    A step is assembled between ``begin_step`` and ``finish_step``; ``fork_table`` may be called at other times too.
    """

    def __init__(self, pool: BlockPool, prefix_cache: bool):
        self.pool = pool
        self.prefix_cache = prefix_cache
        self._copies: list[tuple[int, int]] = []  # (source, target), before the next step

    def begin(self) -> None:
        """Release the pages of pending copies, and drop copies into pages that have no holder any more."""
        for pair in self._copies:
            self.pool.drop(pair)
        self._copies = [pair for pair in self._copies if not self.pool.idle(pair[1:])]

    def end(self, step: Step) -> None:
        """Move the copies into the step; if it has no rows, hold their pages until the next one."""
        if step.rows:
            step.copies, self._copies = self._copies, []
        self._hold()

    def find(self, sequence: Sequence) -> list[int]:
        """Return the cached pages that continue the sequence, in order; none unless ``computed`` is at a page end.

        They never cover the last token, whose logits are needed, nor prompt tokens whose logits are still needed for
        scores (position p scores token p + 1).
        """
        if not self.prefix_cache or sequence.computed % BLOCK_SIZE:
            return []
        scored = len(sequence.prompt_scores)
        reach = (scored if 0 < scored < sequence.prompt_len else len(sequence.tokens)) - 1
        found: list[int] = []
        for page in range(sequence.computed // BLOCK_SIZE, min(reach // BLOCK_SIZE, len(sequence.hashes))):
            block = self.pool.find(sequence.hashes[page])
            if block is None:
                break
            found.append(block)
        return found

    def attach(self, sequence: Sequence, found: list[int]) -> None:
        """Append cached pages to the table and count their tokens as computed."""
        for block in found:
            self.pool.share(block)
        sequence.blocks += found
        sequence.computed += len(found) * BLOCK_SIZE
        if not sequence.preemptions:
            sequence.cached = min(sequence.cached + len(found) * BLOCK_SIZE, sequence.prompt_len)
            self.pool.hits += 0 if sequence.work.begun else len(found) * BLOCK_SIZE

    def take(self, step: Step, sequence: Sequence, count: int) -> None:
        """Append ``count`` fresh pages, which must be free."""
        for _ in range(count):
            block = self.pool.take()
            sequence.blocks.append(block)
            step.fresh.append(block)

    def publish(self, sequence: Sequence, start: int) -> list[int]:
        """Publish the pages that the computed tokens from ``start`` on fill. Returns those that were not cached yet."""
        first, end = start // BLOCK_SIZE, sequence.computed // BLOCK_SIZE
        if not self.prefix_cache or first == end:
            return []
        extend(sequence.hashes, sequence.root, sequence.tokens, end)
        fresh = range(first, end)
        return [
            sequence.blocks[page] for page in fresh if self.pool.publish(sequence.blocks[page], sequence.hashes[page])
        ]

    def fork(self, sequence: Sequence, parent: Sequence) -> None:
        """Share the pages of ``parent``. Its last page is copied; without a free page, those tokens are recomputed."""
        self.pool.drop(sequence.blocks)
        whole, rest = divmod(parent.computed, BLOCK_SIZE)
        sequence.blocks = parent.blocks[:whole]
        for block in sequence.blocks:
            self.pool.share(block)
        sequence.hashes = list(parent.hashes)
        sequence.computed = whole * BLOCK_SIZE
        if rest and self.pool.free:
            sequence.blocks.append(self.pool.take())
            self.begin()
            self._copies.append((parent.blocks[whole], sequence.blocks[whole]))
            self._hold()
            sequence.computed = parent.computed
        sequence.reached = max(sequence.reached, sequence.computed)

    def trim(self, sequence: Sequence) -> None:
        """Free the pages after the computed tokens."""
        keep = pages(sequence.computed)
        self.pool.drop(sequence.blocks[keep:])
        del sequence.blocks[keep:]

    def drop(self, sequence: Sequence) -> None:
        """Free all pages; no token of the sequence counts as computed any more."""
        self.pool.drop(sequence.blocks)
        sequence.blocks.clear()
        sequence.computed = 0

    def clear(self) -> bool:
        """Clear the prefix cache. Returns False and does nothing while a page is held by more than a pending copy."""
        self.begin()
        done = self.pool.clear()
        self._hold()
        return done

    def check(self, held: Collection[list[int]]) -> None:
        """Check page conservation, for tests; ``held_tables``: pages held by anything but copies. Raises
        AssertionError."""
        self.pool.check([*held, *self._copies])

    def _hold(self) -> None:
        """Add a reference to both pages of each pending copy."""
        for pair in self._copies:
            for block in pair:
                self.pool.share(block)
