"""The parts of a model's answer: reasoning, content, tool calls, told apart while the text arrives.

A ``Markup`` says how a family of models writes them; ``Regions`` is the parser of one answer. Any cutting of a text
into pieces gives the same events once neighbours are joined, and time is linear in the text: nothing is read twice.

Newlines that only set the marks apart are dropped: after ``<think>``, before and after ``</think>``, and before a call.
A call whose head is not what the family writes is content, mark and all. Once its name is known a call is announced and
can no longer be taken back: then its arguments are passed on exactly as written, be they valid JSON or not.

Knows text only: no tokens, no requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from parley.types import CallDelta, Part

from .calls import CallReader

Region = tuple[Part, str, CallDelta | None]


@dataclass(frozen=True)
class Markup:
    """Marks of a family: the pairs around reasoning and around one tool call, None for what it cannot do."""

    think: tuple[str, str] | None = None
    call: tuple[str, str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. Where they are special tokens, the text to be parsed must not hide them."""
        return (self.think or ()) + (self.call or ())


PLAIN = Markup()


def detect(template: str) -> Markup:
    """The markup of the family that a chat template belongs to, told by the marks in it.

    Tool calls are those of Hermes and Qwen: JSON between the marks. Templates that put something else between the same
    marks (XML of functions or of argument keys) have no known calls.
    """
    other = "<function=" in template or "<arg_key>" in template
    return Markup(
        think=("<think>", "</think>") if "<think>" in template or "</think>" in template else None,
        call=("<tool_call>", "</tool_call>") if "<tool_call>" in template and not other else None,
    )


def begins_thinking(markup: Markup, prompt: str, continued: bool) -> bool:
    """Whether the rendered prompt leaves a reasoning block open for the model to go on in.

    ``continued``: the prompt ends inside a turn begun by the client, so the block may hold text already.
    """
    if markup.think is None:
        return False
    opening, closing = markup.think
    if prompt.rstrip().endswith(opening):
        return True
    return continued and prompt.rfind(opening) > prompt.rfind(closing)


def new_call_id() -> str:
    return "call_" + os.urandom(12).hex()


class Regions:
    """Parser of one answer. ``thinking``: it begins inside a reasoning block. ``calls``: how many were announced."""

    def __init__(self, markup: Markup, thinking: bool = False, new_id: Callable[[], str] = new_call_id):
        self.calls = 0
        self._think = markup.think
        self._call = markup.call
        self._new_id = new_id
        self._text = ""  # unread; between pushes only what may become a mark
        self._at = 0
        self._newlines = 0  # held back: dropped before a mark, given out before text
        self._trim = thinking  # drop newlines until the first text of this region
        self._after_call = False  # nothing but newlines since the last call
        self._reader: CallReader | None = None
        # Unbound, so that a parser does not refer to itself and goes as soon as its answer does.
        start = Regions._reasoning if thinking else Regions._beginning
        self._state: Callable[[Regions], bool] = start if markup.think is not None else Regions._content
        self._out: list[Region] = []

    @property
    def thinking(self) -> bool:
        """Whether the text read last was reasoning."""
        return self._state is Regions._reasoning

    def push(self, piece: str) -> list[Region]:
        """What is certain now, in order: (part, text, call); ``call`` is set and the text empty when part is "tool"."""
        self._out = []
        self._text, self._at = self._text[self._at :] + piece, 0
        while self._at < len(self._text) and self._state(self):
            pass
        return self._out

    def flush(self) -> list[Region]:
        """What was held back when the text is at its end."""
        self._out = []
        rest, self._text, self._at = self._text[self._at :], "", 0
        if self._reader is not None:
            if self._reader.announced:
                self._tell(self._reader.finish(rest))
                return self._out
            rest = self._opening() + self._reader.raw + rest
        part: Part = "reasoning" if self.thinking else "content"
        self._say(part, rest)
        if not self._after_call:
            self._give(part, "\n" * self._newlines)
        return self._out

    # Each state reads on from ``_at`` and returns whether another state has to go on; False: more text is needed.

    def _beginning(self) -> bool:
        """The answer may begin with a reasoning block."""
        assert self._think is not None
        mark = self._think[0]
        self._skip_newlines()
        rest = self._text[self._at : self._at + len(mark)]
        if rest == mark:
            self._at += len(mark)
            self._newlines, self._trim = 0, True
            self._state = Regions._reasoning
        elif len(rest) < len(mark) and mark.startswith(rest):
            return False
        else:
            self._state = Regions._content
        return True

    def _reasoning(self) -> bool:
        assert self._think is not None
        if not self._until(self._think[1], "reasoning"):
            return False
        self._newlines, self._trim = 0, True
        self._state = Regions._content
        return True

    def _content(self) -> bool:
        if self._call is None:
            if self._trimmed():
                self._give("content", "\n" * self._newlines + self._text[self._at :])
                self._newlines = 0
            self._at = len(self._text)
            return False
        if not self._until(self._call[0], "content"):
            return False
        self._reader = CallReader(self.calls, self._new_id(), self._call[1])
        self._state = Regions._calling
        return True

    def _calling(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._at, deltas = reader.read(self._text, self._at)
        self._tell(deltas)
        if not reader.ended:
            return False
        self._reader = None
        self._state = Regions._content
        if reader.announced:
            self._after_call = True
        else:
            self._say("content", self._opening() + reader.raw)
        return True

    def _opening(self) -> str:
        assert self._call is not None
        return self._call[0]

    def _until(self, mark: str, part: Part) -> bool:
        """Give out text up to the mark and step over it; False if it has not come yet."""
        if not self._trimmed():
            return False
        index = self._text.find(mark, self._at)
        end = index if index >= 0 else len(self._text) - _overlap(self._text, self._at, mark)
        self._say(part, self._text[self._at : end])
        self._at = end
        if index < 0:
            return False
        self._at += len(mark)
        return True

    def _trimmed(self) -> bool:
        """Drop newlines at the start of a region; False while there is nothing else."""
        if self._trim:
            self._skip_newlines()
            self._newlines = 0
            self._trim = self._at == len(self._text)
        return not self._trim

    def _skip_newlines(self) -> None:
        start = self._at
        while self._text.startswith("\n", self._at):
            self._at += 1
        self._newlines += self._at - start

    def _say(self, part: Part, text: str) -> None:
        """Text of a part, its last newlines held back."""
        body = text.rstrip("\n")
        if body:
            self._give(part, "\n" * self._newlines + body)
            self._newlines = 0
        self._newlines += len(text) - len(body)

    def _give(self, part: Part, text: str) -> None:
        if text:
            self._out.append((part, text, None))
            self._after_call = False

    def _tell(self, deltas: list[CallDelta]) -> None:
        for call in deltas:
            if call.name is not None:
                self.calls += 1
                self._newlines = 0
            self._out.append(("tool", "", call))


def _overlap(text: str, start: int, mark: str) -> int:
    """Length of the longest end of ``text[start:]`` that begins the mark without completing it."""
    for size in range(min(len(mark) - 1, len(text) - start), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0
