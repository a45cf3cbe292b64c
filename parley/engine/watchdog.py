"""Detects a process that hangs: it exists, but makes no progress any more.

Time alone is no evidence, because one step may take a minute on a slow machine. A process shows that it lives by its
messages (the results of a step, and heartbeats while it is idle and between the layers of a step) and by the processor
time that it uses. A stopped or deadlocked process shows neither. A process that only uses processor time may be in an
endless loop, so this counts for a limited time.

Time is counted in ticks of the watchdog itself. If the whole machine or process group is suspended, no ticks pass.
"""

from __future__ import annotations

import time

TICK_SECONDS = 0.5
BUSY_FACTOR = 20  # a process that computes, or loads its model, may be silent this many times longer
COMPUTING_SECONDS = 0.005  # seconds of processor time per tick that show work; waiting threads use less


class Watchdog:
    """Counts the ticks since a process last showed that it lives.

    ``timeout``: seconds without a sign of life until the process counts as hung.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._message_count = 0
        self._processor_seconds = 0.0
        self._messageless_ticks = 0  # ticks in a row without a message
        self._lifeless_ticks = 0  # ticks in a row without a message or processor time

    def explain_hang(self, message_count: int, processor_seconds: float, *, is_serving: bool) -> str:
        """Count one tick. Return what the process did instead of its work ("did nothing for 8 s") if it counts as hung,
        an empty string if it does not.

        ``message_count``: messages that it has ever sent; ``processor_seconds``: that it has ever used;
        ``is_serving``: it has loaded its model. Loading sends few messages and may wait for a disk.
        """
        self._messageless_ticks += 1
        self._lifeless_ticks += 1
        if message_count != self._message_count:
            self._message_count = message_count
            self._messageless_ticks = self._lifeless_ticks = 0
        if processor_seconds >= self._processor_seconds + COMPUTING_SECONDS:
            self._processor_seconds = processor_seconds
            self._lifeless_ticks = 0
        lifeless_seconds = self._lifeless_ticks * TICK_SECONDS
        if lifeless_seconds >= self._timeout * (1 if is_serving else BUSY_FACTOR):
            return f"did nothing for {lifeless_seconds:g} s"
        messageless_seconds = self._messageless_ticks * TICK_SECONDS
        if is_serving and messageless_seconds >= self._timeout * BUSY_FACTOR:
            return f"computed for {messageless_seconds:g} s without a result"
        return ""


def read_processor_seconds(process_id: int) -> float:
    """Return the processor time that all threads of another process have used. Raises OSError if it is gone."""
    # The kernel's number of a process' clock (clock_getcpuclockid(3), MAKE_PROCESS_CPUCLOCK with CPUCLOCK_SCHED).
    return time.clock_gettime((~process_id << 3) | 2)
