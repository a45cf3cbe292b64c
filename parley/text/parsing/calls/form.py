"""How a family of models writes tool calls, as data: the marks around calls, and the shape of the calls themselves.

Marks are given as the model writes them, blanks included; the reader ignores the blanks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

LIST_ITEM = "item"  # the tag of a list's elements, in the shape "elements"

CallShape = Literal["object", "named", "tags", "elements", "python", "loose", "keyed"]


@dataclass(frozen=True)
class CallForm:
    """A block of calls: ``block_open`` (``call_open`` call ``call_close``) ``separator`` … ``block_close``

    ``shape`` describes a single call:
    - "object": a JSON object with a name and arguments
    - "named": the name, the marks ``after_name``, and arguments as JSON
    - "tags": the name, the marks ``after_name``, and arguments, each a name between ``key_marks`` and a value between
      ``value_marks``
    - "elements": the same, but the name is repeated after the value, and values that are objects or lists are written
      in the same way
    - "python": ``name(key=value, …)``
    - "loose": ``name{key:value,…}``, text between two ``quote_mark``
    - "keyed": a JSON object with the name as its only key and the arguments as its value
    """

    shape: CallShape = "object"
    block_open: tuple[str, ...] = ()
    call_open: tuple[str, ...] = ()
    id_mark: str = ""  # of "named": a model may write the call's id after the name and this mark
    name_mark: str = ""  # of "named": or it writes the id before this mark and the name
    after_name: tuple[str, ...] = ()
    call_close: tuple[str, ...] = ()
    separator: str = ""
    block_close: tuple[str, ...] = ()
    member_names: tuple[str, str] = ("name", "arguments")  # of "object", as a constrained model writes them
    # Of "tags" and "elements"
    key_marks: tuple[str, str] = ("", "")
    value_marks: tuple[str, str] = ("", "")
    marks_strings: bool = False  # a mark states whether the value is a string
    type_marks: tuple[str, str] = ("", "")  # around the name of the value's type
    type_required: bool = False  # whether each value has these
    number_end: str = ""  # the mark after the call's number, which follows ``after_name``
    # Models may forget the mark after a value, so a value also ends at the next one or at the end of the call
    end_optional: bool = False
    verbatim_marks: tuple[str, str] = ("", "")  # optional, around a value that contains the mark after it
    quote_mark: str = ""  # of "loose"
    # Of all shapes
    known_tools_only: bool = False  # calls count only if they name one of the request's tools
    # No mark is unique to calls, so they are looked for only at the start of an answer, and must name known tools
    unmarked: bool = False
    numbered_names: bool = False  # names are written "functions.NAME:NUMBER", and the whole is the call's id
    single_call: bool = False  # an answer has at most one call

    @property
    def all_marks(self) -> tuple[str, ...]:
        """Return all marks without the blanks around them."""
        marks = (
            *self.block_open,
            *self.call_open,
            self.id_mark,
            self.name_mark,
            *self.after_name,
            self.number_end,
            *self.key_marks,
            *self.type_marks,
            *self.value_marks,
            *self.verbatim_marks,
            self.quote_mark,
            *self.call_close,
            *self.block_close,
        )
        return tuple(filter(None, map(str.strip, marks)))

    @cached_property
    def trigger_mark(self) -> str:
        """Return the text that a block of calls starts with."""
        marks = (*self.block_open, *self.call_open)
        return marks[0].strip() if marks else "{"

    @cached_property
    def end_guard(self) -> str:
        """Return the mark that ends a call even if its JSON is broken, or "" if JSON may contain all marks."""
        marks = [mark.strip() for mark in (*reversed(self.call_close), *reversed(self.block_close))]
        return next((mark for mark in marks if len(mark) > 1 and mark[0] not in '[{"'), "")
