"""Samples of the corpus, and the split between training and evaluation.

One tenth of all question keys, chosen by a hash, is held out. A `SampleSource` draws questions from one side of the
split.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field

from parley.demo.questions import Question, Turn
from parley.demo.template import DemoMessage

HELD_OUT_SHARE = 10  # one key in this many is held out


@dataclass
class Sample:
    """A conversation (`messages`) or, if that is empty, plain text whose first `prompt` characters are given.

    The text includes the mark of its end (`END_OF_TEXT`), if it ends.
    """

    messages: list[DemoMessage] = field(default_factory=list)
    tools: list[DemoMessage] | None = None
    thinking: bool = False
    text: str = ""
    prompt: int = 0
    keys: list[str] = field(default_factory=list)  # of all its questions, in order


def is_held_out(key: str) -> bool:
    """Whether the question with this key is reserved for the evaluation."""
    return zlib.crc32(key.lower().encode()) % HELD_OUT_SHARE == 0


class SampleSource:
    """A random source that draws questions either for training or for the evaluation."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out

    def accepts_key(self, key: str) -> bool:
        """Whether this source may use the question with this key as the one that counts."""
        return is_held_out(key) == self.held_out

    def draw_turn(self, make: Question) -> Turn:
        """Draw a question on this source's side of the split."""
        while True:
            turn = make(self.rng)
            if self.accepts_key(turn.key):
                return turn

    def draw_side_turn(self, make: Question) -> Turn:
        """Draw a question that training may use, even if this source draws for the evaluation."""
        while True:
            turn = make(self.rng)
            if not is_held_out(turn.key):
                return turn

    def happens_with(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.rng.random() < probability
