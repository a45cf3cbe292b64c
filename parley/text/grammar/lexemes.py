"""Write grammar rules in Lark, whose lexer always reads as far as any lexeme that is allowed at a position can reach.

A regular part becomes a single lexeme where possible, because the matcher follows lexemes fastest. It must not, where
it could read past its end into the text that follows a lexeme at the same position (itself or another). Such a part is
split into its own parts, down to single characters, and the parser decides. Depends on productions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from parley.text.grammar.lark import quote_lark
from parley.text.grammar.productions import (
    AlternativesNode,
    CharacterNode,
    GrammarNode,
    RepeatNode,
    RuleReference,
    SequenceNode,
    TextNode,
    sets_intersect,
    union_sets,
)
from parley.text.grammar.regular import RegularParts

EMPTY_TEXT = quote_lark("")
START_RULE = ""  # no rule can have this name


def write_lark(rules: dict[str, GrammarNode], ends: Sequence[str] = ()) -> str:
    """Write the grammar of the rule root, followed by one of the texts in ``ends`` if there are any.

    Raises GrammarRefused, and RecursionError if it is nested too deeply.
    """
    start: GrammarNode = (
        SequenceNode((RuleReference("root"), AlternativesNode(tuple(map(TextNode, ends)))))
        if ends
        else RuleReference("root")
    )
    rules = rules | {START_RULE: start}
    shapes = RegularParts(rules)
    split_shapes: set[int] = set()
    while True:
        writer = _LexemeWriter(shapes, split_shapes)
        text = writer.write_rules()
        if not (overreaching := _overreaching_shapes(writer, shapes)):
            return text
        split_shapes |= overreaching


@dataclass
class _WrittenNode:
    """A written node, and the lexemes and rules that it can begin and end with."""

    text: str
    can_be_empty: bool
    first: set[int | str] = field(default_factory=set)
    last: set[int | str] = field(default_factory=set)


class _LexemeWriter:
    """Writes a grammar whose lexemes are the largest regular parts, except for the shapes that must be split."""

    def __init__(self, shapes: RegularParts, split_shapes: set[int]):
        self._shapes, self._split_shapes = shapes, split_shapes
        self.lexeme_shapes: list[int] = []  # shape of each lexeme, by position
        self.links: list[tuple[set[int | str], set[int | str]]] = []  # (ends of one node, beginnings of the next)
        self.rules: dict[str, _WrittenNode] = {}
        self._rule_numbers = {name: number for number, name in enumerate(shapes.rules)}
        self._terminals: dict[int, str] = {}  # by shape
        self._lines: list[str] = []
        self._unwritten: list[str] = []

    def write_rules(self) -> str:
        """Return the whole grammar. Raises GrammarRefused when time is up."""
        self._write_reference(START_RULE)
        while self._unwritten:
            name = self._unwritten.pop()
            self.rules[name] = self._write_node(self._shapes.rules[name])
        rules = [f"rule{self._rule_numbers[name]}: {part.text}" for name, part in self.rules.items()]
        return "\n".join([f"start: rule{self._rule_numbers[START_RULE]}", *rules, *self._lines])

    def _write_node(self, node: GrammarNode) -> _WrittenNode:
        self._shapes.check_deadline()
        shape = self._shapes.shape_of(node)
        if shape is not None and shape not in self._split_shapes:
            index = len(self.lexeme_shapes)
            self.lexeme_shapes.append(shape)
            return _WrittenNode(self._write_lexeme(node), self._shapes.can_be_empty(node), {index}, {index})
        match node:
            case TextNode(text):
                return self._write_sequence([TextNode(letter) for letter in text])
            case RuleReference(name):
                return self._write_reference(name)
            case RepeatNode(inner, min_count, max_count):
                part = self._write_node(inner)
                if max_count != 1:
                    self.links.append((part.last, part.first))
                return _WrittenNode(
                    f"({part.text}){_lark_count(min_count, max_count)}",
                    part.can_be_empty or min_count == 0,
                    part.first,
                    part.last,
                )
            case SequenceNode(nodes):
                return self._write_sequence(nodes)
        assert isinstance(node, AlternativesNode)
        parts = [self._write_node(alternative) for alternative in self._shapes.merged_alternatives(node)]
        text = f"({' | '.join(part.text for part in parts)})"
        first, last = (part.first for part in parts), (part.last for part in parts)
        return _WrittenNode(text, any(part.can_be_empty for part in parts), set().union(*first), set().union(*last))

    def _write_reference(self, name: str) -> _WrittenNode:
        if name not in self.rules:
            self.rules[name] = _WrittenNode("", False)  # placeholder until it is written
            self._unwritten.append(name)
        return _WrittenNode(
            f"rule{self._rule_numbers[name]}", self._shapes.can_be_empty(RuleReference(name)), {name}, {name}
        )

    def _write_sequence(self, nodes: Sequence[GrammarNode]) -> _WrittenNode:
        parts = [self._write_node(node) for node in nodes]
        sequence = _WrittenNode(f"({' '.join(part.text for part in parts)})" if parts else EMPTY_TEXT, True)
        for part in parts:
            self._shapes.check_deadline()
            self.links.append((sequence.last, part.first))
            sequence.first = sequence.first | part.first if sequence.can_be_empty else sequence.first
            sequence.last = sequence.last | part.last if part.can_be_empty else part.last
            sequence.can_be_empty = sequence.can_be_empty and part.can_be_empty
        return sequence

    def _write_lexeme(self, node: GrammarNode) -> str:
        """Return a regular node as part of a terminal: inline if it is simple, otherwise as a terminal's name."""
        while isinstance(node, RuleReference):
            node = self._shapes.rules[node.name]
        match node:
            case TextNode(text):
                return quote_lark(text)
            case CharacterNode(letters):
                return f"/[{''.join(map(_regex_range, letters))}]/"
        shape = self._shapes.shape_of(node)
        assert shape is not None
        if shape not in self._terminals:
            body = self._terminal_body(node)
            self._terminals[shape] = name = f"T{len(self._terminals)}" if body != EMPTY_TEXT else body
            if body != EMPTY_TEXT:
                self._lines.append(f"{name}: {body}")
        return self._terminals[shape]

    def _terminal_body(self, node: GrammarNode) -> str:
        """Return the definition of a terminal, without redundant parts: llguidance panics at some of them."""
        match node:
            case RepeatNode(inner, min_count, max_count):
                body = self._terminal_body(inner)
                return f"({body}){_lark_count(min_count, max_count)}" if body != EMPTY_TEXT else body
            case SequenceNode(nodes):
                bodies = [body for body in map(self._terminal_body, nodes) if body != EMPTY_TEXT]
                return f"({' '.join(bodies)})" if bodies else EMPTY_TEXT
            case AlternativesNode():
                bodies = list(dict.fromkeys(map(self._terminal_body, _flat_alternatives(node))))
                return f"({' | '.join(bodies)})" if bodies != [EMPTY_TEXT] else EMPTY_TEXT
        return self._write_lexeme(node)


def _overreaching_shapes(writer: _LexemeWriter, shapes: RegularParts) -> set[int]:
    """Return the shapes of lexemes that can read into the text that must follow a lexeme at the same position."""
    rules, lexemes = writer.rules, writer.lexeme_shapes
    first_lexemes = _resolve_lexemes({name: part.first for name, part in rules.items()}, shapes)
    last_lexemes = _resolve_lexemes({name: part.last for name, part in rules.items()}, shapes)
    follow: list[set[int]] = [set() for _ in lexemes]
    for before, after in writer.links:
        shapes.check_deadline()
        next_lexemes = _as_lexemes(after, first_lexemes)
        for lexeme in _as_lexemes(before, last_lexemes):
            shapes.check_deadline()
            follow[lexeme] |= next_lexemes
    followers = [frozenset(next_lexemes) for next_lexemes in follow]
    starts = {
        next_lexemes: union_sets(*map(shapes.first_characters, {lexemes[follower] for follower in next_lexemes}))
        for next_lexemes in set(followers)
    }
    overreaching: set[int] = set()
    first = frozenset(first_lexemes[START_RULE])
    unvisited = [(first, first)]  # pairs of lexeme sets that may be read at the same position
    known_pairs, compared_lexemes = set(unvisited), set[tuple[int, int]]()
    while unvisited:
        for one, other in product(*unvisited.pop()):
            shapes.check_deadline()
            if (one, other) in compared_lexemes:
                continue
            compared_lexemes.add((one, other))
            overlap = shapes.shape_overlap(lexemes[one], lexemes[other])
            if sets_intersect(overlap.second_continues, starts[followers[one]]) and shapes.can_be_split(lexemes[other]):
                overreaching.add(lexemes[other])
            if overlap.same_text and (pair := (followers[one], followers[other])) not in known_pairs:
                known_pairs.add(pair)
                unvisited.append(pair)
    return overreaching


def _resolve_lexemes(named: dict[str, set[int | str]], shapes: RegularParts) -> dict[str, set[int]]:
    """Resolve each rule name to the lexemes that it stands for, directly or through other rules."""
    resolved = {}
    for name in named:
        shapes.check_deadline()
        seen: set[int | str] = {name}
        unvisited: list[int | str] = [name]
        while unvisited:
            if isinstance(lexeme_or_rule := unvisited.pop(), str):
                unvisited += named[lexeme_or_rule] - seen
                seen |= named[lexeme_or_rule]
        resolved[name] = {lexeme_or_rule for lexeme_or_rule in seen if isinstance(lexeme_or_rule, int)}
    return resolved


def _as_lexemes(mixed: set[int | str], named: dict[str, set[int]]) -> set[int]:
    """Return a mixture of lexemes and rule names as lexemes only."""
    lexemes: set[int] = set()
    for item in mixed:
        lexemes |= {item} if isinstance(item, int) else named[item]
    return lexemes


def _flat_alternatives(node: GrammarNode) -> Iterator[GrammarNode]:
    """Yield the alternatives of a node, nested ones flattened."""
    if isinstance(node, AlternativesNode):
        for alternative in node.nodes:
            yield from _flat_alternatives(alternative)
    else:
        yield node


def _lark_count(min_count: int, max_count: int | None) -> str:
    return f"{{{min_count},{'' if max_count is None else max_count}}}"


def _regex_range(ends: tuple[int, int]) -> str:
    low, high = ends
    return rf"\x{{{low:x}}}-\x{{{high:x}}}" if low < high else rf"\x{{{low:x}}}"
