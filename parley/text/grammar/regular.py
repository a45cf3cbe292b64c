"""Analyse the parts of grammar rules: which can be empty, which are regular, and which regular parts overlap.

Regular parts that are written alike share a number, their shape. The whole analysis has a limit of processor time.
Depends on productions, not on lexemes.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.limits import COMPILE_SECONDS, TOO_SLOW
from parley.text.grammar.overlap import FULL_OVERLAP, AutomatonTooLarge, Overlap, PositionAutomaton, find_overlap
from parley.text.grammar.productions import (
    ANY_CHARACTER,
    LAST_CODE_POINT,
    AlternativesNode,
    CharacterNode,
    CharacterSet,
    GrammarNode,
    RepeatNode,
    RuleReference,
    SequenceNode,
    TextNode,
    referenced_rules,
    union_sets,
)

# (end, characters per first UTF-8 byte).
FIRST_BYTE_WIDTHS = (
    (0x80, 1),
    (0x800, 0x40),
    (0x10000, 0x1000),
    (LAST_CODE_POINT + 1, 0x40000),
)


class RegularParts:
    """Numbers the regular parts of rules, and caches the results of comparing them."""

    def __init__(self, rules: dict[str, GrammarNode]):
        self.rules = rules
        self._deadline = time.thread_time() + COMPILE_SECONDS
        self._rule_users: dict[str, list[str]] = {name: [] for name in rules}
        self._rule_uses = {name: set(referenced_rules(node)) for name, node in rules.items()}
        for name, used_names in self._rule_uses.items():
            for used_name in used_names:
                self._rule_users[used_name].append(name)
        self._empty_rules: set[str] = set()
        self._find_empty_rules()
        self._node_shapes: dict[int, int | None] = {}  # by the node's id()
        self._merged: dict[int, tuple[GrammarNode, ...]] = {}  # by the node's id()
        self._shape_numbers: dict[Hashable, int] = {}
        self.shape_nodes: list[GrammarNode] = []  # one node of each shape
        self._rule_shapes: dict[str, int | None] = {}  # shapes of the rules that are not recursive
        self._find_regular_rules()
        self._automata: dict[int, PositionAutomaton | None] = {}
        self._overlaps: dict[tuple[int, int], Overlap] = {}

    def check_deadline(self) -> None:
        """Raise GrammarRefused if the limit of processor time is reached."""
        if time.thread_time() > self._deadline:
            raise GrammarRefused(TOO_SLOW)

    def can_be_empty(self, node: GrammarNode) -> bool:
        """Whether a node can match the empty text."""
        match node:
            case TextNode(text):
                return not text
            case CharacterNode():
                return False
            case RuleReference(name):
                return name in self._empty_rules
            case RepeatNode(inner, min_count):
                return min_count == 0 or self.can_be_empty(inner)
            case SequenceNode(nodes):
                return all(map(self.can_be_empty, nodes))
            case AlternativesNode(nodes):
                return any(map(self.can_be_empty, nodes))

    def shape_of(self, node: GrammarNode) -> int | None:
        """Return the shape of a regular node: equal for all that are written alike. None if the node is recursive."""
        if isinstance(node, RuleReference):
            return self._rule_shapes.get(node.name)
        if isinstance(node, TextNode | CharacterNode):
            return self._shape_number(node, node)
        if id(node) not in self._node_shapes:
            inner = [
                self.shape_of(inner_node)
                for inner_node in ([node.node] if isinstance(node, RepeatNode) else node.nodes)
            ]
            times = (node.min_count, node.max_count) if isinstance(node, RepeatNode) else ()
            key = (type(node), times, *inner)
            self._node_shapes[id(node)] = None if None in inner else self._shape_number(key, node)
        return self._node_shapes[id(node)]

    def merged_alternatives(self, node: AlternativesNode) -> tuple[GrammarNode, ...]:
        """Return a node's alternatives; if some are recursive, all regular ones are merged into one."""
        if id(node) not in self._merged:
            regular = tuple(alternative for alternative in node.nodes if self.shape_of(alternative) is not None)
            other_alternatives = tuple(alternative for alternative in node.nodes if self.shape_of(alternative) is None)
            self._merged[id(node)] = (
                (AlternativesNode(regular), *other_alternatives)
                if other_alternatives and len(regular) > 1
                else node.nodes
            )
        return self._merged[id(node)]

    def shape_overlap(self, one: int, other: int) -> Overlap:
        """Compare two shapes. Automata that are too large count as overlapping."""
        if (one, other) not in self._overlaps:
            first, second = self._shape_automaton(one), self._shape_automaton(other)
            result = find_overlap(first, second, self.check_deadline) if first and second else FULL_OVERLAP
            self._overlaps[one, other] = result
            self._overlaps[other, one] = result.swap_parts()
        return self._overlaps[one, other]

    def first_characters(self, shape: int) -> CharacterSet:
        """Return the characters a shape can begin with, and all others whose UTF-8 starts with the same byte."""
        automaton = self._shape_automaton(shape)
        return (
            _widen_to_first_bytes(
                union_sets(*(automaton.characters[position] for position in automaton.first_positions))
            )
            if automaton
            else ANY_CHARACTER
        )

    def can_be_split(self, shape: int) -> bool:
        """Whether a shape can be split into smaller parts."""
        node = self.shape_nodes[shape]
        return not isinstance(node, CharacterNode) and not (isinstance(node, TextNode) and len(node.text) < 2)

    def _shape_number(self, key: Hashable, node: GrammarNode) -> int:
        number = self._shape_numbers.setdefault(key, len(self._shape_numbers))
        if number == len(self.shape_nodes):
            self.shape_nodes.append(node)
        return number

    def _shape_automaton(self, shape: int) -> PositionAutomaton | None:
        if shape not in self._automata:
            try:
                self._automata[shape] = PositionAutomaton(self.shape_nodes[shape], self.rules)
            except AutomatonTooLarge:
                self._automata[shape] = None
        return self._automata[shape]

    def _find_empty_rules(self) -> None:
        unvisited = list(self.rules)
        while unvisited:
            name = unvisited.pop()
            if name not in self._empty_rules and self.can_be_empty(self.rules[name]):
                self._empty_rules.add(name)
                unvisited += self._rule_users[name]

    def _find_regular_rules(self) -> None:
        """Number the rules, beginning with those that refer to no others."""
        open_uses = {name: len(used) for name, used in self._rule_uses.items()}
        ready = [name for name, used in open_uses.items() if not used]
        for name in ready:  # the list grows during the loop
            self._rule_shapes[name] = self.shape_of(self.rules[name])
            for user in self._rule_users[name]:
                open_uses[user] -= 1
                if not open_uses[user]:
                    ready.append(user)


def _widen_to_first_bytes(characters: CharacterSet) -> CharacterSet:
    """Return these characters and all others whose UTF-8 starts with the same byte."""
    ranges, start = [], 0
    for end, width in FIRST_BYTE_WIDTHS:
        for low, high in characters:
            if low < end and high >= start:
                ranges.append((max(low, start) // width * width, min(high, end - 1) // width * width + width - 1))
        start = end
    return union_sets(tuple(ranges))
