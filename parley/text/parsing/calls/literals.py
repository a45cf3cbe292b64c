"""Converts values that are not JSON into JSON while they arrive: Python literals, and Gemma's own notation.

Nothing is evaluated. Raises MalformedCall for other text; the part converted before it stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from functools import cache

from parley.text.parsing.calls.form import Form
from parley.text.parsing.calls.scanner import Garbled, Scan, Wait
from parley.text.parsing.calls.tools import Tools
from parley.text.parsing.marks import marks

DEEPEST = 64  # levels of nesting
LONGEST = 1024  # characters of a number or word
_WORD = re.compile(r"[^\s,()\[\]{}=:'\"<]*")
_BARE = re.compile(r"[^,\]}<]*")  # a text without its quote marks
_BLANK = re.compile(r"[ \t\r\n]{0,64}")
_BEHIND = ",)]}:="  # characters that may follow a string; before any other, a quote is part of the string
_ZEROS = re.compile(r"^(-?)0+(?=\d)")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_KEYWORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", "'": "'", '"': '\\"', "/": "/",
          "a": "\\u0007", "v": "\\u000b", "\n": ""}  # fmt: skip
_CODES = {"x": 2, "u": 4, "U": 8}  # number of hexadecimal digits after the letter


def escaped(text: str) -> str:
    """Return text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def literal(scan: Scan, quote: str = "", depth: int = 0) -> Wait:
    """Read one value into the call's arguments, as JSON. ``quote``: the mark around strings; empty: as in Python."""
    if depth > DEEPEST:
        raise Garbled
    char = yield from scan.peek()
    if char in "[(":
        scan.at += 1
        scan.say("[")
        yield from _items(scan, quote, depth, "]" if char == "[" else ")", keyed=False)
        scan.say("]")
    elif char == "{":
        scan.at += 1
        scan.say("{")
        yield from _items(scan, quote, depth, "}", keyed=True)
        scan.say("}")
    elif quote and (yield from scan.stands(quote)):
        scan.at += len(quote)
        yield from marked(scan, (quote,))
    elif not quote and char in "'\"":
        yield from _quoted(scan)
    elif quote:
        scan.say(scalar((yield from bare(scan, True, _BARE)).strip()))
    else:
        scan.say(scalar((yield from bare(scan, True))))


def marked(scan: Scan, ends: tuple[str, ...], lined: bool = False) -> Wait:
    """Read text up to the first of the marks, as a JSON string. Step over the mark if it is the one listed first.

    ``lined``: a line break at its start and one at its end are not part of it.
    """
    watched = marks(*ends)
    scan.say('"')
    scan.tail = escaped
    while lined and scan.at == len(scan.text):
        yield
    if lined and scan.text[scan.at] == "\n":
        scan.at += 1
    while True:
        end, found = watched.find(scan.text, scan.at)
        held = lined and end > scan.at and scan.text[end - 1] == "\n"
        scan.take(end - held, lambda text: scan.say(escaped(text)))
        if found:
            break
        yield
    scan.at = end + (len(found) if found == ends[0] else 0)
    scan.tail = None
    scan.say('"')


def bare(scan: Scan, value: bool, word: re.Pattern[str] = _WORD) -> Generator[None, None, str]:
    """Read characters that match ``word``: at least one, unless the pattern allows blanks.

    ``value``: they are part of the arguments.
    """
    parts: list[str] = []
    scan.tail = (lambda rest: "".join(parts) + rest) if value else None
    size = 0
    while True:
        end = word.match(scan.text, scan.at).end()  # type: ignore[union-attr]  # it also matches nothing
        size += end - scan.at
        scan.take(end, parts.append)
        if end < len(scan.text) or size > LONGEST:
            break
        yield
    scan.tail = None
    if size > LONGEST or (not size and word is _WORD):
        scan.say("".join(parts))
        raise Garbled
    return "".join(parts)


def scalar(word: str) -> str:
    """Return the JSON of a number or a word."""
    if word in _KEYWORDS:
        return _KEYWORDS[word]
    number = _ZEROS.sub(r"\1", word.removeprefix("+").replace("_", ""))
    number = f"{number}0" if number.endswith(".") else number
    number = f"0{number}" if number.startswith(".") else number
    return number if _NUMBER.fullmatch(number) else json.dumps(word, ensure_ascii=False)


END = ","  # appended to a complete literal, because the reader needs a character after it


def converted(text: str) -> str:
    """Return the JSON of a complete Python literal, or "" if the text is not one."""
    whole = _Whole(text)
    try:
        for _ in literal(whole):
            return ""
    except Garbled:
        return ""
    return "".join(whole.said) if whole.text[whole.at :].strip() == END else ""


class _Whole(Scan):
    """A text that has arrived completely."""

    def __init__(self, text: str):
        super().__init__(Form(), 0, str, Tools())
        self.text = text + END
        self.said: list[str] = []

    def say(self, arguments: str) -> None:
        self.said.append(arguments)


def _items(scan: Scan, quote: str, depth: int, closing: str, keyed: bool) -> Wait:
    """Read the items between brackets, separated by commas."""
    first = True
    while (yield from scan.peek()) != closing:
        if not first:
            scan.say(", ")
        if keyed:
            yield from _key(scan, quote)
            yield from scan.expect(":")
            scan.say(": ")
        yield from literal(scan, quote, depth + 1)
        first = False
        if (yield from scan.peek()) == ",":
            scan.at += 1
        elif scan.text[scan.at] != closing:
            raise Garbled
    scan.at += 1


def _key(scan: Scan, quote: str) -> Wait:
    """Read a member's name."""
    char = yield from scan.peek()
    if char in "'\"" or (quote and (yield from scan.stands(quote))):
        yield from literal(scan, "" if char in "'\"" else quote)
    else:
        scan.say(json.dumps((yield from bare(scan, False)), ensure_ascii=False))


def _quoted(scan: Scan) -> Wait:
    """Read a Python string."""
    mark = scan.text[scan.at]
    if (yield from scan.stands(mark * 3)):
        mark *= 3
    scan.at += len(mark)
    scan.say('"')
    scan.tail = escaped
    while True:
        found = _stops(mark[0]).search(scan.text, scan.at)
        scan.take(found.start() if found else len(scan.text), lambda text: scan.say(escaped(text)))
        if found is None:
            yield
        elif found[0] == "\\":
            yield from _escape(scan)
        elif (yield from scan.stands(mark)) and (len(mark) > 1 or (yield from _closes(scan))):
            break
        else:
            scan.take(scan.at + 1, lambda text: scan.say(escaped(text)))
    scan.at += len(mark)
    scan.tail = None
    scan.say('"')


def _closes(scan: Scan) -> Generator[None, None, bool]:
    """Whether the next quote ends its string: models also write such quotes inside strings without a backslash."""
    while True:
        end = _BLANK.match(scan.text, scan.at + 1).end()  # type: ignore[union-attr]  # it also matches nothing
        if end < len(scan.text):
            scan.tail = escaped
            return scan.text[end] in _BEHIND
        scan.tail = lambda _: '"'
        yield


def _escape(scan: Scan) -> Wait:
    """Read an escape sequence of a Python string."""
    while scan.at + 1 >= len(scan.text):
        yield
    char = scan.text[scan.at + 1]
    size = _CODES.get(char, 0)
    while size and scan.at + 2 + size > len(scan.text):
        yield
    digits = scan.text[scan.at + 2 : scan.at + 2 + size]
    if size:
        try:
            code = int(digits, 16) if digits.isalnum() else -1
            # Halves of a surrogate pair are passed on unchanged: JSON joins them.
            text = f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escaped(chr(code))
        except (ValueError, OverflowError):
            size, text = 0, "\\\\" + char
    else:
        text = _PLAIN.get(char, "\\\\" + escaped(char))
    scan.at += 2 + size
    scan.say(text)


@cache
def _stops(quote: str) -> re.Pattern[str]:
    return re.compile(f"[{quote}\\\\]")
