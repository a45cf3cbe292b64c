"""Which pages a sequence's tokens lie in: its table, from what is found in the cache to what is free again.

A table grows by pages of others whose content it continues with (``find``, ``attach``) and by fresh ones (``take``);
pages that are full become findable (``publish``). A sequence that forks shares the whole pages of another and copies
the last one. The copy is made with the next step that has rows; until then both of its pages are held, for what is
taken for other instances in between is written at once.

Knows pages of sequences, and nothing of who runs, of order and of budgets.
"""

from __future__ import annotations

from collections.abc import Collection

from parley.core.blocks import BlockPool, extend, pages
from parley.core.sequence import BLOCK_SIZE, Sequence, Step


class Tables:
    """Tables over ``pool``. With ``prefix_cache`` False nothing is looked up or made findable.

    Between ``begin`` and ``end`` a step is put together; ``fork`` may be called at other times too.
    """

    def __init__(self, pool: BlockPool, prefix_cache: bool):
        self.pool = pool
        self.prefix_cache = prefix_cache
        self._copies: list[tuple[int, int]] = []  # of pages, before the next step

    def begin(self) -> None:
        """Hold the pages of copies no longer, and forget copies into pages that nobody has."""
        for pair in self._copies:
            self.pool.drop(pair)
        self._copies = [pair for pair in self._copies if not self.pool.idle(pair[1:])]

    def end(self, step: Step) -> None:
        """Give the copies to the step, or hold their pages until the next one if it has no rows."""
        if step.rows:
            step.copies, self._copies = self._copies, []
        self._hold()

    def find(self, sequence: Sequence) -> list[int]:
        """Pages in the cache that continue what the sequence has computed, in order, if that ends with a page.

        The last token is never covered: its logits are needed. Nor are prompt tokens whose logits are still to be
        scored (position p scores token p + 1).
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
        """Let pages of the cache stand for the next tokens."""
        for block in found:
            self.pool.share(block)
        sequence.blocks += found
        sequence.computed += len(found) * BLOCK_SIZE
        if not sequence.preemptions:
            sequence.cached = min(sequence.cached + len(found) * BLOCK_SIZE, sequence.prompt_len)
            self.pool.hits += 0 if sequence.work.begun else len(found) * BLOCK_SIZE

    def take(self, step: Step, sequence: Sequence, count: int) -> None:
        """So many more pages, which are free."""
        for _ in range(count):
            block = self.pool.take()
            sequence.blocks.append(block)
            step.fresh.append(block)

    def publish(self, sequence: Sequence, start: int) -> list[int]:
        """Make the pages findable that its computed tokens from ``start`` on fill. Gives those that nobody else had."""
        first, end = start // BLOCK_SIZE, sequence.computed // BLOCK_SIZE
        if not self.prefix_cache or first == end:
            return []
        extend(sequence.hashes, sequence.root, sequence.tokens, end)
        fresh = range(first, end)
        return [
            sequence.blocks[page] for page in fresh if self.pool.publish(sequence.blocks[page], sequence.hashes[page])
        ]

    def fork(self, sequence: Sequence, parent: Sequence) -> None:
        """Let a sequence have the pages of another. The last one is copied; if no page is free for that, its tokens
        are computed again."""
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
        """Give back the pages behind what is computed."""
        keep = pages(sequence.computed)
        self.pool.drop(sequence.blocks[keep:])
        del sequence.blocks[keep:]

    def drop(self, sequence: Sequence) -> None:
        """Give back all its pages: nothing of it counts as computed any more."""
        self.pool.drop(sequence.blocks)
        sequence.blocks.clear()
        sequence.computed = 0

    def clear(self) -> bool:
        """Forget what is cached. False, and nothing is done, while a page is held for more than a copy."""
        self.begin()
        done = self.pool.clear()
        self._hold()
        return done

    def check(self, held: Collection[list[int]]) -> None:
        """Conservation of pages, for tests; ``held``: all that is held but by copies. Raises AssertionError."""
        self.pool.check([*held, *self._copies])

    def _hold(self) -> None:
        for pair in self._copies:
            for block in pair:
                self.pool.share(block)
