"""Sequences, and the contract between the scheduler and whatever runs a model.

A *sequence* is one choice of one request: its tokens so far, and how many of them have keys and values in the cache
(``computed``). There are no phases: a step lets ``computed`` catch up with ``len(tokens)``. A chunk of a long prompt,
what a prefix hit leaves over, a sequence that was preempted and a plain decode are all the same thing, a distance.

A *step* is a list of rows; a *runner* computes them. Nothing else passes between policy and model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from parley.types import Score, Work

BLOCK_SIZE = 16  # tokens in a page of the KV cache, and the span of one prefix hash


class Adapter(Protocol):
    """What an adapter is to everybody but the runner: content with a name of its own, and how much memory it takes."""

    @property
    def digest(self) -> bytes: ...

    @property
    def nbytes(self) -> int: ...


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One choice of one request. ``tokens`` = prompt + output; the first ``computed`` of them are in the cache.

    ``blocks[i]`` is the page that holds tokens ``i * BLOCK_SIZE ..``. ``slot`` is the row of the sampler's tables while
    it runs, -1 otherwise. ``hashes[i]`` is the chained hash of page i (only whole pages have one), ``root`` the start
    of the chain. ``computed`` advances when a step is scheduled, so a runner goes by its row, not by the sequence.
    """

    id: str
    index: int
    work: Work
    tokens: list[int]
    prompt_len: int
    seed: int
    order: int  # arrival number; smaller is older
    turn: int = -1  # number of its first admission, which it keeps; -1: it has not run yet
    turns: int = 1  # how many numbers it takes up: those that fork from it have the next ones
    priority: float = field(init=False)  # its work's, but while others wait for what comes of it
    reached: int = 0  # how many of its tokens were ever computed or found
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    slot: int = -1
    status: Status = Status.WAITING
    cached: int = 0  # prompt tokens found in the prefix cache when it first ran
    preemptions: int = 0
    added: float = 0.0  # when it was queued, time.perf_counter
    waited: float = 0.0  # seconds from then to its first step
    since: float = 0.0  # when it got its last token, at first when it was queued
    computing: float = 0.0  # seconds of steps with a row of it since then; kept if its work wants costs
    prompt_scores: list[Score | None] = field(default_factory=list)
    limit: int = 0  # output tokens it may have; 0 computes the prompt alone
    stops: frozenset[int] = frozenset()  # tokens that end it
    root: bytes = b""
    adapter: Adapter | None = None  # what its work asked for, as it was when it began

    def __post_init__(self) -> None:
        self.priority = self.work.priority

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rank(self) -> tuple[float, int]:
        """Its place among those that run or did: of two, the one with the higher rank has to leave first."""
        return self.priority, self.turn

    @property
    def generated(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - self.prompt_len


@dataclass(slots=True)
class Row:
    """Compute tokens ``start .. start + count`` of a sequence. ``sample``: draw the next token after the last of them.
    ``pool``: make its vector, for the last of them is the sequence's last.

    ``drafts`` are guesses at the tokens to be drawn, of a row that samples. They are computed behind the others, and as
    long as each is what is drawn in its place, the token after it is drawn as well.

    ``score_from``: if not None, also give the log-probabilities of prompt tokens ``score_from`` .. min(start + count,
    prompt_len - 1): position p predicts token p + 1, so the first of them is predicted by position score_from - 1,
    which is in this row.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool
    score_from: int | None = None
    pool: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """How many tokens of the step are this row's."""
        return self.count + len(self.drafts)


@dataclass(slots=True)
class Step:
    """One forward pass. ``fresh`` are pages handed out since the last step: the runner clears them first.

    ``copies``: (from, to) are pages to be copied before that, one after the other.
    ``hashed`` are pages that became findable with this step, which writes their last token; no concern of the runner's.
    """

    rows: list[Row]
    fresh: list[int] = field(default_factory=list)
    hashed: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(row.count + len(row.drafts) for row in self.rows)


@dataclass(slots=True)
class Candidate:
    """A token that may follow in a search, its log-probability after the edits of the logits, and the score of the raw
    ones if scores are wanted. ``end``: as in ``Sampled``, if it is the token that follows."""

    token: int
    logprob: float
    score: Score | None = None
    end: Literal["form", "mark"] | None = None


@dataclass(slots=True)
class Sampled:
    """What a row gave: the drawn tokens and the scores that were asked for. A row that samples gives one token, and one
    more for each of its drafts that was right; the others none.

    ``prompt_scores[i]`` belongs to prompt token ``score_from + i``. ``error`` is set when this row alone failed (for
    example logits that are not numbers); the others are unaffected. ``vector``: float32, little endian. ``end``: its
    grammar lets nothing follow the token, which is text like others ("form") or a mark that only ends it ("mark").
    A row of a search has no token but ``candidates``, the likeliest first: at least as many as there are beams, and as
    many that are no stop tokens, or all that there are.
    """

    tokens: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    vector: bytes | None = None
    prompt_scores: list[Score] | tuple[()] = ()
    error: str | None = None
    end: Literal["form", "mark"] | None = None
    candidates: list[Candidate] | tuple[()] = ()


class Proposer(Protocol):
    """Guesses tokens. May be wrong, and gives what it likes: nothing depends on it but speed."""

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence at most so many tokens that may follow its last."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Unknown ones are ignored."""


class Runner(Protocol):
    """Runs a model. Holds the KV pages and the sampler's tables; owns no policy."""

    blocks: int  # pages in the KV cache; 0: it keeps nothing between steps, and takes sequences whole
    max_model_len: int
    vocab_size: int
    generates: bool  # can it draw tokens?
    dimensions: int  # of the vectors it makes, 0: it makes none
    proposer: Proposer | None  # a model beside it that guesses tokens

    def fetch(self, folder: str) -> Adapter:
        """Read an adapter. Called beside steps, in a thread of its own; raises with a sentence for a person."""

    def prepare(self, work: Work) -> Callable[[], None] | None:
        """What is best done for a work before it is begun, beside steps and in any thread; None: nothing. It raises
        nothing: what is wrong with the work is told by its rows."""

    def admit(self, sequence: Sequence) -> None:
        """The sequence got ``sequence.slot``: write its sampling parameters (and token counts) into that row."""

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves its slot (finished or preempted)."""

    def follow(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Of a search: each of these sequences, all of which have slots, goes on as a copy of the one beside it, which
        may be itself, and has its new last token already. Who goes on as another has nobody going on as it."""

    def run(self, step: Step) -> list[Sampled]:
        """Compute the step. One result per row, in order. An exception means that the whole step failed."""
