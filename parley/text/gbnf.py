"""Grammars in llama.cpp's GBNF as ones in Lark, where a lexeme is as long as it can be.

So a part that is a regular expression becomes a lexeme only where nothing that it could go on with may also follow it;
else its parts do, down to single letters, and the parser finds out. Line breaks between alternatives are allowed.
Knows the notation; nothing of models.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from .bounds import BUDGET
from .lark import quoted
from .refused import Refused

Set = tuple[tuple[int, int], ...]  # ranges of characters

LAST = 0x10FFFF
ANY: Set = ((0, LAST),)
NAME = re.compile(r"[A-Za-z0-9_-]+")
RULE = re.compile(r"([A-Za-z0-9_-]+)[ \t]*::=")
BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
COUNT = re.compile(r"\{\s*([0-9]*)\s*(,?)\s*([0-9]*)\s*\}")
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([^A-Za-z0-9]|[nrt]))")
PLAIN = {"n": "\n", "r": "\r", "t": "\t"}
MOST = 1 << 20  # times
COMPARED = 64  # alternatives, up to which each is compared with all others


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Letter:
    letters: Set


@dataclass(frozen=True)
class Name:
    name: str


@dataclass(frozen=True)
class Repeat:
    node: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Row:
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    nodes: tuple[Node, ...]


Node = Text | Letter | Name | Repeat | Row | Either


def lark(text: str) -> str:
    """The grammar in Lark. Raises Refused, and RecursionError for one that is nested too deeply."""
    return _Writer(_Reader(text).read()).write()


class _Reader:
    def __init__(self, text: str):
        self.text, self.at = text, 0

    def read(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip()
        while self.at < len(self.text):
            found = RULE.match(self.text, self.at)
            if not found:
                raise self._wrong("a rule, as in name ::= …, is missing")
            self.at = found.end()
            rules[found[1]] = self._either()
        if "root" not in rules:
            raise Refused("it has no rule root ::= …")
        for name in sorted({name for node in rules.values() for name in _names(node)} - rules.keys()):
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
        raise self._wrong("something that no rule consists of stands")

    def _ends(self, mark: str) -> bool:
        """Step over it, if it stands here."""
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
            raise self._wrong("an escape that there is not stands")
        self.at = found.end()
        if plain := found[4]:
            return ord(PLAIN.get(plain, plain))
        code = int(found[1] or found[2] or found[3], 16)
        if code > LAST or 0xD800 <= code < 0xE000:
            raise self._wrong("a character that there is not stands")
        return code

    def _class(self) -> Node:
        inverse = self.text.startswith("^", self.at)
        self.at += inverse
        ranges = []
        while not self._ends("]"):
            first = last = self._letter()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                last = self._letter() if self.at < len(self.text) else first
            if last < first:
                raise self._wrong("a range that ends before it begins stands")
            ranges.append((first, last))
        made = _union(tuple(ranges))
        made = _inverse(made) if inverse else made
        if not made:
            raise self._wrong("a class that nothing is in stands")
        return Letter(made)

    def _times(self, node: Node) -> Node:
        self._skip()
        while self.at < len(self.text) and self.text[self.at] in "*+?{":
            mark = self.text[self.at]
            least, most = (int(mark == "+"), 1 if mark == "?" else None)
            if mark == "{":
                found = COUNT.match(self.text, self.at)
                if not found or not (found[1] or found[3]):
                    raise self._wrong("a count that there is not stands")
                least = int(found[1] or 0)
                most = (int(found[3]) if found[3] else None) if found[2] else least
                if max(least, most or 0) > MOST:
                    raise Refused("it is too large")
                if most is not None and most < least:
                    raise self._wrong("a count that ends before it begins stands")
                self.at = found.end()
            else:
                self.at += 1
            node = Repeat(node, least, most) if most != 0 else Row(())
            self._skip()
        return node


class _Writer:
    def __init__(self, rules: dict[str, Node]):
        self._rules = rules
        self._regular = _regular(rules)
        self._empty: dict[str, bool] = dict.fromkeys(rules, False)
        self._first: dict[str, Set] = dict.fromkeys(rules, ())
        self._more: dict[str, Set] = dict.fromkeys(rules, ())
        self._follow: dict[str, Set] = dict.fromkeys(rules, ())
        self._number = {name: number for number, name in enumerate(rules)}
        self._lines: dict[str, str] = {}
        began, before = time.thread_time(), None
        while before != (before := (dict(self._empty), dict(self._first), dict(self._more), dict(self._follow))):
            for name, node in rules.items():
                self._empty[name] = self.empty(node)
                self._first[name] = self.first(node)
                self._more[name] = self.more(node)
                self._pass(node, self._follow[name])
                if time.thread_time() - began > BUDGET:
                    raise Refused("it takes too long to prepare")

    def write(self) -> str:
        self._lines["start"] = ""
        self._lines["start"] = self._node(Name("root"), ())
        return "\n".join(f"{name}: {body}" for name, body in self._lines.items())

    def empty(self, node: Node) -> bool:
        """Whether it may be no text."""
        match node:
            case Text(text):
                return not text
            case Letter():
                return False
            case Name(name):
                return self._empty[name]
            case Repeat(inner, least):
                return least == 0 or self.empty(inner)
            case Row(nodes):
                return all(map(self.empty, nodes))
            case Either(nodes):
                return any(map(self.empty, nodes))

    def first(self, node: Node) -> Set:
        """What it may begin with."""
        match node:
            case Text(text):
                return ((ord(text[0]), ord(text[0])),) if text else ()
            case Letter(letters):
                return letters
            case Name(name):
                return self._first[name]
            case Repeat(inner):
                return self.first(inner)
            case Row(nodes):
                return next(self._starts(nodes, ()))
            case Either(nodes):
                return _union(*map(self.first, nodes))

    def _starts(self, nodes: tuple[Node, ...], follow: Set) -> Iterator[Set]:
        """What a row may begin with before something, and what each rest of it may, which is but that in the end."""
        found = [follow]
        for node in reversed(nodes):
            found.append(_union(self.first(node), found[-1]) if self.empty(node) else self.first(node))
        return reversed(found)

    def more(self, node: Node) -> Set:
        """What a text of it may go on with, so that it is one of it still, or again."""
        match node:
            case Name(name):
                return self._more[name]
            case Repeat(inner):
                return _union(self.more(inner), self.first(inner))
            case Row(nodes):
                found: Set = ()
                for node in nodes:
                    found = _union(self.more(node), *([self.first(node), found] if self.empty(node) else []))
                return found
            case Either(nodes):
                return _union(*map(self.more, nodes), *self._longer(nodes))
        return ()

    def _longer(self, nodes: tuple[Node, ...]) -> Iterator[Set]:
        """What one of several may go on with as another."""
        if len(nodes) > COMPARED:
            yield ANY
            return
        for one, other in permutations(nodes, 2):
            match one, other:
                case Text(text), Text(longer):
                    if longer.startswith(text):
                        yield self.first(Text(longer[len(text) :]))
                case _, Letter():
                    if self.empty(one):
                        yield other.letters
                case _:
                    if self.empty(one):
                        yield self.first(other)
                    elif _both(self.first(one), self.first(other)):
                        yield ANY

    def _pass(self, node: Node, follow: Set) -> None:
        """Tell rules what may follow them."""
        match node:
            case Name(name):
                self._follow[name] = _union(self._follow[name], follow)
            case Repeat(inner, _, most):
                self._pass(inner, _union(follow, self.first(inner)) if most != 1 else follow)
            case Row(nodes):
                for each, rest in zip(nodes, list(self._starts(nodes, follow))[1:], strict=True):
                    self._pass(each, rest)
            case Either(nodes):
                for each in nodes:
                    self._pass(each, follow)

    def _node(self, node: Node, follow: Set) -> str:
        """Its form in a rule."""
        if all(name in self._regular for name in _names(node)) and not _both(self.more(node), follow):
            return self._lexeme(node)
        match node:
            case Name(name):
                rule = f"rule{self._number[name]}"
                if rule not in self._lines:
                    self._lines[rule] = ""
                    self._lines[rule] = self._node(self._rules[name], self._follow[name])
                return rule
            case Repeat(inner, least, most):
                return f"({self._node(inner, _union(follow, self.first(inner)))}){_count(least, most)}"
            case Row(nodes):
                rests = list(self._starts(nodes, follow))[1:]
                parts = [self._node(each, rest) for each, rest in zip(nodes, rests, strict=True)]
                return f"({' '.join(parts)})"
            case Either(nodes):
                return f"({' | '.join(self._node(each, follow) for each in nodes)})"
        return self._lexeme(node)

    def _lexeme(self, node: Node) -> str:
        """Its form in a terminal, or as one."""
        match node:
            case Text(text):
                return quoted(text)
            case Letter(letters):
                return f"/[{''.join(map(_range, letters))}]/"
            case Name(name):
                terminal = f"T{self._number[name]}"
                if terminal not in self._lines:
                    self._lines[terminal] = self._lexeme(self._rules[name])
                return terminal
        body = self._body(node)
        terminal = f"P{len(self._lines)}"
        self._lines[terminal] = body
        return terminal

    def _body(self, node: Node) -> str:
        match node:
            case Repeat(inner, least, most):
                return f"({self._body(inner)}){_count(least, most)}"
            case Row(nodes):
                return f"({' '.join(map(self._body, nodes))})" if nodes else '""'
            case Either(nodes):
                return f"({' | '.join(map(self._body, nodes))})"
        return self._lexeme(node)


def _names(node: Node) -> Iterator[str]:
    match node:
        case Name(name):
            yield name
        case Repeat(inner):
            yield from _names(inner)
        case Row(nodes) | Either(nodes):
            for each in nodes:
                yield from _names(each)


def _regular(rules: dict[str, Node]) -> set[str]:
    """The rules that do not come back to themselves."""
    left = {name: set(_names(node)) for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in left.items():
        for each in used:
            users[each].append(name)
    found = [name for name, used in left.items() if not used]
    for name in found:  # grows
        for user in users[name]:
            left[user].discard(name)
            if not left[user]:
                found.append(user)
    return set(found)


def _count(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _range(ends: tuple[int, int]) -> str:
    low, high = ends
    return rf"\x{{{low:x}}}-\x{{{high:x}}}" if low < high else rf"\x{{{low:x}}}"


def _union(*sets: Set) -> Set:
    made: list[tuple[int, int]] = []
    for low, high in sorted(ends for each in sets for ends in each):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def _inverse(letters: Set) -> Set:
    starts = [0, *(high + 1 for _, high in letters)]
    ends = [*(low - 1 for low, _ in letters), LAST]
    return tuple((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)


def _both(one: Set, other: Set) -> bool:
    """Whether they share a character."""
    return any(low <= high2 and low2 <= high for low, high in one for low2, high2 in other)
