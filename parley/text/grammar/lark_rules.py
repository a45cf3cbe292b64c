"""Parse Lark's notation into grammar rules. A terminal is a rule like any other: the parser decides, not a lexer.

Templates, tokens, and imports other than those of Lark's own ``common`` are refused. Depends on the notation only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.productions import (
    AlternativesNode,
    CharacterNode,
    GrammarNode,
    RepeatNode,
    RuleReference,
    SequenceNode,
    TextNode,
    referenced_rules,
)
from parley.text.grammar.regex_rules import parse_regex

TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*|->\s*\w+)
    |(?P<rule>[?!]{0,2}(?P<name>\w+)(?:\.-?\d+)?\s*:)
    |(?P<string>"(?:\\.|[^"\\\n])*")(?P<insensitive>i?)
    |/(?![/*])(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[imslux]*)
    |%import\s+common\s*(?:\.\s*(?P<imported>\w+)(?:\s*->\s*(?P<own>\w+))?|\((?P<several>[\w,\s]*)\))
    |(?P<directive>%\w+)|(?P<reference>\w+)|(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\d+(?:,\d*)?\})
    |(?P<mark>\.\.|[][()|*+?])|(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
COMMON = {  # terminals of Lark's own library, as regular expressions
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "NUMBER": r"[0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}
IGNORED = " ignored"  # no rule can have this name
ROOT = "root"  # as ``lexemes.write_lark`` expects it
MAX_COUNT = 1 << 20


def parse_lark(text: str) -> dict[str, GrammarNode]:
    """Parse a grammar into its rules by name; that of ``start`` is ``root``.

    Raises GrammarRefused, and RecursionError if it is nested too deeply.
    """
    return _LarkParser(text).parse_rules()


class _LarkParser:
    def __init__(self, text: str):
        self._tokens = [match for match in TOKEN.finditer(text) if match.lastgroup != "space"]
        self._position = 0
        self._text = text
        self._rules: dict[str, GrammarNode] = {}
        self._ignored: list[GrammarNode] = []
        self._in_terminal = False
        self._ignores = any(match["directive"] == "%ignore" for match in self._tokens)

    def parse_rules(self) -> dict[str, GrammarNode]:
        """Parse all rules, and check that every reference is defined."""
        while self._position < len(self._tokens):
            self._parse_statement(self._next_token())
        if "start" not in self._rules:
            raise GrammarRefused("it has no rule start: …")
        start: GrammarNode = RuleReference(_rule_name("start"))
        if self._ignored:
            rules: dict[str, GrammarNode] = {IGNORED: RepeatNode(AlternativesNode(tuple(self._ignored)), 0, None)}
            start = SequenceNode((RuleReference(IGNORED), start))
        else:
            rules = {}
        rules |= {ROOT: start} | {_rule_name(name): node for name, node in self._rules.items()}
        for name in sorted({name for node in rules.values() for name in referenced_rules(node)} - rules.keys()):
            raise GrammarRefused(f"it has no rule {name.removeprefix(' ')}: …")
        return rules

    def _parse_statement(self, token: re.Match[str]) -> None:
        if token["name"]:
            self._in_terminal = token["name"].strip("_").isupper()
            self._rules[token["name"]] = self._parse_alternatives()
        elif token["imported"] or token["several"]:
            for name, own_name in _imported_names(token):
                if name not in COMMON:
                    raise GrammarRefused(f"the terminal common.{name} is not supported")
                self._rules[own_name] = parse_regex(COMMON[name])
        elif token["directive"] == "%ignore":
            self._in_terminal = True
            self._ignored.append(self._parse_alternatives())
        else:
            raise self._syntax_error(token)

    def _next_token(self) -> re.Match[str]:
        self._position += 1
        return self._tokens[self._position - 1]

    def _peek_mark(self) -> str:
        """Return the mark that comes next; empty for anything else."""
        return (self._tokens[self._position]["mark"] or "") if self._position < len(self._tokens) else ""

    def _skip_mark(self, mark: str) -> bool:
        is_here = self._peek_mark() == mark
        self._position += is_here
        return is_here

    def _syntax_error(self, token: re.Match[str] | None) -> GrammarRefused:
        if token is None:
            return GrammarRefused("it ends too early")
        line = self._text.count("\n", 0, token.start()) + 1
        shown = token[0] if token["directive"] else self._text[token.start() : token.start() + 20]
        return GrammarRefused(f"{shown!r} in line {line} is not supported")

    def _parse_alternatives(self) -> GrammarNode:
        rows = [self._parse_sequence()]
        while self._skip_mark("|"):
            rows.append(self._parse_sequence())
        return rows[0] if len(rows) == 1 else AlternativesNode(tuple(rows))

    def _parse_sequence(self) -> GrammarNode:
        nodes: list[GrammarNode] = []
        while self._begins_item():
            nodes.append(self._parse_repeats(self._parse_item(self._next_token())))
        return nodes[0] if len(nodes) == 1 else SequenceNode(tuple(nodes))

    def _begins_item(self) -> bool:
        if self._position == len(self._tokens):
            return False
        token = self._tokens[self._position]
        return token["mark"] not in ("|", ")", "]") and not (
            token["name"] or token["directive"] or token["imported"] or token["several"]
        )

    def _parse_item(self, token: re.Match[str]) -> GrammarNode:
        if token["reference"]:
            is_terminal = token["reference"].strip("_").isupper()
            return self._before_ignored(RuleReference(_rule_name(token["reference"])), is_terminal)
        if token["string"]:
            return self._before_ignored(self._parse_string(token), True)
        if token["regex"]:
            return self._before_ignored(parse_regex(token["regex"].replace(r"\/", "/"), token["flags"]), True)
        close = {"(": ")", "[": "]"}.get(token["mark"] or "")
        if close is None:
            raise self._syntax_error(token)
        node = self._parse_alternatives()
        if not self._skip_mark(close):
            raise self._syntax_error(self._tokens[self._position] if self._position < len(self._tokens) else None)
        return node if close == ")" else RepeatNode(node, 0, 1)

    def _before_ignored(self, node: GrammarNode, is_terminal: bool) -> GrammarNode:
        """Return a terminal, in a rule followed by the terminals that may be ignored."""
        if self._ignores and is_terminal and not self._in_terminal:
            return SequenceNode((node, RuleReference(IGNORED)))
        return node

    def _parse_string(self, token: re.Match[str]) -> GrammarNode:
        text = _read_literal(token["string"])
        if self._skip_mark(".."):
            last = _read_literal(self._next_token()["string"] or '""') if self._position < len(self._tokens) else ""
            if len(text) != 1 or len(last) != 1 or last < text:
                raise self._syntax_error(token)
            return CharacterNode(((ord(text), ord(last)),))
        return parse_regex(re.escape(text), "i") if token["insensitive"] else TextNode(text)

    def _parse_repeats(self, node: GrammarNode) -> GrammarNode:
        while self._peek_mark() in ("*", "+", "?"):
            mark = self._next_token()[0]
            node = RepeatNode(node, int(mark == "+"), 1 if mark == "?" else None)
        if self._position < len(self._tokens) and (count := self._tokens[self._position]["count"]):
            self._position += 1
            min_count, max_count = _read_count(count)
            node = RepeatNode(node, min_count, max_count) if max_count != 0 else SequenceNode(())
        return node


def _rule_name(name: str) -> str:
    return f" {name}"  # so that none is called as the root is


def _imported_names(token: re.Match[str]) -> Iterator[tuple[str, str]]:
    if token["imported"]:
        yield token["imported"], token["own"] or token["imported"]
    else:
        yield from ((name.strip(), name.strip()) for name in token["several"].split(","))


def _read_literal(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        raise GrammarRefused(f"the string {literal[:60]} has an escape that JSON does not know") from None


def _read_count(count: str) -> tuple[int, int | None]:
    numbers = re.findall(r"\d+", count)
    is_open = count.endswith(",}")
    if any(len(number) > len(str(MAX_COUNT)) or int(number) > MAX_COUNT for number in numbers):
        raise GrammarRefused("it is too large")
    min_count, max_count = int(numbers[0]), None if is_open else int(numbers[-1])
    if max_count is not None and max_count < min_count:
        raise GrammarRefused("the maximum of a count is below its minimum")
    return min_count, max_count
