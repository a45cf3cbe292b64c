"""A context-free grammar as data: rules made of nodes, down to sets of characters. Independent of any notation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CharacterSet = tuple[tuple[int, int], ...]  # inclusive ranges of code points, sorted and not adjacent

LAST_CODE_POINT = 0x10FFFF
ANY_CHARACTER: CharacterSet = ((0, LAST_CODE_POINT),)


@dataclass(frozen=True)
class TextNode:
    """Exactly this text, which may be empty."""

    text: str


@dataclass(frozen=True)
class CharacterNode:
    """One character of the set."""

    characters: CharacterSet


@dataclass(frozen=True)
class RuleReference:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True)
class RepeatNode:
    """A node repeated at least ``min_count`` times and at most ``max_count`` times; None: without limit."""

    node: GrammarNode
    min_count: int
    max_count: int | None


@dataclass(frozen=True)
class SequenceNode:
    """Nodes one after another."""

    nodes: tuple[GrammarNode, ...]


@dataclass(frozen=True)
class AlternativesNode:
    """One of several nodes."""

    nodes: tuple[GrammarNode, ...]


GrammarNode = TextNode | CharacterNode | RuleReference | RepeatNode | SequenceNode | AlternativesNode


def referenced_rules(node: GrammarNode) -> Iterator[str]:
    """Yield the names of the rules that a node refers to."""
    match node:
        case RuleReference(name):
            yield name
        case RepeatNode(inner):
            yield from referenced_rules(inner)
        case SequenceNode(nodes) | AlternativesNode(nodes):
            for inner in nodes:
                yield from referenced_rules(inner)


def union_sets(*sets: CharacterSet) -> CharacterSet:
    """Return the union of sets, with adjacent ranges merged."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ends for ranges in sets for ends in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def single_set(character: str) -> CharacterSet:
    """Return the set of one character."""
    return ((ord(character), ord(character)),)


def complement_set(characters: CharacterSet) -> CharacterSet:
    """Return all characters that are not in a set."""
    starts = [0, *(high + 1 for _, high in characters)]
    ends = [*(low - 1 for low, _ in characters), LAST_CODE_POINT]
    return tuple((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)


def sets_intersect(first: CharacterSet, second: CharacterSet) -> bool:
    """Whether two sets share a character."""
    return any(low <= high2 and low2 <= high for low, high in first for low2, high2 in second)
