"""Regular expressions in the quantization configs of checkpoints, matched against the names of layers.

Python's ``re`` backtracks: it tries one match after another, which takes exponential time for some patterns, such as
nested repetitions. For these, this module follows all possible matches at once: for each part of the pattern and each
index in the name, it computes once where the part can end. That decides whether a name matches, which is all that
configs need. Such patterns must not have parts that depend on what others matched (references to groups, possessive
repetitions) or flags.

Configs may list every layer of a model, so an entry that is a plain name is looked up in a dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import itemgetter
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Generic, TypeVar

MAX_PATTERN = 4096  # characters
MAX_DEPTH = 40  # groups within groups
USUAL_NAME = 64  # characters
QUICK_TIMES = 8  # most repetitions of a part with several possible matches
MAX_WAYS = 1e6  # patterns with at most this many ways to match a name of USUAL_NAME characters are left to ``re``
REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
CHARACTER_CLASSES = {
    codes.CATEGORY_DIGIT: r"\d", codes.CATEGORY_NOT_DIGIT: r"\D", codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S", codes.CATEGORY_WORD: r"\w", codes.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip

PLAIN_CHARACTER = re.compile(
    r"[A-Za-z0-9_]|\\?\."
)  # a pattern of these alone is a name, though its dots match anything

Part = tuple[Any, Any]  # an operation and its argument, as ``re`` parses them
NameTest = Callable[[str], bool]
Value = TypeVar("Value")


class BadPattern(ValueError):
    """The pattern is broken, or has parts that are not read."""


class NamePattern:
    """A compiled pattern. Raises BadPattern."""

    def __init__(self, text: str):
        try:
            if len(text) > MAX_PATTERN:
                raise BadPattern
            quick, parsed = re.compile(text), parser.parse(text)
            self._parts: list[Part] = list(parsed)
            self._quick = quick if _count_ways(self._parts, MAX_DEPTH) <= MAX_WAYS else None
            if self._quick is None and (parsed.state.flags & ~re.UNICODE or not _are_read(self._parts)):
                raise BadPattern
        except (re.error, OverflowError, RecursionError):
            raise BadPattern from None

    def matches_start(self, name: str) -> bool:
        """Whether the pattern matches from the first character on, as ``re.match``."""
        if self._quick is not None:
            return self._quick.match(name) is not None
        return bool(_Match(name).ends_of(self._parts, 0))

    def is_found(self, name: str) -> bool:
        """Whether the pattern matches anywhere, as ``re.search``."""
        if self._quick is not None:
            return self._quick.search(name) is not None
        match = _Match(name)
        return any(match.ends_of(self._parts, start) for start in range(len(name) + 1))


class NameRules(Generic[Value]):
    """Values for names, and for tests of names such as patterns, in order: the first that fits a name counts."""

    def __init__(self, rules: Iterable[tuple[str | NameTest, Value]]):
        self._names: dict[str, tuple[float, Value]] = {}
        self._tests: list[tuple[int, NameTest, Value]] = []
        for rule_number, (rule, value) in enumerate(rules):
            if isinstance(rule, str):
                self._names.setdefault(rule, (rule_number, value))
            else:
                self._tests.append((rule_number, rule, value))

    def find_value(self, name: str, default: Value) -> Value:
        """Return the value of the first rule that fits, or ``default``."""
        name_rule, value = self._names.get(name, (float("inf"), default))
        for rule_number, fits_name, test_value in self._tests:
            if rule_number > name_rule:
                break
            if fits_name(name):
                return test_value
        return value


class PatternRules(Generic[Value]):
    """Values for patterns that match from the first character on, in order: the first that matches a name counts.

    Patterns of plain characters are looked up together if they have their letters at the same indices. Raises
    BadPattern, with the pattern.
    """

    def __init__(self, rules: Iterable[tuple[str, Value]]):
        # By length and indices of the letters
        self._names_by_letters: dict[tuple[int, tuple[int, ...]], dict[str, tuple[int, Value]]] = {}
        self._tests: list[tuple[int, NameTest, Value]] = []
        for rule_number, (text, value) in enumerate(rules):
            characters = PLAIN_CHARACTER.findall(text)
            if "".join(characters) != text:
                self._tests.append((rule_number, self._compile(text), value))
                continue
            letters = {i: character[-1] for i, character in enumerate(characters) if character != "."}
            names = self._names_by_letters.setdefault((len(characters), tuple(letters)), {})
            names.setdefault("".join(letters.values()), (rule_number, value))

    @staticmethod
    def _compile(text: str) -> NameTest:
        try:
            return NamePattern(text).matches_start
        except BadPattern:
            raise BadPattern(text) from None

    def find_value(self, name: str, default: Value) -> Value:
        """Return the value of the first pattern that matches, or ``default``."""
        first: tuple[float, Value] = float("inf"), default
        for (length, letter_indices), names in self._names_by_letters.items():
            if length <= len(name) and (rule := names.get("".join(map(name.__getitem__, letter_indices)))) is not None:
                first = min(first, rule, key=itemgetter(0))
        for rule_number, fits_name, value in self._tests:
            if rule_number > first[0]:
                break
            if fits_name(name):
                return value
        return first[1]


def _count_ways(parts: Iterable[Part], depth: int) -> float:
    """Return an upper bound of the ways that ``re`` may try to match a sequence with a name of USUAL_NAME characters.

    Raises BadPattern if groups are nested too deeply.
    """
    if not depth:
        raise BadPattern
    total = 1.0
    for code, argument in parts:
        ways = [_count_ways(inner, depth - 1) for inner in _inner_parts(code, argument)]
        if code in (*REPEATS, codes.POSSESSIVE_REPEAT):
            min_count, max_count = (min(times, USUAL_NAME) for times in argument[:2])
            repeat_ways = 2 * MAX_WAYS if ways[0] > 1 and max_count > QUICK_TIMES else ways[0] ** max_count
            total *= (max_count - min_count + 1) * repeat_ways
        elif ways:
            total *= sum(ways) if code in (codes.BRANCH, codes.GROUPREF_EXISTS) else ways[0]
        total = min(total, 2 * MAX_WAYS)
    return total


def _are_read(parts: Iterable[Part]) -> bool:
    """Whether this module can match all parts itself, without ``re``."""
    return all(
        code in PARTS
        and not (code is codes.SUBPATTERN and (argument[1] or argument[2]))
        and all(map(_are_read, _inner_parts(code, argument)))
        for code, argument in parts
    )


def _inner_parts(code: Any, argument: Any) -> Iterable[Iterable[Part]]:
    """Return the sequences of parts that a part consists of."""
    if code is codes.BRANCH:
        return list(argument[1])
    if code is codes.GROUPREF_EXISTS:
        return [part for part in argument[1:] if part is not None]
    if code is codes.ATOMIC_GROUP:
        return [argument]
    is_nested = code in (codes.SUBPATTERN, codes.ASSERT, codes.ASSERT_NOT, codes.POSSESSIVE_REPEAT, *REPEATS)
    return [argument[-1]] if is_nested else []


class _Match:
    """Where the parts of one pattern end in one name."""

    def __init__(self, name: str):
        self.name = name
        self._known: dict[tuple[int, int], frozenset[int]] = {}

    def ends_of(self, parts: Iterable[Part], start: int) -> frozenset[int]:
        """Return where a sequence that begins at ``start`` can end."""
        ends = frozenset((start,))
        for part in parts:
            ends = self._ends_of_all(part, ends)
        return ends

    def _ends_of_all(self, part: Part, starts: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(self._ends_of_part(part, start) for start in starts))

    def _ends_of_part(self, part: Part, start: int) -> frozenset[int]:
        key = id(part), start
        if key not in self._known:
            self._known[key] = PARTS[part[0]](self, part, start)
        return self._known[key]

    def match_character(self, part: Part, start: int) -> frozenset[int]:
        """Match one character."""
        fits = start < len(self.name) and _allows_character(part, self.name[start])
        return frozenset((start + 1,)) if fits else frozenset()

    def match_anchor(self, part: Part, start: int) -> frozenset[int]:
        """Match the empty string, at certain positions only."""
        follows_word, precedes_word = (
            at >= 0 and bool(re.fullmatch(r"\w", self.name[at : at + 1])) for at in (start - 1, start)
        )
        fits = {
            codes.AT_BEGINNING: start == 0,
            codes.AT_BEGINNING_STRING: start == 0,
            codes.AT_END: start == len(self.name),
            codes.AT_END_STRING: start == len(self.name),
            codes.AT_BOUNDARY: follows_word != precedes_word,
            codes.AT_NON_BOUNDARY: follows_word == precedes_word,
        }[part[1]]
        return frozenset((start,)) if fits else frozenset()

    def match_branch(self, part: Part, start: int) -> frozenset[int]:
        """Match one of several sequences."""
        return frozenset().union(*(self.ends_of(branch, start) for branch in part[1][1]))

    def match_group(self, part: Part, start: int) -> frozenset[int]:
        """Match one sequence."""
        return self.ends_of(part[1][-1], start)

    def match_repeat(self, part: Part, start: int) -> frozenset[int]:
        """Match a sequence a number of times. Once the set of ends no longer changes, more times do not change it."""
        min_count, max_count, inner = part[1]
        ends, reached_ends = frozenset((start,)), frozenset((start,) if min_count == 0 else ())
        for count in range(1, min_count + len(self.name) + 2):
            if count > max_count:
                break
            next_ends = frozenset().union(*(self.ends_of(inner, end) for end in ends))
            is_stable = next_ends == ends
            ends = next_ends
            if count >= min_count or is_stable:
                reached_ends |= ends
            if not ends or is_stable:
                break
        return reached_ends

    def match_lookaround(self, part: Part, start: int) -> frozenset[int]:
        """Match the empty string where a sequence follows or precedes, or where it does not."""
        direction, inner = part[1]
        if direction > 0:
            fits = bool(self.ends_of(inner, start))
        else:
            fits = any(start in self.ends_of(inner, inner_start) for inner_start in range(start + 1))
        return frozenset((start,)) if fits == (part[0] is codes.ASSERT) else frozenset()


def _allows_character(part: Part, character: str) -> bool:
    """Whether a character is one that a part allows."""
    code, argument = part
    if code is codes.IN:
        negated = argument[0][0] is codes.NEGATE
        return any(_allows_character(item, character) for item in argument[negated:]) != negated
    if code is codes.RANGE:
        return bool(argument[0] <= ord(character) <= argument[1])
    if code is codes.CATEGORY:
        return re.fullmatch(CHARACTER_CLASSES[argument], character) is not None
    if code is codes.ANY:
        return character != "\n"
    return bool(ord(character) == argument) == (code is codes.LITERAL)


PARTS: dict[Any, Callable[[_Match, Part, int], frozenset[int]]] = {
    **dict.fromkeys((codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN), _Match.match_character),
    **dict.fromkeys((codes.ASSERT, codes.ASSERT_NOT), _Match.match_lookaround),
    **dict.fromkeys(REPEATS, _Match.match_repeat),
    codes.AT: _Match.match_anchor,
    codes.BRANCH: _Match.match_branch,
    codes.SUBPATTERN: _Match.match_group,
}
