"""Prefill for other instances, and prompts that other instances computed: pinned pages keep their content until they
are released, nothing deadlocks, and a continuation after handed-over tokens equals the output without a handover.
"""

from __future__ import annotations

import os
from math import inf
from random import Random

import msgspec
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.invariant_ledger import COMMON_TOKENS, VOCAB, LoopHarness, kv_history, require, run_alone
from support.placed_items import place_items

from parley.core.beam_search.beam import beam_capacity
from parley.core.pages.page_pool import count_transferable_pages
from parley.core.sequence import PAGE_SIZE
from parley.core.shared_pages.pinned import PinnedPages
from parley.core.shared_pages.reservations import ReserveResult
from parley.core.shared_pages.staging import PageStaging
from parley.types import BeamOptions, EmbeddingRun, EngineOutput, EngineRequest, EngineStats, KVPrefix, MediaItem


class StagingMemory:
    """Staging memory for the pages of a runner."""

    def __init__(self, pages: list[list[int | None]], blocks: int):
        self.staging_page_count = blocks
        self.stored_pages: list[list[int | None]] = [[] for _ in range(blocks)]
        self._pages = pages

    def store_pages(self, pairs: list[tuple[int, int]]) -> None:
        for page, place in pairs:
            self.stored_pages[place] = list(self._pages[page])

    def load_pages(self, pairs: list[tuple[int, int]]) -> None:
        for page, place in pairs:
            self._pages[page] = list(self.stored_pages[place])


class HandoverHarness(LoopHarness):
    """A harness whose pages, or ``staged`` copies of them, others read and fill. Checks leased pages after every step
    until they are released."""

    def __init__(self, *, staged: int | None, **options) -> None:
        self.staging: PageStaging | None = None
        super().__init__(**options)
        self.pinned_pages: PinnedPages | PageStaging = self.loop.pinned_pages
        self.memory = self.runner.pages  # the pages that the other side sees
        if staged is not None:
            host = StagingMemory(self.runner.pages, staged)
            self.memory = host.stored_pages
            self.pinned_pages = self.staging = PageStaging(host, self.record_leased_pages)
            self.staging.attach_pinned_pages(self.loop.pinned_pages)
        self.requests: dict[str, EngineRequest] = {}
        self.leased_pages: dict[str, list[int]] = {}  # pages, by lease
        self.reservations: dict[str, ReserveResult] = {}  # by reservation
        self.received_counts: dict[str, int] = {}

    def add_request(self, request: EngineRequest) -> None:
        self.requests[request.id] = request
        if request.lease:
            self.leased_pages[request.id] = []
        self.loop.add_request(request)

    def on_pages_leased(self, request_id: str, pages: list[int]) -> None:
        (self.staging.add_leased_pages if self.staging is not None else self.record_leased_pages)(request_id, pages)

    def record_leased_pages(self, request_id: str, pages: list[int]) -> None:
        self.leased_pages[request_id] += pages

    def _receive(self, outputs: list[EngineOutput], stats: EngineStats) -> None:
        if self.staging is not None:
            self.staging.flush_outgoing()
        super()._receive(outputs, stats)

    def step(self) -> bool:
        more = super().step()
        for request_id in self.leased_pages:
            self.check_lease(request_id)
        return more

    def check(self) -> None:
        self.loop.check_invariants()
        if self.staging is not None:
            self.staging.check_invariants()

    def _next_due(self) -> None:
        """Return nothing: any sequence may have to wait for pages of others."""

    def check_lease(self, request_id: str) -> None:
        request = self.requests[request_id]
        tokens = request.token_ids + (request.prior_tokens[0] if request.prior_tokens else [])
        kv_states = kv_history(request.cache_salt, tokens, len(tokens) > self.runner.long_rope_after, request.media)
        pages = self.leased_pages[request_id]
        if pages and pages[-1] >= self.runner.page_count:
            pages = pages[:-1]
            require(len(pages) == (len(tokens) - 1) // PAGE_SIZE, "a state after fewer pages than the prompt's")
            state = self.runner.states[self.slot_of(self.leased_pages[request_id][-1])]
            require(state == kv_states[len(pages) * PAGE_SIZE - 1], "a state that is read is not that of the pages")
        require(len(pages) <= len(tokens) // PAGE_SIZE, "a lease of more than whole pages")
        for number, page in enumerate(pages):
            span = slice(number * PAGE_SIZE, (number + 1) * PAGE_SIZE)
            require(self.memory[page] == kv_states[span], "a page that is read does not hold what it is read for")

    def slot_of(self, number: int) -> int:
        """Return the slot of a state, from its number after those of the pages."""
        return (self.runner.state_slots or 0) + number - self.runner.page_count

    def release_lease(self, request_id: str) -> None:
        self.check_lease(request_id)
        del self.leased_pages[request_id]
        self.pinned_pages.release_lease(request_id)

    def reserve_pages(self, request: EngineRequest) -> ReserveResult:
        key, tokens = request.id, request.token_ids
        self.pinned_pages.reserve_pages(
            key,
            KVPrefix(tokens, request.cache_salt, media=request.media),
            lambda reservation: self.reservations.__setitem__(key, reservation),
        )
        reservation = self.reservations[key]
        if reservation.error:
            return self.reservations.pop(key)
        pages = [page for page in reservation.pages if page < self.runner.page_count]
        transferable = count_transferable_pages(len(tokens), has_states=self.runner.state_slots is not None)
        is_complete = len(pages) + reservation.skip == transferable
        assert pages == reservation.pages or (self.runner.state_slots and pages == reservation.pages[:-1])
        assert is_complete or (self.staging is not None and len(reservation.pages) <= len(self.memory))
        self.is_complete = is_complete  # of the last reservation
        self.received_counts[key] = 0
        return reservation

    def receive_pages(self, request: EngineRequest, count: int) -> None:
        """Write pages as a transfer does, over their old content."""
        key, tokens = request.id, request.token_ids
        reservation = self.reservations[key]
        kv_states = kv_history(request.cache_salt, tokens, len(tokens) > self.runner.long_rope_after, request.media)
        for number in range(self.received_counts[key], min(count, len(reservation.pages))):
            first = (reservation.skip + number) * PAGE_SIZE
            if reservation.pages[number] >= self.runner.page_count:
                self.runner.states[self.slot_of(reservation.pages[number])] = kv_states[first - 1]
                continue
            self.memory[reservation.pages[number]] = list(kv_states[first : first + PAGE_SIZE])
        self.received_counts[key] = max(self.received_counts[key], min(count, len(reservation.pages)))
        self.pinned_pages.mark_received(key, count)

    def free_reservation(self, key: str) -> None:
        del self.reservations[key], self.received_counts[key]
        self.pinned_pages.free_reservation(key)


class HandoverScenario:
    """Random requests, some handed over in either direction, and random events between their steps, from ``seed``."""

    def __init__(self, seed: int, *, failures: bool):
        self.random = Random(seed)
        pick = self.random.choice
        self.blocks = pick([6, 7, 8, 9, 12, 30])
        has_states = pick([False, True])
        self.harness = HandoverHarness(
            has_states=has_states,
            snapshots=pick([1, 2, 5, 30]),
            staged=None if has_states else pick([None, None, 0, 1, 2, 5, 30]),
            blocks=self.blocks,
            slots=pick([1, 2, 4, 8]),
            budgets=tuple(pick([1, 5, 16, 23, 32, 64, 500]) for _ in range(3)),
            guesses=pick([None, None, 1]),
            long_rope_after=pick([inf, inf, 16, 37, 70]),
            step_ms=pick([0, 250]),
            media_cache=pick([0, 200, 1000]),
        )
        self.sees_both_ways = pick([False, True])
        self.failures = failures
        self.requests = [self.random_request(number) for number in range(self.random.randint(2, 8))]
        self.expected_outputs = {
            (request.id, k): self.expected_output(request, k) for request in self.requests for k in range(request.n)
        }
        self.requests = [self.add_prior_tokens(request) for request in self.requests]
        self.prefilled_elsewhere = [
            request for request in self.requests if self.random.random() < 0.5
        ]  # another instance computes them
        for request, other in zip(self.requests, self.requests[1:], strict=False):  # some are released as one group
            if (
                request.lease
                and other.lease
                and not {request.id, other.id} & {prefilled.id for prefilled in self.prefilled_elsewhere}
                and pick([0, 1])
            ):
                other.release_group = request.release_group = request.release_group or request.id
        self.queue = list(self.requests)
        self.in_transfer: dict[str, EngineRequest] = {}  # requests whose pages are in transfer, by reservation
        self.reserved: dict[str, EngineRequest] = {}
        self.stalled: set[str] = set()  # those of them that began before all pages had arrived
        self.cancelled: set[tuple[str, int]] = set()

    def random_request(self, number: int) -> EngineRequest:
        pick = self.random.choice
        shared_length = pick([0, 0, 16, 17, 32, 48, 64, 80])
        tokens = COMMON_TOKENS[:shared_length] + [
            (number * 11 + i) % VOCAB for i in range(self.random.randint(0 if shared_length else 1, 40))
        ]
        n = pick([1, 1, 2])
        tokens = tokens[: self.blocks * PAGE_SIZE]
        request = EngineRequest(
            id=f"w{number}",
            token_ids=tokens,
            media=place_items(len(tokens), pick, sees_both_ways=self.sees_both_ways) if pick([0, 1]) else [],
            max_tokens=pick([0, 1, 5, 20, 45]),
            seed=pick([0, 1, 2**64 - 1]),
            n=n,
            min_tokens=pick([0, 0, 3]),
            stop_ids=pick([[], [], [5], [5, 6, 7]]),
            logprobs=pick([-1, 2]),
            prompt_logprobs=pick([-1, -1, 0]),
            cache_salt=pick(["", "", "pepper"]),
            priority=pick([0, 0, 0, 1, -3]),
            tenant=pick(["", "", "a"]),
            lease=pick([False, True]),
        )
        max_tokens_in_search = beam_capacity(self.blocks, 2) if self.harness.loop.settings.max_batch >= 2 else 0
        if pick([0, 0, 1]) and len(request.token_ids) < max_tokens_in_search:
            request.beam, request.lease = BeamOptions(2), request.lease and request.max_tokens == 0
        return request

    def expected_output(self, request: EngineRequest, index: int) -> EngineOutput:
        room = self.blocks * PAGE_SIZE if request.beam is None else beam_capacity(self.blocks, request.beam.width)
        return run_alone(request, index, room, self.harness.runner.long_rope_after)

    def add_prior_tokens(self, request: EngineRequest) -> EngineRequest:
        """Mark a random prefix of each choice's output as sampled elsewhere, never with the last token."""
        if request.beam is not None or self.random.random() < 0.5:
            return request
        tokens = [self.expected_outputs[request.id, k].token_ids for k in range(request.n)]
        cuts = [self.random.randint(0, max(0, len(token) - 1)) for token in tokens]
        return msgspec.structs.replace(
            request, prior_tokens=[choice_tokens[:cut] for choice_tokens, cut in zip(tokens, cuts, strict=True)]
        )

    def run_actions(self) -> None:
        actions = [
            self.add_next_request,
            self.add_next_request,
            self.run_some_steps,
            self.run_some_steps,
            self.receive_some_pages,
            self.cancel_some,
            self.release_finished,
            self.preempt_one,
        ]
        actions += [self.break_transfer, self.lose_reader, self.begin_before_transfer_ends] + [
            self.fail_one_step
        ] * self.failures
        for _ in range(60):
            self.random.choice(actions)()
            self.harness.check()
        while self.queue:
            self.add_next_request()
        self.run_to_end()

    def add_next_request(self) -> None:
        """Add the next request, or reserve pages for its prompt."""
        if not self.queue:
            return
        request = self.queue.pop(0)
        if request in self.prefilled_elsewhere:
            reservation = self.harness.reserve_pages(request)
            if not reservation.error:
                self.reserved[request.id] = self.in_transfer[request.id] = request
                event(f"reserved all pages: {self.harness.is_complete}")
                return
            event("refused")
        self.harness.add_request(request)
        if request.release_group and self.queue and self.queue[0].release_group == request.release_group:
            self.add_next_request()

    def run_some_steps(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.harness.step()

    def receive_some_pages(self, count: int | None = None) -> None:
        """Deliver more pages of one reservation; with the last of them add its request."""
        if not self.in_transfer:
            return
        key = self.random.choice(list(self.in_transfer))
        request = self.in_transfer[key]
        count = self.harness.received_counts[key] + self.random.randint(0, 3) if count is None else count
        self.harness.receive_pages(request, count)
        if self.harness.received_counts[key] == len(self.harness.reservations[key].pages):
            self.harness.add_request(self.in_transfer.pop(key))

    def break_transfer(self) -> None:
        """Break a transfer off: its delivered pages stay, and the request begins."""
        if self.in_transfer:
            key = self.random.choice(list(self.in_transfer))
            del self.reserved[key]
            self.harness.free_reservation(key)
            self.harness.add_request(self.in_transfer.pop(key))

    def begin_before_transfer_ends(self) -> None:
        """Begin a request before its transfer ends; it may have to wait until the end of the transfer is known."""
        if self.in_transfer:
            key = self.random.choice(list(self.in_transfer))
            self.stalled.add(key)
            self.harness.add_request(self.in_transfer.pop(key))
            event("stalled")

    def release_finished(self) -> None:
        """Release the prompts that the other side has read, and the reservations whose requests have begun."""
        for request_id in list(self.harness.leased_pages):
            if self.has_all_answers(request_id):
                self.harness.release_lease(request_id)
        for key in list(self.reserved):
            if key not in self.in_transfer and (key in self.stalled or self.has_progress(key)):
                del self.reserved[key]
                self.harness.free_reservation(key)

    def lose_reader(self) -> None:
        """Lose the other side before it has read all pages."""
        if self.harness.leased_pages and self.random.random() < 0.3:
            lost = self.harness.requests[self.random.choice(list(self.harness.leased_pages))]
            for request_id in list(self.harness.leased_pages):
                if request_id == lost.id or (
                    lost.release_group and self.harness.requests[request_id].release_group == lost.release_group
                ):
                    self.harness.release_lease(request_id)

    def has_progress(self, request_id: str) -> bool:
        """Whether any choice of the request has an output or was cancelled."""
        request = self.harness.requests[request_id]
        return any(
            (request_id, k) in self.cancelled or self.harness.outputs.get((request_id, k)) for k in range(request.n)
        )

    def has_all_answers(self, request_id: str) -> bool:
        """Whether every choice of the request's group has an output or was cancelled: only then may it be released."""
        request = self.harness.requests[request_id]
        group = [
            other_request
            for other_request in self.requests
            if other_request is request
            or (request.release_group and other_request.release_group == request.release_group)
        ]
        choices = [(other_request.id, k) for other_request in group for k in range(other_request.n)]
        return all(self.harness.outputs.get(choice) or choice in self.cancelled for choice in choices)

    def cancel_some(self) -> None:
        if not self.harness.requests or self.random.random() < 0.5:
            return
        request = self.random.choice(list(self.harness.requests.values()))
        index = self.random.choice([-1, *range(request.n)])
        for k in range(request.n) if index < 0 else [index]:
            outputs = self.harness.outputs.get((request.id, k), [])
            if not outputs or outputs[-1].finish_reason is None:
                self.cancelled.add((request.id, k))
        self.harness.loop.cancel_request(request.id, index)

    def preempt_one(self) -> None:
        if self.harness.loop.scheduler.running:
            self.harness.loop.scheduler.preempt_last()

    def fail_one_step(self) -> None:
        self.harness.runner.fail_next = self.random.choice(["before", "midway"])
        self.harness.step()
        self.harness.runner.fail_next = None

    def run_to_end(self) -> None:
        """Run to the end; from outside come only the ends of transfers."""
        for number in range(50_000):
            must_release = number % 500 == 499 and self.has_search_beside_pinned_pages()
            if self.harness.step() and not must_release:
                continue
            if self.harness.loop.is_idle and not self.in_transfer and not self.harness.leased_pages:
                break
            before = self.harness.stats.pinned_pages + self.harness.stats.reserved_pages, len(self.in_transfer)
            if self.harness.loop.is_blocked:
                event("stuck")
            self.receive_some_pages(1 << 20)
            self.release_finished()
            after = (
                self.harness.loop.pinned_pages.pinned_count + self.harness.loop.pinned_pages.reserved_count,
                len(self.in_transfer),
            )
            is_stuck = after == before and self.harness.loop.is_idle
            assert must_release or not is_stuck, "all requests wait, and nothing can change that"
        for key in list(self.reserved):
            self.harness.free_reservation(key)
        self.harness.drain()
        assert self.harness.loop.pool.used_count == 0

    def has_search_beside_pinned_pages(self) -> bool:
        """Whether a beam search runs while pages are pinned. Without room for all its beams next to them, it is
        preempted until they are released."""
        pinned_pages, outputs = self.harness.loop.pinned_pages, self.harness.outputs
        return pinned_pages.pinned_count + pinned_pages.reserved_count > 0 and any(
            request.beam is not None and not any(part.finish_reason for part in outputs.get((request.id, 0), []))
            for request in self.requests
        )

    def compare_outputs(self) -> None:
        for request in self.requests:
            for k in range(request.n):
                expected = msgspec.structs.replace(self.expected_outputs[request.id, k])
                prior_count = len(request.prior_tokens[k]) if request.prior_tokens else 0
                if prior_count:
                    expected.prompt_scores = None
                expected.token_ids = expected.token_ids[prior_count:]
                expected.scores = expected.scores[prior_count:] if expected.scores else None
                parts = self.harness.outputs.get((request.id, k), [])
                tokens = [token for part in parts for token in part.token_ids]
                if (request.id, k) in self.cancelled:
                    assert all(part.finish_reason is None for part in parts)
                    assert tokens == expected.token_ids[: len(tokens)]
                    continue
                actual = self.harness.merged_output(request.id, k)
                if actual.finish_reason == "error":
                    assert self.failures and tokens == expected.token_ids[: len(tokens)]
                    continue
                assert actual.cached_tokens <= len(request.token_ids)
                actual.cached_tokens = expected.cached_tokens = 0
                assert actual == expected


handover_settings = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=200 if os.environ.get("PARLEY_NIGHTLY") else 70,
)


@given(st.integers(0, 2**32), st.booleans())
@handover_settings
def test_random_handovers_keep_outputs_and_never_deadlock(seed: int, failures: bool) -> None:
    world = HandoverScenario(seed, failures=failures)
    world.run_actions()
    world.compare_outputs()
    event(f"preempted: {world.harness.stats.preemptions > 0}")


def test_the_state_at_the_end_of_a_prompt_travels_as_its_last_page() -> None:
    """The state is sent once for all choices, and not again while the other side has it."""
    for length in (65, 69):
        request = EngineRequest("w", COMMON_TOKENS[:length], max_tokens=4, n=2, lease=True)
        sender, receiver = (HandoverHarness(staged=None, has_states=True, snapshots=4) for _ in range(2))
        sender.add_request(request)
        while sender.step():
            pass
        assert len(sender.leased_pages["w"]) == 5 and sender.leased_pages["w"][-1] >= 64
        sender.release_lease("w")
        reservation = receiver.reserve_pages(request)
        assert reservation.skip == 0 and len(reservation.pages) == 5
        receiver.receive_pages(request, 5)
        assert receiver.reserve_pages(msgspec.structs.replace(request, id="x")) == ReserveResult(skip=4, pages=[])
        tokens = [sender.merged_output("w", k).token_ids for k in range(2)]
        prior = [token[:1] for token in tokens]
        receiver.add_request(msgspec.structs.replace(request, prior_tokens=prior, lease=False))
        for key in ("w", "x"):
            receiver.free_reservation(key)
        receiver.drain()
        assert receiver.runner.computed_tokens == 2 * (length - 64 + 3)
        assert [receiver.merged_output("w", k).token_ids for k in range(2)] == [token[1:] for token in tokens]


def test_a_full_pool_of_states_refuses_reservations_and_leases_no_page() -> None:
    bench = HandoverHarness(staged=None, has_states=True, snapshots=1)
    first, second = (EngineRequest(f"w{i}", [i, *COMMON_TOKENS[:64]], max_tokens=1, lease=True) for i in range(2))
    assert not bench.reserve_pages(first).error
    assert bench.reserve_pages(second).error == "There is no capacity for this number of pages."
    bench.add_request(second)
    while bench.step():
        pass
    assert bench.leased_pages["w1"] == [] and bench.merged_output("w1").finish_reason == "length"
    bench.free_reservation("w0")
    bench.release_lease("w1")
    assert not bench.loop.pinned_pages.reserved_count


def test_reservation_finds_only_pages_of_the_same_image() -> None:
    pinned_pages = LoopHarness(blocks=30).loop.pinned_pages
    skipped: list[int] = []
    for key, digest, start in [("a", b"cat", 20), ("b", b"cat", 20), ("c", b"dog", 20), ("d", b"cat", 21)]:
        media = [MediaItem("image", digest, start, 20, [EmbeddingRun(0, 20)])]
        pinned_pages.reserve_pages(key, KVPrefix([7] * 64, media=media), lambda result: skipped.append(result.skip))
        pinned_pages.mark_received(key, 4)
    assert skipped == [0, 4, 1, 1]
