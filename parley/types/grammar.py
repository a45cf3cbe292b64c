"""Grammars that constrain an answer, and structural tags, a way to constrain only parts of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

CUSTOM_GRAMMAR = "x-lark"  # in the schema of a tool's text argument: a grammar in Lark that the text follows


class StructuralText(msgspec.Struct, frozen=True, tag=True):
    """Any text, including none, that contains none of ``excludes``."""

    excludes: list[str] = []


class StructuralTag(msgspec.Struct, frozen=True, tag=True):
    """``begin``, the content, then ``end`` (or one of several). A schema as content stands for matching JSON."""

    begin: str
    content: dict[str, Any] | bool | StructuralPiece
    end: str | list[str]


class TriggeredTags(msgspec.Struct, frozen=True, tag=True):
    """Free text; wherever one of ``triggers`` begins, a complete, valid tag of ``tags`` must follow.

    ``at_least_one``: the text begins with a tag. ``stop_after_first``: the first tag ends the text.
    """

    tags: list[StructuralTag]
    triggers: list[str]
    excludes: list[str] = []
    at_least_one: bool = False
    stop_after_first: bool = False


class SeparatedTags(msgspec.Struct, frozen=True, tag=True):
    """Tags only, joined by ``separator``. ``at_least_one`` requires a tag; ``stop_after_first`` allows only one."""

    tags: list[StructuralTag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class StructuralSequence(msgspec.Struct, frozen=True, tag=True):
    """The pieces in order."""

    pieces: list[StructuralPiece]


class StructuralChoice(msgspec.Struct, frozen=True, tag=True):
    """Any one of the pieces."""

    pieces: list[StructuralPiece]


class StructuralRepeat(msgspec.Struct, frozen=True, tag=True):
    """One piece, ``min_count`` to ``max_count`` times; a ``max_count`` of None means no upper limit."""

    piece: StructuralPiece
    min_count: int = 0
    max_count: int | None = None


class StructuralToken(msgspec.Struct, frozen=True, tag=True):
    """One token, given by its id or as the vocabulary writes it; a control token by its text."""

    token: int | str


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on an answer. A finished answer matches it; a truncated answer is a prefix of a match.

    ``value`` depends on ``kind``. "json": a JSON schema (object or bool), whose objects are closed unless it says
    otherwise. "regex": a regular expression for the whole answer. "choice": a list of answers. "lark": a grammar in
    llguidance's Lark dialect. "ebnf": a grammar in llama.cpp's GBNF. "tags": a ``StructuralPiece``. "around": a Lark
    grammar and a grammar of another kind, which the Lark grammar calls ``@inner``.
    ``whitespace``: a regular expression for the space between JSON tokens; None: the default; "": none.
    ``field``: the request field that asked for the grammar, for error messages.
    """

    kind: Literal["json", "regex", "choice", "lark", "ebnf", "tags", "around"]
    value: Any
    whitespace: str | None = None
    field: str = "response_format"


StructuralPiece = (  # part of an answer; a Grammar here is not of kind "around"
    StructuralText
    | StructuralTag
    | TriggeredTags
    | SeparatedTags
    | StructuralSequence
    | StructuralChoice
    | StructuralRepeat
    | StructuralToken
    | Grammar
)
