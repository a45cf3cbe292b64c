"""The log of vLLM's processes: everything that they write, as progress while they load, then as warnings and errors.

All processes of the tree write to one pipe instead of standard output and standard error.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import threading
from collections.abc import Callable

from parley.heartbeat import BEAT_SECONDS
from parley.log_lines import make_child_handler

log = logging.getLogger("parley.engine")

# "(EngineCore pid=12) INFO 11-22 23:00:01 [core.py:100] Initializing …"
LINE = re.compile(r"(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] (.*)")
CAUSE = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt)): (.+)")
WORKER_DEATH = "died unexpectedly"  # in lines of vLLM's executors about a worker
STAGE_CHARS = 100
PROGRESS_PER_LINE = (
    0.03  # part of the remaining progress that each line adds: the number of lines is not known in advance
)


class TreeLog:
    """Reads the pipe in a thread. ``report_stage(stage, fraction)`` gets the progress of loading, ``beat()`` is called
    at least once a second, both from that thread, until ``end_loading``."""

    def __init__(self, report_stage: Callable[[str, float], None], beat: Callable[[], None]):
        self._report_stage = report_stage
        self._beat = beat
        self._left = 1.0  # the part of loading that is left
        self._is_loading = True
        self.cause = ""  # the last error that a process gave as its reason
        self.tells_worker_death = False  # an executor has lost a worker

    def take_over_output(self) -> None:
        """Redirect the output of this process and its children to the pipe; the log goes to the old standard error."""
        reading, writing = os.pipe()
        terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
        # Not the root logger, which some of vLLM's modules write to while they are imported.
        own_log = logging.getLogger("parley")
        own_log.addHandler(make_child_handler(terminal))
        own_log.setLevel(logging.INFO)
        own_log.propagate = False
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(writing, descriptor)
        os.close(writing)
        threading.Thread(target=self._read_pipe, args=(reading,), name="vllm-log", daemon=True).start()

    def end_loading(self) -> None:
        """Stop the progress: the model is loaded."""
        self._is_loading = False

    def _read_pipe(self, descriptor: int) -> None:
        incomplete_line = b""
        while True:
            ready, _, _ = select.select([descriptor], [], [], BEAT_SECONDS)
            if self._is_loading:
                self._beat()
            if not ready:
                continue
            content = os.read(descriptor, 1 << 16)
            if not content:
                return
            *lines, incomplete_line = (incomplete_line + content).split(b"\n")
            for line in lines:
                self.read_line(line.decode("utf-8", "replace").rstrip())

    def read_line(self, line: str) -> None:
        """Take one line that a process wrote."""
        match = LINE.match(line)
        level, text = match.groups() if match is not None else ("", line)
        if (cause := CAUSE.match(text.strip())) is not None and (level in ("", "ERROR")):
            self.cause = cause[2]
        if level == "INFO" and self._is_loading:
            self._left *= 1 - PROGRESS_PER_LINE
            self._report_stage(text[:STAGE_CHARS], 1 - self._left)
        elif level == "WARNING" or (level in ("ERROR", "CRITICAL") and not self._is_loading):
            # Errors of a start are left out: the host gives the reason in one sentence.
            log.log(getattr(logging, level), "vLLM: %s", text)
            self.tells_worker_death |= level == "ERROR" and WORKER_DEATH in text
