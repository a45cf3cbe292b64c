"""Finds stop strings in text that arrives in pieces (Aho-Corasick).

Text is held back only while it may still become a stop string that is not shown: the longest suffix that is a prefix
of a stop string. The time is linear in the text for any number of stop strings. Handles text only, no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Stops:
    """An automaton over the stop strings, built once per request and shared by its choices.

    Node 0 is the root. A node stands for the string on the path to it, which is ``depths[node]`` characters long.
    """

    def __init__(self, strings: Sequence[str]):
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]  # failure link: the node of the longest proper suffix that is also a prefix
        self.match: list[str | None] = [None]  # the longest stop string that ends at this node
        for string in filter(None, strings):
            node = 0
            for char in string:
                if char not in self.next[node]:
                    self.next[node][char] = len(self.next)
                    self.next.append({})
                    self.depth.append(self.depth[node] + 1)
                    self.fail.append(0)
                    self.match.append(None)
                node = self.next[node][char]
            self.match[node] = string
        self._link()

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                if self.match[child] is None:
                    self.match[child] = self.match[self.fail[child]]
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """Return the node after one more character."""
        while node and char not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(char, 0)


class Scanner:
    """Looks for stop strings in one choice's text. ``matched`` is the one that ended it; push nothing after that.

    The stop string that is complete first wins; if several end at the same character, the longest one.
    """

    def __init__(self, stops: Stops, include: bool = False):
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._node = 0
        self._held = ""  # text held back at the current node

    def push(self, piece: str, armed: bool = True) -> str:
        """Return the text that is certain now. Stop strings that end in this piece are ignored unless ``armed``."""
        stops, node = self._stops, self._node
        if not node and stops.next[0].keys().isdisjoint(piece):
            return piece
        text = self._held + piece
        for index, char in enumerate(piece):
            node = stops.step(node, char)
            found = stops.match[node]
            if found is not None and armed:
                self.matched, self._held = found, ""
                end = len(text) - len(piece) + index + 1
                return text[: end if self._include else end - len(found)]
        self._node = node
        keep = len(text) - (0 if self._include else stops.depth[node])
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return the text held back, when the text ends without a stop string."""
        text, self._held, self._node = self._held, "", 0
        return text
