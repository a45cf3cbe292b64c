"""Prefill for other instances, and prompts that other instances computed: pinned pages keep their content until they
are released, nothing deadlocks, and a continuation after handed-over tokens equals the output without a handover.
"""

from __future__ import annotations

from random import Random

import msgspec
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.invariant_ledger import VOCAB, Bench, alone, histories, require

from parley.core.search.beam import capacity
from parley.core.sequence import BLOCK_SIZE
from parley.core.shared_pages.pinned import Holds
from parley.core.shared_pages.reservations import Taken
from parley.core.shared_pages.staging import Transit
from parley.types import Beam, Output, Stats, Work

COMMON = [(7 * i + 3) % VOCAB for i in range(200)]


class Host:
    """Staging memory for the pages of a runner."""

    def __init__(self, pages: list[list[int | None]], blocks: int):
        self.blocks = blocks
        self.places: list[list[int | None]] = [[] for _ in range(blocks)]
        self._pages = pages

    def store(self, pairs: list[tuple[int, int]]) -> None:
        for page, place in pairs:
            self.places[place] = list(self._pages[page])

    def load(self, pairs: list[tuple[int, int]]) -> None:
        for page, place in pairs:
            self._pages[page] = list(self.places[place])


class Exchange(Bench):
    """A harness whose pages, or ``staged`` copies of them, others read and fill. Checks leased pages after every step
    until they are released."""

    def __init__(self, *, staged: int | None, **options) -> None:
        self.transit: Transit | None = None
        super().__init__(**options)
        self.holds: Holds | Transit = self.loop.holds
        self.memory = self.runner.pages  # the pages that the other side sees
        if staged is not None:
            host = Host(self.runner.pages, staged)
            self.memory = host.places
            self.holds = self.transit = Transit(host, self.tell)
            self.transit.holds = self.loop.holds
        self.works: dict[str, Work] = {}
        self.read: dict[str, list[int]] = {}  # pages, by lease
        self.taken: dict[str, Taken] = {}  # by reservation
        self.landed: dict[str, int] = {}

    def add(self, work: Work) -> None:
        self.works[work.id] = work
        if work.lease:
            self.read[work.id] = []
        self.loop.add(work)

    def filled(self, id: str, pages: list[int]) -> None:
        (self.transit.fill if self.transit is not None else self.tell)(id, pages)

    def tell(self, id: str, pages: list[int]) -> None:
        self.read[id] += pages

    def _receive(self, outputs: list[Output], stats: Stats) -> None:
        if self.transit is not None:
            self.transit.flush()
        super()._receive(outputs, stats)

    def step(self) -> bool:
        more = super().step()
        for id in self.read:
            self.look(id)
        return more

    def check(self) -> None:
        self.loop.check()
        if self.transit is not None:
            self.transit.check()

    def _first(self) -> None:
        """Return nothing: any sequence may have to wait for pages of others."""

    def look(self, id: str) -> None:
        work = self.works[id]
        tokens = work.token_ids + (work.given[0] if work.given else [])
        require(len(self.read[id]) <= len(tokens) // BLOCK_SIZE, "a lease of more than whole pages")
        past = histories(work.salt, tokens)
        for number, page in enumerate(self.read[id]):
            span = slice(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE)
            require(self.memory[page] == past[span], "a page that is read does not hold what it is read for")

    def release(self, id: str) -> None:
        self.look(id)
        del self.read[id]
        self.holds.release(id)

    def reserve(self, key: str, tokens: list[int], salt: str = "") -> Taken:
        self.holds.reserve(key, tokens, salt, "", "", lambda taken: self.taken.__setitem__(key, taken))
        taken = self.taken[key]
        if taken.error:
            return self.taken.pop(key)
        whole = len(taken.pages) + taken.skip == len(tokens) // BLOCK_SIZE
        assert whole or (self.transit is not None and len(taken.pages) <= len(self.memory))
        event(f"whole: {whole}")
        self.landed[key] = 0
        return taken

    def land(self, key: str, tokens: list[int], salt: str, count: int) -> None:
        """Write pages as a transfer does, over their old content."""
        taken = self.taken[key]
        past = histories(salt, tokens)
        for number in range(self.landed[key], min(count, len(taken.pages))):
            first = (taken.skip + number) * BLOCK_SIZE
            self.memory[taken.pages[number]] = list(past[first : first + BLOCK_SIZE])
        self.landed[key] = max(self.landed[key], min(count, len(taken.pages)))
        self.holds.land(key, count)

    def free(self, key: str) -> None:
        del self.taken[key], self.landed[key]
        self.holds.free(key)


class World:
    """Random works, some handed over in either direction, and random events between their steps, from ``seed``."""

    def __init__(self, seed: int, *, failures: bool):
        self.random = Random(seed)
        pick = self.random.choice
        self.blocks = pick([6, 7, 8, 9, 12, 30])
        self.bench = Exchange(
            staged=pick([None, None, 0, 1, 2, 5, 30]),
            blocks=self.blocks,
            slots=pick([1, 2, 4, 8]),
            budgets=tuple(pick([1, 5, 16, 23, 32, 64, 500]) for _ in range(3)),
            guesses=pick([None, None, 1]),
        )
        self.failures = failures
        self.works = [self.work(number) for number in range(self.random.randint(2, 8))]
        self.whole = {(work.id, k): self.alone(work, k) for work in self.works for k in range(work.n)}
        self.works = [self.give(work) for work in self.works]
        self.coming = [work for work in self.works if self.random.random() < 0.5]  # another instance computes them
        for work, other in zip(self.works, self.works[1:], strict=False):  # some are released as one group
            if (
                work.lease
                and other.lease
                and not {work.id, other.id} & {each.id for each in self.coming}
                and pick([0, 1])
            ):
                other.group = work.group = work.group or work.id
        self.queue = list(self.works)
        self.waiting: dict[str, Work] = {}  # works whose pages are in transfer, by reservation
        self.reserved: dict[str, Work] = {}
        self.stalled: set[str] = set()  # those of them that began before all pages had arrived
        self.cancelled: set[tuple[str, int]] = set()

    def work(self, number: int) -> Work:
        pick = self.random.choice
        shared = pick([0, 0, 16, 17, 32, 48, 64, 80])
        tokens = COMMON[:shared] + [
            (number * 11 + i) % VOCAB for i in range(self.random.randint(0 if shared else 1, 40))
        ]
        n = pick([1, 1, 2])
        work = Work(
            id=f"w{number}",
            token_ids=tokens[: self.blocks * BLOCK_SIZE],
            max_tokens=pick([0, 1, 5, 20, 45]),
            seed=pick([0, 1, 2**64 - 1]),
            n=n,
            min_tokens=pick([0, 0, 3]),
            stop_ids=pick([[], [], [5], [5, 6, 7]]),
            logprobs=pick([-1, 2]),
            prompt_logprobs=pick([-1, -1, 0]),
            salt=pick(["", "", "pepper"]),
            priority=pick([0, 0, 0, 1, -3]),
            tenant=pick(["", "", "a"]),
            lease=pick([False, True]),
        )
        room = capacity(self.blocks, 2) if self.bench.loop.settings.max_batch >= 2 else 0
        if pick([0, 0, 1]) and len(work.token_ids) < room:
            work.beam, work.lease = Beam(2), work.lease and work.max_tokens == 0
        return work

    def alone(self, work: Work, index: int) -> Output:
        room = self.blocks * BLOCK_SIZE if work.beam is None else capacity(self.blocks, work.beam.width)
        return alone(work, index, max_model_len=room)

    def give(self, work: Work) -> Work:
        """Mark a random prefix of each choice's output as sampled elsewhere, never with the last token."""
        if work.beam is not None or self.random.random() < 0.5:
            return work
        tokens = [self.whole[work.id, k].token_ids for k in range(work.n)]
        cuts = [self.random.randint(0, max(0, len(each) - 1)) for each in tokens]
        return msgspec.structs.replace(work, given=[each[:cut] for each, cut in zip(tokens, cuts, strict=True)])

    def play(self) -> None:
        actions = [self.arrive, self.arrive, self.step, self.step, self.land, self.cancel, self.settle, self.preempt]
        actions += [self.lose, self.leave, self.stall] + [self.fail] * self.failures
        for _ in range(60):
            self.random.choice(actions)()
            self.bench.check()
        while self.queue:
            self.arrive()
        self.finish()

    def arrive(self) -> None:
        """Add the next work, or reserve pages for its prompt."""
        if not self.queue:
            return
        work = self.queue.pop(0)
        if work in self.coming:
            taken = self.bench.reserve(work.id, work.token_ids, work.salt)
            if not taken.error:
                self.reserved[work.id] = self.waiting[work.id] = work
                event("reserved")
                return
            event("refused")
        self.bench.add(work)
        if work.group and self.queue and self.queue[0].group == work.group:
            self.arrive()

    def step(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.bench.step()

    def land(self, count: int | None = None) -> None:
        """Deliver more pages of one reservation; with the last of them add its work."""
        if not self.waiting:
            return
        key = self.random.choice(list(self.waiting))
        work = self.waiting[key]
        count = self.bench.landed[key] + self.random.randint(0, 3) if count is None else count
        self.bench.land(key, work.token_ids, work.salt, count)
        if self.bench.landed[key] == len(self.bench.taken[key].pages):
            self.bench.add(self.waiting.pop(key))

    def lose(self) -> None:
        """Break a transfer off: its delivered pages stay, and the work begins."""
        if self.waiting:
            key = self.random.choice(list(self.waiting))
            del self.reserved[key]
            self.bench.free(key)
            self.bench.add(self.waiting.pop(key))

    def stall(self) -> None:
        """Begin a work before its transfer ends; it may have to wait until the end of the transfer is known."""
        if self.waiting:
            key = self.random.choice(list(self.waiting))
            self.stalled.add(key)
            self.bench.add(self.waiting.pop(key))
            event("stalled")

    def settle(self) -> None:
        """Release the prompts that the other side has read, and the reservations whose works have begun."""
        for id in list(self.bench.read):
            if self.over(id):
                self.bench.release(id)
        for key in list(self.reserved):
            if key not in self.waiting and (key in self.stalled or self.told(key)):
                del self.reserved[key]
                self.bench.free(key)

    def leave(self) -> None:
        """Lose the other side before it has read all pages."""
        if self.bench.read and self.random.random() < 0.3:
            lost = self.bench.works[self.random.choice(list(self.bench.read))]
            for id in list(self.bench.read):
                if id == lost.id or (lost.group and self.bench.works[id].group == lost.group):
                    self.bench.release(id)

    def told(self, id: str) -> bool:
        """Whether any choice of the work has an output or was cancelled."""
        work = self.bench.works[id]
        return any((id, k) in self.cancelled or self.bench.outputs.get((id, k)) for k in range(work.n))

    def over(self, id: str) -> bool:
        """Whether every choice of the work's group has an output or was cancelled: only then may it be released."""
        work = self.bench.works[id]
        group = [each for each in self.works if each is work or (work.group and each.group == work.group)]
        choices = [(each.id, k) for each in group for k in range(each.n)]
        return all(self.bench.outputs.get(choice) or choice in self.cancelled for choice in choices)

    def cancel(self) -> None:
        if not self.bench.works or self.random.random() < 0.5:
            return
        work = self.random.choice(list(self.bench.works.values()))
        index = self.random.choice([-1, *range(work.n)])
        for k in range(work.n) if index < 0 else [index]:
            outputs = self.bench.outputs.get((work.id, k), [])
            if not outputs or outputs[-1].finish is None:
                self.cancelled.add((work.id, k))
        self.bench.loop.cancel(work.id, index)

    def preempt(self) -> None:
        if self.bench.loop.scheduler.running:
            self.bench.loop.scheduler.preempt()

    def fail(self) -> None:
        self.bench.runner.fail_next = self.random.choice(["before", "midway"])
        self.bench.step()
        self.bench.runner.fail_next = None

    def finish(self) -> None:
        """Run to the end; from outside come only the ends of transfers."""
        for _ in range(50_000):
            if self.bench.step():
                continue
            if self.bench.loop.idle and not self.waiting and not self.bench.read:
                break
            before = self.bench.stats.pinned + self.bench.stats.reserved, len(self.waiting)
            if self.bench.loop._stuck:
                event("stuck")
            self.land(1 << 20)
            self.settle()
            after = self.bench.loop.holds.pinned + self.bench.loop.holds.reserved, len(self.waiting)
            assert after != before or not self.bench.loop.idle, "everybody waits, and nothing can change that"
        for key in list(self.reserved):
            self.bench.free(key)
        self.bench.drain()
        assert self.bench.loop.pool.used == 0

    def compare(self) -> None:
        for work in self.works:
            for k in range(work.n):
                expected = msgspec.structs.replace(self.whole[work.id, k])
                before = len(work.given[k]) if work.given else 0
                if before:
                    expected.prompt_scores = None
                expected.token_ids = expected.token_ids[before:]
                expected.scores = expected.scores[before:] if expected.scores else None
                parts = self.bench.outputs.get((work.id, k), [])
                tokens = [token for part in parts for token in part.token_ids]
                if (work.id, k) in self.cancelled:
                    assert all(part.finish is None for part in parts)
                    assert tokens == expected.token_ids[: len(tokens)]
                    continue
                got = self.bench.result(work.id, k)
                if got.finish == "error":
                    assert self.failures and tokens == expected.token_ids[: len(tokens)]
                    continue
                assert got.cached_tokens <= len(work.token_ids)
                got.cached_tokens = expected.cached_tokens = 0
                assert got == expected


quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150)


@given(st.integers(0, 2**32), st.booleans())
@quick
def test_random_handovers_keep_outputs_and_never_deadlock(seed: int, failures: bool) -> None:
    world = World(seed, failures=failures)
    world.play()
    world.compare()
    event(f"preempted: {world.bench.stats.preemptions > 0}")
