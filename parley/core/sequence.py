"""Sequences, and the contract between the scheduler and a model runner.

A *sequence* is one choice of one request: its tokens so far, and how many of them have keys and values in the KV cache
(``computed``). There are no phases: a step lets ``computed`` catch up with ``len(tokens)``. A chunk of a long prompt,
the rest after a prefix hit, a preempted sequence and a decode are the same case: some tokens are not computed yet.

A *step* is a list of rows; a *model runner* computes them. Nothing else passes between policy and model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from parley.core.rope_positions import RopePositions, hashed_items
from parley.types import EngineRequest, MediaItem, PoolingTask, PrefillChunk, TokenScore
from parley.types.media import LEAD_UNIT, lead_length

PAGE_SIZE = 16  # tokens in a page of the KV cache, and the span of one prefix hash
assert LEAD_UNIT % PAGE_SIZE == 0


class LoadedAdapter(Protocol):
    """An adapter as seen outside of the model runner: a digest of its content and its size in memory (bytes)."""

    @property
    def digest(self) -> bytes:
        """Digest of its content."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""


class ItemEmbeddings(Protocol):
    """The embeddings of one media item, as seen outside of the model runner."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""


class MediaEncoder(Protocol):
    """Computes the embeddings of media items."""

    def encode_item(self, item: MediaItem, between_blocks: Callable[[], None]) -> ItemEmbeddings:
        """Compute the embeddings of an item from its features. Runs in a thread of its own.

        ``between_blocks`` is called before each block of the network; it may wait, or raise to stop the work. Errors
        are sentences for users.
        """


class SequenceStatus(Enum):
    """State of a sequence in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One choice of one request. ``tokens`` = prompt + output; the first ``computed`` of them are in the KV cache.

    ``block_table[i]`` is the number of the page that holds tokens ``i * PAGE_SIZE ..``. ``slot`` is its row in the
    sampler's tables while it runs, else -1. ``hashes[i]`` is the chained hash of its i-th page (only full pages have
    one), ``hash_root`` the start of the chain; ``long_rope_root`` derives another start for sequences that use the long
    rotary factors. ``computed`` advances when a step is scheduled, so a model runner must use its row, not the
    sequence.
    """

    request_id: str
    index: int
    request: EngineRequest
    tokens: list[int]
    prompt_len: int
    seed: int
    arrival_number: int  # smaller is older
    admission_number: int = -1  # number of its first admission, which it keeps; -1: not admitted yet
    admission_span: int = 1  # how many admission numbers it reserves; the beams that fork from it get the next ones
    priority: float = field(init=False)  # its request's, unless others wait for its result
    furthest_computed: int = 0  # the most tokens that were ever computed or cached
    computed: int = 0
    block_table: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    slot: int = -1
    # The slot of its state after ``computed`` tokens, if not its own; see ``core.pages.state_slots``.
    state_slot: int = -1
    leased_length: int = 0  # tokens at the start whose pages it computes for another instance, with states
    # Number of its first tokens whose pages were cached without a state at their end: its own state there is kept.
    branch_point: int = 0
    output_snapshot: bytes = b""  # hash of the last state that was kept while it decoded
    status: SequenceStatus = SequenceStatus.WAITING
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when it first ran
    preemptions: int = 0
    queued_at: float = 0.0  # when it was queued, time.perf_counter
    queue_seconds: float = 0.0  # seconds in the queue before its first step
    last_token_at: float = 0.0  # time of its last token, at first when it was queued
    compute_seconds: float = 0.0  # seconds of steps with a row of it since then; only if its request wants costs
    prompt_scores: list[TokenScore | None] = field(default_factory=list)
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)  # steps with a part of it, before the first output
    output_limit: int = 0  # output limit in tokens; 0 computes only the prompt
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end it
    hash_root: bytes = b""
    uses_long_rope: bool = False  # all its keys have the long rotary factors: it exceeds ``long_rope_after``
    adapter: LoadedAdapter | None = None  # its request's adapter, as it was at the start
    # The embeddings of its request's media by digest: at least those of all items that overlap a row that it computes.
    item_embeddings: dict[bytes, ItemEmbeddings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.priority = self.request.priority

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rank(self) -> tuple[float, int]:
        """The position among sequences that run or have run. The sequence with the highest rank is preempted first."""
        return self.priority, self.admission_number

    @cached_property
    def rope_positions(self) -> RopePositions | None:
        """The rotary positions on three axes; None if each token's position is its index on all of them."""
        return RopePositions.of_prompt(self.request.media, self.prompt_len)

    @cached_property
    def lead(self) -> int:
        """Number of its first tokens that are no text, as in ``lead_length``."""
        return lead_length(self.request.media)

    @cached_property
    def prompt_sees_both_ways(self) -> bool:
        """Whether all tokens of the prompt attend to each other."""
        return any(item.prompt_sees_both_ways for item in self.request.media)

    @cached_property
    def hashed_items(self) -> list[MediaItem]:
        """The items that the hashes of its pages cover."""
        return hashed_items(self.request.media, self.request.token_ids)

    @property
    def uncomputed_count(self) -> int:
        """Number of tokens that are not in the KV cache yet: 1 while it decodes, more in its prompt."""
        return len(self.tokens) - self.computed

    @property
    def output_length(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - self.prompt_len


class StateWrite(NamedTuple):
    """The state after the next ``tokens`` tokens of a row goes to ``slot``."""

    tokens: int
    slot: int


class StepStates(NamedTuple):
    """The slots of states that a row uses: it reads the state before its tokens from ``read_slot`` (-1: there are no
    tokens before), and the ``writes`` cover all of its tokens, drafts included."""

    read_slot: int
    writes: list[StateWrite]


@dataclass(slots=True)
class StepRow:
    """One sequence's part of a step: compute its tokens ``start .. start + count``.

    * ``sample``: sample the token after the last of them.
    * ``make_vector``: return the sequence's vector, because the last of them is its last token.
    * ``drafts``: guesses of the tokens to be sampled, in a row that samples. They are computed after the others; as
      long as each draft equals the token sampled in its place, the token after it is sampled as well.
    * ``score_from``: if not None, also return the log-probabilities of prompt tokens ``score_from`` .. min(start +
      count, prompt_len - 1). Position p predicts token p + 1, so the first of them is predicted by position
      ``score_from`` - 1, which is in this row. Tokens that only stand for embeddings of media have none.
    * ``states``: for models with layers that keep a state; None: the state in the sequence's own slot advances.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool
    score_from: int | None = None
    make_vector: bool = False
    drafts: tuple[int, ...] = ()
    states: StepStates | None = None

    @property
    def token_count(self) -> int:
        """Number of tokens that this row adds to the step."""
        return self.count + len(self.drafts)


@dataclass(slots=True)
class Step:
    """One forward pass. ``fresh_pages``: pages allocated since the last step; the model runner clears them first.

    ``page_copies``: (source, target) pages to copy before that, in order.
    ``published_pages``: pages published with this step, which writes their last token; the model runner ignores them.
    """

    rows: list[StepRow]
    fresh_pages: list[int] = field(default_factory=list)
    published_pages: list[int] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        """Number of tokens in all rows, drafts included."""
        return sum(row.count + len(row.drafts) for row in self.rows)


@dataclass(slots=True)
class BeamCandidate:
    """A token that may follow a beam. ``logprob``: after the logits processors; ``score``: of the raw logits, if
    requested. ``end``: as in ``RowResult``, if this token follows."""

    token: int
    logprob: float
    score: TokenScore | None = None
    end: Literal["text", "mark"] | None = None


@dataclass(slots=True)
class RowResult:
    """The result of a row.

    * ``tokens``: one if the row samples, and one more for each of its drafts that was right; ``scores``: theirs.
    * ``vector``: float32, little endian.
    * ``prompt_scores[i]`` belongs to prompt token ``score_from + i``.
    * ``error``: only this row failed (for example, its logits contain NaN); the others are unaffected.
    * ``end``: the grammar allows nothing after the last token, which is either text ("text") or a mark that only ends
      the output ("mark").
    * ``candidates``: those of a row of a beam search, which has no tokens, most probable first. There are at least as
      many as beams, and as many again that are no stop tokens, or all that exist.
    """

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    vector: bytes | None = None
    prompt_scores: list[TokenScore | None] | tuple[()] = ()
    error: str | None = None
    end: Literal["text", "mark"] | None = None
    candidates: list[BeamCandidate] | tuple[()] = ()


class StartedStep(Protocol):
    """A step that a device computes."""

    def wait(self) -> list[RowResult]:
        """Wait for the results: one per row, in order. An exception means that the whole step failed."""


class StepStarter(Protocol):
    """Starts steps on a device without waiting for their results. The device computes them in order."""

    def can_follow(self, row: StepRow) -> bool:
        """Whether the next row of the sequence can be started before the token of this one is known."""

    def start_step(self, step: Step, previous: StartedStep | None) -> StartedStep:
        """Start a step of rows of one token each, which all ``can_follow``.

        Rows whose token is not known yet (``start`` is the number of the sequence's tokens) get the one that
        ``previous`` draws for the same sequence. ``previous`` was the last step that was started.
        """


class DraftProposer(Protocol):
    """Proposes draft tokens. Drafts may be wrong or missing; only speed depends on them."""

    def propose_drafts(self, draft_limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return, for each (sequence, limit), at most ``limit`` tokens that may follow its last token."""

    def forget_sequence(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended. Unknown sequences are ignored."""


class ModelRunner(Protocol):
    """Runs a model. Holds the KV pages and the sampler's tables; makes no scheduling decisions."""

    page_count: int  # pages of the KV cache; 0: an encoder without KV cache, which takes sequences whole
    max_model_len: int
    vocab_size: int
    long_rope_after: float  # tokens; longer sequences use the long rotary factors; inf: there is one set
    generates: bool  # whether it can sample tokens
    dimensions: int  # length of the vectors; 0: the model returns none
    token_dimensions: int  # length of the vectors of tokens
    pooling_tasks: frozenset[PoolingTask]  # tasks that it computes instead of text
    proposer: DraftProposer | None  # a draft model
    media_encoder: MediaEncoder | None  # None: it reads text only
    # Number of sequences whose states it can hold, for a model with layers that sum up a sequence's tokens in a state.
    # None: the model has keys and values only.
    state_slots: int | None
    snapshot_slots: int  # further slots for states, numbered after those
    # None: steps are computed one after the other, each by ``run_step``. Not used for a model with ``state_slots``.
    starter: StepStarter | None

    def load_adapter(self, folder: str) -> LoadedAdapter:
        """Read an adapter from a folder. Runs in a thread of its own, outside the steps; errors are sentences for
        users."""

    def prepare_request(self, request: EngineRequest) -> Callable[[], None] | None:
        """Return work that should run before the request starts, in any thread and outside the steps; None: none. It
        raises nothing: the request's rows report its errors."""

    def admit_sequence(self, sequence: Sequence) -> None:
        """Write the sampling parameters (and token counts) of a sequence into row ``sequence.slot`` of the tables."""

    def release_slot(self, sequence: Sequence) -> None:
        """Free the slot of a sequence (finished or preempted)."""

    def fork_slots(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Fork beams: in each pair, the first sequence continues as a copy of the second, which may be itself. All have
        slots, and the first has its new last token already. A sequence that becomes a copy is not itself copied."""

    def copy_state(self, source: Sequence, target: Sequence) -> None:
        """Copy the state in a running sequence's own slot into that of another; only called if there are
        ``state_slots``."""

    def run_step(self, step: Step) -> list[RowResult]:
        """Compute the step. Returns one result per row, in order. An exception means that the whole step failed."""
