"""What a sequence's grammar lets come next: a mask over the vocabulary for each token, made beside the network's work.

A ``Form`` is one sequence's place in its grammar. As soon as a token is drawn it moves on; once all of a step have, a
thread begins the masks of the next ones, and the network has a whole step to run before these are needed. llguidance
does the work, in Rust and without the interpreter's lock. On few cores what is done beside the network is taken from
it: a *lazy* form can be asked about single tokens, which takes a microsecond, and has a mask made only when that is
wanted. The API process has checked the grammar (``text/grammar.py``) and how much it takes, so what fails here fails
one choice.

Knows sequences and the vocabulary's spelling; nothing of logits but which of them are struck out.
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
from parley.model.thought import Thought
from parley.text.bounds import FOLLOWING
from parley.text.tokenizer import Tokenizer
from parley.types import Work

log = logging.getLogger("parley.engine")

End = Literal["form", "mark"]

KEPT = 64  # grammars kept to be copied: the choices of a request, and requests that follow one another, share one

WORD = 64  # bits of a mask that are looked at together
FEW = 1024  # words of a mask with any tokens, up to which these are listed

COMPLEX = "The answer's grammar became too complex to go on with."


class Grammars:
    """The grammars of one model. ``folder``: where its tokenizer is; ``vocab_size``: how many logits a row has."""

    def __init__(self, folder: str | Path, vocab_size: int):
        self.vocab_size = vocab_size
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        self._spelled: llguidance.LLTokenizer | None = None
        self.ends: frozenset[int] = frozenset()  # tokens that end an answer
        self.told = 0  # int32 words of llguidance's masks: of all tokens that the tokenizer or the model knows
        self._models: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self.pool = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) // 2)), "grammar")

    def begin(self, sequence: Sequence, *, greedy: bool = False, lazy: bool = False) -> Form:
        """Its place in its grammar, behind what it has written already. ``greedy``: nothing but ``best`` is wanted."""
        return Form(self, sequence, greedy, lazy)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher at the beginning of the grammar. Takes its time: for threads. Raises ValueError."""
        with self._lock:
            model = self._models.get(grammar)
        if model is None:
            # Others may go on meanwhile; at worst two read the same.
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
        """Whether ``matcher`` takes no time for this one."""
        return grammar in self._models

    def prepare(self, grammar: str) -> None:
        """Read a grammar for ``matcher``, beside the steps: what takes long is done then."""
        try:
            self.matcher(grammar)
        except Exception as error:  # is told where it is used
            log.info("a grammar cannot be read: %s", error)

    def tokenizer(self) -> Tokenizer:
        """How tokens are spelled, read at the first use. Raises BadTokenizer."""
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.load(self._folder)
                self.ends = self._tokenizer.eos_ids
            return self._tokenizer

    def _vocabulary(self) -> llguidance.LLTokenizer:
        """The same for llguidance. Takes a second where there are many tokens, and others wait for the most part."""
        tokenizer = self.tokenizer()
        with self._reading:
            if self._spelled is None:
                self._spelled = self._spell(tokenizer)
            return self._spelled

    def _spell(self, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
        size = max(self.vocab_size, tokenizer.vocab_size)
        self.told = -(-size // 32)
        ends = sorted(tokenizer.eos_ids) or None
        try:
            spelled = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=ends, slices=[])
        except ValueError:  # a kind that it does not read
            pieces = llguidance.TokenizerWrapper(Pieces(tokenizer))
            spelled = llguidance.LLTokenizer(pieces, n_vocab=size, eos_token=ends, slices=[])
        # It keeps the interpreter's lock; in two calls, so that the steps of others come in between.
        return spelled.with_slices(llguidance.LLTokenizer.general_slices())


class Pieces:
    """A vocabulary by the bytes of its tokens, in the form that llguidance asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.marks.values())
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        marks = set(self.special_token_ids)
        self._ids = {piece: id for id, piece in enumerate(self.tokens) if piece and id not in marks}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens that a text which must come is written in: at each place the longest that there is."""
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
    """A sequence's place in its grammar and in its reasoning, as far as that is limited.

    ``end``: nothing may follow the token that was drawn last, which is text ("form") or a mark that ends it ("mark").
    ``few``: the tokens that may come next, int64 and ascending, where they are not many; not of a greedy one.
    ``due``: nothing is forced, and there is no mask unless it is ``wanted``. ``ready`` must have been asked.
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
        self._forced: int | None = None  # the token that must come next
        self._bits: np.ndarray | None = None  # uint8 [V / 8 or more]: those that may come, the first in the lowest bit
        self.few: torch.Tensor | None = None
        written = sequence.tokens[sequence.prompt_len :]
        self._making: Future[None] | None = None
        self._start(partial(self._begin, sequence.work, written), True)

    @staticmethod
    def wanted(work: Work) -> bool:
        """Whether a sequence of this work needs a Form."""
        return bool(work.grammar) or work.thinking is not None

    def copy(self) -> Form:
        """The same place, to go on from separately. Waits for the mask."""
        self.ready()
        other = object.__new__(Form)
        other.__dict__.update(self.__dict__)
        if self._error is None:
            other._matcher = self._matcher.deep_copy() if self._matcher is not None else None
            other._thought = self._thought.copy() if self._thought is not None else None
        return other

    def ready(self) -> str | None:
        """Wait for the mask of the next token: why there is none, None if it is there."""
        self.prepare(beside=False)
        if self._making is not None:
            making, self._making = self._making, None
            try:
                if making.cancel():  # no thread has begun it
                    self._make()
                else:
                    making.result()
            except Exception as error:
                log.error("a grammar cannot be followed: %s", error)
                self._error = COMPLEX
        return self._error

    def _start(self, make: Callable[[], None], beside: bool) -> None:
        self._make, self._making = make, self._grammars.pool.submit(make) if beside else Future()

    def allows(self, token: int) -> bool:
        """Whether a mask that is due would let this token come. A mark that only comes when nothing else can does not
        count."""
        if token in self._grammars.ends and token not in self._stops:
            return False
        return self._matcher is not None and self._matcher.validate_tokens([token]) == 1

    def prepare(self, *, beside: bool = True) -> None:
        """Begin the mask that is due, unless it may turn out not to be needed. Threads that begin while others of the
        step still move on would only be in their way."""
        if self.due and not self._lazy:
            self.want(beside=beside)

    def want(self, *, beside: bool = True) -> None:
        """Have the mask made that is due: by a thread, if there is something else to do meanwhile, or by ``ready``."""
        self.due = False
        if self._matcher is not None:
            self._start(partial(self._mask, self._matcher), beside)

    @property
    def changes(self) -> bool:
        """Whether it has anything to say of the next token. ``ready`` must have been asked."""
        return self._forced is not None or self._bits is not None

    def apply(self, row: torch.Tensor) -> None:
        """Strike out what may not come next, in logits float32 [V]. ``ready`` must have said that there is a mask."""
        if self._forced is not None:
            row.fill_(float("-inf"))
            row[self._forced] = 0.0
        elif self._bits is not None:
            native.strike(row, self._bits)

    def best(self, row: torch.Tensor) -> int | None:
        """The likeliest token that may come next, by logits float32 [V], even if the model rules it out; None where
        any may. ``ready`` must have been asked."""
        if self._forced is not None or self._bits is None:
            return self._forced
        return native.best(row, self._bits)

    def mend(self, token: int) -> int:
        """The token that was drawn, or, where the model rules out all that may come, the first of these."""
        if self._bits is None or int(self._bits[token // 8]) >> token % 8 & 1:
            return token
        first = int(np.flatnonzero(self._bits)[0])
        bits = int(self._bits[first])
        return 8 * first + (bits & -bits).bit_length() - 1

    def after(self, token: int) -> End | None:
        """What ``end`` would be if this token were drawn. ``ready`` must have said that there is a mask."""
        if self._matcher is None:
            return None
        matcher = self._matcher.deep_copy()
        return self._end(token) if matcher.consume_token(token) and matcher.is_stopped() else None

    def append(self, token: int) -> None:
        """Move on by a token that was drawn: a mask is due."""
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
        return "mark" if token in self._grammars.ends else "form"

    def _begin(self, work: Work, written: list[int]) -> None:
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
        if ends:  # tokens that end the answer, and that the request ignores, come when nothing else can
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
    """A mask in larger pieces: what looks for those with any tokens is so much faster."""
    return bits.view(np.uint64)
