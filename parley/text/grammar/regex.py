"""Translate regular expressions of Python and ECMAScript to Rust's syntax, which reads some constructs differently.

Where the dialects disagree about the characters of a class, the result allows only those that all of them accept, so
that an answer matches in every dialect. Constructs that no automaton can follow are refused here or by Rust's parser.
Depends on the three syntaxes, not on grammars.
"""

from __future__ import annotations

import re

from parley.text.grammar.refused import Refused

COMMON = r"\t\n\x{c}\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"  # white space in all
SPACES = COMMON + r"\x{b}\x{1c}-\x{1f}\x{85}\u{feff}"  # white space in at least one
LETTERS = r"\p{L}\p{N}_"  # \w in Python
ASCII = "0-9A-Za-z_"  # \w in ECMAScript
LINES = r"\n\r\u{2028}\u{2029}"  # line ends in at least one
CONTROLS = r"\x{0}-\x{7}\x{b}\x{e}-\x{1f}\x{7f}"  # JSON writes these as \u escapes, which llguidance does not allow
CONTROL = frozenset([*range(0x20), 0x7F]) - frozenset(b"\b\t\n\f\r")
ALL = r"\x{0}-\x{10ffff}"

QUANTIFIER = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
FLAGS = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
NAMED = re.compile(r"\(\?P?<([^\W\d]\w*)>")
POSIX = re.compile(r"\[:\^?[a-z]+:\]")
PROPERTY = re.compile(r"[pP](?:\{[^{}]*\}|[A-Za-z])")
NUMBERED = re.compile(
    r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\}|(0[0-7]{0,2}|[1-3][0-7]{2})"
)
LOW = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
PLAIN = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}

BACKSLASH = "it ends with a backslash that escapes nothing"
BACK = "backreferences are not supported"
POSSESSIVE = "possessive quantifiers and atomic groups are not supported"
SURROGATE = "it contains half of a surrogate pair"


class Rust(str):
    """An expression in Rust's syntax."""


def rust(expression: str, *, schema: bool) -> Rust:
    """Translate an expression to Rust. ``schema``: it is ECMAScript (JSON Schema), otherwise Python. Raises
    GrammarRefused."""
    return expression if isinstance(expression, Rust) else Rust(_Reader(expression, schema).read())


class _Reader:
    def __init__(self, text: str, schema: bool):
        self.text, self.at = text, 0
        self._schema = schema
        self._made: list[str] = []
        self._dots = schema and not any("s" in found[1] for found in FLAGS.finditer(text))
        self._never = CONTROLS if schema else ""  # excluded from every class

    def read(self) -> str:
        """Return the whole expression in Rust's syntax."""
        while self.at < len(self.text):
            self._made.append(self._one())
        return "".join(self._made)

    def _one(self) -> str:
        letter = self._next()
        match letter:
            case "\\":
                return self._escape()
            case "[":
                return self._class()
            case "(":
                return self._group()
            case "{":
                return self._braces()
            case "*" | "+" | "?":
                self._check_possessive()
                return letter
            case "." if self._dots:
                return f"[^{LINES}{self._never}]"
        return self._written(ord(letter)) if letter < " " else letter

    def _next(self) -> str:
        letter = self.text[self.at]
        self.at += 1
        return letter

    def _take(self, pattern: re.Pattern[str], back: int = 0) -> re.Match[str] | None:
        """Match a pattern ``back`` characters before the position; on a match, move the position to its end."""
        found = pattern.match(self.text, self.at - back)
        if found:
            self.at = found.end()
        return found

    def _check_possessive(self) -> None:
        if self.text.startswith("+", self.at):
            raise Refused(POSSESSIVE)

    def _braces(self) -> str:
        """Translate a count, or a literal brace."""
        found = self._take(QUANTIFIER, 1)
        if not found or not (found[1] or found[2]):
            self.at = self.at if not found else found.start() + 1
            return r"\{"
        self._check_possessive()
        least, comma, most = found.groups()
        if not least and self._schema:
            raise Refused("{,n} has more than one meaning; write {0,n}")
        return f"{{{least or 0}{comma}{most}}}"

    def _group(self) -> str:
        text, start = self.text, self.at - 1
        if text.startswith("?#", self.at):
            self.at = text.find(")", self.at) + 1
            if not self.at:
                raise Refused("a comment in it is not closed")
            return ""
        if self._take(NAMED, 1):
            return "(?:"
        if text.startswith(("?P=", "?(", "?&", "?P>", "?R"), self.at):
            raise Refused(BACK)
        if text.startswith("?>", self.at):
            raise Refused(POSSESSIVE)
        found = self._take(FLAGS, 1)
        if not found:
            return "("
        on, off, end = found[1].replace("u", ""), found[2] or "", found[3]
        if other := set(on + off) - set("ims"):
            raise Refused(f"the flag {min(other)} is not supported")
        if start and end == ")" and not self._schema and text[:start].strip("^"):
            raise Refused("flags for the whole expression must stand at its beginning")
        return f"(?{on}{'-' if off else ''}{off}{end}" if on or off or end == ":" else ""

    def _escape(self) -> str:
        if self.at == len(self.text):
            raise Refused(BACKSLASH)
        if (code := self._code()) is not None:
            return self._written(code)
        if found := self._take(PROPERTY):
            return "\\" + found[0]
        letter = self._next()
        if letter in "dDsSwW":
            return f"[{self._set(letter, False)}]"
        if letter.isdigit():
            raise Refused(BACK)
        if letter == "Z":
            return r"\z"
        return letter if letter in "<>" or letter > "\x7f" else "\\" + letter

    def _code(self) -> int | None:
        """Return the code point of a numeric or control escape at the position, None if there is none."""
        if found := self._take(NUMBERED):
            code = int(found[5], 8) if found[5] else int(next(filter(None, found.groups())), 16)
            if 0xD800 <= code < 0xDC00 and (low := self._take(LOW)):
                return 0x10000 + (code - 0xD800 << 10) + int(low[1], 16) - 0xDC00
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                raise Refused(SURROGATE if code < 0xE000 else "it names a character beyond U+10FFFF")
            return code
        if self.text.startswith("c", self.at) and self.text[self.at + 1 : self.at + 2].isalpha():
            self.at += 2
            return ord(self.text[self.at - 1]) % 32
        return None

    def _set(self, letter: str, broad: bool) -> str:
        """Return the inside of a bracketed class for \\d, \\s, \\w and their inverses.

        ``broad``: include characters that any dialect accepts, otherwise only those that all accept.
        """
        inverse = letter.isupper()
        wide = broad is not inverse
        match letter.lower():
            case "d":
                inner = r"\p{Nd}" if wide else "0-9"
            case "s":
                inner = SPACES if wide else COMMON
            case _:
                inner = LETTERS if wide or not self._schema else ASCII
        return f"[^{inner}{'' if broad else self._never}]" if inverse else inner

    def _class(self) -> str:
        """Translate a bracketed class member by member, so that Rust reads nothing more into it."""
        negated = self.text.startswith("^", self.at)
        self.at += negated
        made: list[str] = []
        letters: set[str] = set()
        start = self.at
        if self._schema and self.text.startswith("]", start):
            raise Refused("a class that begins with ] has more than one meaning")
        while self.at == start or not self.text.startswith("]", self.at):
            first = self._member(negated, letters)
            if isinstance(first, str):
                made.append(first)
                continue
            if self.text.startswith("-", self.at) and not self.text.startswith("]", self.at + 1):
                self.at += 1
                last = self._member(negated, letters)
                if isinstance(last, str) or last < first:
                    raise Refused("a range in it has no end, or its end is before its beginning")
                made += self._range(first, last, negated)
            else:
                made += self._range(first, first, negated)
        self.at += 1
        every = any(letter.swapcase() in letters for letter in letters)
        if every or not made:
            return (
                f"[^{self._never}]"
                if every and self._never and not negated
                else f"[{'^' * (negated or not made)}{ALL}]"
            )
        return f"[{'^' * negated}{''.join(made)}{self._never * negated}]"

    def _member(self, negated: bool, letters: set[str]) -> int | str:
        """Read one member of a class: a code point, or the text of a named class."""
        if self.at >= len(self.text):
            raise Refused("unclosed character class")
        if found := self._take(POSIX):
            return found[0]
        letter = self._next()
        if letter != "\\":
            return ord(letter)
        if self.at == len(self.text):
            raise Refused(BACKSLASH)
        if (code := self._code()) is not None:
            return code
        if found := self._take(PROPERTY):
            return "\\" + found[0]
        letter = self._next()
        if letter in "dDsSwW":
            letters.add(letter)
            return self._set(letter, negated)
        if letter == "b":
            return 8
        if letter in PLAIN:
            return ord(PLAIN[letter])
        if letter.isalnum() and letter.isascii():
            raise Refused(BACK if letter.isdigit() else f"the escape \\{letter} in a class is not supported")
        return ord(letter)

    def _written(self, code: int) -> str:
        """Write a single character; an empty class if it is excluded."""
        return f"[^{ALL}]" if self._never and code in CONTROL else _letter(code)

    def _range(self, first: int, last: int, negated: bool) -> list[str]:
        """Write a range of characters inside a class, without the excluded ones."""
        made = []
        if self._never and not negated:
            for code in sorted(CONTROL):
                if first <= code <= last:
                    made += [(first, code - 1)] if first < code else []
                    first = code + 1
        made += [(first, last)] if first <= last else []
        return [_letter(low) if low == high else f"{_letter(low)}-{_letter(high)}" for low, high in made]


def _letter(code: int) -> str:
    """Write a character so that it stands for itself everywhere."""
    letter = chr(code)
    return letter if letter.isalnum() and letter.isascii() else f"\\x{{{code:x}}}"
