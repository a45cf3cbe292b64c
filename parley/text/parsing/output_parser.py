"""Output parser: splits a model's answer into reasoning, content and tool calls while the text arrives.

``OutputParser`` parses one answer by the ``Markup`` of the model's family. Cutting the text differently into pieces
gives the same events once neighbours are joined. The time is linear in the text: no form of calls reads anything twice.

Blanks that only separate marks are dropped: blank lines before a call and before the mark that ends reasoning,
newlines after that mark and after the one that starts reasoning, and newlines after a call if no content preceded it.
A mark that ends reasoning is dropped too if an answer starts with it. If the head of a call does not fit the family's
form, it is content, mark included. Calls inside reasoning are reasoning, unless the answer ends with them while the
reasoning is still open: then they are real calls. A call is announced as soon as its name is known and cannot be taken
back; its arguments are then passed on as they arrive, complete or not.

Handles text only: no tokens, no requests.
"""

from __future__ import annotations

from collections.abc import Callable

from parley.text.parsing.calls import CallReader, Form, Tools
from parley.text.parsing.marks import Marks, marks
from parley.text.parsing.markup import Markup
from parley.text.parsing.tentative_calls import BLANKS, Draft
from parley.types import CallDelta, Part

Region = tuple[Part, str, CallDelta | None]


class Regions:
    """Parser of one answer. ``call_count``: how many calls were announced.

    ``starts_in_reasoning``: the answer starts inside a reasoning block. ``tools``: those of the request, for forms that
    need their names or the types of their parameters.
    """

    def __init__(
        self,
        markup: Markup,
        thinking: bool = False,
        new_id: Callable[[], str] | None = None,
        tools: Tools | None = None,
    ):
        self.calls = 0
        self._think = markup.think
        self._begun = thinking and markup.begun
        self._bare = tuple(form for form in markup.calls if form.bare)
        self._marked = tuple(form for form in markup.calls if not form.bare)
        self._triggers = tuple(dict.fromkeys(form.trigger for form in self._marked))
        self._leaving = marks(markup.think[1], *self._triggers) if markup.think is not None else None
        self._anew = markup.think[0] if markup.think is not None and markup.again else ""
        self._silent = markup.silent
        self._watch()
        self._new_id = new_id or markup.ids()
        self._tools = tools if tools is not None else Tools()
        self._text = ""  # unread; between pushes only a suffix that may become a mark
        self._at = 0
        self._blanks: list[str] = []  # held back: dropped before a mark, emitted before text
        self._trim = thinking  # drop newlines until the first text of this region
        self._around = markup.around
        self._closing = ""  # the mark that closes the wrapper around content
        self._after_call = False  # nothing but blanks since the last call
        self._spoken = False  # there was content
        self._fresh = True  # no text since a mark
        self._reader: CallReader | None = None
        self._others: list[Form] = []  # forms to try if the reader's form does not fit
        self._failed = ""  # the longest text consumed by a form that did not fit
        self._draft: Draft | None = None
        # The states are unbound so that a parser does not refer to itself and is freed along with its answer.
        start = Regions._reasoning if thinking and not markup.begun else Regions._beginning
        self._state: Callable[[Regions], bool] = start if markup.think is not None else Regions._opening
        self._out: list[Region] = []

    @property
    def thinking(self) -> bool:
        """Whether the text read last was reasoning."""
        thinking = self._state is Regions._reasoning or self._state is Regions._drafting
        return thinking or (self._begun and self._state is Regions._beginning)

    @property
    def called(self) -> bool:
        """Whether a call is complete."""
        return self.calls > 1 or (self.calls == 1 and (self._reader is None or not self._reader.inside))

    def push(self, piece: str) -> list[Region]:
        """Return the parts certain now, in order: (part, text, call). For part "tool" the text is empty."""
        self._out = []
        self._text, self._at = self._text[self._at :] + piece, 0
        while self._at < len(self._text) and self._state(self):
            pass
        return self._out

    def flush(self) -> list[Region]:
        """Return the parts held back, at the end of the text."""
        self._out = []
        rest, self._text, self._at = self._text[self._at :], "", 0
        if self._reader is not None:
            deltas, rest = self._reader.finish(rest)
            self._tell(deltas)
            self._after_call = self._after_call or self._reader.calls > 0
        if self._draft is not None:
            deltas = self._draft.finish(rest)
            self._tell(deltas)
            self._after_call = bool(deltas)
            rest = "" if deltas else self._draft.text + rest
        part: Part = "reasoning" if self.thinking else "content"
        self._say(part, rest)
        if not self._after_call:
            self._give(part, "".join(self._blanks))
        return self._out

    # Each state reads from ``_at`` and returns whether another state must continue; False: more text is needed.

    def _beginning(self) -> bool:
        """Read the start of an answer: a mark that opens reasoning, or one that closes it."""
        assert self._think is not None
        self._hold_newlines()
        following = (Regions._reasoning, Regions._opening)
        for mark, state in zip(self._think, following, strict=True):
            rest = self._text[self._at : self._at + len(mark)]
            if rest == mark:
                self._at += len(mark)
                self._turn()
                self._state = state
                return True
            if len(rest) < len(mark) and mark.startswith(rest):
                return False
        self._state = following[not self._begun]
        return True

    def _reasoning(self) -> bool:
        """Read reasoning up to its closing mark or to a mark that may start a call."""
        assert self._think is not None and self._leaving is not None
        mark = self._until(self._leaving, "reasoning")
        if mark == self._think[1]:
            self._at += len(mark)
            self._turn()
            self._state = Regions._opening
        elif mark:
            self._draft = Draft(self._marked, self.calls, self._new_id, self._tools)
            self._state = Regions._drafting
        return bool(mark)

    def _drafting(self) -> bool:
        """Read calls inside open reasoning until it is clear whether they are real."""
        assert self._think is not None and self._draft is not None
        end, mark = marks(self._think[1]).find(self._text, self._at)
        self._at = self._draft.read(self._text[:end], self._at)
        held = self._draft.text if mark or self._draft.refuted else ""
        if not held:
            return False
        if not self._draft.refuted:
            held += self._text[self._at : end]
            self._at = end
        self._say("reasoning", held)
        self._draft = None
        self._state = Regions._reasoning
        return True

    def _opening(self) -> bool:
        """Read the start of content: it may be wrapped in marks, or be a call without marks."""
        if not self._trimmed():
            return False
        self._hold_newlines()
        if self._at == len(self._text):
            return False
        if self._around is not None and not self._closing:
            mark, closing = self._around
            here = self._text[self._at : self._at + len(mark)]
            if here == mark:
                self._at += len(mark)
                self._closing = closing
                self._turn()
                self._watch(closing)
                return True
            if mark.startswith(here):
                return False
        forms = (*self._marked, *self._bare)
        if self._bare and any(form.trigger.startswith(self._text[self._at :]) for form in forms):
            return False
        self._state = Regions._content
        if self._bare:  # a marked form may start like an unmarked one
            self._call([form for form in forms if self._text.startswith(form.trigger, self._at)])
        return True

    def _content(self) -> bool:
        """Read content up to the next mark."""
        if not self._trimmed():
            return False
        if self._watched is None:
            self._give("content", "".join(self._blanks) + self._text[self._at :])
            self._blanks.clear()
            self._at = len(self._text)
            return False
        mark = self._until(self._watched, "content")
        if mark and mark == self._closing:
            self._at += len(mark)
            self._turn()
            self._watch()
        elif mark and mark == self._anew:
            self._at += len(mark)
            self._turn()
            self._state = Regions._reasoning
        elif mark in self._silent:
            self._at += len(mark)
            self._turn()
        elif mark:
            self._call([form for form in self._marked if form.trigger == mark])
        return bool(mark)

    def _call(self, forms: list[Form]) -> None:
        """Start to read a call in the first of the forms, if any; keep the others in case it does not fit."""
        if forms:
            form, *self._others = forms
            self._reader = CallReader(form, self.calls, self._new_id, self._tools)
            self._state = Regions._calling

    def _calling(self) -> bool:
        """Read a block of calls; if its form does not fit, try the next one."""
        reader = self._reader
        assert reader is not None
        self._at, deltas = reader.read(self._text, self._at)
        self._tell(deltas)
        if reader.calls:
            self._failed = ""
        if not reader.ended:
            return False
        raw = reader.raw
        if not reader.calls:
            self._failed = max(self._failed, raw, key=len)
            self._back(raw)
            if self._others:
                self._call(self._others)
                return True
            raw, self._failed = self._failed, ""
            self._at += len(raw)  # no form reads it again
        self._reader = None
        self._state = Regions._content
        if reader.calls:
            self._after_call = True
            self._trim = not self._spoken
            raw = raw.lstrip("\n") if self._trim else raw
            self._trim = self._trim and not raw
        self._say("content", raw)
        return True

    def _back(self, text: str) -> None:
        """Unread the last ``text``."""
        self._at -= len(text)
        if self._at < 0:  # the text began in an earlier piece
            self._text, self._at = text + self._text[self._at + len(text) :], 0

    def _until(self, watched: Marks, part: Part) -> str:
        """Emit text up to the first of the marks and return that mark, or "" if none has come yet."""
        if not self._trimmed():
            return ""
        end, mark = watched.find(self._text, self._at)
        self._say(part, self._text[self._at : end])
        self._at = end
        return mark

    def _trimmed(self) -> bool:
        """Drop newlines at the start of a part. Return False while there is nothing else."""
        if self._trim:
            self._hold_newlines()
            self._blanks.clear()
            self._trim = self._at == len(self._text)
        return not self._trim

    def _hold_newlines(self) -> None:
        start = self._at
        while self._text.startswith("\n", self._at):
            self._at += 1
        self._hold(self._text[start : self._at])

    def _watch(self, *closing: str) -> None:
        """Set the marks that may end a piece of content from here on."""
        watched = tuple(filter(None, (*self._triggers, self._anew, *self._silent, *closing)))
        self._watched = marks(*watched) if watched else None

    def _turn(self) -> None:
        """Start another part, after a mark."""
        self._trim = self._fresh = True
        self._blanks.clear()

    def _hold(self, blanks: str) -> None:
        if blanks:
            self._blanks.append(blanks)

    def _say(self, part: Part, text: str) -> None:
        """Emit text, holding back the blanks at its end from the first line break on (all of them after a mark)."""
        end = len(text.rstrip(BLANKS))
        if end or not (self._fresh or self._blanks):
            line = text.find("\n", end)
            end = line if line >= 0 else len(text)
        if end:
            self._give(part, "".join(self._blanks) + text[:end])
            self._blanks.clear()
        self._hold(text[end:])

    def _give(self, part: Part, text: str) -> None:
        if text:
            self._out.append((part, text, None))
            self._after_call = self._fresh = False
            self._spoken = self._spoken or part == "content"

    def _tell(self, deltas: list[CallDelta]) -> None:
        for call in deltas:
            if call.name is not None:
                self.calls += 1
                self._fresh = True
                self._blanks.clear()
            self._out.append(("tool", "", call))
