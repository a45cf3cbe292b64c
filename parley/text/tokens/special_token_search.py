"""Finds special tokens in texts. Linear in the text, also for a thousand special tokens that begin alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from parley.interrupt import stop_if_abandoned

SEARCH_SIZE = 1 << 18  # characters searched in one call, during which other threads wait
PREFIX_LENGTH = 4  # characters of tokens that are searched for first: so long prefixes are few, and rare in other texts

_Tree = dict[str, Any]  # the next character -> the tree of characters that may follow; "" where a token ends


class SpecialTokenSearch:
    """A set of special tokens to search for together.

    The beginning of a token at the end of a text counts, too, because a text that follows may complete the token. White
    space may come after it, which is often cut off. A beginning that starts with a letter does not count: it may be any
    word.
    """

    def __init__(self, special_tokens: Iterable[str]):
        self.special_tokens = tuple(special_tokens)
        self._pattern = compile_longest_match(self.special_tokens)
        self._first_characters = {token[0] for token in self.special_tokens}
        self._prefixes = {token[:PREFIX_LENGTH] for token in self.special_tokens}
        self._openers = tuple(character for character in self._first_characters if not character.isalnum())
        self._beginnings = {
            token[:length]
            for token in self.special_tokens
            if token.startswith(self._openers)
            for length in range(1, len(token) + 1)
        }
        self._longest = max(map(len, self.special_tokens), default=0)

    def occur_in(self, texts: Sequence[str]) -> bool:
        """Whether one of the texts has a special token, or ends with the beginning of one."""
        joined_text = "\n".join(texts)  # one search is faster than one for each text
        return any(map(joined_text.__contains__, self._first_characters)) and any(map(self._occurs_in, texts))

    def _occurs_in(self, text: str) -> bool:
        if any(map(text.__contains__, self._prefixes)) and self.count_in(text, limit=1):
            return True
        return self._find_beginning(text) is not None

    def count_in(self, text: str, limit: int | None = None) -> int:
        """Return how many special tokens the text has, counted up to ``limit``."""
        count = 0
        for count, _ in enumerate(self._find_all(text), start=1):
            if count == limit:
                break
        return count

    def replace_tokens(self, text: str, replace_token: Callable[[str], str], beginnings: bool = False) -> str:
        """Return the text with each special token replaced: at each position the longest one, as tokenizers take it.

        With ``beginnings`` the beginning of a token at the end of the text is replaced, too.
        """
        parts, end = [], 0
        for match in self._find_all(text):
            parts += [text[end : match.start()], replace_token(match[0])]
            end = match.end()
        tail = text[end:]
        beginning = self._find_beginning(tail) if beginnings else None
        if beginning is not None:
            start, stop = beginning
            tail = tail[:start] + replace_token(tail[start:stop]) + tail[stop:]
        return "".join([*parts, tail])

    def _find_all(self, text: str) -> Iterator[re.Match[str]]:
        position = 0
        while position < len(text):
            stop = position + SEARCH_SIZE
            match = self._pattern.search(text, position, stop + self._longest)
            if match is not None and match.start() < stop:  # one that starts later may be cut off
                yield match
                position = match.end()
            else:
                position = stop
                stop_if_abandoned()

    def _find_beginning(self, text: str) -> tuple[int, int] | None:
        """Return start and end of the longest beginning of a special token at the end of a text."""
        end = len(text.rstrip())
        first = max(0, end - self._longest + 1)
        tail = text[first:end]
        if any(map(tail.__contains__, self._openers)):
            for start in range(len(tail)):
                if tail[start:] in self._beginnings:
                    return first + start, end
        return None


def compile_longest_match(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of some texts at a position."""
    tree: _Tree = {}
    for text in texts:
        branch = tree
        for character in text:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return re.compile(_write_branches(tree) if tree else r"(?!)")


def _write_branches(tree: _Tree) -> str:
    return "|".join(_write_branch(character, following) for character, following in tree.items() if character)


def _write_branch(character: str, following: _Tree) -> str:
    text = character
    while len(following) == 1 and "" not in following:
        ((character, following),) = following.items()
        text += character
    if list(following) == [""]:
        return re.escape(text)
    return f"{re.escape(text)}(?:{_write_branches(following)}){'?' if '' in following else ''}"
