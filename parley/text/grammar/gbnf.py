"""Parse llama.cpp's GBNF notation into grammar rules. Line breaks between alternatives are allowed.

Depends on the notation only.
"""

from __future__ import annotations

import re

from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.productions import (
    ANY_CHARACTER,
    LAST_CODE_POINT,
    AlternativesNode,
    CharacterNode,
    GrammarNode,
    RepeatNode,
    RuleReference,
    SequenceNode,
    TextNode,
    complement_set,
    referenced_rules,
    union_sets,
)

GBNF_NAME = re.compile(r"[A-Za-z0-9_-]+")
RULE_START = re.compile(r"([A-Za-z0-9_-]+)[ \t]*::=")
BLANK_OR_COMMENT = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
REPEAT_COUNT = re.compile(r"\{\s*([0-9]*)\s*(,?)\s*([0-9]*)\s*\}")
GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([^A-Za-z0-9]|[nrt]))")
LETTER_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
MAX_REPEATS = 1 << 20  # largest repeat count


def parse_gbnf(text: str) -> dict[str, GrammarNode]:
    """Parse a grammar into its rules by name, including ``root`` and every rule that is referred to.

    Raises GrammarRefused, and RecursionError if it is nested too deeply.
    """
    return _GbnfParser(text).parse_rules()


class _GbnfParser:
    def __init__(self, text: str):
        self.text, self.position = text, 0

    def parse_rules(self) -> dict[str, GrammarNode]:
        """Parse all rules, and check that every reference is defined."""
        rules: dict[str, GrammarNode] = {}
        self._skip_blank()
        while self.position < len(self.text):
            rule_start = RULE_START.match(self.text, self.position)
            if not rule_start:
                raise self._syntax_error("a rule (name ::= …) is missing")
            self.position = rule_start.end()
            rules[rule_start[1]] = self._parse_alternatives()
        if "root" not in rules:
            raise GrammarRefused("it has no rule root ::= …")
        for name in sorted({name for node in rules.values() for name in referenced_rules(node)} - rules.keys()):
            raise GrammarRefused(f"it has no rule {name} ::= …")
        return rules

    def _syntax_error(self, problem: str) -> GrammarRefused:
        line = self.text.count("\n", 0, self.position) + 1
        return GrammarRefused(f"{problem} in line {line}, before {self.text[self.position : self.position + 20]!r}")

    def _skip_blank(self) -> None:
        blank = BLANK_OR_COMMENT.match(self.text, self.position)
        assert blank is not None
        self.position = blank.end()

    def _parse_alternatives(self) -> GrammarNode:
        rows = [self._parse_sequence()]
        while self.text.startswith("|", self.position):
            self.position += 1
            rows.append(self._parse_sequence())
        return rows[0] if len(rows) == 1 else AlternativesNode(tuple(rows))

    def _parse_sequence(self) -> GrammarNode:
        nodes: list[GrammarNode] = []
        self._skip_blank()
        while (
            self.position < len(self.text)
            and self.text[self.position] not in "|)"
            and not RULE_START.match(self.text, self.position)
        ):
            nodes.append(self._parse_repeats(self._parse_item()))
        return nodes[0] if len(nodes) == 1 else SequenceNode(tuple(nodes))

    def _parse_item(self) -> GrammarNode:
        letter = self.text[self.position]
        if name := GBNF_NAME.match(self.text, self.position):
            self.position = name.end()
            return RuleReference(name[0])
        self.position += 1
        match letter:
            case '"':
                letters = []
                while not self._skip_mark('"'):
                    letters.append(chr(self._parse_letter()))
                return TextNode("".join(letters))
            case "[":
                return self._parse_class()
            case ".":
                return CharacterNode(ANY_CHARACTER)
            case "(":
                node = self._parse_alternatives()
                if not self._skip_mark(")"):
                    raise self._syntax_error("a ) is missing")
                return node
        self.position -= 1
        raise self._syntax_error("an unexpected character")

    def _skip_mark(self, mark: str) -> bool:
        """Skip ``mark`` and return True if it comes next. Raises GrammarRefused at the end of the text."""
        if self.position == len(self.text):
            raise self._syntax_error(f"a {mark} is missing")
        is_here = self.text.startswith(mark, self.position)
        self.position += is_here
        return is_here

    def _parse_letter(self) -> int:
        if self.text[self.position] != "\\":
            self.position += 1
            return ord(self.text[self.position - 1])
        escape = GBNF_ESCAPE.match(self.text, self.position)
        if not escape:
            raise self._syntax_error("an unknown escape")
        self.position = escape.end()
        if literal := escape[4]:
            return ord(LETTER_ESCAPES.get(literal, literal))
        code = int(escape[1] or escape[2] or escape[3], 16)
        if code > LAST_CODE_POINT or 0xD800 <= code < 0xE000:
            raise self._syntax_error("an escape that is not a valid character")
        return code

    def _parse_class(self) -> GrammarNode:
        negated = self.text.startswith("^", self.position)
        self.position += negated
        ranges = []
        while not self._skip_mark("]"):
            first = last = self._parse_letter()
            if self.text.startswith("-", self.position) and not self.text.startswith("-]", self.position):
                self.position += 1
                last = self._parse_letter() if self.position < len(self.text) else first
            if last < first:
                raise self._syntax_error("a range whose end is before its beginning")
            ranges.append((first, last))
        letters = union_sets(tuple(ranges))
        letters = complement_set(letters) if negated else letters
        if not letters:
            raise self._syntax_error("an empty character class")
        return CharacterNode(letters)

    def _parse_repeats(self, node: GrammarNode) -> GrammarNode:
        self._skip_blank()
        while self.position < len(self.text) and self.text[self.position] in "*+?{":
            mark = self.text[self.position]
            min_count, max_count = (int(mark == "+"), 1 if mark == "?" else None)
            if mark == "{":
                count = REPEAT_COUNT.match(self.text, self.position)
                if not count or not (count[1] or count[3]):
                    raise self._syntax_error("an invalid count")
                if any(len(digits) > len(str(MAX_REPEATS)) for digits in count.groups()):
                    raise GrammarRefused("it is too large")
                min_count = int(count[1] or 0)
                max_count = (int(count[3]) if count[3] else None) if count[2] else min_count
                if max(min_count, max_count or 0) > MAX_REPEATS:
                    raise GrammarRefused("it is too large")
                if max_count is not None and max_count < min_count:
                    raise self._syntax_error("a count whose maximum is below its minimum")
                self.position = count.end()
            else:
                self.position += 1
            node = RepeatNode(node, min_count, max_count) if max_count != 0 else SequenceNode(())
            self._skip_blank()
        return node
