"""A fake model runner whose model is a hash of the token history and whose KV pages record every write.

On every row it checks that the sequence's pages hold exactly that sequence's history, so a stale, foreign, unwritten or
uncleared page cannot go unnoticed. Tokens and scores depend only on the history and the seed, as those of an exact
model do, so tests can compare outputs between schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from queue import SimpleQueue
from random import Random

import msgspec

from parley.core.admission import PrepareRequest
from parley.core.engine_loop import EngineLoop
from parley.core.pages.cache_events import CacheEvent, PageRemoved, PagesStored
from parley.core.prefill_share import PrefillShare
from parley.core.sequence import (
    PAGE_SIZE,
    BeamCandidate,
    RowResult,
    Sequence,
    SequenceStatus,
    StateWrite,
    Step,
    StepRow,
    StepStarter,
    StepStates,
)
from parley.core.step_budget import FixedBudget
from parley.types import (
    EngineFinishReason,
    EngineOutput,
    EngineRequest,
    EngineStats,
    MediaItem,
    ParleySettings,
    TokenScore,
)

VOCAB = 50
COMMON_TOKENS = [(7 * i + 3) % VOCAB for i in range(200)]  # the beginning of prompts with a shared prefix


class InjectedFailure(Exception):
    """A failure that the test injects."""


class LedgerViolation(BaseException):
    """The scheduler broke a rule. Not an Exception, so that the loop cannot mistake it for a failure of the model."""


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise LedgerViolation(rule)


def kv_salt(request: EngineRequest) -> str:
    """Return the salt for ``kv_history``: the client's, and the prompt, if all of its tokens attend to each other."""
    if any(item.prompt_sees_both_ways for item in request.media):
        return f"{request.cache_salt} {request.token_ids} {[(item.start, item.digest) for item in request.media]}"
    return request.cache_salt


def kv_history(salt: str, tokens: list[int], is_long: bool = False, media: list[MediaItem] | None = None) -> list[int]:
    """Return a state per position that stands for its keys and values: it depends on the salt, all tokens so far, the
    media items among them, and on whether the sequence uses the long rotary factors."""
    state, result = int.from_bytes(sha256(salt.encode() + b" long" * is_long).digest()[:7], "little"), []
    contents = {position: content for item in media or [] for position, content in item_contents(item)}
    for position, token in enumerate(tokens):
        # a hash of integers is the same in every process, and quick
        state = hash((state, contents.get(position, token)))
        result.append(state)
    return result


def item_contents(item: MediaItem) -> Iterator[tuple[int, int]]:
    """Yield position and content of each embedding of an item."""
    numbers = count()
    for run in item.runs:
        for position in range(item.start + run.offset, item.start + run.offset + run.count):
            yield position, hash((int.from_bytes(item.digest[:7], "little"), next(numbers)))


@dataclass
class LedgerEmbeddings:
    """Embeddings of the item with this digest."""

    digest: bytes
    nbytes: int


class LedgerEncoder:
    """An encoder of ``blocks`` blocks. An embedding has ``embedding_bytes``; items in ``failing`` raise."""

    def __init__(self) -> None:
        self.blocks, self.embedding_bytes = 3, 10
        self.failing: set[bytes] = set()
        self.encoded_digests: list[bytes] = []  # of all items that were started
        self.block_count = 0
        self.before_block: Callable[[], None] = lambda: None
        self.is_computing = False

    def encode_item(self, item: MediaItem, between_blocks: Callable[[], None]) -> LedgerEmbeddings:
        self.encoded_digests.append(item.digest)
        require(item.features is not None, "an item without features was encoded")
        for _ in range(self.blocks):
            self.is_computing = False
            between_blocks()
            self.is_computing = True
            self.before_block()
            self.block_count += 1
        self.is_computing = False
        if item.digest in self.failing:
            raise InjectedFailure(f"The {item.kind} cannot be encoded.")
        return LedgerEmbeddings(item.digest, item.embedding_count * self.embedding_bytes)


class LedgerRunner:
    @property
    def pooling_tasks(self):
        return frozenset({"embed"} if self.dimensions else ())

    def __init__(
        self,
        blocks: int = 64,
        slots: int = 4,
        max_model_len: int = 10_000,
        long_rope_after: float = math.inf,
        has_states: bool = False,
        snapshots: int = 0,
    ):
        self.long_rope_after = long_rope_after
        self.state_slots, self.snapshot_slots = (slots, snapshots) if has_states else (None, 0)
        self.states = [-1] * (slots + snapshots)  # of the last tokens computed in each slot; dirty from the start
        self.starter: StepStarter | None = None
        self.page_count, self.max_model_len, self.vocab_size = blocks, max_model_len, VOCAB
        self.generates, self.dimensions = True, 2
        self.proposer: SeededProposer | None = None
        self.media_encoder: LedgerEncoder | None = None
        self.pages: list[list[int | None]] = [[-1] * PAGE_SIZE for _ in range(blocks)]  # dirty from the start
        self.slots: list[Sequence | None] = [None] * slots
        self.computed_tokens = 0  # tokens that the model computed
        self.largest_step = 0  # tokens of the largest step
        self.steps: list[list[tuple[str, int, int, int]]] = []  # (id, index, start, count) of each row
        self.fail_next: str | None = None  # "before" or "midway": the next step raises
        self.failing_admissions: set[str] = set()  # requests whose admission raises
        self.failing_rows: set[tuple[str, int]] = set()  # (request, output number) whose row fails

    def admit_sequence(self, sequence: Sequence) -> None:
        require(self.slots[sequence.slot] is None, "a slot was given twice")
        if sequence.request_id in self.failing_admissions:
            raise InjectedFailure("admission")
        self.slots[sequence.slot] = sequence

    def release_slot(self, sequence: Sequence) -> None:
        require(self.slots[sequence.slot] is sequence, "a sequence left a slot that it did not have")
        self.slots[sequence.slot] = None

    def fork_slots(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        for sequence, parent in forks:
            require(
                self.slots[sequence.slot] is sequence and self.slots[parent.slot] is parent, "a fork without a slot"
            )
            require(sequence.tokens[:-1] == parent.tokens[: len(sequence) - 1], "a fork with other tokens")
        forked = [sequence for sequence, parent in forks if sequence is not parent]
        require(
            not {id(parent) for _, parent in forks} & set(map(id, forked)),
            "a sequence that continues another is a parent as well",
        )

    def copy_state(self, source: Sequence, target: Sequence) -> None:
        require(self.slots[source.slot] is source and self.slots[target.slot] is target, "a state without a slot")
        require(source.computed == target.computed, "a state after other tokens")
        require(source.state_slot == target.state_slot == -1, "a state that lies elsewhere")
        self.states[target.slot] = self.states[source.slot]

    def _advance_states(self, rows: list[StepRow], histories: dict[int, list[int]]) -> None:
        """Advance the states of all rows at once: a row starts from nothing at the sequence's first token."""
        before, owners = list(self.states), {}
        for row in rows:
            own, at = row.sequence.slot, row.start
            slot, writes = row.states or StepStates(own if row.start else -1, [StateWrite(row.count, own)])
            require((slot < 0) == (row.start == 0), "a state before the first token")
            require(slot < 0 or before[slot] == histories[id(row)][row.start - 1], "a state of other tokens")
            require(sum(write.tokens for write in writes) == row.token_count, "more or fewer states than tokens")
            require(not row.drafts or all(write.tokens == 1 for write in writes), "a draft without a state of its own")
            targets = [target for _, target in writes]
            require(len(set(targets)) == len(targets), "a row writes a slot twice")
            for used in {slot, *targets} - {-1}:
                readers, writers = owners.setdefault(used, (set(), set()))
                (writers if used in targets else readers).add(id(row))
                require(not writers or len(readers | writers) == 1, "rows of a step write a slot that others use")
            for tokens, target in writes:
                at += tokens
                self.states[target] = histories[id(row)][at - 1]

    def run_step(self, step: Step) -> list[RowResult]:
        require(not self.media_encoder or not self.media_encoder.is_computing, "a step while the encoder computes")
        failure, self.fail_next = self.fail_next, None
        if failure == "before":
            raise InjectedFailure("step")
        for source, target in step.page_copies:
            self.pages[target] = list(self.pages[source])
        require(len(set(step.fresh_pages)) == len(step.fresh_pages), "a page was handed out twice in a step")
        require(len({id(row.sequence) for row in step.rows}) == len(step.rows), "a sequence has two rows")
        for block in step.fresh_pages:
            self.pages[block] = [None] * PAGE_SIZE
        rows = step.rows[: len(step.rows) // 2] if failure == "midway" else step.rows
        kv_states = {id(row): self._history_of(row) for row in rows}
        for row in rows:
            self._write_kv(row, kv_states[id(row)])
        if self.state_slots is not None:
            self._advance_states(rows, kv_states)
        if failure:
            raise InjectedFailure("step")
        self.computed_tokens += step.total_tokens
        self.largest_step = max(self.largest_step, step.total_tokens)
        self.steps.append([(row.sequence.request_id, row.sequence.index, row.start, row.count) for row in rows])
        return [self._check_and_sample(row, kv_states[id(row)]) for row in rows]

    def _history_of(self, row: StepRow) -> list[int]:
        sequence, is_long = row.sequence, row.sequence.uses_long_rope
        require(is_long == (len(sequence) > self.long_rope_after), "the rotary factors do not follow the length")
        tokens = [*sequence.tokens, *row.drafts]
        require(is_long or len(tokens) <= self.long_rope_after, "drafts beyond the short rotary factors")
        return kv_history(kv_salt(sequence.request), tokens, is_long, sequence.request.media)

    def _write_kv(self, row: StepRow, kv_states: list[int]) -> None:
        sequence, end = row.sequence, row.start + row.token_count
        require(self.slots[sequence.slot] is sequence, "a row without a slot")
        require(row.count > 0 and end - len(row.drafts) <= len(sequence.tokens), "a row beyond its sequence")
        require(row.sample or not row.drafts, "a row that samples nothing has drafts")
        require(all(0 <= token < VOCAB for token in row.drafts), "a draft that is no token")
        require(len(sequence.block_table) == -(-end // PAGE_SIZE), "more or fewer pages than tokens need")
        for item in sequence.request.media:
            if item.start < end and item.end > row.start:
                embeddings = sequence.item_embeddings.get(item.digest)
                require(isinstance(embeddings, LedgerEmbeddings), "a row lacks embeddings")
                require(embeddings.digest == item.digest, "a row has the embeddings of another item")
                require(end >= item.end or not item.sees_both_ways, "a row ends within an item that sees both ways")
        is_whole = row.start >= sequence.prompt_len or end == sequence.prompt_len
        require(is_whole or not sequence.prompt_sees_both_ways, "a row ends elsewhere than its prompt, which must not")
        for position in range(row.start, end):
            page = self.pages[sequence.block_table[position // PAGE_SIZE]]
            require(page[position % PAGE_SIZE] is None, "wrote over a page, or into one that was not cleared")
            page[position % PAGE_SIZE] = kv_states[position]

    def _check_and_sample(self, row: StepRow, kv_states: list[int]) -> RowResult:
        sequence, end = row.sequence, row.start + row.count
        for position in range(end):
            stored_state = self.pages[sequence.block_table[position // PAGE_SIZE]][position % PAGE_SIZE]
            require(stored_state == kv_states[position], "a page does not hold its sequence's history")
        result = RowResult()
        if row.score_from is not None:
            require(row.start < row.score_from <= end, "asked to score what the row does not predict")
            last = min(end, sequence.prompt_len - 1)
            result.prompt_scores = [
                token_score_of(kv_states[p - 1], sequence.tokens[p]) for p in range(row.score_from, last + 1)
            ]
        if row.make_vector:
            require(end == len(sequence.tokens), "a vector before the end")
            result.vector = kv_states[end - 1].to_bytes(8, "little", signed=True)
        if row.sample:
            require(end == len(sequence.tokens), "sampled before the end")
            if (sequence.request_id, sequence.output_length) in self.failing_rows:
                return RowResult(error="This row is not a number.")
            if sequence.request.beam is not None:
                return RowResult(
                    candidates=beam_candidates(sequence.request, sequence.output_length, kv_states[end - 1]),
                    prompt_scores=result.prompt_scores,
                )
            self._verify_drafts(row, kv_states, result)
        return result

    def _verify_drafts(self, row: StepRow, kv_states: list[int], result: RowResult) -> None:
        """Sample while the drafts are right, and clear the KV entries of rejected drafts: they need a new write before
        a read."""
        sequence, last = row.sequence, row.start + row.count - 1
        for ahead in range(len(row.drafts) + 1):
            if (sequence.request_id, sequence.output_length + ahead) in self.failing_rows:
                break
            token = draw_token(sequence, kv_states[last + ahead], ahead)
            require(not result.tokens or result.tokens[-1] not in sequence.stop_token_ids, "went on after the end")
            result.tokens.append(token)
            if sequence.request.logprobs >= 0:
                result.scores.append(token_score_of(kv_states[last + ahead], token))
            if ahead == len(row.drafts) or token != row.drafts[ahead]:
                break
        for position in range(last + len(result.tokens), last + 1 + len(row.drafts)):
            self.pages[sequence.block_table[position // PAGE_SIZE]][position % PAGE_SIZE] = None


def draw_token(sequence: Sequence, state: int, ahead: int = 0) -> int:
    """Return the token that is sampled ``ahead`` tokens after the end: a function of history, seed and position. Stop
    ids are forbidden before ``min_tokens``."""
    forbidden = sequence.request.stop_ids if sequence.output_length + ahead < sequence.request.min_tokens else []
    allowed = [token for token in range(VOCAB) if token not in forbidden]
    return allowed[hash((state, sequence.seed, len(sequence.tokens) + ahead)) % len(allowed)]


class SeededProposer:
    """A proposer that knows the next tokens, and drafts them or wrong ones at random from ``seed``."""

    def __init__(self, seed: int):
        self.random = Random(seed)

    def propose_drafts(self, draft_limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._draft_tokens(sequence, length) for sequence, length in draft_limits]

    def _draft_tokens(self, sequence: Sequence, length: int) -> list[int]:
        drafts: list[int] = []
        for ahead in range(self.random.choice([0, length, length, length + 3])):
            tokens = sequence.tokens + drafts
            states = kv_history(kv_salt(sequence.request), tokens, sequence.uses_long_rope, sequence.request.media)
            correct_token = draw_token(sequence, states[-1], ahead)
            drafts.append(
                correct_token if self.random.random() < 0.8 else self.random.choice([0, 1, 5, VOCAB, -1, 2**70])
            )
        return drafts

    def forget_sequence(self, sequence: Sequence) -> None:
        pass


def beam_candidates(request: EngineRequest, generated: int, state: int) -> list[BeamCandidate]:
    """Return the candidates of a beam, most probable first. Few tokens have any probability, sometimes fewer than there
    are beams."""
    forbidden = request.stop_ids if generated < request.min_tokens else []
    scores_by_token = {token: token_score_of(state, token) for token in range(VOCAB) if token not in forbidden}
    ranked_tokens = [token for token in scores_by_token if hash((state, token)) % 7 == 0] or [min(scores_by_token)]
    ranked_tokens.sort(key=lambda token: (-scores_by_token[token].logprob, token))
    scores = [scores_by_token[token] if request.logprobs >= 0 else None for token in ranked_tokens]
    return [
        BeamCandidate(token, scores_by_token[token].logprob, token_score)
        for token, token_score in zip(ranked_tokens, scores, strict=True)
    ]


def reference_beam_search(
    request: EngineRequest, limit: int, long_rope_after: float = math.inf
) -> list[tuple[list[int], list[TokenScore | None], bool]]:
    """Reference beam search on plain lists: tokens and scores of each result, best first, and if a stop ended it."""
    beam = request.beam
    assert beam is not None
    running: list[tuple[float, list[int], list[TokenScore | None]]] = [(0.0, [], [])]
    finished_beams: list[tuple[float, list[int], list[TokenScore | None], bool]] = []
    while True:
        length = len(running[0][1]) + 1
        options = []
        for rank, (total, tokens, scores) in enumerate(running):
            history = request.token_ids + tokens
            state = kv_history(kv_salt(request), history, len(history) > long_rope_after, request.media)[-1]
            for candidate in beam_candidates(request, len(tokens), state):
                key = (-(total + candidate.logprob), rank, candidate.token)
                options.append((key, [*tokens, candidate.token], [*scores, candidate.score]))
        options.sort(key=lambda option: option[0])
        running = []
        for rank_in_step, ((loss, _, token), tokens, scores) in enumerate(options):
            stopped = token in request.stop_ids and length > request.min_tokens
            if stopped or length == limit:
                if rank_in_step < beam.width:
                    finished_beams.append((-loss / length**beam.length_penalty, tokens, scores, stopped))
            elif len(running) < beam.width:
                running.append((-loss, tokens, scores))
        finished_beams.sort(key=lambda beam: -beam[0])
        del finished_beams[beam.width :]
        ahead = limit if beam.early_stopping == "never" and beam.length_penalty > 0 else length
        if not running or (
            len(finished_beams) == beam.width
            and (beam.early_stopping is True or running[0][0] / ahead**beam.length_penalty <= finished_beams[-1][0])
        ):
            return [candidate[1:] for candidate in finished_beams]


def token_score_of(state: int, token: int) -> TokenScore:
    return TokenScore(-float(hash((state, token)) % 1000) / 100, token + 1)


class CyclicBudget(FixedBudget):
    """A step budget that cycles through a list of values."""

    def __init__(self, *budgets: int):
        super().__init__(0)
        self.budgets = list(budgets)
        self.step_number = 0

    def begin_step(self, decodes: int) -> None:
        self.step_number += 1
        self.remaining = self.budgets[self.step_number % len(self.budgets)]


class SimulatedShare(PrefillShare):
    """A prefill share whose clock is a formula of a step's rows, so that no result depends on the machine's speed."""

    def __init__(self, runner: LedgerRunner, share: float):
        super().__init__(share)
        self.runner = runner
        self.prompt_seconds = self.mixed_seconds = self.longest_step = (
            0.0  # seconds in mixed steps: of prompts, of all, of the longest step
        )
        self.closed_steps = 0  # steps that were closed to prompts

    def observe_step(self, seconds: float, tokens: int) -> None:
        rows = self.runner.steps[-1]
        seconds = 0.01 + sum(0.001 * count * (1 + (start + count / 2) / 1000) for _, _, start, count in rows)
        super().observe_step(seconds, tokens)
        self.closed_steps += not self.allows_prefill
        if self._has_decodes:
            self.prompt_seconds += seconds * self._prefill_tokens / tokens
            self.mixed_seconds += seconds
            self.longest_step = max(self.longest_step, seconds)


class CacheIndex:
    """The content of a prefix cache as its events tell it: the first token and the tokens of each page, by hash."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[int, list[int]]] = {}

    def apply_events(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, PagesStored):
                self._store_pages(event)
            elif isinstance(event, PageRemoved):
                del self.pages[event.digest]
            else:
                self.pages.clear()

    def _store_pages(self, event: PagesStored) -> None:
        assert len(event.token_ids) == PAGE_SIZE * len(event.hashes) and (event.parent_hash is None) == (
            event.start == 0
        )
        parent, start = event.parent_hash, event.start
        for place, digest in enumerate(event.hashes):
            tokens = event.token_ids[place * PAGE_SIZE : (place + 1) * PAGE_SIZE]
            assert digest not in self.pages, "a page was stored twice"
            if parent is not None and not event.media:
                data = b"".join(token.to_bytes(4, "little") for token in tokens)
                assert sha256(parent + data).digest()[:16] == digest, "the tokens are not those of the page"
            self.pages[digest] = start, tokens
            parent, start = digest, start + PAGE_SIZE


class LoopHarness:
    """A loop on a `LedgerRunner`: records every output and checks after each step that no page leaks."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        slots: int = 4,
        budgets: tuple[int, ...] = (64,),
        prefix_cache: bool = True,
        max_model_len: int = 10_000,
        guesses: int | None = None,
        prefill_share: float = 1.0,
        prepare_request: PrepareRequest | None = None,
        long_rope_after: float = math.inf,
        step_ms: float = 250,
        media_cache: int = 1000,
        has_states: bool = False,
        snapshots: int = 0,
    ):
        self.runner = self.make_runner(blocks, slots, max_model_len, long_rope_after, has_states, snapshots)
        self.encoder = LedgerEncoder()
        self.runner.media_encoder = self.encoder
        if guesses is not None:
            self.runner.proposer = SeededProposer(guesses)
        self.prefill_share = SimulatedShare(self.runner, prefill_share)
        self.outputs: dict[tuple[str, int], list[EngineOutput]] = {}
        self.step_log: list[
            tuple[list[tuple[str, int]], EngineStats, list[EngineOutput]]
        ] = []  # of each step, with the choices it ran
        self.stats = EngineStats()
        settings = ParleySettings(
            model="ledger",
            max_batch=slots,
            prefix_cache=prefix_cache,
            step_ms=step_ms,
            media_cache=media_cache,
            speculate_tokens=7,
        )
        self.cache_index = CacheIndex()
        self.posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.loop = EngineLoop(
            self.runner,
            settings,
            self._receive,
            CyclicBudget(*budgets),
            prepare_request=prepare_request,
            on_pages_leased=self.on_pages_leased,
            prefill_share=self.prefill_share,
            post=self.posted.put,
            publish_events=self.cache_index.apply_events,
        )
        self.speculates = self.loop.speculation is not None and self.loop.speculation.is_active
        if self.loop.speculation is not None:  # always draft, even where it does not pay
            self.loop.speculation.draft_length = lambda sequence: settings.speculate_tokens  # type: ignore[method-assign]
            self.loop.speculation.costs.best_draft_count = lambda rows, chances: len(chances)  # type: ignore[method-assign]

    def _receive(self, outputs: list[EngineOutput], stats: EngineStats) -> None:
        for output in outputs:
            self.outputs.setdefault((output.id, output.index), []).append(output)
        self.stats = stats
        rows = [(request_id, index) for request_id, index, _, _ in self.runner.steps[-1]] if stats.step_rows else []
        self.step_log.append((rows, stats, outputs))

    def make_runner(self, *args) -> LedgerRunner:
        """Return the runner; subclasses make another."""
        return LedgerRunner(*args)

    def on_pages_leased(self, request_id: str, pages: list[int]) -> None:
        """Receive the pages of a lease; subclasses record them."""

    def step(self) -> bool:
        self._run_posted()
        due = self._next_due()
        older = [
            waiting
            for waiting in self.loop.scheduler.waiting
            if due and waiting.admission_number >= 0 and waiting.rank < due.rank
        ]
        more = self.loop.step()
        self.check()
        assert self.cache_index.pages.keys() == self.loop.pool._cache.keys(), "the events tell of another cache"
        is_held_back = due is not None and not due.output_length and not self.prefill_share.allows_prefill
        if (
            due is not None
            and self.stats.step_rows
            and not is_held_back
            and due.request_id not in self.runner.failing_admissions
            and due not in (self.loop.encode_queue or ())
        ):
            # One that lacks pages gives up its own, to a sequence that was admitted before it and waits for them.
            entitled = older if due.status is SequenceStatus.WAITING else [due]
            rows = self.step_log[-1][0]
            assert any((sequence.request_id, sequence.index) in rows for sequence in entitled), (
                "the first in order had no row"
            )
        assert more == (not self.loop.is_idle)
        return more or self.awaits_encoder()

    def awaits_encoder(self) -> bool:
        """Whether an item is being encoded while the loop has nothing else to do."""
        return self.loop.is_idle and self.loop.encode_queue is not None and self.loop.encode_queue.is_encoding

    def _run_posted(self) -> None:
        """Run posted calls; wait for one if the loop has nothing else to do."""
        while self.awaits_encoder() or not self.posted.empty():
            self.posted.get(timeout=60)()

    def check(self) -> None:
        """Check that no page leaks, and that sequences run and wait in order. Harnesses with pinned pages relax it."""
        self.loop.check_invariants()
        scheduler = self.loop.scheduler
        for sequence in scheduler.running:
            needed = {item.digest for item in sequence.request.media if item.end > sequence.computed}
            assert sequence.item_embeddings.keys() <= needed, "embeddings that are no longer needed are still held"
        all_sequences = (*scheduler.running, *scheduler.waiting)
        # One that waited for embeddings has let others pass.
        ranks = [
            sequence.rank for sequence in all_sequences if sequence.admission_number >= 0 and not sequence.request.media
        ]
        assert ranks == sorted(ranks), "one that ran waits before another that runs, or they are not in order"
        arrivals_by_tenant: dict[tuple[float, str, int], list[int]] = {}
        for sequence in all_sequences:
            if sequence.request.media:
                continue
            line = sequence.priority, sequence.request.tenant, sequence.request.tenant_priority
            arrivals_by_tenant.setdefault(line, []).append(sequence.arrival_number)
        assert all(arrivals == sorted(arrivals) for arrivals in arrivals_by_tenant.values()), (
            "a younger equal of one tenant is before an older"
        )

    def _next_due(self) -> Sequence | None:
        """Return the sequence that must have a row in the next step: best priority, and running before waiting."""
        running, waiting = self.loop.scheduler.running, self.loop.scheduler.waiting
        unfinished = [sequence for sequence in running if sequence.computed < len(sequence)]  # leaves out waiting beams
        heads = [*unfinished[:1], *([waiting.head_sequence] if waiting else [])]
        return min(heads, key=lambda sequence: sequence.priority, default=None)

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        assert self.loop.is_idle, "the loop does not come to an end"
        self.loop.close()
        assert self.stats.used_pages == self.stats.running == self.stats.waiting == 0
        assert self.runner.slots == [None] * len(self.runner.slots)

    def beam_length(self, request_id: str) -> int:
        """Return how many tokens each beam of a running search has."""
        (length,) = {slot.output_length for slot in self.runner.slots if slot and slot.request_id == request_id}
        return length

    def merged_output(self, request_id: str, index: int = 0) -> EngineOutput:
        """Merge all outputs of a choice into one; assert that only the last of them has ``finish``."""
        parts = self.outputs[request_id, index]
        assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(part.prompt_scores is None for part in parts[1:])
        if not self.speculates and not self.stats.drafts:
            assert all(len(part.token_ids) == 1 for part in parts[:-1])  # beam search results arrive whole
        scores = [score for part in parts for score in part.scores or []]
        return EngineOutput(
            request_id,
            index,
            token_ids=[token for part in parts for token in part.token_ids],
            scores=scores or None,
            finish_reason=parts[-1].finish_reason,
            stop_id=parts[-1].stop_id,
            error=parts[-1].error,
            cached_tokens=parts[-1].cached_tokens,
            prompt_scores=parts[0].prompt_scores,
            vector=parts[-1].vector,
        )


def assert_same_output(actual: EngineOutput, expected: EngineOutput) -> None:
    actual.cached_tokens = expected.cached_tokens = 0
    assert actual == expected


def run_alone(
    request: EngineRequest, index: int = 0, max_model_len: int = 10_000, long_rope_after: float = math.inf
) -> EngineOutput:
    """Return the output of one choice that runs alone: in one chunk, without prefix cache, in a pool with room."""
    if request.beam is not None and request.max_tokens:
        limit = min(request.max_tokens, max_model_len - len(request.token_ids))
        beams = reference_beam_search(request, limit, long_rope_after)
        tokens, scores, stopped = beams[index % len(beams)]
        scoring = msgspec.structs.replace(request, beam=None, max_tokens=0)
        prompt_scores = run_alone(scoring, index, long_rope_after=long_rope_after).prompt_scores
        token_scores = [score for score in scores if score is not None]
        finish: EngineFinishReason = "stop" if stopped else "length"
        return EngineOutput(
            request.id,
            index,
            tokens,
            token_scores or None,
            finish,
            tokens[-1] if stopped else None,
            prompt_scores=prompt_scores,
        )
    single = EngineRequest(
        id=request.id,
        token_ids=request.token_ids,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        seed=(request.seed + index) % 2**64,
        min_tokens=request.min_tokens,
        stop_ids=request.stop_ids,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs if index == 0 else -1,
        cache_salt=request.cache_salt,
        pooling=request.pooling,
        media=request.media,
    )
    bench = LoopHarness(
        blocks=64,
        slots=1,
        budgets=(8192,),
        prefix_cache=False,
        max_model_len=max_model_len,
        long_rope_after=long_rope_after,
    )
    bench.loop.add_request(single)
    bench.drain()
    result = bench.merged_output(request.id)
    result.index = index
    return result
