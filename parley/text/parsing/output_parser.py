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

from parley.text.parsing.calls import CallForm, CallReader, RequestTools
from parley.text.parsing.mark_search import MarkFinder, compile_marks
from parley.text.parsing.markup import Markup
from parley.text.parsing.tentative_calls import BLANK_CHARACTERS, TentativeCalls
from parley.types import DeltaPart, ToolCallDelta

AnswerPart = tuple[DeltaPart, str, ToolCallDelta | None]


class OutputParser:
    """Parser of one answer. ``call_count``: how many calls were announced. ``part_count``: how many parts were begun
    by a mark.

    ``starts_in_reasoning``: the answer starts inside a reasoning block. ``tools``: those of the request, for forms that
    need their names or the types of their parameters.
    """

    def __init__(
        self,
        markup: Markup,
        starts_in_reasoning: bool = False,
        new_id: Callable[[], str] | None = None,
        tools: RequestTools | None = None,
    ):
        self.call_count = self.part_count = 0
        self._reasoning_marks = markup.reasoning_marks
        self._implicit_reasoning = starts_in_reasoning and markup.always_reasons
        self._unmarked_forms = tuple(form for form in markup.call_forms if form.unmarked)
        self._marked_forms = tuple(form for form in markup.call_forms if not form.unmarked)
        self._triggers = tuple(dict.fromkeys(form.trigger_mark for form in self._marked_forms))
        self._reasoning_ends = (
            compile_marks(markup.reasoning_marks[1], *self._triggers) if markup.reasoning_marks is not None else None
        )
        self._reopening_mark = (
            markup.reasoning_marks[0] if markup.reasoning_marks is not None and markup.may_reopen else ""
        )
        self._dropped_marks = markup.dropped_marks
        self._set_content_marks()
        self._new_id = new_id or markup.call_id_source()
        self._tools = tools if tools is not None else RequestTools()
        self._text = ""  # unread; between pushes only a suffix that may become a mark
        self._at = 0
        self._blanks: list[str] = []  # held back: dropped before a mark, emitted before text
        self._trim_newlines = starts_in_reasoning  # drop newlines until the first text of this region
        self._wrapper = markup.answer_wrapper
        self._wrapper_end = ""  # the mark that closes the wrapper around content
        self._after_call = False  # nothing but blanks since the last call
        self._had_content = False  # there was content
        self._follows_mark = True  # no text since a mark
        self._reader: CallReader | None = None
        self._other_forms: list[CallForm] = []  # forms to try if the reader's form does not fit
        self._rejected_text = ""  # the longest text consumed by a form that did not fit
        self._tentative: TentativeCalls | None = None
        # The states are unbound so that a parser does not refer to itself and is freed along with its answer.
        start = (
            OutputParser._read_reasoning
            if starts_in_reasoning and not markup.always_reasons
            else OutputParser._read_start
        )
        self._state: Callable[[OutputParser], bool] = (
            start if markup.reasoning_marks is not None else OutputParser._read_opening
        )
        self._parts: list[AnswerPart] = []

    @property
    def in_reasoning(self) -> bool:
        """Whether the text read last was reasoning."""
        thinking = self._state is OutputParser._read_reasoning or self._state is OutputParser._read_tentative_calls
        return thinking or (self._implicit_reasoning and self._state is OutputParser._read_start)

    @property
    def unread_length(self) -> int:
        """Number of characters that wait for more text, because they may be part of a mark."""
        return len(self._text) - self._at

    @property
    def has_complete_call(self) -> bool:
        """Whether a call is complete."""
        return self.call_count > 1 or (self.call_count == 1 and (self._reader is None or not self._reader.in_call))

    def plain_part(self, piece: str) -> DeltaPart | None:
        """Return the part that all of ``piece`` belongs to; None if ``parse_piece`` must read it.

        Such a piece leaves the parser as it is: it is not the first of its part, and nothing in it may begin a mark or
        be a blank that is dropped before one.
        """
        if self._follows_mark or self._after_call or self._at < len(self._text) or self._blanks or "\n" in piece:
            return None
        if self._state is OutputParser._read_content and self._had_content:
            marks = self._content_marks
            return "content" if marks is None or not marks.may_begin_in(piece) else None
        if self._state is OutputParser._read_reasoning and self._reasoning_ends is not None:
            return None if self._reasoning_ends.may_begin_in(piece) else "reasoning"
        return None

    def parse_piece(self, piece: str) -> list[AnswerPart]:
        """Return the parts certain now, in order: (part, text, call). For part "tool" the text is empty."""
        self._parts = []
        self._text, self._at = self._text[self._at :] + piece, 0
        while self._at < len(self._text) and self._state(self):
            pass
        return self._parts

    def finish_parsing(self) -> list[AnswerPart]:
        """Return the parts held back, at the end of the text."""
        self._parts = []
        unread_text, self._text, self._at = self._text[self._at :], "", 0
        if self._reader is not None:
            deltas, unread_text = self._reader.finish_text(unread_text)
            self._append_calls(deltas)
            self._after_call = self._after_call or self._reader.call_count > 0
        if self._tentative is not None:
            deltas = self._tentative.finish_calls(unread_text)
            self._append_calls(deltas)
            self._after_call = bool(deltas)
            unread_text = "" if deltas else self._tentative.held_text + unread_text
        part: DeltaPart = "reasoning" if self.in_reasoning else "content"
        self._emit_text(part, unread_text)
        if not self._after_call:
            self._append_text(part, "".join(self._blanks))
        return self._parts

    # Each state reads from ``_at`` and returns whether another state must continue; False: more text is needed.

    def _read_start(self) -> bool:
        """Read the start of an answer: a mark that opens reasoning, or one that closes it."""
        assert self._reasoning_marks is not None
        self._hold_newlines()
        next_states = (OutputParser._read_reasoning, OutputParser._read_opening)
        for mark, state in zip(self._reasoning_marks, next_states, strict=True):
            next_text = self._text[self._at : self._at + len(mark)]
            if next_text == mark:
                self._at += len(mark)
                self._start_part()
                self._state = state
                return True
            if len(next_text) < len(mark) and mark.startswith(next_text):
                return False
        self._state = next_states[not self._implicit_reasoning]
        return True

    def _read_reasoning(self) -> bool:
        """Read reasoning up to its closing mark or to a mark that may start a call."""
        assert self._reasoning_marks is not None and self._reasoning_ends is not None
        mark = self._emit_until(self._reasoning_ends, "reasoning")
        if mark == self._reasoning_marks[1]:
            self._at += len(mark)
            self._start_part()
            self._state = OutputParser._read_opening
        elif mark:
            self._tentative = TentativeCalls(self._marked_forms, self.call_count, self._new_id, self._tools)
            self._state = OutputParser._read_tentative_calls
        return bool(mark)

    def _read_tentative_calls(self) -> bool:
        """Read calls inside open reasoning until it is clear whether they are real."""
        assert self._reasoning_marks is not None and self._tentative is not None
        end, mark = compile_marks(self._reasoning_marks[1]).find_first(self._text, self._at)
        self._at = self._tentative.read_blocks(self._text[:end], self._at)
        reasoning = self._tentative.held_text if mark or self._tentative.refuted else ""
        if not reasoning:
            return False
        if not self._tentative.refuted:
            reasoning += self._text[self._at : end]
            self._at = end
        self._emit_text("reasoning", reasoning)
        self._tentative = None
        self._state = OutputParser._read_reasoning
        return True

    def _read_opening(self) -> bool:
        """Read the start of content: it may be wrapped in marks, or be a call without marks."""
        if not self._skip_newlines():
            return False
        self._hold_newlines()
        if self._at == len(self._text):
            return False
        if self._wrapper is not None and not self._wrapper_end:
            mark, closing = self._wrapper
            upcoming = self._text[self._at : self._at + len(mark)]
            if upcoming == mark:
                self._at += len(mark)
                self._wrapper_end = closing
                self._start_part()
                self._set_content_marks(closing)
                return True
            if mark.startswith(upcoming):
                return False
        forms = (*self._marked_forms, *self._unmarked_forms)
        if self._unmarked_forms and any(form.trigger_mark.startswith(self._text[self._at :]) for form in forms):
            return False
        self._state = OutputParser._read_content
        if self._unmarked_forms:  # a marked form may start like an unmarked one
            self._start_call([form for form in forms if self._text.startswith(form.trigger_mark, self._at)])
        return True

    def _read_content(self) -> bool:
        """Read content up to the next mark."""
        if not self._skip_newlines():
            return False
        if self._content_marks is None:
            self._append_text("content", "".join(self._blanks) + self._text[self._at :])
            self._blanks.clear()
            self._at = len(self._text)
            return False
        mark = self._emit_until(self._content_marks, "content")
        if mark and mark == self._wrapper_end:
            self._at += len(mark)
            self._start_part()
            self._set_content_marks()
        elif mark and mark == self._reopening_mark:
            self._at += len(mark)
            self._start_part()
            self._state = OutputParser._read_reasoning
        elif mark in self._dropped_marks:
            self._at += len(mark)
            self._start_part()
        elif mark:
            self._start_call([form for form in self._marked_forms if form.trigger_mark == mark])
        return bool(mark)

    def _start_call(self, forms: list[CallForm]) -> None:
        """Start to read a call in the first of the forms, if any; keep the others in case it does not fit."""
        if forms:
            form, *self._other_forms = forms
            self._reader = CallReader(form, self.call_count, self._new_id, self._tools)
            self._state = OutputParser._read_call

    def _read_call(self) -> bool:
        """Read a block of calls; if its form does not fit, try the next one."""
        reader = self._reader
        assert reader is not None
        self._at, deltas = reader.read_calls(self._text, self._at)
        self._append_calls(deltas)
        if reader.call_count:
            self._rejected_text = ""
        if not reader.ended:
            return False
        raw = reader.raw_text
        if not reader.call_count:
            self._rejected_text = max(self._rejected_text, raw, key=len)
            self._unread_text(raw)
            if self._other_forms:
                self._start_call(self._other_forms)
                return True
            raw, self._rejected_text = self._rejected_text, ""
            self._at += len(raw)  # no form reads it again
        self._reader = None
        self._state = OutputParser._read_content
        if reader.call_count:
            self._after_call = True
            self._trim_newlines = not self._had_content
            raw = raw.lstrip("\n") if self._trim_newlines else raw
            self._trim_newlines = self._trim_newlines and not raw
        self._emit_text("content", raw)
        return True

    def _unread_text(self, text: str) -> None:
        """Unread the last ``text``."""
        self._at -= len(text)
        if self._at < 0:  # the text began in an earlier piece
            self._text, self._at = text + self._text[self._at + len(text) :], 0

    def _emit_until(self, end_marks: MarkFinder, part: DeltaPart) -> str:
        """Emit text up to the first of the marks and return that mark, or "" if none has come yet."""
        if not self._skip_newlines():
            return ""
        end, mark = end_marks.find_first(self._text, self._at)
        self._emit_text(part, self._text[self._at : end])
        self._at = end
        return mark

    def _skip_newlines(self) -> bool:
        """Drop newlines at the start of a part. Return False while there is nothing else."""
        if self._trim_newlines:
            self._hold_newlines()
            self._blanks.clear()
            self._trim_newlines = self._at == len(self._text)
        return not self._trim_newlines

    def _hold_newlines(self) -> None:
        start = self._at
        while self._text.startswith("\n", self._at):
            self._at += 1
        self._hold_blanks(self._text[start : self._at])

    def _set_content_marks(self, *closing: str) -> None:
        """Set the marks that may end a piece of content from here on."""
        watched_marks = tuple(filter(None, (*self._triggers, self._reopening_mark, *self._dropped_marks, *closing)))
        self._content_marks = compile_marks(*watched_marks) if watched_marks else None

    def _start_part(self) -> None:
        """Start another part, after a mark."""
        self.part_count += 1
        self._trim_newlines = self._follows_mark = True
        self._blanks.clear()

    def _hold_blanks(self, blanks: str) -> None:
        if blanks:
            self._blanks.append(blanks)

    def _emit_text(self, part: DeltaPart, text: str) -> None:
        """Emit text, holding back the blanks at its end from the first line break on (all of them after a mark)."""
        end = len(text.rstrip(BLANK_CHARACTERS))
        if end or not (self._follows_mark or self._blanks):
            line = text.find("\n", end)
            end = line if line >= 0 else len(text)
        if end:
            self._append_text(part, "".join(self._blanks) + text[:end])
            self._blanks.clear()
        self._hold_blanks(text[end:])

    def _append_text(self, part: DeltaPart, text: str) -> None:
        if text:
            self._parts.append((part, text, None))
            self._after_call = self._follows_mark = False
            self._had_content = self._had_content or part == "content"

    def _append_calls(self, deltas: list[ToolCallDelta]) -> None:
        for call in deltas:
            if call.name is not None:
                self.call_count += 1
                self._follows_mark = True
                self._blanks.clear()
            self._parts.append(("tool", "", call))
