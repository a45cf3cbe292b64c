"""A fake model runner whose model is a hash of the token history and whose KV pages record every write.

On every row it checks that the sequence's pages hold exactly that sequence's history, so a stale, foreign, unwritten or
uncleared page cannot go unnoticed. Tokens and scores depend only on the history and the seed, as those of an exact
model do, so tests can compare outputs between schedules.
"""

from __future__ import annotations

from hashlib import sha256
from random import Random

import msgspec

from parley.core.loop import Loop
from parley.core.prefill_share import Quota
from parley.core.sequence import BLOCK_SIZE, Candidate, Row, Sampled, Sequence, Step
from parley.core.step_budget import Fixed
from parley.types import Finish, Output, Score, Settings, Stats, Work

VOCAB = 50


class Broken(Exception):
    """A failure that the test injects."""


class Violation(BaseException):
    """The scheduler broke a rule. Not an Exception, so that the loop cannot mistake it for a failure of the model."""


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise Violation(rule)


def histories(salt: str, tokens: list[int]) -> list[int]:
    """Return a state per position that stands for its keys and values: it depends on the salt and all tokens so far."""
    state, result = int.from_bytes(sha256(salt.encode()).digest()[:7], "little"), []
    for token in tokens:
        state = hash((state, token))  # a hash of integers is the same in every process, and quick
        result.append(state)
    return result


class LedgerRunner:
    def __init__(self, blocks: int = 64, slots: int = 4, max_model_len: int = 10_000):
        self.blocks, self.max_model_len, self.vocab_size = blocks, max_model_len, VOCAB
        self.generates, self.dimensions = True, 2
        self.proposer: Guesser | None = None
        self.pages: list[list[int | None]] = [[-1] * BLOCK_SIZE for _ in range(blocks)]  # dirty from the start
        self.slots: list[Sequence | None] = [None] * slots
        self.computed = 0  # tokens that the model computed
        self.widest = 0  # tokens of the largest step
        self.steps: list[list[tuple[str, int, int, int]]] = []  # (id, index, start, count) of each row
        self.fail_next: str | None = None  # "before" or "midway": the next step raises
        self.refuse: set[str] = set()  # works whose admission raises
        self.poison: set[tuple[str, int]] = set()  # (work, output number) whose row fails

    def admit(self, sequence: Sequence) -> None:
        require(self.slots[sequence.slot] is None, "a slot was given twice")
        if sequence.id in self.refuse:
            raise Broken("admission")
        self.slots[sequence.slot] = sequence

    def release(self, sequence: Sequence) -> None:
        require(self.slots[sequence.slot] is sequence, "a sequence left a slot that it did not have")
        self.slots[sequence.slot] = None

    def follow(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        for sequence, parent in forks:
            require(
                self.slots[sequence.slot] is sequence and self.slots[parent.slot] is parent, "a fork without a slot"
            )
            require(sequence.tokens[:-1] == parent.tokens[: len(sequence) - 1], "a fork with other tokens")
        forked = [sequence for sequence, parent in forks if sequence is not parent]
        require(not {id(parent) for _, parent in forks} & set(map(id, forked)), "who goes on as another is a parent")

    def run(self, step: Step) -> list[Sampled]:
        failure, self.fail_next = self.fail_next, None
        if failure == "before":
            raise Broken("step")
        for source, target in step.copies:
            self.pages[target] = list(self.pages[source])
        require(len(set(step.fresh)) == len(step.fresh), "a page was handed out twice in a step")
        require(len({id(row.sequence) for row in step.rows}) == len(step.rows), "a sequence has two rows")
        for block in step.fresh:
            self.pages[block] = [None] * BLOCK_SIZE
        rows = step.rows[: len(step.rows) // 2] if failure == "midway" else step.rows
        past = {id(row): histories(row.sequence.work.salt, [*row.sequence.tokens, *row.drafts]) for row in rows}
        for row in rows:
            self._write(row, past[id(row)])
        if failure:
            raise Broken("step")
        self.computed += step.tokens
        self.widest = max(self.widest, step.tokens)
        self.steps.append([(row.sequence.id, row.sequence.index, row.start, row.count) for row in rows])
        return [self._attend(row, past[id(row)]) for row in rows]

    def _write(self, row: Row, past: list[int]) -> None:
        sequence, end = row.sequence, row.start + row.width
        require(self.slots[sequence.slot] is sequence, "a row without a slot")
        require(row.count > 0 and end - len(row.drafts) <= len(sequence.tokens), "a row beyond its sequence")
        require(row.sample or not row.drafts, "drafts of what is not drawn")
        require(all(0 <= token < VOCAB for token in row.drafts), "a draft that is no token")
        require(len(sequence.blocks) == -(-end // BLOCK_SIZE), "more or fewer pages than tokens need")
        for position in range(row.start, end):
            page = self.pages[sequence.blocks[position // BLOCK_SIZE]]
            require(page[position % BLOCK_SIZE] is None, "wrote over a page, or into one that was not cleared")
            page[position % BLOCK_SIZE] = past[position]

    def _attend(self, row: Row, past: list[int]) -> Sampled:
        sequence, end = row.sequence, row.start + row.count
        for position in range(end):
            held = self.pages[sequence.blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            require(held == past[position], "a page does not hold its sequence's history")
        result = Sampled()
        if row.score_from is not None:
            require(row.start < row.score_from <= end, "asked to score what the row does not predict")
            last = min(end, sequence.prompt_len - 1)
            result.prompt_scores = [score(past[p - 1], sequence.tokens[p]) for p in range(row.score_from, last + 1)]
        if row.pool:
            require(end == len(sequence.tokens), "a vector before the end")
            result.vector = past[end - 1].to_bytes(8, "little", signed=True)
        if row.sample:
            require(end == len(sequence.tokens), "sampled before the end")
            if (sequence.id, sequence.generated) in self.poison:
                return Sampled(error="This row is not a number.")
            if sequence.work.beam is not None:
                return Sampled(
                    candidates=candidates(sequence.work, sequence.generated, past[end - 1]),
                    prompt_scores=result.prompt_scores,
                )
            self._try(row, past, result)
        return result

    def _try(self, row: Row, past: list[int], result: Sampled) -> None:
        """Sample while the drafts are right, and clear the KV entries of rejected drafts: they need a new write before
        a read."""
        sequence, last = row.sequence, row.start + row.count - 1
        for ahead in range(len(row.drafts) + 1):
            if (sequence.id, sequence.generated + ahead) in self.poison:
                break
            token = draw(sequence, past[last + ahead], ahead)
            require(not result.tokens or result.tokens[-1] not in sequence.stops, "went on after the end")
            result.tokens.append(token)
            if sequence.work.logprobs >= 0:
                result.scores.append(score(past[last + ahead], token))
            if ahead == len(row.drafts) or token != row.drafts[ahead]:
                break
        for position in range(last + len(result.tokens), last + 1 + len(row.drafts)):
            self.pages[sequence.blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] = None


def draw(sequence: Sequence, state: int, ahead: int = 0) -> int:
    """Return the token that is sampled ``ahead`` tokens after the end: a function of history, seed and position. Stop
    ids are forbidden before ``min_tokens``."""
    forbidden = sequence.work.stop_ids if sequence.generated + ahead < sequence.work.min_tokens else []
    allowed = [token for token in range(VOCAB) if token not in forbidden]
    return allowed[hash((state, sequence.seed, len(sequence.tokens) + ahead)) % len(allowed)]


class Guesser:
    """A proposer that knows the next tokens, and drafts them or wrong ones at random from ``seed``."""

    def __init__(self, seed: int):
        self.random = Random(seed)

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._guess(sequence, length) for sequence, length in asked]

    def _guess(self, sequence: Sequence, length: int) -> list[int]:
        guess: list[int] = []
        for ahead in range(self.random.choice([0, length, length, length + 3])):
            states = histories(sequence.work.salt, sequence.tokens + guess)
            right = draw(sequence, states[-1], ahead)
            guess.append(right if self.random.random() < 0.8 else self.random.choice([0, 1, 5, VOCAB, -1, 2**70]))
        return guess

    def forget(self, sequence: Sequence) -> None:
        pass


def candidates(work: Work, generated: int, state: int) -> list[Candidate]:
    """Return the candidates of a beam, most probable first. Few tokens have any probability, sometimes fewer than there
    are beams."""
    forbidden = work.stop_ids if generated < work.min_tokens else []
    chances = {token: score(state, token) for token in range(VOCAB) if token not in forbidden}
    likely = [token for token in chances if hash((state, token)) % 7 == 0] or [min(chances)]
    likely.sort(key=lambda token: (-chances[token].logprob, token))
    scores = [chances[token] if work.logprobs >= 0 else None for token in likely]
    return [Candidate(token, chances[token].logprob, told) for token, told in zip(likely, scores, strict=True)]


def searched(work: Work, limit: int) -> list[tuple[list[int], list[Score | None], bool]]:
    """Reference beam search on plain lists: tokens and scores of each result, best first, and if a stop ended it."""
    beam = work.beam
    assert beam is not None
    running: list[tuple[float, list[int], list[Score | None]]] = [(0.0, [], [])]
    found: list[tuple[float, list[int], list[Score | None], bool]] = []
    while True:
        length = len(running[0][1]) + 1
        options = []
        for rank, (total, tokens, scores) in enumerate(running):
            state = histories(work.salt, work.token_ids + tokens)[-1]
            for each in candidates(work, len(tokens), state):
                key = (-(total + each.logprob), rank, each.token)
                options.append((key, [*tokens, each.token], [*scores, each.score]))
        options.sort(key=lambda option: option[0])
        running = []
        for place, ((loss, _, token), tokens, scores) in enumerate(options):
            stopped = token in work.stop_ids and length > work.min_tokens
            if stopped or length == limit:
                if place < beam.width:
                    found.append((-loss / length**beam.length_penalty, tokens, scores, stopped))
            elif len(running) < beam.width:
                running.append((-loss, tokens, scores))
        found.sort(key=lambda each: -each[0])
        del found[beam.width :]
        ahead = limit if beam.early_stopping == "never" and beam.length_penalty > 0 else length
        if not running or (
            len(found) == beam.width
            and (beam.early_stopping is True or running[0][0] / ahead**beam.length_penalty <= found[-1][0])
        ):
            return [each[1:] for each in found]


def score(state: int, token: int) -> Score:
    return Score(-float(hash((state, token)) % 1000) / 100, token + 1)


class Steady(Fixed):
    """A step budget that cycles through a list of values."""

    def __init__(self, *budgets: int):
        super().__init__(0)
        self.budgets = list(budgets)
        self.turn = 0

    def begin(self, decodes: int) -> None:
        self.turn += 1
        self.left = self.budgets[self.turn % len(self.budgets)]


class Metered(Quota):
    """A prefill share whose clock is a formula of a step's rows, so that no result depends on the machine's speed."""

    def __init__(self, runner: LedgerRunner, part: float):
        super().__init__(part)
        self.runner = runner
        self.prompts = self.beside = self.most = 0.0  # seconds in mixed steps: of prompts, of all, of the longest step
        self.held = 0  # steps that were closed to prompts

    def observe(self, seconds: float, tokens: int) -> None:
        rows = self.runner.steps[-1]
        seconds = 0.01 + sum(0.001 * count * (1 + (start + count / 2) / 1000) for _, _, start, count in rows)
        super().observe(seconds, tokens)
        self.held += not self.open
        if self._beside:
            self.prompts += seconds * self._taken / tokens
            self.beside += seconds
            self.most = max(self.most, seconds)


class Bench:
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
        share: float = 1.0,
    ):
        self.runner = LedgerRunner(blocks, slots, max_model_len)
        if guesses is not None:
            self.runner.proposer = Guesser(guesses)
        self.quota = Metered(self.runner, share)
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        self.log: list[tuple[list[tuple[str, int]], Stats, list[Output]]] = []  # of each step, with the choices it ran
        self.stats = Stats()
        settings = Settings(model="ledger", max_batch=slots, prefix_cache=prefix_cache)
        self.loop = Loop(self.runner, settings, self._receive, Steady(*budgets), filled=self.filled, quota=self.quota)
        self.speculates = self.loop.speculation is not None and self.loop.speculation.wanted
        if self.loop.speculation is not None:  # always draft, even where it does not pay
            self.loop.speculation.length = lambda sequence: settings.speculate_tokens  # type: ignore[method-assign]
            self.loop.speculation.costs.best = lambda rows, chances: len(chances)  # type: ignore[method-assign]

    def _receive(self, outputs: list[Output], stats: Stats) -> None:
        for output in outputs:
            self.outputs.setdefault((output.id, output.index), []).append(output)
        self.stats = stats
        rows = [(id, index) for id, index, _, _ in self.runner.steps[-1]] if stats.step_rows else []
        self.log.append((rows, stats, outputs))

    def filled(self, id: str, pages: list[int]) -> None:
        """Receive the pages of a lease; subclasses record them."""

    def step(self) -> bool:
        first = self._first()
        more = self.loop.step()
        self.check()
        held = first is not None and not first.generated and not self.quota.open
        if first is not None and self.stats.step_rows and not held and first.id not in self.runner.refuse:
            assert (first.id, first.index) in self.log[-1][0], "the first in order had no row"
        assert more == (not self.loop.idle)
        return more

    def check(self) -> None:
        """Check that no page leaks, and that sequences run and wait in order. Harnesses with pinned pages relax it."""
        self.loop.check()
        scheduler = self.loop.scheduler
        both = (*scheduler.running, *scheduler.waiting)
        ranks = [sequence.rank for sequence in both if sequence.turn >= 0]
        assert ranks == sorted(ranks), "one that ran waits before another that runs, or they are not in order"
        lines: dict[tuple[float, str], list[int]] = {}
        for sequence in both:
            lines.setdefault((sequence.priority, sequence.work.tenant), []).append(sequence.order)
        assert all(line == sorted(line) for line in lines.values()), "a younger equal of one tenant is before an older"

    def _first(self) -> Sequence | None:
        """Return the sequence that must have a row in the next step: best priority, and running before waiting."""
        running, waiting = self.loop.scheduler.running, self.loop.scheduler.waiting
        going = [sequence for sequence in running if sequence.computed < len(sequence)]  # leaves out waiting beams
        ahead = [*going[:1], *([waiting.head] if waiting else [])]
        return min(ahead, key=lambda sequence: sequence.priority, default=None)

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        assert self.loop.idle, "the loop does not come to an end"
        assert self.stats.blocks_used == self.stats.running == self.stats.waiting == 0
        assert self.runner.slots == [None] * len(self.runner.slots)

    def result(self, id: str, index: int = 0) -> Output:
        """Merge all outputs of a choice into one; assert that only the last of them has ``finish``."""
        parts = self.outputs[id, index]
        assert [part.finish is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(part.prompt_scores is None for part in parts[1:])
        if not self.speculates and not self.stats.drafts:
            assert all(len(part.token_ids) == 1 for part in parts[:-1])  # beam search results arrive whole
        scores = [score for part in parts for score in part.scores or []]
        return Output(
            id,
            index,
            token_ids=[token for part in parts for token in part.token_ids],
            scores=scores or None,
            finish=parts[-1].finish,
            stop_id=parts[-1].stop_id,
            error=parts[-1].error,
            cached_tokens=parts[-1].cached_tokens,
            prompt_scores=parts[0].prompt_scores,
            vector=parts[-1].vector,
        )


def alone(work: Work, index: int = 0, max_model_len: int = 10_000) -> Output:
    """Return the output of one choice that runs alone: in one chunk, without prefix cache, in a pool with room."""
    if work.beam is not None and work.max_tokens:
        limit = min(work.max_tokens, max_model_len - len(work.token_ids))
        found = searched(work, limit)
        tokens, scores, stopped = found[index % len(found)]
        prompt = alone(msgspec.structs.replace(work, beam=None, max_tokens=0), index).prompt_scores
        told = [score for score in scores if score is not None]
        finish: Finish = "stop" if stopped else "length"
        return Output(
            work.id, index, tokens, told or None, finish, tokens[-1] if stopped else None, prompt_scores=prompt
        )
    single = Work(
        id=work.id,
        token_ids=work.token_ids,
        max_tokens=work.max_tokens,
        sampling=work.sampling,
        seed=(work.seed + index) % 2**64,
        min_tokens=work.min_tokens,
        stop_ids=work.stop_ids,
        logprobs=work.logprobs,
        prompt_logprobs=work.prompt_logprobs if index == 0 else -1,
        salt=work.salt,
        pooling=work.pooling,
    )
    bench = Bench(blocks=64, slots=1, budgets=(8192,), prefix_cache=False, max_model_len=max_model_len)
    bench.loop.add(single)
    bench.drain()
    result = bench.result(work.id)
    result.index = index
    return result
