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
    - "object": a JSON object with a name and arguments; a constrained model writes them as ``member_names``
    - "named": the name, the marks ``after_name``, and arguments as JSON. A model may write the call's id: after the
      name and ``id_mark``, or before ``name_mark`` and the name
    - "tags": the name, the marks ``after_name``, and arguments, each a name between ``key_marks`` and a value between
      ``value_marks``. ``marks_strings``: a mark states whether the value is a string. ``type_marks``: marks around the
      name of the value's type, optional unless ``type_required``. ``number_end``: the mark after the call's number,
      which follows ``after_name``. ``verbatim_marks``: optional marks around a value that contains the mark after it.
      ``end_optional``: models may forget that mark, so a value also ends at the next one or at the end of the call
    - "elements": the same, but the name is repeated after the value, and values that are objects or lists are written
      in the same way
    - "python": ``name(key=value, …)``
    - "loose": ``name{key:value,…}``, text between two ``quote_mark``
    - "keyed": a JSON object with the name as its only key and the arguments as its value

    ``known_tools_only``: calls count only if they name one of the request's tools. ``unmarked``: no mark is unique to
    calls, so calls are looked for only at the start of an answer, and count only if their tools are known.
    ``numbered_names``: names are written "functions.NAME:NUMBER", and the whole is the call's id. ``single_call``: an
    answer has at most one call.
    """

    shape: CallShape = "object"
    block_open: tuple[str, ...] = ()
    call_open: tuple[str, ...] = ()
    id_mark: str = ""
    name_mark: str = ""
    after_name: tuple[str, ...] = ()
    call_close: tuple[str, ...] = ()
    separator: str = ""
    block_close: tuple[str, ...] = ()
    member_names: tuple[str, str] = ("name", "arguments")
    key_marks: tuple[str, str] = ("", "")
    value_marks: tuple[str, str] = ("", "")
    marks_strings: bool = False
    type_marks: tuple[str, str] = ("", "")
    type_required: bool = False
    number_end: str = ""
    end_optional: bool = False
    verbatim_marks: tuple[str, str] = ("", "")
    quote_mark: str = ""
    known_tools_only: bool = False
    unmarked: bool = False
    numbered_names: bool = False
    single_call: bool = False

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
