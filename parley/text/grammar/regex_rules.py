"""Read a regular expression in Python's syntax as grammar rules, down to characters. Depends on that syntax only."""

from __future__ import annotations

import re
import sys
import warnings
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]  # Python's own parser has no public name
from typing import Any

from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.productions import (
    AlternativesNode,
    CharacterNode,
    CharacterSet,
    GrammarNode,
    RepeatNode,
    SequenceNode,
    TextNode,
    complement_set,
    single_set,
    union_sets,
)

DIGITS: CharacterSet = ((0x30, 0x39),)
SPACES = union_sets(*map(single_set, " \t\n\r\f\v"))
LINE_END: CharacterSet = ((0x0A, 0x0A),)
FLAGS = {"i": re.IGNORECASE, "s": re.DOTALL, "m": re.MULTILINE, "x": re.VERBOSE}


def parse_regex(expression: str, flags: str = "") -> GrammarNode:
    """Return the grammar of an expression. Raises GrammarRefused, and RecursionError if it is nested too deeply."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of classes that Python may read differently one day
            parsed = _parser.parse(expression, sum(FLAGS.get(flag, 0) for flag in set(flags)))
    except (re.error, OverflowError) as error:
        raise GrammarRefused(f"the expression /{expression[:60]}/ is wrong: {error}") from None
    return _sequence_node(parsed, parsed.state.flags)


def _sequence_node(items: Any, flags: int) -> GrammarNode:
    nodes = [_operation_node(operation, value, flags) for operation, value in items]
    return nodes[0] if len(nodes) == 1 else SequenceNode(tuple(nodes))


def _operation_node(operation: Any, value: Any, flags: int) -> GrammarNode:
    match str(operation):
        case "LITERAL" if not flags & re.IGNORECASE:
            return TextNode(chr(value))
        case "LITERAL":
            return CharacterNode(_both_cases(((value, value),)))
        case "NOT_LITERAL":
            return CharacterNode(complement_set(_in_wanted_cases(((value, value),), flags)))
        case "ANY":
            return CharacterNode(complement_set(() if flags & re.DOTALL else LINE_END))
        case "IN":
            return CharacterNode(_class_set(value, flags))
        case "BRANCH":
            return AlternativesNode(tuple(_sequence_node(branch, flags) for branch in value[1]))
        case "SUBPATTERN":
            _, added, removed, inner = value
            return _sequence_node(inner, (flags | added) & ~removed)
        case "MAX_REPEAT" | "MIN_REPEAT":
            min_count, max_count, inner = value
            node = _sequence_node(inner, flags)
            return (
                RepeatNode(node, min_count, None if max_count is _constants.MAXREPEAT else max_count)
                if max_count
                else SequenceNode(())
            )
    raise GrammarRefused("assertions, backreferences and possessive quantifiers are not supported in expressions")


def _class_set(members: Any, flags: int) -> CharacterSet:
    negated = str(members[0][0]) == "NEGATE"
    characters = union_sets(*(_member_set(operation, value, flags) for operation, value in members[negated:]))
    return complement_set(characters) if negated else characters


def _member_set(operation: Any, value: Any, flags: int) -> CharacterSet:
    match str(operation):
        case "LITERAL":
            return _in_wanted_cases(((value, value),), flags)
        case "RANGE":
            return _in_wanted_cases((value,), flags)
    kind = str(value).removeprefix("CATEGORY_")
    name = kind.removeprefix("NOT_")
    characters = DIGITS if name == "DIGIT" else SPACES if name == "SPACE" else _word_characters()
    return complement_set(characters) if kind != name else characters


def _in_wanted_cases(characters: CharacterSet, flags: int) -> CharacterSet:
    return _both_cases(characters) if flags & re.IGNORECASE else characters


def _both_cases(characters: CharacterSet) -> CharacterSet:
    """Return the characters with the other case of each Latin letter of ASCII."""
    other_case = []
    for low, high in characters:
        for first, last, shift in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
            if max(low, first) <= min(high, last):
                other_case.append((max(low, first) + shift, min(high, last) + shift))
    return union_sets(characters, tuple(other_case))


@lru_cache(1)
def _word_characters() -> CharacterSet:
    """Return letters, digits and the underscore, of all scripts."""
    starts, in_word, ranges = 0, False, []
    for code in range(sys.maxunicode + 2):
        is_word = code <= sys.maxunicode and (chr(code).isalnum() or code == 0x5F)
        if is_word and not in_word:
            starts = code
        elif in_word and not is_word:
            ranges.append((starts, code - 1))
        in_word = is_word
    return tuple(ranges)
