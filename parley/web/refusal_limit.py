"""Limits the lines about refused requests in a log: usually all are written, but a flood does not fill the disk.

Omitted lines of a window are counted, and one line reports their number.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from time import monotonic

log = logging.getLogger("parley.access")

WINDOW_SECONDS = 10.0
LINES_PER_CLIENT = 50  # lines in a window for one status of one client
LINES_PER_WINDOW = 500  # lines in a window for all clients together
SHOWN_CLIENTS = 3  # clients that the line with the number names


class RefusalLimit:
    """Decides which refused requests are logged. A window begins with a refusal, and the next one after its end.

    ``report`` gets a sentence with the number of lines that were left out in a window.
    """

    def __init__(self, report: Callable[[str], object] = log.warning) -> None:
        self._report = report
        self._logged: Counter[tuple[str, str]] = Counter()  # lines in this window, by client and status
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._window_end = 0.0  # time.monotonic

    def allows_line(self, client: str, status: str) -> bool:
        """Whether the line of a refused request is logged; else it is counted."""
        if monotonic() >= self._window_end:
            self.end_window()
            self._window_end = monotonic() + WINDOW_SECONDS
        source = (client, status)
        if self._logged[source] < LINES_PER_CLIENT and self._logged.total() < LINES_PER_WINDOW:
            self._logged[source] += 1
            return True
        if source not in self._dropped and len(self._dropped) >= LINES_PER_WINDOW:  # bounded, however many clients
            source = ("others", status)
        if not self._dropped:  # perhaps no other request comes that would end the window
            asyncio.get_running_loop().call_later(self._window_end - monotonic(), self.end_window)
        self._dropped[source] += 1
        return False

    def end_window(self) -> None:
        """Log how many lines were left out, if any."""
        dropped, self._logged, self._dropped = self._dropped, Counter(), Counter()
        self._window_end = 0.0
        if dropped:
            most = ", ".join(
                f"{count} with status {status} of {client or 'an unknown client'}"
                for (client, status), count in dropped.most_common(SHOWN_CLIENTS)
            )
            most += " and others" if len(dropped) > SHOWN_CLIENTS else ""
            count = dropped.total()
            self._report(f"{count} lines of refused requests were left out within {WINDOW_SECONDS:g} s: {most}.")
