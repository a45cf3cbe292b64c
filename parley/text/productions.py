"""A context-free grammar as data: rules of nodes, down to sets of characters. Knows no notation, nothing of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Set = tuple[tuple[int, int], ...]  # ranges of characters

LAST = 0x10FFFF
ANY: Set = ((0, LAST),)


@dataclass(frozen=True)
class Text:
    """Just this; empty as well."""

    text: str


@dataclass(frozen=True)
class Letter:
    """One character of them."""

    letters: Set


@dataclass(frozen=True)
class Name:
    name: str


@dataclass(frozen=True)
class Repeat:
    """So many times, ``most`` of None without end."""

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


def names(node: Node) -> Iterator[str]:
    """The rules that it names."""
    match node:
        case Name(name):
            yield name
        case Repeat(inner):
            yield from names(inner)
        case Row(nodes) | Either(nodes):
            for each in nodes:
                yield from names(each)


def union(*sets: Set) -> Set:
    made: list[tuple[int, int]] = []
    for low, high in sorted(ends for each in sets for ends in each):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def inverse(letters: Set) -> Set:
    starts = [0, *(high + 1 for _, high in letters)]
    ends = [*(low - 1 for low, _ in letters), LAST]
    return tuple((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)


def both(one: Set, other: Set) -> bool:
    """Whether they share a character."""
    return any(low <= high2 and low2 <= high for low, high in one for low2, high2 in other)
