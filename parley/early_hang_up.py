"""Keeps SIGHUP from ending a server that is still starting. ``web/hangup.py`` handles it once the event loop runs.

Imports take seconds, and the signal would end the process until then. This module imports little itself.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


class EarlyHangUp:
    """The handler of the signal until the event loop has its own, which makes up for a signal that ``has_come``.

    ``follows_terminal``: the process ends with its terminal, as it would without a handler; not under ``nohup``.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.follows_terminal = has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal, or let it end the process whose terminal has closed."""
        if self.follows_terminal and not has_terminal():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.has_come = True


def has_terminal() -> bool:
    """Whether the process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
