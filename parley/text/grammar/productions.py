"""A context-free grammar as data: rules made of nodes, down to sets of characters. Independent of any notation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Set = tuple[tuple[int, int], ...]  # inclusive ranges of code points, sorted and not adjacent

LAST = 0x10FFFF
ANY: Set = ((0, LAST),)


@dataclass(frozen=True)
class Text:
    """Exactly this text, which may be empty."""

    text: str


@dataclass(frozen=True)
class Letter:
    """One character of the set."""

    letters: Set


@dataclass(frozen=True)
class Name:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True)
class Repeat:
    """A node repeated at least ``least`` times and at most ``most`` times; None: without limit."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Row:
    """Nodes one after another."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """One of several nodes."""

    nodes: tuple[Node, ...]


Node = Text | Letter | Name | Repeat | Row | Either


def names(node: Node) -> Iterator[str]:
    """Yield the names of the rules that a node refers to."""
    match node:
        case Name(name):
            yield name
        case Repeat(inner):
            yield from names(inner)
        case Row(nodes) | Either(nodes):
            for each in nodes:
                yield from names(each)


def union(*sets: Set) -> Set:
    """Return the union of sets, with adjacent ranges merged."""
    made: list[tuple[int, int]] = []
    for low, high in sorted(ends for each in sets for ends in each):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def inverse(letters: Set) -> Set:
    """Return all characters that are not in a set."""
    starts = [0, *(high + 1 for _, high in letters)]
    ends = [*(low - 1 for low, _ in letters), LAST]
    return tuple((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)


def both(one: Set, other: Set) -> bool:
    """Whether two sets share a character."""
    return any(low <= high2 and low2 <= high for low, high in one for low2, high2 in other)
