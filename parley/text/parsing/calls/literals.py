"""Converts values that are not JSON into JSON while they arrive: Python literals, and Gemma's own notation.

Nothing is evaluated. Raises MalformedCall for other text; the part converted before it stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from functools import cache

from parley.text.parsing.calls.form import CallForm
from parley.text.parsing.calls.scanner import CallScanner, MalformedCall, ReadSteps
from parley.text.parsing.calls.tools import RequestTools
from parley.text.parsing.mark_search import compile_marks

MAX_NESTING = 64  # levels of nesting
MAX_WORD_CHARACTERS = 1024  # characters of a number or word
_BARE_WORD = re.compile(r"[^\s,()\[\]{}=:'\"<]*")
_UNQUOTED_TEXT = re.compile(r"[^,\]}<]*")  # a text without its quote marks
_FEW_BLANKS = re.compile(r"[ \t\r\n]{0,64}")
# The first item between braces, with the character that follows it, and a text that may become one.
_FIRST_ITEM = re.compile(r"""\s*(?:(['"])(?:\\.|(?!\1)[^\\])*\1|[^\s,()\[\]{}=:'"<]++)\s*+(.)""", re.DOTALL)
_PART_OF_FIRST_ITEM = re.compile(r"""\s*(?:$|['"]|[^\s,()\[\]{}=:'"<]+\s*$)""")
_AFTER_STRING = ",)]}:="  # characters that may follow a string; before any other, a quote is part of the string
_LEADING_ZEROS = re.compile(r"^(-?)0+(?=\d)")
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_JSON_KEYWORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_SIMPLE_ESCAPES = {
    "n": "\\n",
    "t": "\\t",
    "r": "\\r",
    "b": "\\b",
    "f": "\\f",
    "\\": "\\\\",
    "'": "'",
    '"': '\\"',
    "/": "/",
    "a": "\\u0007",
    "v": "\\u000b",
    "\n": "",
}
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}  # number of hexadecimal digits after the letter


def json_escape(text: str) -> str:
    """Return text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_literal(scan: CallScanner, quote: str = "", depth: int = 0) -> ReadSteps:
    """Read one value into the call's arguments, as JSON. ``quote``: the mark around strings; empty: as in Python."""
    if depth > MAX_NESTING:
        raise MalformedCall
    char = yield from scan.peek_character()
    if char in "[(":
        scan.position += 1
        scan.add_arguments("[")
        yield from _read_items(scan, quote, depth, "]" if char == "[" else ")", keyed=False)
        scan.add_arguments("]")
    elif char == "{":
        scan.position += 1
        is_set = not quote and (yield from _braces_hold_set(scan))
        scan.add_arguments("[" if is_set else "{")
        yield from _read_items(scan, quote, depth, "}", keyed=not is_set)
        scan.add_arguments("]" if is_set else "}")
    elif quote and (yield from scan.mark_follows(quote)):
        scan.position += len(quote)
        yield from read_marked_string(scan, (quote,))
    elif not quote and char in "'\"":
        yield from _read_python_string(scan)
    elif quote:
        scan.add_arguments(scalar_to_json((yield from read_bare_word(scan, True, _UNQUOTED_TEXT)).strip()))
    else:
        scan.add_arguments(scalar_to_json((yield from read_bare_word(scan, True))))


def read_marked_string(scan: CallScanner, end_marks: tuple[str, ...], lined: bool = False) -> ReadSteps:
    """Read text up to the first of the marks, as a JSON string. Step over the mark if it is the one listed first.

    ``lined``: a line break at its start and one at its end are not part of it.
    """
    mark_finder = compile_marks(*end_marks)
    scan.add_arguments('"')
    scan.convert_tail = json_escape
    while lined and scan.position == len(scan.text):
        yield
    if lined and scan.text[scan.position] == "\n":
        scan.position += 1
    while True:
        end, mark = mark_finder.find_first(scan.text, scan.position)
        holds_newline = lined and end > scan.position and scan.text[end - 1] == "\n"
        scan.step_to(end - holds_newline, lambda text: scan.add_arguments(json_escape(text)))
        if mark:
            break
        yield
    scan.position = end + (len(mark) if mark == end_marks[0] else 0)
    scan.convert_tail = None
    scan.add_arguments('"')


def read_bare_word(scan: CallScanner, value: bool, word: re.Pattern[str] = _BARE_WORD) -> Generator[None, None, str]:
    """Read characters that match ``word``: at least one, unless the pattern allows blanks.

    ``value``: they are part of the arguments.
    """
    parts: list[str] = []
    scan.convert_tail = (lambda tail: "".join(parts) + tail) if value else None
    size = 0
    while True:
        end = word.match(scan.text, scan.position).end()  # type: ignore[union-attr]  # it also matches nothing
        size += end - scan.position
        scan.step_to(end, parts.append)
        if end < len(scan.text) or size > MAX_WORD_CHARACTERS:
            break
        yield
    scan.convert_tail = None
    if size > MAX_WORD_CHARACTERS or (not size and word is _BARE_WORD):
        scan.add_arguments("".join(parts))
        raise MalformedCall
    return "".join(parts)


def scalar_to_json(word: str) -> str:
    """Return the JSON of a number or a word."""
    if word in _JSON_KEYWORDS:
        return _JSON_KEYWORDS[word]
    number = _LEADING_ZEROS.sub(r"\1", word.removeprefix("+").replace("_", ""))
    number = f"{number}0" if number.endswith(".") else number
    number = f"0{number}" if number.startswith(".") else number
    return number if _JSON_NUMBER.fullmatch(number) else json.dumps(word, ensure_ascii=False)


LITERAL_END = ","  # appended to a complete literal, because the reader needs a character after it


def literal_to_json(text: str) -> str:
    """Return the JSON of a complete Python literal, or "" if the text is not one."""
    scanner = _CompleteText(text)
    try:
        for _ in read_literal(scanner):
            return ""
    except MalformedCall:
        return ""
    return "".join(scanner.json_parts) if scanner.text[scanner.position :].strip() == LITERAL_END else ""


class _CompleteText(CallScanner):
    """A text that has arrived completely."""

    def __init__(self, text: str):
        super().__init__(CallForm(), 0, str, RequestTools())
        self.text = text + LITERAL_END
        self.json_parts: list[str] = []

    def add_arguments(self, arguments: str) -> None:
        self.json_parts.append(arguments)


def _read_items(scan: CallScanner, quote: str, depth: int, closing: str, keyed: bool) -> ReadSteps:
    """Read the items between brackets, separated by commas."""
    first = True
    while (yield from scan.peek_character()) != closing:
        if not first:
            scan.add_arguments(", ")
        if keyed:
            yield from _read_member_name(scan, quote)
            yield from scan.expect_mark(":")
            scan.add_arguments(": ")
        yield from read_literal(scan, quote, depth + 1)
        first = False
        if (yield from scan.peek_character()) == ",":
            scan.position += 1
        elif scan.text[scan.position] != closing:
            raise MalformedCall
    scan.position += 1


def _braces_hold_set(scan: CallScanner) -> Generator[None, None, bool]:
    """Whether the text after an opening brace is that of a Python set: no colon follows the first item.

    A longer first item than MAX_WORD_CHARACTERS is a name, whether its end has come or not.
    """
    while (first := _FIRST_ITEM.match(scan.text, scan.position, scan.position + MAX_WORD_CHARACTERS)) is None:
        is_short = len(scan.text) - scan.position <= MAX_WORD_CHARACTERS
        if not is_short or not _PART_OF_FIRST_ITEM.match(scan.text, scan.position):
            break
        scan.convert_tail = "{".__add__  # the text that was read
        yield
    scan.convert_tail = None
    return first is not None and first[2] in ",}"


def _read_member_name(scan: CallScanner, quote: str) -> ReadSteps:
    """Read a member's name."""
    char = yield from scan.peek_character()
    if char in "'\"" or (quote and (yield from scan.mark_follows(quote))):
        yield from read_literal(scan, "" if char in "'\"" else quote)
    else:
        scan.add_arguments(json.dumps((yield from read_bare_word(scan, False)), ensure_ascii=False))


def _read_python_string(scan: CallScanner) -> ReadSteps:
    """Read a Python string."""
    mark = scan.text[scan.position]
    if (yield from scan.mark_follows(mark * 3)):
        mark *= 3
    scan.position += len(mark)
    scan.add_arguments('"')
    scan.convert_tail = json_escape
    while True:
        stop = _string_stops(mark[0]).search(scan.text, scan.position)
        scan.step_to(stop.start() if stop else len(scan.text), lambda text: scan.add_arguments(json_escape(text)))
        if stop is None:
            yield
        elif stop[0] == "\\":
            yield from _read_escape(scan)
        elif (yield from scan.mark_follows(mark)) and (len(mark) > 1 or (yield from _quote_closes(scan))):
            break
        else:
            scan.step_to(scan.position + 1, lambda text: scan.add_arguments(json_escape(text)))
    scan.position += len(mark)
    scan.convert_tail = None
    scan.add_arguments('"')


def _quote_closes(scan: CallScanner) -> Generator[None, None, bool]:
    """Whether the next quote ends its string: models also write such quotes inside strings without a backslash."""
    while True:
        end = _FEW_BLANKS.match(scan.text, scan.position + 1).end()  # type: ignore[union-attr]  # it also matches nothing
        if end < len(scan.text):
            scan.convert_tail = json_escape
            return scan.text[end] in _AFTER_STRING
        scan.convert_tail = lambda _: '"'
        yield


def _read_escape(scan: CallScanner) -> ReadSteps:
    """Read an escape sequence of a Python string."""
    while scan.position + 1 >= len(scan.text):
        yield
    char = scan.text[scan.position + 1]
    size = _CODE_DIGITS.get(char, 0)
    while size and scan.position + 2 + size > len(scan.text):
        yield
    digits = scan.text[scan.position + 2 : scan.position + 2 + size]
    if size:
        try:
            code = int(digits, 16) if digits.isalnum() else -1
            # Halves of a surrogate pair are passed on unchanged: JSON joins them.
            text = f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else json_escape(chr(code))
        except (ValueError, OverflowError):
            size, text = 0, "\\\\" + char
    else:
        text = _SIMPLE_ESCAPES.get(char, "\\\\" + json_escape(char))
    scan.position += 2 + size
    scan.add_arguments(text)


@cache
def _string_stops(quote: str) -> re.Pattern[str]:
    return re.compile(f"[{quote}\\\\]")
