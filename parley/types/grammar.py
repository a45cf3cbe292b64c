"""Grammars that constrain an answer, and structural tags: the forms that a request may ask for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class AnyText(msgspec.Struct, frozen=True, tag=True):
    """Any text, also none, that has none of these in it."""

    excludes: list[str] = []


class Tag(msgspec.Struct, frozen=True, tag=True):
    """``begin``, a piece, and ``end`` or one of them. A piece that is a schema is JSON that follows it."""

    begin: str
    inside: dict[str, Any] | bool | Piece
    end: str | list[str]


class Tags(msgspec.Struct, frozen=True, tag=True):
    """Free text, in which whatever begins with one of ``triggers`` must be one of ``tags``, whole and of its form.

    ``some``: it begins with a tag. ``single``: it has no more than one, which is its end.
    """

    tags: list[Tag]
    triggers: list[str]
    excludes: list[str] = []
    some: bool = False
    single: bool = False


class TagList(msgspec.Struct, frozen=True, tag=True):
    """Nothing but tags and ``separator`` between two. ``some``: at least one; ``single``: not more than one."""

    tags: list[Tag]
    separator: str
    some: bool = False
    single: bool = False


class Sequence(msgspec.Struct, frozen=True, tag=True):
    """One piece behind the other."""

    pieces: list[Piece]


class Either(msgspec.Struct, frozen=True, tag=True):
    """One of the pieces."""

    pieces: list[Piece]


class Repeat(msgspec.Struct, frozen=True, tag=True):
    """A piece, ``least`` to ``most`` times; None: any number of times."""

    piece: Piece
    least: int = 0
    most: int | None = None


class Exactly(msgspec.Struct, frozen=True, tag=True):
    """One token, by its id or as the vocabulary writes it; marks as their text."""

    token: int | str


class Grammar(msgspec.Struct, frozen=True):
    """The form that an answer has to have. One that came to its end has it, one that was cut off is a beginning of one.

    By ``kind``, ``value`` is: "json" a JSON schema (object or bool), "regex" a regular expression for the whole answer,
    "choice" a list of answers, "lark" a grammar in llguidance's Lark dialect, "ebnf" one in llama.cpp's GBNF, "tags"
    a ``Piece``, "around" a grammar in Lark and one of another kind, which that one calls ``@inner``.
    ``whitespace``: what may stand between JSON's marks, as a regular expression; None: the usual; "" nothing.
    ``closed``: objects have no members that their schema does not name, unless it says otherwise.
    ``field``: the member of the request that asked for it, for errors.
    """

    kind: Literal["json", "regex", "choice", "lark", "ebnf", "tags", "around"]
    value: Any
    whitespace: str | None = None
    closed: bool = False
    field: str = "response_format"


Piece = (  # of an answer; a grammar not of kind "around"
    AnyText | Tag | Tags | TagList | Sequence | Either | Repeat | Exactly | Grammar
)
