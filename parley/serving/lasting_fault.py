"""Log lines about a fault that may last, such as a full disk: at most one a minute, and one when it is over."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("parley.server")

REPEAT_SECONDS = 60.0


class LastingFault:
    """A fault that may recur at each use of a file. ``end_text``: the log line for its end."""

    def __init__(self, end_text: str):
        self._end_text = end_text
        self._next_line = 0.0  # time.monotonic
        self._is_logged = False  # whether the fault was logged since it last ended

    def report(self, text: str, *args: object) -> None:
        """Log that the fault exists, at most once a minute, even if it was over in between: on a nearly full disk,
        small writes succeed between large ones that fail."""
        if time.monotonic() >= self._next_line:
            self._next_line, self._is_logged = time.monotonic() + REPEAT_SECONDS, True
            log.error(text, *args)

    def report_end(self) -> None:
        """Log that the fault is over, if it was logged. Called after each use of the kind that failed."""
        if self._is_logged:
            self._is_logged = False
            log.warning(self._end_text)
