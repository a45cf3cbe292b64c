"""Grammar masks: which tokens of the vocabulary a sequence's grammar allows next, computed during the network's step.

A ``GrammarState`` is one sequence's position in its grammar. It advances as soon as a token is drawn. Once all states
of a step have advanced, threads begin the next masks, which are not needed until the network has run a whole step.
llguidance does the work, in Rust and without the GIL. With few cores, such background work slows the network down: a
*lazy* state can be asked about single tokens, at a microsecond each, and computes a mask only on request. The API
process has already checked the grammar (``text/grammar/compiler.py``) and its size, so an error here fails only one
choice.

This module knows sequences and the bytes of tokens; of logits it knows only which to mask.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import llguidance
import numpy as np
import torch
from llguidance.numpy import fill_next_token_bitmask

from parley import native
from parley.core.sequence import Sequence
from parley.model.sampling.thinking_budget import Thought
from parley.text.grammar.limits import FOLLOWING
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import Work

log = logging.getLogger("parley.engine")

End = Literal["form", "mark"]

KEPT = 64  # compiled grammars kept as templates: the choices of a request, and often consecutive requests, share one

WORD = 64  # bits of a mask that are examined at once
FEW = 1024  # masks with at most this many non-zero words have their allowed tokens listed

COMPLEX = "The answer's grammar became too complex to continue."


class Grammars:
    """The grammars of one model. ``folder``: holds its tokenizer; ``vocab_size``: the number of logits in a row."""

    def __init__(self, folder: str | Path, vocab_size: int):
        self.vocab_size = vocab_size
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        self._spelled: llguidance.LLTokenizer | None = None
        self.ends: frozenset[int] = frozenset()  # ids of tokens that end an answer
        self.told = 0  # int32 words in llguidance's masks, which cover all tokens of the tokenizer and of the model
        self._models: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self.pool = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) // 2)), "grammar")

    def begin(self, sequence: Sequence, *, greedy: bool = False, lazy: bool = False) -> Form:
        """Create a sequence's state, past the output it already has. ``greedy``: only ``best_allowed`` will be used."""
        return Form(self, sequence, greedy, lazy)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Return a matcher at the start of the grammar. Slow, so call it in a thread. Raises ValueError."""
        with self._lock:
            model = self._models.get(grammar)
        if model is None:
            # Without the lock, so that others can continue; at worst two threads compile the same grammar.
            limits = llguidance.LLParserLimits(**FOLLOWING)
            model = llguidance.LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
            if model.is_error():
                raise ValueError(model.get_error())
        with self._lock:
            model = self._models.setdefault(grammar, model)
            self._models.move_to_end(grammar)
            if len(self._models) > KEPT:
                self._models.popitem(last=False)
            return model.deep_copy()

    def kept(self, grammar: str) -> bool:
        """Whether the grammar is cached, so that ``new_matcher`` is fast."""
        return grammar in self._models

    def prepare(self, grammar: str) -> None:
        """Compile a grammar for ``new_matcher`` in advance, concurrently with steps."""
        try:
            self.matcher(grammar)
        except Exception as error:  # reported again where the grammar is used
            log.info("a grammar cannot be read: %s", error)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, loaded on first use. Raises BadTokenizer."""
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.load(self._folder)
                self.ends = self._tokenizer.eos_ids
            return self._tokenizer

    def _vocabulary(self) -> llguidance.LLTokenizer:
        """Return llguidance's tokenizer, built on first use. For large vocabularies this takes a second, mostly under
        the GIL."""
        tokenizer = self.tokenizer()
        with self._reading:
            if self._spelled is None:
                self._spelled = self._spell(tokenizer)
            return self._spelled

    def _spell(self, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
        """Build llguidance's tokenizer."""
        size = max(self.vocab_size, tokenizer.vocab_size)
        self.told = -(-size // 32)
        ends = sorted(tokenizer.eos_ids) or None
        try:
            spelled = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=ends, slices=[])
        except ValueError:  # a tokenizer type that llguidance does not support
            pieces = llguidance.TokenizerWrapper(Pieces(tokenizer))
            spelled = llguidance.LLTokenizer(pieces, n_vocab=size, eos_token=ends, slices=[])
        # It holds the GIL. Two calls let other threads run a step in between.
        return spelled.with_slices(llguidance.LLTokenizer.general_slices())


class Pieces:
    """A vocabulary as the bytes of its tokens, with the attributes that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.marks.values())
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        marks = set(self.special_token_ids)
        self._ids = {piece: id for id, piece in enumerate(self.tokens) if piece and id not in marks}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize a text that the grammar forces, taking the longest matching token at each place."""
        data, ids, at = text.encode() if isinstance(text, str) else text, [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


class Form:
    """A sequence's position in its grammar and in its reasoning, if that has a budget.

    ``end_kind``: nothing may follow the last token, which is text ("form") or a mark that ends the answer ("mark").
    ``allowed_tokens``: the tokens allowed next, int64 and ascending, if they are few; not set for greedy states.
    ``mask_needed``: no token is forced, and there is no mask until ``request_mask``. Valid after ``wait_ready``.
    """

    def __init__(self, grammars: Grammars, sequence: Sequence, greedy: bool, lazy: bool):
        self.end: End | None = None
        self.due = False
        self._greedy, self._lazy = greedy, lazy
        self._grammars = grammars
        self._stops = sequence.stops
        self._error: str | None = None
        self._matcher: llguidance.LLMatcher | None = None
        self._thought: Thought | None = None
        self._forced: int | None = None  # the only token allowed next
        self._bits: np.ndarray | None = None  # uint8 [V / 8 or more]: the allowed tokens, token 0 in the lowest bit
        self.few: torch.Tensor | None = None
        written = sequence.tokens[sequence.prompt_len :]
        self._making: Future[None] | None = None
        self._start(partial(self._begin, sequence.work, written), True)

    @staticmethod
    def wanted(work: Work) -> bool:
        """Whether a sequence of this request needs a GrammarState."""
        return bool(work.grammar) or work.thinking is not None

    def copy(self) -> Form:
        """Return an independent state at the same position. Waits for the mask."""
        self.ready()
        other = object.__new__(Form)
        other.__dict__.update(self.__dict__)
        if self._error is None:
            other._matcher = self._matcher.deep_copy() if self._matcher is not None else None
            other._thought = self._thought.copy() if self._thought is not None else None
        return other

    def ready(self) -> str | None:
        """Wait for the mask of the next token. Return None if it exists, otherwise the error message."""
        self.prepare(beside=False)
        if self._making is not None:
            making, self._making = self._making, None
            try:
                if making.cancel():  # no thread has started it
                    self._make()
                else:
                    making.result()
            except Exception as error:
                log.error("a grammar cannot be followed: %s", error)
                self._error = COMPLEX
        return self._error

    def _start(self, make: Callable[[], None], beside: bool) -> None:
        """Schedule ``compute``: in a thread if ``in_thread``, otherwise in ``wait_ready``."""
        self._make, self._making = make, self._grammars.pool.submit(make) if beside else Future()

    def allows(self, token: int) -> bool:
        """Whether the next mask would allow this token. An end mark that is allowed only as a last resort does not
        count."""
        if token in self._grammars.ends and token not in self._stops:
            return False
        return self._matcher is not None and self._matcher.validate_tokens([token]) == 1

    def prepare(self, *, beside: bool = True) -> None:
        """Start the next mask, unless it may turn out to be unnecessary. Call it after all states of a step have
        advanced; threads that start earlier only slow the others down."""
        if self.due and not self._lazy:
            self.want(beside=beside)

    def want(self, *, beside: bool = True) -> None:
        """Compute the mask: in a thread if ``in_thread``, otherwise in ``wait_ready``."""
        self.due = False
        if self._matcher is not None:
            self._start(partial(self._mask, self._matcher), beside)

    @property
    def changes(self) -> bool:
        """Whether the state restricts the next token. Valid after ``wait_ready``."""
        return self._forced is not None or self._bits is not None

    def apply(self, row: torch.Tensor) -> None:
        """Mask the logits float32 [V] of forbidden tokens in place. Valid after ``wait_ready`` returned None."""
        if self._forced is not None:
            row.fill_(float("-inf"))
            row[self._forced] = 0.0
        elif self._bits is not None:
            native.strike(row, self._bits)

    def best(self, row: torch.Tensor) -> int | None:
        """Return the allowed token with the largest logit, float32 [V], even if all allowed ones are -inf; None if the
        state allows any token. Valid after ``wait_ready``."""
        if self._forced is not None or self._bits is None:
            return self._forced
        return native.best(row, self._bits)

    def mend(self, token: int) -> int:
        """Return the drawn token if it is allowed, otherwise the first allowed one (the model excludes all of them)."""
        if self._bits is None or int(self._bits[token // 8]) >> token % 8 & 1:
            return token
        first = int(np.flatnonzero(self._bits)[0])
        bits = int(self._bits[first])
        return 8 * first + (bits & -bits).bit_length() - 1

    def after(self, token: int) -> End | None:
        """Return the ``end_kind`` that this token would cause. Valid after ``wait_ready`` returned None."""
        if self._matcher is None:
            return None
        matcher = self._matcher.deep_copy()
        return self._end(token) if matcher.consume_token(token) and matcher.is_stopped() else None

    def append(self, token: int) -> None:
        """Advance by a drawn token. Afterwards a mask may be needed."""
        self._forced = self._bits = self.few = None
        self.due = False
        if self._thought is not None:
            self._thought.append(token)
            self._forced = self._thought.forced
        matcher = self._matcher
        if matcher is None:
            return
        if not matcher.consume_token(token):
            self._error = COMPLEX
        elif matcher.is_stopped():
            self.end = self._end(token)
        elif self._forced is None:
            self.due = True

    def _end(self, token: int) -> End:
        """Return the end kind of a final token."""
        return "mark" if token in self._grammars.ends else "form"

    def _begin(self, work: Work, written: list[int]) -> None:
        """Create the matcher and the thinking budget, and advance them past the output so far."""
        if work.thinking is not None:
            self._thought = Thought(work.thinking, self._grammars.tokenizer().token_bytes)
            for token in written:
                self._thought.append(token)
            self._forced = self._thought.forced
        if work.grammar:
            matcher = self._matcher = self._grammars.matcher(work.grammar)
            if not matcher.consume_tokens(written):
                raise ValueError(matcher.get_error())
            if self._forced is None:
                if self._lazy:
                    self.due = True
                else:
                    self._mask(matcher)

    def _mask(self, matcher: llguidance.LLMatcher) -> None:
        """Compute the mask, and the list of allowed tokens if they are few. Raises ValueError."""
        size, told = self._grammars.vocab_size, self._grammars.told
        words = -(-size // WORD)
        bits = np.zeros(max(4 * told, 8 * words), np.uint8)
        fill_next_token_bitmask(matcher, bits[: 4 * told].view(np.int32)[np.newaxis])
        bits = bits[: 8 * words]
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        if size % WORD:  # the tokenizer may know more tokens than the model
            _words(bits)[-1] &= np.uint64((1 << size % WORD) - 1)
        ends = [id for id in self._grammars.ends - self._stops if id < size and bits[id // 8] >> id % 8 & 1]
        if ends:  # end tokens that the request ignores are allowed only if nothing else is
            rest = bits.copy()
            for id in ends:
                rest[id // 8] &= ~np.uint8(1 << id % 8)
            if _words(rest).any():
                bits = rest
        some = np.flatnonzero(_words(bits))
        if not len(some):
            raise ValueError("no token of the vocabulary may come next")
        self._bits = bits
        if not self._greedy and len(some) <= FEW:
            place, bit = np.nonzero(np.unpackbits(bits.reshape(-1, WORD // 8)[some], axis=1, bitorder="little"))
            self.few = torch.from_numpy(some[place] * WORD + bit)


def _words(bits: np.ndarray) -> np.ndarray:
    """Return a mask as 64-bit words, because non-zero words are found faster than non-zero bytes."""
    return bits.view(np.uint64)
