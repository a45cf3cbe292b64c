"""Compare two regular parts of a grammar: can both match one text, and can one continue where the other ends?

The parts' position automata (Glushkov's: one state for each occurrence of a character set) are run side by side. Parts
that are too large to compare count as overlapping. Depends on productions only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from parley.text.grammar.productions import ANY, Either, Letter, Name, Node, Repeat, Row, Set, Text, union

PLACES = 4000  # character positions of one part
VISITS = 4 * PLACES  # nodes of one part: empty nodes add no positions, however often they are repeated or referred to
COPIES = 16  # copies of a repeated node; a node that may repeat more often is treated as unlimited
STATES = 4000  # states of two automata side by side


class TooLarge(Exception):
    """The automaton of a part would be too large."""


@dataclass(frozen=True)
class Overlap:
    """How two parts relate.

    ``same_text``: one text matches both. ``first_continues``, ``second_continues``: the characters that may continue
    that part where the other can end.
    """

    meet: bool
    first: Set
    second: Set

    def turned(self) -> Overlap:
        """Return the same for the parts in reverse order."""
        return Overlap(self.meet, self.second, self.first)


ALL = Overlap(True, ANY, ANY)


class Automaton:
    """The position automaton of a node without recursive rules. Raises AutomatonTooLarge."""

    def __init__(self, node: Node, rules: Mapping[str, Node]):
        self.letters: list[Set] = []  # characters of each position
        self.after: list[set[int]] = []  # positions that may follow each position
        self._rules, self._visits = rules, 0
        _, self.first, self.last = self._places(node)

    def then(self, places: Iterable[int]) -> set[int]:
        """Return the positions that may follow any of ``positions``."""
        return set[int]().union(*(self.after[place] for place in places))

    def _places(self, node: Node) -> tuple[bool, set[int], set[int]]:
        """Add a node's positions; return whether it can be empty, and where it can begin and end."""
        self._visits += 1
        if self._visits > VISITS:
            raise TooLarge
        match node:
            case Text(text):
                return self._row([Letter(((ord(letter), ord(letter)),)) for letter in text])
            case Letter(letters):
                if len(self.letters) == PLACES:
                    raise TooLarge
                self.letters.append(letters)
                self.after.append(set())
                return False, {len(self.letters) - 1}, {len(self.letters) - 1}
            case Name(name):
                return self._places(self._rules[name])
            case Repeat(inner, least, most):
                return self._repeat(inner, least, most)
            case Row(nodes):
                return self._row(nodes)
            case Either(nodes):
                found = [self._places(each) for each in nodes]
                empty, first, last = zip(*found, strict=True)
                return any(empty), set().union(*first), set().union(*last)

    def _row(self, nodes: Iterable[Node]) -> tuple[bool, set[int], set[int]]:
        empty, first, last = True, set[int](), set[int]()
        for node in nodes:
            blank, begin, end = self._places(node)
            for place in last:
                self.after[place] |= begin
            first = first | begin if empty else first
            last = last | end if blank else end
            empty = empty and blank
        return empty, first, last

    def _repeat(self, inner: Node, least: int, most: int | None) -> tuple[bool, set[int], set[int]]:
        if 1 < (least + 1 if most is None else most) <= COPIES:
            rest = [Repeat(inner, 0, None)] if most is None else [Repeat(inner, 0, 1)] * (most - least)
            return self._row([*[inner] * least, *rest])
        empty, first, last = self._places(inner)
        if most != 1:
            for place in last:
                self.after[place] |= first
        return empty or least == 0, first, last


def overlap(one: Automaton, other: Automaton, check: Callable[[], None]) -> Overlap:
    """Compare the non-empty texts of two automata. ``check`` is called in every step, and may raise."""
    meet, first, second = False, set[int](), set[int]()
    left = [(one.first, other.first)]
    seen = set[tuple[frozenset[int], frozenset[int]]]()
    while left:
        check()
        for here, there in _steps(one, other, *left.pop()):
            if (here, there) in seen:
                continue
            if len(seen) == STATES:
                return ALL
            seen.add((here, there))
            on, on_there = one.then(here), other.then(there)
            ends, ends_there = not one.last.isdisjoint(here), not other.last.isdisjoint(there)
            meet = meet or (ends and ends_there)
            first |= on if ends_there else set()
            second |= on_there if ends else set()
            left.append((on, on_there))
    letters, others = (one.letters[place] for place in first), (other.letters[place] for place in second)
    return Overlap(meet, union(*letters), union(*others))


def _steps(
    one: Automaton, other: Automaton, first: set[int], second: set[int]
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Yield the pairs of position sets that one more character leads to, for each group of characters both accept."""
    sides = [[(low, high + 1, place) for place in places for low, high in part.letters[place]]
             for part, places in ((one, first), (other, second))]  # fmt: skip
    edges = sorted({edge for side in sides for low, high, _ in side for edge in (low, high)})
    reached: list[list[set[int]]] = [[set() for _ in edges] for _ in sides]
    for side, found in zip(sides, reached, strict=True):
        for low, high, place in side:
            for at in range(bisect_left(edges, low), bisect_left(edges, high)):
                found[at].add(place)
    for here, there in zip(*reached, strict=True):
        if here and there:
            yield frozenset(here), frozenset(there)
