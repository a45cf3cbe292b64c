"""Reads the constants of Go's syntax: texts with escapes, characters and numbers."""

from __future__ import annotations

import math
import re

ESCAPE = re.compile(
    r"\\(?:([abfnrtv\\'\"])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))", re.DOTALL
)
NAMED_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
LEADING_ZERO = re.compile(r"([+-]?)0[0-7_]+")  # an octal number
MAX_DIGITS = 64
SURROGATES = range(0xD800, 0xE000)  # halves of pairs in UTF-16, which are no characters


def read_string(text: str) -> str:
    """Return a text in quotes. Raises ValueError."""
    return ESCAPE.sub(_read_escape, text[1:-1])


def read_character(text: str) -> int:
    """Return the code point of a character in quotes. Raises ValueError."""
    character = read_string(text)
    if len(character) != 1:
        raise ValueError
    return ord(character)


def read_go_number(text: str) -> int | float:
    """Return a number. Raises ValueError."""
    if len(text) > MAX_DIGITS:
        raise ValueError
    if octal := LEADING_ZERO.fullmatch(text):
        return int(f"{octal[1]}0o{text.lstrip('+-')[1:]}", 0)
    try:
        number = int(text, 0)
    except ValueError:
        value = float(text)
        if math.isinf(value):  # too large for a float64
            raise
        return value
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError
    return number


def _read_escape(match: re.Match[str]) -> str:
    named, *codes, octal, wrong = match.groups()
    if wrong is not None:
        raise ValueError
    if named is not None:
        return NAMED_ESCAPES.get(named, named)
    code = int(octal, 8) if octal is not None else int(next(filter(None, codes)), 16)
    if code > (0xFF if octal is not None else 0x10FFFF) or code in SURROGATES:
        raise ValueError
    return chr(code)
