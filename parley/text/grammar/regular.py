"""Analyse the parts of grammar rules: which can be empty, which are regular, and which regular parts overlap.

Regular parts that are written alike share a number, their shape. The whole analysis has a limit of processor time.
Depends on productions, not on lexemes.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

from parley.text.grammar.limits import BUDGET, SLOW
from parley.text.grammar.overlap import ALL, Automaton, Overlap, TooLarge, overlap
from parley.text.grammar.productions import ANY, LAST, Either, Letter, Name, Node, Repeat, Row, Set, Text, names, union
from parley.text.grammar.refused import Refused

WIDTHS = ((0x80, 1), (0x800, 0x40), (0x10000, 0x1000), (LAST + 1, 0x40000))  # (end, characters per first UTF-8 byte)


class Shapes:
    """Numbers the regular parts of rules, and caches the results of comparing them."""

    def __init__(self, rules: dict[str, Node]):
        self.rules = rules
        self._ends = time.thread_time() + BUDGET
        self._users: dict[str, list[str]] = {name: [] for name in rules}
        self._used = {name: set(names(node)) for name, node in rules.items()}
        for name, used in self._used.items():
            for each in used:
                self._users[each].append(name)
        self._blank: set[str] = set()
        self._find_blank()
        self._shapes: dict[int, int | None] = {}  # by the node's id()
        self._joined: dict[int, tuple[Node, ...]] = {}  # by the node's id()
        self._known: dict[Hashable, int] = {}
        self.nodes: list[Node] = []  # one node of each shape
        self._regular: dict[str, int | None] = {}  # shapes of the rules that are not recursive
        self._find_regular()
        self._automata: dict[int, Automaton | None] = {}
        self._overlaps: dict[tuple[int, int], Overlap] = {}

    def check(self) -> None:
        """Raise GrammarRefused if the limit of processor time is reached."""
        if time.thread_time() > self._ends:
            raise Refused(SLOW)

    def blank(self, node: Node) -> bool:
        """Whether a node can match the empty text."""
        match node:
            case Text(text):
                return not text
            case Letter():
                return False
            case Name(name):
                return name in self._blank
            case Repeat(inner, least):
                return least == 0 or self.blank(inner)
            case Row(nodes):
                return all(map(self.blank, nodes))
            case Either(nodes):
                return any(map(self.blank, nodes))

    def shape(self, node: Node) -> int | None:
        """Return the shape of a regular node: equal for all that are written alike. None if the node is recursive."""
        if isinstance(node, Name):
            return self._regular.get(node.name)
        if isinstance(node, Text | Letter):
            return self._numbered(node, node)
        if id(node) not in self._shapes:
            inner = [self.shape(each) for each in ([node.node] if isinstance(node, Repeat) else node.nodes)]
            times = (node.least, node.most) if isinstance(node, Repeat) else ()
            key = (type(node), times, *inner)
            self._shapes[id(node)] = None if None in inner else self._numbered(key, node)
        return self._shapes[id(node)]

    def alternatives(self, node: Either) -> tuple[Node, ...]:
        """Return a node's alternatives; if some are recursive, all regular ones are merged into one."""
        if id(node) not in self._joined:
            regular = tuple(each for each in node.nodes if self.shape(each) is not None)
            others = tuple(each for each in node.nodes if self.shape(each) is None)
            self._joined[id(node)] = (Either(regular), *others) if others and len(regular) > 1 else node.nodes
        return self._joined[id(node)]

    def overlap(self, one: int, other: int) -> Overlap:
        """Compare two shapes. Automata that are too large count as overlapping."""
        if (one, other) not in self._overlaps:
            first, second = self._automaton(one), self._automaton(other)
            made = overlap(first, second, self.check) if first and second else ALL
            self._overlaps[one, other] = made
            self._overlaps[other, one] = made.turned()
        return self._overlaps[one, other]

    def begins(self, shape: int) -> Set:
        """Return the characters a shape can begin with, and all others whose UTF-8 starts with the same byte."""
        automaton = self._automaton(shape)
        return _widened(union(*(automaton.letters[place] for place in automaton.first))) if automaton else ANY

    def divides(self, shape: int) -> bool:
        """Whether a shape can be split into smaller parts."""
        node = self.nodes[shape]
        return not isinstance(node, Letter) and not (isinstance(node, Text) and len(node.text) < 2)

    def _numbered(self, key: Hashable, node: Node) -> int:
        number = self._known.setdefault(key, len(self._known))
        if number == len(self.nodes):
            self.nodes.append(node)
        return number

    def _automaton(self, shape: int) -> Automaton | None:
        if shape not in self._automata:
            try:
                self._automata[shape] = Automaton(self.nodes[shape], self.rules)
            except TooLarge:
                self._automata[shape] = None
        return self._automata[shape]

    def _find_blank(self) -> None:
        left = list(self.rules)
        while left:
            name = left.pop()
            if name not in self._blank and self.blank(self.rules[name]):
                self._blank.add(name)
                left += self._users[name]

    def _find_regular(self) -> None:
        """Number the rules, beginning with those that refer to no others."""
        left = {name: len(used) for name, used in self._used.items()}
        found = [name for name, used in left.items() if not used]
        for name in found:  # the list grows during the loop
            self._regular[name] = self.shape(self.rules[name])
            for user in self._users[name]:
                left[user] -= 1
                if not left[user]:
                    found.append(user)


def _widened(letters: Set) -> Set:
    """Return these characters and all others whose UTF-8 starts with the same byte."""
    made, start = [], 0
    for end, width in WIDTHS:
        for low, high in letters:
            if low < end and high >= start:
                made.append((max(low, start) // width * width, min(high, end - 1) // width * width + width - 1))
        start = end
    return union(tuple(made))
