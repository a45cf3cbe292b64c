"""Parse llama.cpp's GBNF notation into grammar rules. Line breaks between alternatives are allowed.

Depends on the notation only.
"""

from __future__ import annotations

import re

from parley.text.grammar.productions import (
    ANY,
    LAST,
    Either,
    Letter,
    Name,
    Node,
    Repeat,
    Row,
    Text,
    inverse,
    names,
    union,
)
from parley.text.grammar.refused import Refused

NAME = re.compile(r"[A-Za-z0-9_-]+")
RULE = re.compile(r"([A-Za-z0-9_-]+)[ \t]*::=")
BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
COUNT = re.compile(r"\{\s*([0-9]*)\s*(,?)\s*([0-9]*)\s*\}")
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([^A-Za-z0-9]|[nrt]))")
PLAIN = {"n": "\n", "r": "\r", "t": "\t"}
MOST = 1 << 20  # largest repeat count


def read(text: str) -> dict[str, Node]:
    """Parse a grammar into its rules by name, including ``root`` and every rule that is referred to.

    Raises GrammarRefused, and RecursionError if it is nested too deeply.
    """
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str):
        self.text, self.at = text, 0

    def read(self) -> dict[str, Node]:
        """Parse all rules, and check that every reference is defined."""
        rules: dict[str, Node] = {}
        self._skip()
        while self.at < len(self.text):
            found = RULE.match(self.text, self.at)
            if not found:
                raise self._wrong("a rule (name ::= …) is missing")
            self.at = found.end()
            rules[found[1]] = self._either()
        if "root" not in rules:
            raise Refused("it has no rule root ::= …")
        for name in sorted({name for node in rules.values() for name in names(node)} - rules.keys()):
            raise Refused(f"it has no rule {name} ::= …")
        return rules

    def _wrong(self, what: str) -> Refused:
        line = self.text.count("\n", 0, self.at) + 1
        return Refused(f"{what} in line {line}, before {self.text[self.at : self.at + 20]!r}")

    def _skip(self) -> None:
        found = BLANK.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def _either(self) -> Node:
        rows = [self._row()]
        while self.text.startswith("|", self.at):
            self.at += 1
            rows.append(self._row())
        return rows[0] if len(rows) == 1 else Either(tuple(rows))

    def _row(self) -> Node:
        nodes: list[Node] = []
        self._skip()
        while self.at < len(self.text) and self.text[self.at] not in "|)" and not RULE.match(self.text, self.at):
            nodes.append(self._times(self._one()))
        return nodes[0] if len(nodes) == 1 else Row(tuple(nodes))

    def _one(self) -> Node:
        letter = self.text[self.at]
        if found := NAME.match(self.text, self.at):
            self.at = found.end()
            return Name(found[0])
        self.at += 1
        match letter:
            case '"':
                letters = []
                while not self._ends('"'):
                    letters.append(chr(self._letter()))
                return Text("".join(letters))
            case "[":
                return self._class()
            case ".":
                return Letter(ANY)
            case "(":
                node = self._either()
                if not self._ends(")"):
                    raise self._wrong("a ) is missing")
                return node
        self.at -= 1
        raise self._wrong("an unexpected character")

    def _ends(self, mark: str) -> bool:
        """Skip ``mark`` and return True if it comes next. Raises GrammarRefused at the end of the text."""
        if self.at == len(self.text):
            raise self._wrong(f"a {mark} is missing")
        here = self.text.startswith(mark, self.at)
        self.at += here
        return here

    def _letter(self) -> int:
        if self.text[self.at] != "\\":
            self.at += 1
            return ord(self.text[self.at - 1])
        found = ESCAPE.match(self.text, self.at)
        if not found:
            raise self._wrong("an unknown escape")
        self.at = found.end()
        if plain := found[4]:
            return ord(PLAIN.get(plain, plain))
        code = int(found[1] or found[2] or found[3], 16)
        if code > LAST or 0xD800 <= code < 0xE000:
            raise self._wrong("an escape that is not a valid character")
        return code

    def _class(self) -> Node:
        negated = self.text.startswith("^", self.at)
        self.at += negated
        ranges = []
        while not self._ends("]"):
            first = last = self._letter()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                last = self._letter() if self.at < len(self.text) else first
            if last < first:
                raise self._wrong("a range whose end is before its beginning")
            ranges.append((first, last))
        made = union(tuple(ranges))
        made = inverse(made) if negated else made
        if not made:
            raise self._wrong("an empty character class")
        return Letter(made)

    def _times(self, node: Node) -> Node:
        self._skip()
        while self.at < len(self.text) and self.text[self.at] in "*+?{":
            mark = self.text[self.at]
            least, most = (int(mark == "+"), 1 if mark == "?" else None)
            if mark == "{":
                found = COUNT.match(self.text, self.at)
                if not found or not (found[1] or found[3]):
                    raise self._wrong("an invalid count")
                if any(len(each) > len(str(MOST)) for each in found.groups()):
                    raise Refused("it is too large")
                least = int(found[1] or 0)
                most = (int(found[3]) if found[3] else None) if found[2] else least
                if max(least, most or 0) > MOST:
                    raise Refused("it is too large")
                if most is not None and most < least:
                    raise self._wrong("a count whose maximum is below its minimum")
                self.at = found.end()
            else:
                self.at += 1
            node = Repeat(node, least, most) if most != 0 else Row(())
            self._skip()
        return node
