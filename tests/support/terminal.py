"""A command that runs on a pseudo-terminal, as in front of a user.

A launcher takes the terminal, because forking the test process is unsafe: it has threads.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from support.cli_process import clean_environment

LAUNCHER = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal sends Ctrl-C to the session that it controls
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background process inherits "ignored"
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "parley", *sys.argv[2:]])
"""


class Terminal:
    """A parley command on a pseudo-terminal. Must be closed, as a context manager does. ``nohup``: it was started so
    that it ignores the end of its terminal."""

    def __init__(self, *words: str, home: Path, nohup: bool = False):
        self.terminal_fd, command_fd = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, "nohup" if nohup else "", *words],
            stdin=command_fd,
            stdout=command_fd,
            stderr=command_fd,
            env=clean_environment() | {"XDG_STATE_HOME": str(home), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(command_fd)
        self.unread_output = ""

    def read_until(self, text: str, seconds: float = 60.0) -> str:
        """Reads until a text appears; returns everything up to its end."""
        end = time.monotonic() + seconds
        poll = select.poll()  # unlike ``select``, it takes any descriptor
        poll.register(self.terminal_fd, select.POLLIN)
        while text not in self.unread_output:
            ready = poll.poll(1000 * max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not come; got {self.unread_output!r}"
            self.unread_output += os.read(self.terminal_fd, 4096).decode()
        head, _, self.unread_output = self.unread_output.partition(text)
        return head + text

    def type_text(self, text: str) -> None:
        os.write(self.terminal_fd, text.encode())

    def interrupt(self, text: str) -> None:
        """Presses Ctrl-C at a prompt until a text appears. Python's readline misses a signal that arrives just between
        the prompt and its wait; users press the keys again, and so does this."""
        for _ in range(30):
            self.type_text("\x03")
            try:
                self.read_until(text, seconds=2)
                return
            except AssertionError:
                continue
        raise AssertionError(f"{text!r} did not come; got {self.unread_output!r}")

    def exit_code(self) -> int:
        """Waits for the process and returns its exit code."""
        return self.process.wait(60)

    def hang_up(self) -> None:
        """Closes the terminal, as a user who closes its window does."""
        if self.terminal_fd >= 0:
            os.close(self.terminal_fd)
        self.terminal_fd = -1

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
