"""Finds stop strings in text that arrives in pieces (Aho-Corasick).

Text is held back only while it may still become a stop string that is not shown: the longest suffix that is a prefix
of a stop string. The time is linear in the text for any number of stop strings. Handles text only, no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """An automaton over the stop strings, built once per request and shared by its choices.

    Node 0 is the root. A node stands for the string on the path to it, which is ``depths[node]`` characters long.
    """

    def __init__(self, strings: Sequence[str]):
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.failure_links = [0]  # failure link: the node of the longest proper suffix that is also a prefix
        self.matches: list[str | None] = [None]  # the longest stop string that ends at this node
        for string in filter(None, strings):
            node = 0
            for char in string:
                if char not in self.children[node]:
                    self.children[node][char] = len(self.children)
                    self.children.append({})
                    self.depths.append(self.depths[node] + 1)
                    self.failure_links.append(0)
                    self.matches.append(None)
                node = self.children[node][char]
            self.matches[node] = string
        self._link_failures()

    def _link_failures(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.children[node].items():
                self.failure_links[child] = self.next_node(self.failure_links[node], char)
                if self.matches[child] is None:
                    self.matches[child] = self.matches[self.failure_links[child]]
                queue.append(child)

    def next_node(self, node: int, char: str) -> int:
        """Return the node after one more character."""
        while node and char not in self.children[node]:
            node = self.failure_links[node]
        return self.children[node].get(char, 0)


class StopScanner:
    """Looks for stop strings in one choice's text. ``matched`` is the one that ended it; push nothing after that.

    The stop string that is complete first wins; if several end at the same character, the longest one.
    """

    def __init__(self, stops: StopAutomaton, include: bool = False):
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._node = 0
        self._held_text = ""  # text held back at the current node

    def scan_piece(self, piece: str, armed: bool = True) -> str:
        """Return the text that is certain now. Stop strings that end in this piece are ignored unless ``armed``."""
        stops, node = self._stops, self._node
        if not node and stops.children[0].keys().isdisjoint(piece):
            return piece
        text = self._held_text + piece
        for index, char in enumerate(piece):
            node = stops.next_node(node, char)
            stop = stops.matches[node]
            if stop is not None and armed:
                self.matched, self._held_text = stop, ""
                end = len(text) - len(piece) + index + 1
                return text[: end if self._include else end - len(stop)]
        self._node = node
        keep = len(text) - (0 if self._include else stops.depths[node])
        self._held_text = text[keep:]
        return text[:keep]

    def release_held(self) -> str:
        """Return the text held back, when the text ends without a stop string."""
        text, self._held_text, self._node = self._held_text, "", 0
        return text
