"""Grammar masks: which tokens of the vocabulary a sequence's grammar allows next, computed during the network's step.

A ``GrammarState`` is one sequence's position in its grammar. It advances as soon as a token is drawn. Once all states
of a step have advanced, threads begin the next masks, which are not needed until the network has run a whole step.
llguidance computes masks, in Rust and without the GIL. With few cores, such background work slows the network down. So
a *lazy* state checks single tokens, in a microsecond each, and computes a mask only on request. A mask of few tokens
takes less time than the start of a thread; a mask of free text takes up to a hundred times as long. Whether two letters
are allowed tells which of the two comes next (``allows_letters``). The API process has already checked the grammar
(``text/grammar/compiler.py``) and its size, so an error here fails only one choice.

This module knows sequences and the bytes of tokens. It masks logits, and does nothing else with them.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import llguidance
import numpy as np
import torch
from llguidance.numpy import fill_next_token_bitmask

from parley import native
from parley.control_groups import core_count
from parley.core.sequence import Sequence
from parley.model.sampling.thinking_budget import ThinkingBudget
from parley.text.grammar.limits import GRAMMAR_NOT_FOLLOWED, GRAMMAR_TOO_COMPLEX, MATCHER_LIMITS
from parley.types import EngineRequest

if TYPE_CHECKING:
    from parley.text.tokens.tokenizer import Tokenizer

log = logging.getLogger("parley.engine")

EndKind = Literal["text", "mark"]

# Compiled grammars kept as templates: the choices of a request, and often consecutive requests, share one.
CACHED_GRAMMARS = 64

LETTERS = ("a", "A")  # where text is free, one of them may come next
WORD_BITS = 64  # bits of a mask that are examined at once
MAX_LISTED_WORDS = 1024  # masks with at most this many non-zero words have their allowed tokens listed


class GrammarCache:
    """The grammars of one model. ``folder``: holds its tokenizer; ``vocab_size``: the number of logits in a row."""

    def __init__(self, folder: str | Path, vocab_size: int):
        self.vocab_size = vocab_size
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        self._llg_tokenizer: llguidance.LLTokenizer | None = None
        self.letter_ids: list[int] = []  # the ids of LETTERS
        self.end_ids: frozenset[int] = frozenset()  # ids of tokens that end an answer
        # Int32 words in llguidance's masks, which cover all tokens of the tokenizer and of the model.
        self.mask_words = 0
        self._templates: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock, self._tokenizer_lock = threading.Lock(), threading.Lock()
        self.threads = ThreadPoolExecutor(max(1, min(4, core_count() // 2)), "grammar")

    def new_state(self, sequence: Sequence, *, greedy: bool = False, lazy: bool = False) -> GrammarState:
        """Create a sequence's state, past the output it already has. ``greedy``: only ``best_allowed`` will be used."""
        return GrammarState(self, sequence, greedy, lazy)

    def new_matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Return a matcher at the start of the grammar. Slow, so call it in a thread. Raises ValueError."""
        with self._lock:
            template = self._templates.get(grammar)
        if template is None:
            # Without the lock, so that others can continue; at worst two threads compile the same grammar.
            limits = llguidance.LLParserLimits(**MATCHER_LIMITS)
            template = llguidance.LLMatcher(self._load_llg_tokenizer(), grammar, log_level=0, limits=limits)
            if template.is_error():
                raise ValueError(template.get_error())
        with self._lock:
            template = self._templates.setdefault(grammar, template)
            self._templates.move_to_end(grammar)
            if len(self._templates) > CACHED_GRAMMARS:
                self._templates.popitem(last=False)
            return template.deep_copy()

    def is_cached(self, grammar: str) -> bool:
        """Whether the grammar is cached, so that ``new_matcher`` is fast."""
        return grammar in self._templates

    def precompile(self, grammar: str) -> None:
        """Compile a grammar for ``new_matcher`` in advance, concurrently with steps."""
        try:
            self.new_matcher(grammar)
        except Exception as error:  # reported again where the grammar is used
            log.info("a grammar cannot be read: %s", error)

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, loaded on first use. Raises BadTokenizer."""
        from parley.text.tokens.tokenizer import Tokenizer  # few engines need it, and all start faster without

        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.from_folder(self._folder)
                self.end_ids = self._tokenizer.eos_ids
                self.letter_ids = [
                    token_id for token_id in map(self._tokenizer.find_token, LETTERS) if token_id is not None
                ]
            return self._tokenizer

    def _load_llg_tokenizer(self) -> llguidance.LLTokenizer:
        """Return llguidance's tokenizer, built on first use. For large vocabularies this takes a second, mostly under
        the GIL."""
        tokenizer = self.load_tokenizer()
        with self._tokenizer_lock:
            if self._llg_tokenizer is None:
                self._llg_tokenizer = self._build_llg_tokenizer(tokenizer)
            return self._llg_tokenizer

    def _build_llg_tokenizer(self, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
        """Build llguidance's tokenizer."""
        size = max(self.vocab_size, tokenizer.vocab_size)
        self.mask_words = -(-size // 32)
        end_ids = sorted(tokenizer.eos_ids) or None
        try:
            llg_tokenizer = llguidance.LLTokenizer(
                tokenizer.backend.to_str(), n_vocab=size, eos_token=end_ids, slices=[]
            )
        except ValueError:  # a tokenizer type that llguidance does not support
            pieces = llguidance.TokenizerWrapper(TokenBytes(tokenizer))
            llg_tokenizer = llguidance.LLTokenizer(pieces, n_vocab=size, eos_token=end_ids, slices=[])
        # It holds the GIL. Two calls let other threads run a step in between.
        return llg_tokenizer.with_slices(llguidance.LLTokenizer.general_slices())


class TokenBytes:
    """A vocabulary as the bytes of its tokens, with the attributes that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.marks.values())
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        marks = set(self.special_token_ids)
        self._ids = {piece: token_id for token_id, piece in enumerate(self.tokens) if piece and token_id not in marks}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize a text that the grammar forces, with the longest matching token at each position."""
        data, ids, at = text.encode() if isinstance(text, str) else text, [], 0
        while at < len(data):
            candidate_ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in candidate_ends if data[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


class GrammarState:
    """A sequence's position in its grammar and in its reasoning, if that has a budget.

    ``end_kind``: nothing may follow the last token, which is text ("text") or a mark that ends the answer ("mark").
    ``allowed_tokens``: the tokens allowed next, int64 and ascending, if they are few; not set for greedy states.
    ``mask_needed``: no token is forced, and there is no mask until ``request_mask``. Valid after ``wait_ready``.
    """

    def __init__(self, grammars: GrammarCache, sequence: Sequence, greedy: bool, lazy: bool):
        self.end_kind: EndKind | None = None
        self.mask_needed = False
        self._greedy, self._lazy = greedy, lazy
        self._grammars = grammars
        self._stops = sequence.stop_token_ids
        self._error: str | None = None
        self._matcher: llguidance.LLMatcher | None = None
        self._thinking_budget: ThinkingBudget | None = None
        self._forced: int | None = None  # the only token allowed next
        self._bits: np.ndarray | None = None  # uint8 [V / 8 or more]: the allowed tokens, token 0 in the lowest bit
        self.allowed_tokens: torch.Tensor | None = None
        output = sequence.tokens[sequence.prompt_len :]
        self._future: Future[None] | None = None
        self._schedule_mask(partial(self._initialize_state, sequence.request, output), True)

    @staticmethod
    def needs_state(request: EngineRequest) -> bool:
        """Whether a sequence of this request needs a GrammarState."""
        return bool(request.grammar) or request.reasoning_limit is not None

    def copy_state(self) -> GrammarState:
        """Return an independent state at the same position. Waits for the mask."""
        self.wait_ready()
        duplicate = copy(self)
        if self._error is None:
            duplicate._matcher = self._matcher.deep_copy() if self._matcher is not None else None
            duplicate._thinking_budget = (
                self._thinking_budget.copy_budget() if self._thinking_budget is not None else None
            )
        return duplicate

    def wait_ready(self) -> str | None:
        """Wait for the mask of the next token. Return None if it exists, otherwise the error message."""
        self.start_mask(in_thread=False)
        if self._future is not None:
            future, self._future = self._future, None
            try:
                if future.cancel():  # no thread has started it
                    self._compute()
                else:
                    future.result()
            except ValueError as error:
                log.error("a grammar cannot be enforced: %s", error)
                self._error = GRAMMAR_TOO_COMPLEX
            except Exception as error:  # not the client's fault: the folder's files may be gone, for example
                log.error("a grammar cannot be enforced: %s", error)
                self._error = GRAMMAR_NOT_FOLLOWED
        return self._error

    def _schedule_mask(self, compute: Callable[[], None], in_thread: bool) -> None:
        """Schedule ``compute``: in a thread if ``in_thread``, otherwise in ``wait_ready``."""
        self._compute, self._future = compute, self._grammars.threads.submit(compute) if in_thread else Future()

    def allows_token(self, token: int) -> bool:
        """Whether the next mask would allow this token. An end mark that is allowed only as a last resort does not
        count."""
        if token in self._grammars.end_ids and token not in self._stops:
            return False
        return self._matcher is not None and self._matcher.validate_tokens([token]) == 1

    def allows_letters(self) -> bool:
        """Whether the grammar allows one of ``LETTERS`` next: then it allows many other tokens too, and the mask takes
        long. True if the vocabulary has no such token."""
        letter_ids = self._grammars.letter_ids
        return not letter_ids or any(map(self.allows_token, letter_ids))

    def start_mask(self, *, in_thread: bool = True) -> None:
        """Start the next mask, unless it may turn out to be unnecessary. Call it after all states of a step have
        advanced; threads that start earlier only slow the others down."""
        if self.mask_needed and not self._lazy:
            self.request_mask(in_thread=in_thread)

    def request_mask(self, *, in_thread: bool = True) -> None:
        """Compute the mask: in a thread if ``in_thread``, otherwise in ``wait_ready``."""
        self.mask_needed = False
        if self._matcher is not None:
            self._schedule_mask(partial(self._compute_mask, self._matcher), in_thread)

    @property
    def restricts_next(self) -> bool:
        """Whether the state restricts the next token. Valid after ``wait_ready``."""
        return self._forced is not None or self._bits is not None

    def mask_logits(self, row: torch.Tensor) -> None:
        """Mask the logits float32 [V] of forbidden tokens in place. Valid after ``wait_ready`` returned None."""
        if self._forced is not None:
            row.fill_(float("-inf"))
            row[self._forced] = 0.0
        elif self._bits is not None:
            native.apply_mask(row, self._bits)

    def best_allowed(self, row: torch.Tensor) -> int | None:
        """Return the allowed token with the largest logit, float32 [V], even if all allowed ones are -inf; None if the
        state allows any token. Valid after ``wait_ready``."""
        if self._forced is not None or self._bits is None:
            return self._forced
        return native.masked_argmax(row, self._bits)

    def correct_token(self, token: int) -> int:
        """Return the sampled token if it is allowed, otherwise the first allowed one (all allowed ones have logits of
        -inf)."""
        if self._bits is None or int(self._bits[token // 8]) >> token % 8 & 1:
            return token
        first = int(np.flatnonzero(self._bits)[0])
        bits = int(self._bits[first])
        return 8 * first + (bits & -bits).bit_length() - 1

    def end_after(self, token: int) -> EndKind | None:
        """Return the ``end_kind`` that this token would cause. Valid after ``wait_ready`` returned None."""
        if self._matcher is None:
            return None
        matcher = self._matcher.deep_copy()
        return self._end_kind_of(token) if matcher.consume_token(token) and matcher.is_stopped() else None

    def accept_token(self, token: int) -> None:
        """Advance by a drawn token. Afterwards a mask may be needed."""
        self._forced = self._bits = self.allowed_tokens = None
        self.mask_needed = False
        if self._thinking_budget is not None:
            self._thinking_budget.track_token(token)
            self._forced = self._thinking_budget.forced
        matcher = self._matcher
        if matcher is None:
            return
        if not matcher.consume_token(token):
            self._error = GRAMMAR_TOO_COMPLEX
        elif matcher.is_stopped():
            self.end_kind = self._end_kind_of(token)
        elif self._forced is None:
            self.mask_needed = True

    def _end_kind_of(self, token: int) -> EndKind:
        """Return the end kind of a final token."""
        return "mark" if token in self._grammars.end_ids else "text"

    def _initialize_state(self, request: EngineRequest, output: list[int]) -> None:
        """Create the matcher and the thinking budget, and advance them past the output so far."""
        if request.reasoning_limit is not None:
            self._thinking_budget = ThinkingBudget(request.reasoning_limit, self._grammars.load_tokenizer().token_bytes)
            for token in output:
                self._thinking_budget.track_token(token)
            self._forced = self._thinking_budget.forced
        if request.grammar:
            matcher = self._matcher = self._grammars.new_matcher(request.grammar)
            if not matcher.consume_tokens(output):
                raise ValueError(matcher.get_error())
            if self._forced is None:
                if self._lazy:
                    self.mask_needed = True
                else:
                    self._compute_mask(matcher)

    def _compute_mask(self, matcher: llguidance.LLMatcher) -> None:
        """Compute the mask, and the list of allowed tokens if they are few. Raises ValueError."""
        size, mask_words = self._grammars.vocab_size, self._grammars.mask_words
        words = -(-size // WORD_BITS)
        bits = np.zeros(max(4 * mask_words, 8 * words), np.uint8)
        fill_next_token_bitmask(matcher, bits[: 4 * mask_words].view(np.int32)[np.newaxis])
        bits = bits[: 8 * words]
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        if size % WORD_BITS:  # the tokenizer may know more tokens than the model
            _as_words(bits)[-1] &= np.uint64((1 << size % WORD_BITS) - 1)
        ignored_ends = [
            token_id
            for token_id in self._grammars.end_ids - self._stops
            if token_id < size and bits[token_id // 8] >> token_id % 8 & 1
        ]
        if ignored_ends:  # end tokens that the request ignores are allowed only if nothing else is
            without_ends = bits.copy()
            for token_id in ignored_ends:
                without_ends[token_id // 8] &= ~np.uint8(1 << token_id % 8)
            if _as_words(without_ends).any():
                bits = without_ends
        if not _as_words(bits).any():
            raise ValueError("no token of the vocabulary may come next")
        self._bits = bits
        if self._greedy:
            return
        nonzero_words = np.flatnonzero(_as_words(bits))
        if len(nonzero_words) <= MAX_LISTED_WORDS:
            word, bit = np.nonzero(
                np.unpackbits(bits.reshape(-1, WORD_BITS // 8)[nonzero_words], axis=1, bitorder="little")
            )
            self.allowed_tokens = torch.from_numpy(nonzero_words[word] * WORD_BITS + bit)


def _as_words(bits: np.ndarray) -> np.ndarray:
    """Return a mask as 64-bit words, because non-zero words are found faster than non-zero bytes."""
    return bits.view(np.uint64)
