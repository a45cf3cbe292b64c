"""Reads files that an operator names and a server reads again: none stops the server or fills its memory."""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path

PIPE_SECONDS = 30.0  # that the writer of a pipe has to write all of it
CHUNK_BYTES = 1 << 20


def read_bounded_file(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a file, or of a pipe whose writer ends soon.

    Raises OSError, also for more than ``max_bytes``, and for a pipe that is empty or does not end.
    """
    # Opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        content, deadline = bytearray(), time.monotonic() + PIPE_SECONDS
        while chunk := _read_chunk(descriptor, deadline):
            content += chunk
            if len(content) > max_bytes:
                raise OSError(f"it has more than {max_bytes >> 20} MB")
    finally:
        os.close(descriptor)
    if not content and is_pipe:  # perhaps its writer has not come yet
        raise OSError("it is a pipe, and nothing can be read from it")
    return bytes(content)


def _read_chunk(descriptor: int, deadline: float) -> bytes:
    """Return the next bytes of a file; none at its end. Raises OSError, also after ``deadline``."""
    while True:
        try:
            return os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            waiting = select.poll()  # unlike select, of any descriptor
            waiting.register(descriptor, select.POLLIN)
            milliseconds = 1000 * (deadline - time.monotonic())
            if milliseconds <= 0 or not waiting.poll(milliseconds):
                raise OSError(f"its writer did not end within {PIPE_SECONDS:g} s") from None
