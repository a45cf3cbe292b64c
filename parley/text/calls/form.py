"""How a family of models writes tool calls, as data: which marks stand around calls, and what a call is between them.

Marks are given as the model writes them, blanks included; a reader ignores the blanks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ITEM = "item"  # the name of a list's elements, in the shape "elements"

Shape = Literal["object", "named", "tags", "elements", "python", "loose", "keyed"]


@dataclass(frozen=True)
class Form:
    """``open`` (``each`` call ``after``) ``between`` (``each`` call ``after``) … ``close``

    ``shape`` says what a call is:
    - "object": a JSON object with a name and arguments, under ``keys`` where a model is made to write it
    - "named": the name, its id behind the mark ``id`` if a model writes one, or before the name and the mark ``first``,
      the marks ``head``, and arguments as JSON
    - "tags": the name, the marks ``head``, and arguments, each a name between the marks ``key`` and a value between the
      marks ``value``. ``typed``: a mark says whether the value is text. ``kind``: marks that a model may put around the
      name of its type, or must if that is ``stated``. ``count``: the mark behind the call's number, which stands behind
      the marks ``head``. ``verbatim``: marks that a model may put around a value in which the mark behind it occurs.
      ``unclosed``: models forget that mark, so a value also ends where the next one or the call's end stands
    - "elements": the same, but the name comes again behind the value, and values that are objects or lists are such
      arguments themselves
    - "python": ``name(key=value, …)``
    - "loose": ``name{key:value,…}``, text between the marks ``quote``
    - "keyed": a JSON object with the name as its only key and the arguments as its value

    ``known``: calls count only if they name one of the request's tools. ``bare``: there is no mark that nothing else
    has, so calls are looked for only where an answer begins, and count only if they are known. ``numbered``: names are
    written "functions.NAME:NUMBER", which as a whole is the call's id. ``alone``: an answer has one call at most.
    """

    shape: Shape = "object"
    open: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    id: str = ""
    first: str = ""
    head: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    between: str = ""
    close: tuple[str, ...] = ()
    keys: tuple[str, str] = ("name", "arguments")
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    typed: bool = False
    kind: tuple[str, str] = ("", "")
    stated: bool = False
    count: str = ""
    unclosed: bool = False
    verbatim: tuple[str, str] = ("", "")
    quote: str = ""
    known: bool = False
    bare: bool = False
    numbered: bool = False
    alone: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All of them, without the blanks around them."""
        marks = (
            *self.open,
            *self.each,
            self.id,
            self.first,
            *self.head,
            self.count,
            *self.key,
            *self.kind,
            *self.value,
            *self.verbatim,
            self.quote,
            *self.after,
            *self.close,
        )
        return tuple(filter(None, map(str.strip, marks)))

    @cached_property
    def trigger(self) -> str:
        """What a block of calls begins with."""
        marks = (*self.open, *self.each)
        return marks[0].strip() if marks else "{"

    @cached_property
    def guard(self) -> str:
        """The mark that ends a call even where its JSON is broken; empty if a form has none that JSON cannot have."""
        marks = [mark.strip() for mark in (*reversed(self.after), *reversed(self.close))]
        return next((mark for mark in marks if len(mark) > 1 and mark[0] not in '[{"'), "")
