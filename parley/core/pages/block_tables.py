"""Block tables: the pages of each sequence, from prefix hit to release.

A table grows by cached pages that continue its content (``find_prefix``, ``attach_pages``) and by fresh ones
(``append_pages``); full pages are published in the prefix cache (``publish_pages``). A forked sequence shares the full
pages of its parent and copies the last one. The copy is made with the next step that has rows; until then both of its
pages are held, because pages allocated for other instances in between are written at once.

**Sharing.** A page is published in the prefix cache when its last token is *scheduled*, before it is written. That is
sound within one step, because a layer writes the keys and values of all rows before any row attends. It lets requests
that arrive together compute their common prefix once: the first gets a chunk, and the others find its pages, also in
the middle of their own prompts. The price: a failed step leaves cached pages that were never written; ``abandon_step``
evicts them. A sequence attaches cached pages only in a step where it has a row itself, so only sequences of the failed
step depend on them.

**States.** Some models (Mamba, linear attention) sum up the computed tokens of a sequence in a state. A state only
advances. So a sequence continues after cached pages only from a snapshot of the state at their end, and states after
drafts have slots of their own (``state_slots``). A fork that cannot share all of its parent's tokens starts again.

Knows pages and states of sequences; nothing of order or budgets.
"""

from __future__ import annotations

from collections.abc import Collection

from parley.core.pages.page_pool import PagePool, count_pages, extend_hashes, long_rope_root
from parley.core.pages.state_slots import StateSlots
from parley.core.sequence import PAGE_SIZE, Sequence, Step, StepRow


class BlockTables:
    """Block tables over ``pool``. With ``prefix_cache`` False nothing is looked up or published. ``states``: the slots
    for states, if layers keep them; then cached pages can be used only up to a snapshot.

    A step is assembled between ``begin_step`` and ``finish_step``; ``fork_table`` may be called at other times too.
    ``running_count`` is the number of running sequences, which decides how many snapshots are kept.
    """

    def __init__(self, pool: PagePool, prefix_cache: bool, states: StateSlots | None = None):
        self.pool = pool
        self.prefix_cache = prefix_cache
        self._states = states
        if states is not None:
            pool.on_drop = lambda digest: states.forget_snapshots([digest])
        self._pending_copies: list[tuple[int, int]] = []  # (source, target), before the next step

    @property
    def has_states(self) -> bool:
        """Whether the model has layers that keep a state."""
        return self._states is not None

    def begin_step(self) -> None:
        """Begin the assembly of a step."""
        self._release_copies()
        if self._states is not None:
            self._states.begin_step()

    def finish_step(self, step: Step) -> None:
        """End the assembly of a step. Moves the copies into it; if it has no rows, their pages are held until the next
        one."""
        if step.rows:
            step.page_copies, self._pending_copies = self._pending_copies, []
        self._hold_copies()
        if self._states is not None:
            self._states.finish_step()

    def abandon_step(self, step: Step) -> None:
        """Evict the pages that a failed step published, and forget its snapshots."""
        if self._states is not None:
            self._states.abandon_step()
        for page in step.published_pages:
            self.pool.evict_page(page)

    def find_prefix(self, sequence: Sequence) -> list[int] | None:
        """Return the cached pages that continue the sequence, in order; none unless ``computed`` is at a page end.

        None: the sequence should wait for the next step, where it will find more. The pages never cover the last token,
        whose logits are needed, nor prompt tokens whose logits are still needed for scores (position p scores token
        p + 1).
        """
        if not self.prefix_cache or sequence.computed % PAGE_SIZE:
            return []
        scored_count = len(sequence.prompt_scores)
        last_usable = (scored_count if 0 < scored_count < sequence.prompt_len else len(sequence.tokens)) - 1
        cached_pages: list[int] = []
        for index in range(sequence.computed // PAGE_SIZE, min(last_usable // PAGE_SIZE, len(sequence.hashes))):
            page = self.pool.find_cached(sequence.hashes[index])
            if page is None:
                break
            cached_pages.append(page)
        if self._states is not None and cached_pages:
            first_page = sequence.computed // PAGE_SIZE
            hashes = sequence.hashes[first_page : first_page + len(cached_pages)]
            usable_count = self._states.count_usable(sequence, hashes)
            return None if usable_count is None else cached_pages[:usable_count]
        return cached_pages

    def attach_pages(self, sequence: Sequence, cached_pages: list[int]) -> None:
        """Append cached pages to the table and count their tokens as computed."""
        if self._states is not None and cached_pages:
            last_page = sequence.computed // PAGE_SIZE + len(cached_pages) - 1
            self._states.attach_snapshot(sequence, sequence.hashes[last_page])
        for page in cached_pages:
            self.pool.add_reference(page)
        sequence.block_table += cached_pages
        sequence.computed += len(cached_pages) * PAGE_SIZE
        if not sequence.preemptions:
            sequence.cached_tokens = min(sequence.cached_tokens + len(cached_pages) * PAGE_SIZE, sequence.prompt_len)
            self.pool.prefix_hits += 0 if sequence.request.resumed else len(cached_pages) * PAGE_SIZE

    def append_pages(self, step: Step, sequence: Sequence, count: int) -> None:
        """Append ``count`` fresh pages, which must be free."""
        for _ in range(count):
            page = self.pool.allocate()
            sequence.block_table.append(page)
            step.fresh_pages.append(page)

    def publish_pages(self, sequence: Sequence, start: int) -> list[int]:
        """Publish the pages that the computed tokens from ``start`` on fill. Returns those that were not cached yet."""
        first_page, end_page = start // PAGE_SIZE, sequence.computed // PAGE_SIZE
        if not self.prefix_cache or first_page == end_page:
            return []
        self._extend_chain(sequence, end_page)
        table, hashes = sequence.block_table, sequence.hashes
        published = [
            index for index in range(first_page, end_page) if self.pool.cache_page(table[index], hashes[index])
        ]
        if self.pool.event_log is not None:
            request = sequence.request
            self.pool.event_log.record_stored(
                published, hashes, sequence.tokens, request.adapter, request.cache_salt, sequence.hashed_items
            )
        return [table[index] for index in published]

    def publish_row(self, step: Step, row: StepRow, running_count: int) -> None:
        """Publish the pages that a row fills, and choose the slots of its states. ``sequence.computed`` must include
        the row's tokens."""
        sequence = row.sequence
        if sequence.computed // PAGE_SIZE > row.start // PAGE_SIZE:
            step.published_pages += self.publish_pages(sequence, row.start)
        if self._states is not None:
            self._states.plan_row(row, running_count)

    def cut_drafts(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first of a row's drafts: no more than there are slots for the states after them."""
        return drafts if self._states is None else drafts[: self._states.draft_limit]

    def commit_drafts(self, row: StepRow, computed_before: int, running_count: int) -> None:
        """Publish the pages that the accepted drafts of a row fill, continue from the state after the last of them, and
        free the pages of rejected ones. ``computed_before``: number of computed tokens without drafts."""
        self.publish_pages(row.sequence, computed_before)
        if self._states is not None:
            self._states.commit_drafts(row, running_count)
        self._trim_table(row.sequence)

    def fork_table(self, sequence: Sequence, parent: Sequence) -> None:
        """Share the pages of ``parent``, and its state. Its last page is copied; without a free page, those tokens are
        recomputed."""
        self._share_pages(sequence, parent)
        if self._states is not None and sequence.computed < parent.computed:
            self.free_table(sequence)  # a snapshot of fewer tokens may help
        elif self._states is not None and sequence.computed:
            self._states.fork_state(sequence, parent)

    def _share_pages(self, sequence: Sequence, parent: Sequence) -> None:
        """Release a sequence's pages, share the full ones of ``parent``, and copy its last one if a page is free."""
        self.pool.release_pages(sequence.block_table)
        full_pages, partial_tokens = divmod(parent.computed, PAGE_SIZE)
        sequence.block_table = parent.block_table[:full_pages]
        for page in sequence.block_table:
            self.pool.add_reference(page)
        sequence.hashes, sequence.uses_long_rope = list(parent.hashes), parent.uses_long_rope
        sequence.computed = full_pages * PAGE_SIZE
        if partial_tokens and self.pool.free_count:
            sequence.block_table.append(self.pool.allocate())
            self._release_copies()
            self._pending_copies.append((parent.block_table[full_pages], sequence.block_table[full_pages]))
            self._hold_copies()
            sequence.computed = parent.computed
        sequence.furthest_computed = max(sequence.furthest_computed, sequence.computed)

    def _trim_table(self, sequence: Sequence) -> None:
        """Free the pages after the computed tokens."""
        keep = count_pages(sequence.computed)
        self.pool.release_pages(sequence.block_table[keep:])
        del sequence.block_table[keep:]

    def free_table(self, sequence: Sequence) -> None:
        """Free all pages; no token of the sequence counts as computed any more."""
        if self._states is not None:
            self._states.release_state(sequence)
        self.pool.release_pages(sequence.block_table)
        sequence.block_table.clear()
        sequence.computed = 0

    def evict_table(self, sequence: Sequence) -> None:
        """Evict the pages of a sequence and the states at their ends: they may hold wrong values."""
        for page in sequence.block_table:
            self.pool.evict_page(page)
        if self._states is not None:
            self._states.forget_snapshots(sequence.hashes[: len(sequence.block_table)])

    def switch_to_long_rope(self, sequence: Sequence) -> None:
        """Free all pages, whose keys have the short rotary factors, and start the chain for the long ones."""
        self.free_table(sequence)
        sequence.uses_long_rope = True
        sequence.hashes.clear()
        if self.prefix_cache:
            self._extend_chain(sequence, len(sequence) // PAGE_SIZE)

    def _extend_chain(self, sequence: Sequence, page_count: int) -> None:
        """Extend the hashes of a sequence to its first ``page_count`` pages."""
        root = long_rope_root(sequence.hash_root) if sequence.uses_long_rope else sequence.hash_root
        extend_hashes(sequence.hashes, root, sequence.tokens, page_count, sequence.hashed_items)

    def clear_cached_pages(self) -> bool:
        """Clear the prefix cache. Returns False and does nothing while a page is held by more than a pending copy."""
        self._release_copies()
        cleared = self.pool.clear_cache()
        self._hold_copies()
        return cleared

    def check_invariants(
        self,
        running: Collection[Sequence],
        held_tables: Collection[list[int]],
        held_states: Collection[list[int]],
    ) -> None:
        """Check conservation of pages and slots for states, for tests; ``held_tables``, ``held_states``: those held by
        anything but running sequences and copies. Raises AssertionError."""
        tables = [*held_tables, *(sequence.block_table for sequence in running)]
        self.pool.check_invariants([*tables, *self._pending_copies])
        if self._states is not None:
            self._states.check_invariants(running, held_states)

    def _release_copies(self) -> None:
        """Release the pages of pending copies, and drop copies into pages that have no holder any more."""
        for pair in self._pending_copies:
            self.pool.release_pages(pair)
        self._pending_copies = [pair for pair in self._pending_copies if not self.pool.count_free(pair[1:])]

    def _hold_copies(self) -> None:
        """Add a reference to both pages of each pending copy."""
        for pair in self._pending_copies:
            for page in pair:
                self.pool.add_reference(page)
