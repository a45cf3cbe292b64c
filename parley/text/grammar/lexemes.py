"""Write grammar rules in Lark, whose lexer always reads as far as any lexeme that is allowed at a position can reach.

A regular part becomes a single lexeme where possible, because the matcher follows lexemes fastest. It must not, where
it could read past its end into the text that follows a lexeme at the same position (itself or another). Such a part is
split into its own parts, down to single characters, and the parser decides. Depends on productions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from parley.text.grammar.lark import quoted
from parley.text.grammar.productions import Either, Letter, Name, Node, Repeat, Row, Text, both, union
from parley.text.grammar.regular import Shapes

NOTHING = quoted("")
START = ""  # no rule can have this name


def lark(rules: dict[str, Node], ends: Sequence[str] = ()) -> str:
    """Write the grammar of the rule root, followed by one of the texts in ``ends`` if there are any.

    Raises GrammarRefused, and RecursionError if it is nested too deeply.
    """
    start: Node = Row((Name("root"), Either(tuple(map(Text, ends))))) if ends else Name("root")
    rules = rules | {START: start}
    shapes = Shapes(rules)
    apart: set[int] = set()
    while True:
        writer = _Writer(shapes, apart)
        text = writer.write()
        if not (disturbed := _disturbed(writer, shapes)):
            return text
        apart |= disturbed


@dataclass
class _Part:
    """A written node, and the lexemes and rules that it can begin and end with."""

    text: str
    blank: bool
    first: set[int | str] = field(default_factory=set)
    last: set[int | str] = field(default_factory=set)


class _Writer:
    """Writes a grammar whose lexemes are the largest regular parts, except for the shapes that must be split."""

    def __init__(self, shapes: Shapes, apart: set[int]):
        self._shapes, self._apart = shapes, apart
        self.lexemes: list[int] = []  # shape of each lexeme, by position
        self.links: list[tuple[set[int | str], set[int | str]]] = []  # (ends of one node, beginnings of the next)
        self.rules: dict[str, _Part] = {}
        self._number = {name: number for number, name in enumerate(shapes.rules)}
        self._terminals: dict[int, str] = {}  # by shape
        self._lines: list[str] = []
        self._left: list[str] = []

    def write(self) -> str:
        """Return the whole grammar. Raises GrammarRefused when time is up."""
        self._name(START)
        while self._left:
            name = self._left.pop()
            self.rules[name] = self._node(self._shapes.rules[name])
        rules = [f"rule{self._number[name]}: {part.text}" for name, part in self.rules.items()]
        return "\n".join([f"start: rule{self._number[START]}", *rules, *self._lines])

    def _node(self, node: Node) -> _Part:
        self._shapes.check()
        shape = self._shapes.shape(node)
        if shape is not None and shape not in self._apart:
            place = len(self.lexemes)
            self.lexemes.append(shape)
            return _Part(self._lexeme(node), self._shapes.blank(node), {place}, {place})
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
        parts = [self._node(each) for each in self._shapes.alternatives(node)]
        text = f"({' | '.join(part.text for part in parts)})"
        first, last = (part.first for part in parts), (part.last for part in parts)
        return _Part(text, any(part.blank for part in parts), set().union(*first), set().union(*last))

    def _name(self, name: str) -> _Part:
        if name not in self.rules:
            self.rules[name] = _Part("", False)  # placeholder until it is written
            self._left.append(name)
        return _Part(f"rule{self._number[name]}", self._shapes.blank(Name(name)), {name}, {name})

    def _row(self, nodes: Sequence[Node]) -> _Part:
        parts = [self._node(each) for each in nodes]
        made = _Part(f"({' '.join(part.text for part in parts)})" if parts else NOTHING, True)
        for part in parts:
            self._shapes.check()
            self.links.append((made.last, part.first))
            made.first = made.first | part.first if made.blank else made.first
            made.last = made.last | part.last if part.blank else part.last
            made.blank = made.blank and part.blank
        return made

    def _lexeme(self, node: Node) -> str:
        """Return a regular node as part of a terminal: inline if it is simple, otherwise as a terminal's name."""
        while isinstance(node, Name):
            node = self._shapes.rules[node.name]
        match node:
            case Text(text):
                return quoted(text)
            case Letter(letters):
                return f"/[{''.join(map(_range, letters))}]/"
        shape = self._shapes.shape(node)
        assert shape is not None
        if shape not in self._terminals:
            body = self._body(node)
            self._terminals[shape] = name = f"T{len(self._terminals)}" if body != NOTHING else body
            if body != NOTHING:
                self._lines.append(f"{name}: {body}")
        return self._terminals[shape]

    def _body(self, node: Node) -> str:
        """Return the definition of a terminal, without redundant parts: llguidance panics at some of them."""
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


def _disturbed(writer: _Writer, shapes: Shapes) -> set[int]:
    """Return the shapes of lexemes that can read into the text that must follow a lexeme at the same position."""
    rules, lexemes = writer.rules, writer.lexemes
    heads = _resolved({name: part.first for name, part in rules.items()}, shapes)
    tails = _resolved({name: part.last for name, part in rules.items()}, shapes)
    follow: list[set[int]] = [set() for _ in lexemes]
    for before, behind in writer.links:
        shapes.check()
        places = _places(behind, heads)
        for place in _places(before, tails):
            shapes.check()
            follow[place] |= places
    behind_each = [frozenset(places) for places in follow]
    starts = {places: union(*map(shapes.begins, {lexemes[each] for each in places})) for places in set(behind_each)}
    found: set[int] = set()
    first = frozenset(heads[START])
    left = [(first, first)]  # pairs of lexeme sets that may be read at the same position
    paired, seen = set(left), set[tuple[int, int]]()
    while left:
        for one, other in product(*left.pop()):
            shapes.check()
            if (one, other) in seen:
                continue
            seen.add((one, other))
            told = shapes.overlap(lexemes[one], lexemes[other])
            if both(told.second, starts[behind_each[one]]) and shapes.divides(lexemes[other]):
                found.add(lexemes[other])
            if told.meet and (pair := (behind_each[one], behind_each[other])) not in paired:
                paired.add(pair)
                left.append(pair)
    return found


def _resolved(named: dict[str, set[int | str]], shapes: Shapes) -> dict[str, set[int]]:
    """Resolve each rule name to the lexemes that it stands for, directly or through other rules."""
    found = {}
    for name in named:
        shapes.check()
        seen: set[int | str] = {name}
        left: list[int | str] = [name]
        while left:
            if isinstance(each := left.pop(), str):
                left += named[each] - seen
                seen |= named[each]
        found[name] = {each for each in seen if isinstance(each, int)}
    return found


def _places(mixed: set[int | str], named: dict[str, set[int]]) -> set[int]:
    """Return a mixture of lexemes and rule names as lexemes only."""
    found: set[int] = set()
    for each in mixed:
        found |= {each} if isinstance(each, int) else named[each]
    return found


def _alternatives(node: Node) -> Iterator[Node]:
    """Yield the alternatives of a node, nested ones flattened."""
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
