"""Connections with much to parse take turns, so that no iteration of the event loop lasts long.

Small frames cost their sender almost nothing, and a client may send thousands of them at once on each of many
connections. Parsed as they arrive, they would keep all other clients waiting. So a connection parses a small share at
once, and the rest after the other connections that wait; between two iterations the loop serves everybody else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Protocol

TURN_SECONDS = 0.005  # of an iteration of the loop that connections take turns in


class TurnTaker(Protocol):
    """A connection."""

    def take_turn(self) -> bool:
        """Parse a small share of the received data. Return whether some is left for another turn."""


class LoopTurns:
    """The connections of an event loop that wait for a turn."""

    def __init__(self) -> None:
        self._waiting: deque[TurnTaker] = deque()

    def request_turn(self, connection: TurnTaker) -> bool:
        """Let a connection that does not wait parse at once, or after those that wait. Return whether it waits now."""
        if not self._waiting:
            if not connection.take_turn():
                return False
            asyncio.get_running_loop().call_soon(self._take_turns)
        self._waiting.append(connection)
        return True

    def _take_turns(self) -> None:
        """Give turns for TURN_SECONDS, at least one, and go on in the loop's next iteration."""
        ends_at = monotonic() + TURN_SECONDS
        try:
            while self._waiting:
                connection = self._waiting.popleft()
                if connection.take_turn():
                    self._waiting.append(connection)
                if monotonic() >= ends_at:
                    break
        finally:  # also after an error, which the loop reports
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._take_turns)
