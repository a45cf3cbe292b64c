"""Log lines about a fault that may last, such as a full disk: one when it begins, then one a minute, one at its end."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("parley.server")

REPEAT_SECONDS = 60.0


class LastingFault:
    """A fault that each use of a file meets again. ``end_text``: the line that tells that it is over."""

    def __init__(self, end_text: str):
        self._end_text = end_text
        self._next_line = 0.0  # time.monotonic
        self._is_present = False

    def report(self, text: str, *args: object) -> None:
        """Log that the fault is there, unless that was logged within the last minute."""
        self._is_present = True
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + REPEAT_SECONDS
            log.error(text, *args)

    def end(self) -> None:
        """Log that the fault is over, if it was there. Called after each use that succeeded as those did not."""
        if self._is_present:
            self._is_present, self._next_line = False, 0.0
            log.warning(self._end_text)
