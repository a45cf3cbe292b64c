"""A grammar's rules as one in Lark, whose lexer reads as far as any lexeme that may stand at a place can go.

A regular part that nothing disturbs becomes one lexeme, which is followed fastest. It must not be one where it could go
on over what has to follow a lexeme that may stand at the same place, itself or another: then its own parts are, down to
single characters, and the parser finds out. Knows productions; no notation of them, and nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from .bounds import BUDGET
from .lark import quoted
from .overlap import ALL, Automaton, Overlap, TooLarge, overlap
from .productions import ANY, LAST, Either, Letter, Name, Node, Repeat, Row, Set, Text, both, names, union
from .refused import Refused

WIDTHS = ((0x80, 1), (0x800, 0x40), (0x10000, 0x1000), (LAST + 1, 0x40000))  # of characters with one first byte
NOTHING = quoted("")


def lark(rules: dict[str, Node]) -> str:
    """The grammar that begins with the rule root. Raises Refused, and RecursionError for one nested too deeply."""
    parts = _Parts(rules)
    apart: set[int] = set()
    while True:
        writer = _Writer(parts, apart)
        text = writer.write()
        if not (disturbed := _disturbed(writer, parts)):
            return text
        apart |= disturbed


class _Parts:
    """What is known of the parts of the rules, whatever the lexemes are."""

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
        self._shapes: dict[int, int | None] = {}  # by the node's address
        self._joined: dict[int, tuple[Node, ...]] = {}  # also by that
        self._known: dict[Hashable, int] = {}
        self.nodes: list[Node] = []  # by shape
        self._regular: dict[str, int | None] = {}  # shapes of the rules that do not come back to themselves
        self._find_regular()
        self._automata: dict[int, Automaton | None] = {}
        self._overlaps: dict[tuple[int, int], Overlap] = {}

    def check(self) -> None:
        """Raises Refused when the time is up."""
        if time.thread_time() > self._ends:
            raise Refused("it takes too long to prepare")

    def blank(self, node: Node) -> bool:
        """Whether it may be no text."""
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
        """A number for all regular parts that are written alike, None for what comes back to itself."""
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
        """Those of a node that comes back to itself, the regular ones as one."""
        if id(node) not in self._joined:
            regular = tuple(each for each in node.nodes if self.shape(each) is not None)
            others = tuple(each for each in node.nodes if self.shape(each) is None)
            self._joined[id(node)] = (Either(regular), *others) if others and len(regular) > 1 else node.nodes
        return self._joined[id(node)]

    def overlap(self, one: int, other: int) -> Overlap:
        """Of two shapes."""
        if (one, other) not in self._overlaps:
            first, second = self._automaton(one), self._automaton(other)
            made = overlap(first, second, self.check) if first and second else ALL
            self._overlaps[one, other] = made
            self._overlaps[other, one] = made.turned()
        return self._overlaps[one, other]

    def begins(self, shape: int) -> Set:
        """The characters that it may begin with, and those that share their first byte."""
        automaton = self._automaton(shape)
        return _widened(union(*(automaton.letters[place] for place in automaton.first))) if automaton else ANY

    def divides(self, shape: int) -> bool:
        """Whether it has parts."""
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
        """From the rules that name no others upwards."""
        left = {name: len(used) for name, used in self._used.items()}
        found = [name for name, used in left.items() if not used]
        for name in found:  # grows
            self._regular[name] = self.shape(self.rules[name])
            for user in self._users[name]:
                left[user] -= 1
                if not left[user]:
                    found.append(user)


@dataclass
class _Part:
    """A node as it is written, and the lexemes and rules that it may begin and end with."""

    text: str
    blank: bool
    first: set[int | str] = field(default_factory=set)
    last: set[int | str] = field(default_factory=set)


class _Writer:
    """Writes a grammar whose lexemes are the largest regular parts but for those of some shapes."""

    def __init__(self, parts: _Parts, apart: set[int]):
        self._parts, self._apart = parts, apart
        self.lexemes: list[int] = []  # their shapes, by place
        self.links: list[tuple[set[int | str], set[int | str]]] = []  # what may stand before what
        self.rules: dict[str, _Part] = {}
        self._number = {name: number for number, name in enumerate(parts.rules)}
        self._terminals: dict[int, str] = {}  # by shape
        self._lines: list[str] = []
        self._left: list[str] = []

    def write(self) -> str:
        self._name("root")
        while self._left:
            name = self._left.pop()
            self.rules[name] = self._node(self._parts.rules[name])
        rules = [f"rule{self._number[name]}: {part.text}" for name, part in self.rules.items()]
        return "\n".join([f"start: rule{self._number['root']}", *rules, *self._lines])

    def _node(self, node: Node) -> _Part:
        self._parts.check()
        shape = self._parts.shape(node)
        if shape is not None and shape not in self._apart:
            place = len(self.lexemes)
            self.lexemes.append(shape)
            return _Part(self._lexeme(node), self._parts.blank(node), {place}, {place})
        match node:
            case Text(text):
                return self._row([Text(letter) for letter in text])
            case Name(name):
                return self._name(name)
            case Repeat(inner, least, most):
                part = self._node(inner)
                if most != 1:
                    self.links.append((part.last, part.first))
                return _Part(f"({part.text}){_count(least, most)}", part.blank or least == 0, part.first, part.last)
            case Row(nodes):
                return self._row(nodes)
        assert isinstance(node, Either)
        parts = [self._node(each) for each in self._parts.alternatives(node)]
        text = f"({' | '.join(part.text for part in parts)})"
        first, last = (part.first for part in parts), (part.last for part in parts)
        return _Part(text, any(part.blank for part in parts), set().union(*first), set().union(*last))

    def _name(self, name: str) -> _Part:
        if name not in self.rules:
            self.rules[name] = _Part("", False)  # until it is written
            self._left.append(name)
        return _Part(f"rule{self._number[name]}", self._parts.blank(Name(name)), {name}, {name})

    def _row(self, nodes: Sequence[Node]) -> _Part:
        parts = [self._node(each) for each in nodes]
        made = _Part(f"({' '.join(part.text for part in parts)})" if parts else NOTHING, True)
        for part in parts:
            self._parts.check()
            self.links.append((made.last, part.first))
            made.first = made.first | part.first if made.blank else made.first
            made.last = made.last | part.last if part.blank else part.last
            made.blank = made.blank and part.blank
        return made

    def _lexeme(self, node: Node) -> str:
        """Its form in a terminal, or as one."""
        while isinstance(node, Name):
            node = self._parts.rules[node.name]
        match node:
            case Text(text):
                return quoted(text)
            case Letter(letters):
                return f"/[{''.join(map(_range, letters))}]/"
        shape = self._parts.shape(node)
        assert shape is not None
        if shape not in self._terminals:
            body = self._body(node)
            self._terminals[shape] = name = f"T{len(self._terminals)}" if body != NOTHING else body
            if body != NOTHING:
                self._lines.append(f"{name}: {body}")
        return self._terminals[shape]

    def _body(self, node: Node) -> str:
        """What a terminal consists of, plainly: llguidance panics at some parts that say nothing more."""
        match node:
            case Repeat(inner, least, most):
                body = self._body(inner)
                return f"({body}){_count(least, most)}" if body != NOTHING else body
            case Row(nodes):
                bodies = [body for body in map(self._body, nodes) if body != NOTHING]
                return f"({' '.join(bodies)})" if bodies else NOTHING
            case Either():
                bodies = list(dict.fromkeys(map(self._body, _alternatives(node))))
                return f"({' | '.join(bodies)})" if bodies != [NOTHING] else NOTHING
        return self._lexeme(node)


def _disturbed(writer: _Writer, parts: _Parts) -> set[int]:
    """The shapes of lexemes that can go on over what has to follow another one, or themselves."""
    rules, lexemes = writer.rules, writer.lexemes
    heads = _resolved({name: part.first for name, part in rules.items()}, parts)
    tails = _resolved({name: part.last for name, part in rules.items()}, parts)
    follow: list[set[int]] = [set() for _ in lexemes]
    for before, behind in writer.links:
        parts.check()
        places = _places(behind, heads)
        for place in _places(before, tails):
            parts.check()
            follow[place] |= places
    behind_each = [frozenset(places) for places in follow]
    starts = {places: union(*map(parts.begins, {lexemes[each] for each in places})) for places in set(behind_each)}
    found: set[int] = set()
    first = frozenset(heads["root"])
    left = [(first, first)]  # lexemes of both may stand at the same place
    paired, seen = set(left), set[tuple[int, int]]()
    while left:
        for one, other in product(*left.pop()):
            parts.check()
            if (one, other) in seen:
                continue
            seen.add((one, other))
            told = parts.overlap(lexemes[one], lexemes[other])
            if both(told.second, starts[behind_each[one]]) and parts.divides(lexemes[other]):
                found.add(lexemes[other])
            if told.meet and (pair := (behind_each[one], behind_each[other])) not in paired:
                paired.add(pair)
                left.append(pair)
    return found


def _resolved(named: dict[str, set[int | str]], parts: _Parts) -> dict[str, set[int]]:
    """The lexemes behind each name."""
    found = {}
    for name in named:
        parts.check()
        seen: set[int | str] = {name}
        left: list[int | str] = [name]
        while left:
            if isinstance(each := left.pop(), str):
                left += named[each] - seen
                seen |= named[each]
        found[name] = {each for each in seen if isinstance(each, int)}
    return found


def _places(mixed: set[int | str], named: dict[str, set[int]]) -> set[int]:
    """The lexemes in it and behind its names."""
    found: set[int] = set()
    for each in mixed:
        found |= {each} if isinstance(each, int) else named[each]
    return found


def _alternatives(node: Node) -> Iterator[Node]:
    """The same without alternatives in alternatives."""
    if isinstance(node, Either):
        for each in node.nodes:
            yield from _alternatives(each)
    else:
        yield node


def _count(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _range(ends: tuple[int, int]) -> str:
    low, high = ends
    return rf"\x{{{low:x}}}-\x{{{high:x}}}" if low < high else rf"\x{{{low:x}}}"


def _widened(letters: Set) -> Set:
    """These characters and those whose bytes in UTF-8 begin as theirs do."""
    made, start = [], 0
    for end, width in WIDTHS:
        for low, high in letters:
            if low < end and high >= start:
                made.append((max(low, start) // width * width, min(high, end - 1) // width * width + width - 1))
        start = end
    return union(tuple(made))
