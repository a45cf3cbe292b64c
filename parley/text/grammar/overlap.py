"""Compare two regular parts of a grammar: can both match one text, and can one continue where the other ends?

The parts' position automata (Glushkov's: one state for each occurrence of a character set) are run side by side. Parts
that are too large to compare count as overlapping. Depends on productions only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from parley.text.grammar.productions import (
    ANY_CHARACTER,
    AlternativesNode,
    CharacterNode,
    CharacterSet,
    GrammarNode,
    RepeatNode,
    RuleReference,
    SequenceNode,
    TextNode,
    union_sets,
)

MAX_POSITIONS = 4000  # character positions of one part
# Visits of nodes of one part: empty nodes add no positions, however often they are repeated or referred to.
MAX_NODE_VISITS = 4 * MAX_POSITIONS
MAX_COPIES = 16  # copies of a repeated node; a node that may repeat more often is treated as unlimited
MAX_PAIR_STATES = 4000  # states of two automata side by side


class AutomatonTooLarge(Exception):
    """The automaton of a part would be too large."""


@dataclass(frozen=True)
class Overlap:
    """How two parts relate.

    ``same_text``: one text matches both. ``first_continues``, ``second_continues``: the characters that may continue
    that part where the other can end.
    """

    same_text: bool
    first_continues: CharacterSet
    second_continues: CharacterSet

    def swap_parts(self) -> Overlap:
        """Return the same for the parts in reverse order."""
        return Overlap(self.same_text, self.second_continues, self.first_continues)


FULL_OVERLAP = Overlap(True, ANY_CHARACTER, ANY_CHARACTER)


class PositionAutomaton:
    """The position automaton of a node without recursive rules. Raises AutomatonTooLarge."""

    def __init__(self, node: GrammarNode, rules: Mapping[str, GrammarNode]):
        self.characters: list[CharacterSet] = []  # characters of each position
        self.followers: list[set[int]] = []  # positions that may follow each position
        self._rules, self._visits = rules, 0
        _, self.first_positions, self.last_positions = self._add_node(node)

    def positions_after(self, positions: Iterable[int]) -> set[int]:
        """Return the positions that may follow any of ``positions``."""
        return set[int]().union(*(self.followers[position] for position in positions))

    def _add_node(self, node: GrammarNode) -> tuple[bool, set[int], set[int]]:
        """Add a node's positions; return whether it can be empty, and where it can begin and end."""
        self._visits += 1
        if self._visits > MAX_NODE_VISITS:
            raise AutomatonTooLarge
        match node:
            case TextNode(text):
                return self._add_sequence([CharacterNode(((ord(letter), ord(letter)),)) for letter in text])
            case CharacterNode(letters):
                if len(self.characters) == MAX_POSITIONS:
                    raise AutomatonTooLarge
                self.characters.append(letters)
                self.followers.append(set())
                return False, {len(self.characters) - 1}, {len(self.characters) - 1}
            case RuleReference(name):
                return self._add_node(self._rules[name])
            case RepeatNode(inner, min_count, max_count):
                return self._add_repeat(inner, min_count, max_count)
            case SequenceNode(nodes):
                return self._add_sequence(nodes)
            case AlternativesNode(nodes):
                parts = [self._add_node(alternative) for alternative in nodes]
                empty, first, last = zip(*parts, strict=True)
                return any(empty), set().union(*first), set().union(*last)

    def _add_sequence(self, nodes: Iterable[GrammarNode]) -> tuple[bool, set[int], set[int]]:
        empty, first, last = True, set[int](), set[int]()
        for node in nodes:
            is_blank, node_first, node_last = self._add_node(node)
            for position in last:
                self.followers[position] |= node_first
            first = first | node_first if empty else first
            last = last | node_last if is_blank else node_last
            empty = empty and is_blank
        return empty, first, last

    def _add_repeat(self, inner: GrammarNode, min_count: int, max_count: int | None) -> tuple[bool, set[int], set[int]]:
        if 1 < (min_count + 1 if max_count is None else max_count) <= MAX_COPIES:
            optional_nodes = (
                [RepeatNode(inner, 0, None)]
                if max_count is None
                else [RepeatNode(inner, 0, 1)] * (max_count - min_count)
            )
            return self._add_sequence([*[inner] * min_count, *optional_nodes])
        empty, first, last = self._add_node(inner)
        if max_count != 1:
            for position in last:
                self.followers[position] |= first
        return empty or min_count == 0, first, last


def find_overlap(first_part: PositionAutomaton, second_part: PositionAutomaton, check: Callable[[], None]) -> Overlap:
    """Compare the non-empty texts of two automata. ``check`` is called in every step, and may raise."""
    meet, first, second = False, set[int](), set[int]()
    unvisited = [(first_part.first_positions, second_part.first_positions)]
    seen = set[tuple[frozenset[int], frozenset[int]]]()
    while unvisited:
        check()
        for here, there in _joint_steps(first_part, second_part, *unvisited.pop()):
            if (here, there) in seen:
                continue
            if len(seen) == MAX_PAIR_STATES:
                return FULL_OVERLAP
            seen.add((here, there))
            on, on_there = first_part.positions_after(here), second_part.positions_after(there)
            ends = not first_part.last_positions.isdisjoint(here)
            ends_there = not second_part.last_positions.isdisjoint(there)
            meet = meet or (ends and ends_there)
            first |= on if ends_there else set()
            second |= on_there if ends else set()
            unvisited.append((on, on_there))
    first_continues = union_sets(*(first_part.characters[position] for position in first))
    second_continues = union_sets(*(second_part.characters[position] for position in second))
    return Overlap(meet, first_continues, second_continues)


def _joint_steps(
    first_part: PositionAutomaton, second_part: PositionAutomaton, first: set[int], second: set[int]
) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Yield the pairs of position sets that one more character leads to, for each group of characters both accept."""
    sides = [[(low, high + 1, position) for position in positions for low, high in part.characters[position]]
             for part, positions in ((first_part, first), (second_part, second))]  # fmt: skip
    edges = sorted({edge for side in sides for low, high, _ in side for edge in (low, high)})
    reached: list[list[set[int]]] = [[set() for _ in edges] for _ in sides]
    for side, side_positions in zip(sides, reached, strict=True):
        for low, high, position in side:
            for at in range(bisect_left(edges, low), bisect_left(edges, high)):
                side_positions[at].add(position)
    for here, there in zip(*reached, strict=True):
        if here and there:
            yield frozenset(here), frozenset(there)
