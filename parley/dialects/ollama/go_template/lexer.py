"""Divides a template into text and the tokens of its actions."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import Literal, NamedTuple

from parley.errors import InvalidValue

BLANKS = " \t\r\n"
OPENING, CLOSING = "{{", "}}"
MAX_TEMPLATE_CHARACTERS = 1 << 16

WordKind = Literal[
    "text", "open", "close", "field", "dot", "variable", "name", "string", "raw", "character", "number", "sign"
]
CLOSING_WORD = re.compile(r"[ \t\r\n]+-\}\}|[ \t\r\n]*\}\}")
COMMENT_END = re.compile(r"\*/(?:[ \t\r\n]+-)?\}\}")
WORD = re.compile(
    r"""
      (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<raw>`[^`]*`)
    | (?P<character>'(?:[^'\\\n]|\\.)*')
    | (?P<number>[+-]?(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+
        |(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9]+)?))
    | (?P<field>\.[^\W\d]\w*)
    | (?P<dot>\.)
    | (?P<variable>\$\w*)
    | (?P<name>[^\W\d]\w*)
    | (?P<sign>:=|[=|,()])
    """,
    re.VERBOSE,
)
SPACE = re.compile(r"[ \t\r\n]+")


class TemplateToken(NamedTuple):
    """A token of a template's syntax. ``spaced``: blanks precede it."""

    kind: WordKind
    text: str
    line: int
    spaced: bool = False


def template_error(line: int, message: str) -> InvalidValue:
    """Return the error about a line of a template, in the form of Go's."""
    return InvalidValue(f"template: :{line}: {message}", field="template")


def split_tokens(source: str) -> Iterator[TemplateToken]:
    """Yield the text and the tokens of the actions of a template. Raises InvalidValue."""
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidValue(f"template: it may have at most {MAX_TEMPLATE_CHARACTERS} characters", field="template")
    position, line, trims = 0, 1, False
    while True:
        start = source.find(OPENING, position)
        end = start if start >= 0 else len(source)
        text = source[position:end]
        line += text.count("\n")
        text = text.lstrip(BLANKS) if trims else text
        trims = source.startswith("-", end + 2) and source[end + 3 : end + 4] in (*BLANKS,)
        if text := text.rstrip(BLANKS) if trims else text:
            yield TemplateToken("text", text, line)
        if start < 0:
            return
        body = start + (4 if trims else 2)
        if source.startswith("/*", body):
            position = _skip_comment(source, body, line)
        else:
            yield TemplateToken("open", OPENING, line)
            position = yield from _split_action(source, body, line)
        line += source.count("\n", start, position)
        trims = source.endswith("-}}", start, position)


def _skip_comment(source: str, position: int, line: int) -> int:
    """Return the position after a comment. Raises InvalidValue."""
    end = source.find("*/", position + 2)
    match = COMMENT_END.match(source, end) if end >= 0 else None
    if match is None:
        raise template_error(line, "unclosed comment" if end < 0 else "comment ends before closing delimiter")
    return match.end()


def _split_action(source: str, position: int, line: int) -> Generator[TemplateToken, None, int]:
    """Yield the tokens of an action up to its end, and return the position after it. Raises InvalidValue."""
    while (closing := CLOSING_WORD.match(source, position)) is None:
        space = SPACE.match(source, position)
        start = space.end() if space else position
        line += source.count("\n", position, start)
        match = WORD.match(source, start)
        if match is None:
            raise template_error(line, _unreadable(source, start))
        yield TemplateToken(match.lastgroup, match[0], line, space is not None)  # type: ignore[arg-type]  # kinds are groups
        line += match[0].count("\n")
        position = match.end()
    yield TemplateToken("close", CLOSING, line)
    return closing.end()


def _unreadable(source: str, position: int) -> str:
    """Return the reason why no token begins at a position."""
    match source[position : position + 1]:
        case "" | "{":
            return "unclosed action"
        case '"':
            return "unterminated quoted string"
        case "`":
            return "unterminated raw quoted string"
        case "'":
            return "unterminated character constant"
        case character:
            return f"unexpected {character!r} in an action"
