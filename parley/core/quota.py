"""Which part of the engine's time prompts may have while answers go on.

An account in seconds. A step beside answers is charged to prompts by their part of its tokens, and whatever such a step
takes pays their part of it back. Prompts may have rows as long as they owe nothing: then they have as much as the pace
allows, and after that steps are the answers' alone until it is paid. So no step gets longer by this, and over any
stretch of time prompts have at most their part and two steps' worth. Where only one of the two has anything to do, it
has all the time.

Knows no sequences, and reads no clock.
"""

from __future__ import annotations

LONGEST = 10.0  # seconds of a step that count: a longer pause is not the prompts' doing


class Quota:
    """``part`` 0 to 1. With 0 prompts wait until no answer goes on; with 1 nothing is ever held back.

    One step after another: ``begin``, then ``take`` for prompts if it is ``open`` to them, then ``observe``.
    """

    def __init__(self, part: float = 1.0):
        self.part = part
        self.open = True
        self._owed = 0.0  # seconds; below 0: saved
        self._taken = 0
        self._beside = False

    def divide(self, part: float) -> None:
        """Let prompts have another part from now on; what they owed is forgotten."""
        self.part, self._owed = part, 0.0

    def begin(self, answers: int) -> None:
        """A step is planned in which so many answers go on."""
        self._taken, self._beside = 0, answers > 0
        self.open = not answers or (self.part > 0 and self._owed <= 0)

    def take(self, count: int) -> None:
        """The step has so many tokens of prompts."""
        self._taken += count

    def observe(self, seconds: float, tokens: int) -> None:
        """It took so long, with so many tokens in all. Of what prompts did not want, a step's part is saved."""
        if self._beside:
            seconds = min(seconds, LONGEST)
            owed = self._owed + seconds * (self._taken / tokens - self.part)
            self._owed = max(owed, min(self._owed, -seconds * self.part))
