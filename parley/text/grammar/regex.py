"""Translate regular expressions of Python and ECMAScript to Rust's syntax, which reads some constructs differently.

Where the dialects disagree about the characters of a class, the result allows only those that all of them accept, so
that an answer matches in every dialect. Constructs that no automaton can follow are refused here or by Rust's parser.
Depends on the three syntaxes, not on grammars.
"""

from __future__ import annotations

import re

from parley.text.grammar.grammar_refused import GrammarRefused

# White space in all dialects of expressions.
COMMON_SPACES = r"\t\n\x{c}\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"
ANY_SPACES = COMMON_SPACES + r"\x{b}\x{1c}-\x{1f}\x{85}\u{feff}"  # white space in at least one of them
PYTHON_WORD = r"\p{L}\p{N}_"  # \w in Python
ECMASCRIPT_WORD = "0-9A-Za-z_"  # \w in ECMAScript
LINE_ENDS = r"\n\r\u{2028}\u{2029}"  # line ends in at least one
# JSON writes these as \u escapes, which llguidance does not allow.
ESCAPED_RANGES = r"\x{0}-\x{7}\x{b}\x{e}-\x{1f}\x{7f}"
ESCAPED_CODES = frozenset([*range(0x20), 0x7F]) - frozenset(b"\b\t\n\f\r")
ALL_CHARACTERS = r"\x{0}-\x{10ffff}"

COUNT_QUANTIFIER = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
FLAG_GROUP = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
NAMED_GROUP = re.compile(r"\(\?P?<([^\W\d]\w*)>")
POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
UNICODE_PROPERTY = re.compile(r"[pP](?:\{[^{}]*\}|[A-Za-z])")
NUMERIC_ESCAPE = re.compile(
    r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\}|(0[0-7]{0,2}|[1-3][0-7]{2})"
)
LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
CONTROL_ESCAPES = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}

TRAILING_BACKSLASH = "it ends with a backslash that escapes nothing"
BACKREFERENCE = "backreferences are not supported"
POSSESSIVE_QUANTIFIER = "possessive quantifiers and atomic groups are not supported"
HALF_SURROGATE = "it contains half of a surrogate pair"


class RustRegex(str):
    """An expression in Rust's syntax."""


def to_rust_regex(expression: str, *, schema: bool) -> RustRegex:
    """Translate an expression to Rust. ``schema``: it is ECMAScript (JSON Schema), otherwise Python. Raises
    GrammarRefused."""
    return (
        expression
        if isinstance(expression, RustRegex)
        else RustRegex(_RegexTranslator(expression, schema).translate_regex())
    )


class _RegexTranslator:
    def __init__(self, text: str, schema: bool):
        self.text, self.position = text, 0
        self._ecmascript = schema
        self._output: list[str] = []
        self._narrow_dot = schema and not any("s" in match[1] for match in FLAG_GROUP.finditer(text))
        self._excluded = ESCAPED_RANGES if schema else ""  # excluded from every class

    def translate_regex(self) -> str:
        """Return the whole expression in Rust's syntax."""
        while self.position < len(self.text):
            self._output.append(self._translate_next())
        return "".join(self._output)

    def _translate_next(self) -> str:
        letter = self._next_letter()
        match letter:
            case "\\":
                return self._translate_escape()
            case "[":
                return self._translate_class()
            case "(":
                return self._translate_group()
            case "{":
                return self._translate_braces()
            case "*" | "+" | "?":
                self._check_possessive()
                return letter
            case "." if self._narrow_dot:
                return f"[^{LINE_ENDS}{self._excluded}]"
        return self._write_letter(ord(letter)) if letter < " " else letter

    def _next_letter(self) -> str:
        letter = self.text[self.position]
        self.position += 1
        return letter

    def _match_here(self, pattern: re.Pattern[str], offset: int = 0) -> re.Match[str] | None:
        """Match a pattern ``offset`` characters before the position; on a match, move the position to its end."""
        match = pattern.match(self.text, self.position - offset)
        if match:
            self.position = match.end()
        return match

    def _check_possessive(self) -> None:
        if self.text.startswith("+", self.position):
            raise GrammarRefused(POSSESSIVE_QUANTIFIER)

    def _translate_braces(self) -> str:
        """Translate a count, or a literal brace."""
        match = self._match_here(COUNT_QUANTIFIER, 1)
        if not match or not (match[1] or match[2]):
            self.position = self.position if not match else match.start() + 1
            return r"\{"
        self._check_possessive()
        min_count, comma, max_count = match.groups()
        if not min_count and self._ecmascript:
            raise GrammarRefused("{,n} has more than one meaning; write {0,n}")
        return f"{{{min_count or 0}{comma}{max_count}}}"

    def _translate_group(self) -> str:
        text, start = self.text, self.position - 1
        if text.startswith("?#", self.position):
            self.position = text.find(")", self.position) + 1
            if not self.position:
                raise GrammarRefused("a comment in it is not closed")
            return ""
        if self._match_here(NAMED_GROUP, 1):
            return "(?:"
        if text.startswith(("?P=", "?(", "?&", "?P>", "?R"), self.position):
            raise GrammarRefused(BACKREFERENCE)
        if text.startswith("?>", self.position):
            raise GrammarRefused(POSSESSIVE_QUANTIFIER)
        flags = self._match_here(FLAG_GROUP, 1)
        if not flags:
            return "("
        on, off, end = flags[1].replace("u", ""), flags[2] or "", flags[3]
        if other := set(on + off) - set("ims"):
            raise GrammarRefused(f"the flag {min(other)} is not supported")
        if start and end == ")" and not self._ecmascript and text[:start].strip("^"):
            raise GrammarRefused("flags for the whole expression must stand at its beginning")
        return f"(?{on}{'-' if off else ''}{off}{end}" if on or off or end == ":" else ""

    def _translate_escape(self) -> str:
        if self.position == len(self.text):
            raise GrammarRefused(TRAILING_BACKSLASH)
        if (code := self._escaped_code_point()) is not None:
            return self._write_letter(code)
        if match := self._match_here(UNICODE_PROPERTY):
            return "\\" + match[0]
        letter = self._next_letter()
        if letter in "dDsSwW":
            return f"[{self._shorthand_set(letter, False)}]"
        if letter.isdigit():
            raise GrammarRefused(BACKREFERENCE)
        if letter == "Z":
            return r"\z"
        return letter if letter in "<>" or letter > "\x7f" else "\\" + letter

    def _escaped_code_point(self) -> int | None:
        """Return the code point of a numeric or control escape at the position, None if there is none."""
        if match := self._match_here(NUMERIC_ESCAPE):
            code = int(match[5], 8) if match[5] else int(next(filter(None, match.groups())), 16)
            if 0xD800 <= code < 0xDC00 and (low_surrogate := self._match_here(LOW_SURROGATE)):
                return 0x10000 + (code - 0xD800 << 10) + int(low_surrogate[1], 16) - 0xDC00
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                raise GrammarRefused(HALF_SURROGATE if code < 0xE000 else "it names a character beyond U+10FFFF")
            return code
        if self.text.startswith("c", self.position) and self.text[self.position + 1 : self.position + 2].isalpha():
            self.position += 2
            return ord(self.text[self.position - 1]) % 32
        return None

    def _shorthand_set(self, letter: str, broad: bool) -> str:
        """Return the inside of a bracketed class for \\d, \\s, \\w and their inverses.

        ``broad``: include characters that any dialect accepts, otherwise only those that all accept.
        """
        inverse = letter.isupper()
        is_broad = broad is not inverse
        match letter.lower():
            case "d":
                inner = r"\p{Nd}" if is_broad else "0-9"
            case "s":
                inner = ANY_SPACES if is_broad else COMMON_SPACES
            case _:
                inner = PYTHON_WORD if is_broad or not self._ecmascript else ECMASCRIPT_WORD
        return f"[^{inner}{'' if broad else self._excluded}]" if inverse else inner

    def _translate_class(self) -> str:
        """Translate a bracketed class member by member, so that Rust reads nothing more into it."""
        negated = self.text.startswith("^", self.position)
        self.position += negated
        members: list[str] = []
        shorthands: set[str] = set()
        start = self.position
        if self._ecmascript and self.text.startswith("]", start):
            raise GrammarRefused("a class that begins with ] has more than one meaning")
        while self.position == start or not self.text.startswith("]", self.position):
            first = self._class_member(negated, shorthands)
            if isinstance(first, str):
                members.append(first)
                continue
            if self.text.startswith("-", self.position) and not self.text.startswith("]", self.position + 1):
                self.position += 1
                last = self._class_member(negated, shorthands)
                if isinstance(last, str) or last < first:
                    raise GrammarRefused("a range in it has no end, or its end is before its beginning")
                members += self._class_range(first, last, negated)
            else:
                members += self._class_range(first, first, negated)
        self.position += 1
        matches_all = any(letter.swapcase() in shorthands for letter in shorthands)
        if matches_all or not members:
            return (
                f"[^{self._excluded}]"
                if matches_all and self._excluded and not negated
                else f"[{'^' * (negated or not members)}{ALL_CHARACTERS}]"
            )
        return f"[{'^' * negated}{''.join(members)}{self._excluded * negated}]"

    def _class_member(self, negated: bool, shorthands: set[str]) -> int | str:
        """Read one member of a class: a code point, or the text of a named class."""
        if self.position >= len(self.text):
            raise GrammarRefused("unclosed character class")
        if match := self._match_here(POSIX_CLASS):
            return match[0]
        letter = self._next_letter()
        if letter != "\\":
            return ord(letter)
        if self.position == len(self.text):
            raise GrammarRefused(TRAILING_BACKSLASH)
        if (code := self._escaped_code_point()) is not None:
            return code
        if match := self._match_here(UNICODE_PROPERTY):
            return "\\" + match[0]
        letter = self._next_letter()
        if letter in "dDsSwW":
            shorthands.add(letter)
            return self._shorthand_set(letter, negated)
        if letter == "b":
            return 8
        if letter in CONTROL_ESCAPES:
            return ord(CONTROL_ESCAPES[letter])
        if letter.isalnum() and letter.isascii():
            raise GrammarRefused(
                BACKREFERENCE if letter.isdigit() else f"the escape \\{letter} in a class is not supported"
            )
        return ord(letter)

    def _write_letter(self, code: int) -> str:
        """Write a single character; an empty class if it is excluded."""
        return f"[^{ALL_CHARACTERS}]" if self._excluded and code in ESCAPED_CODES else _escape_letter(code)

    def _class_range(self, first: int, last: int, negated: bool) -> list[str]:
        """Write a range of characters inside a class, without the excluded ones."""
        ranges = []
        if self._excluded and not negated:
            for code in sorted(ESCAPED_CODES):
                if first <= code <= last:
                    ranges += [(first, code - 1)] if first < code else []
                    first = code + 1
        ranges += [(first, last)] if first <= last else []
        return [
            _escape_letter(low) if low == high else f"{_escape_letter(low)}-{_escape_letter(high)}"
            for low, high in ranges
        ]


def _escape_letter(code: int) -> str:
    """Write a character so that it stands for itself everywhere."""
    letter = chr(code)
    return letter if letter.isalnum() and letter.isascii() else f"\\x{{{code:x}}}"
