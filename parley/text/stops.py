"""Stop strings in text that arrives in pieces (Aho-Corasick).

Text is held back only as long as it may still become a stop string that is not to be shown: the longest end of the text
that begins one. Time is linear in the text whatever the number of stop strings. Knows text only, no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Stops:
    """An automaton over the stop strings, built once per request and shared by its choices.

    Node 0 is the root; a node stands for the string that leads to it, which is ``depth`` characters long.
    """

    def __init__(self, strings: Sequence[str]):
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]  # the node of the longest proper ending that is also a beginning
        self.match: list[str | None] = [None]  # the longest stop string that ends here
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
        """The node after one more character."""
        while node and char not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(char, 0)


class Scanner:
    """Looks for stop strings in one choice's text. ``matched`` is the one that ended it; push nothing after that.

    The stop string that is complete first wins; of several that are complete at the same character, the longest.
    """

    def __init__(self, stops: Stops, include: bool = False):
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._node = 0
        self._held = ""  # text of the current node: given out or dropped later

    def push(self, piece: str, armed: bool = True) -> str:
        """Text that is certain now. ``armed`` False lets stop strings that are completed in this piece pass."""
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
        """What was held back when the text ends without a stop string."""
        text, self._held, self._node = self._held, "", 0
        return text
