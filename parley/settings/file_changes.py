"""Detects by polling that files were replaced or written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

POLL_SECONDS = 1.0
SETTLE_SECONDS = 0.05  # a file that changes within this time is still being written

FileState = tuple[int, int, int] | None


async def file_changes(files: tuple[Path, ...], poll_seconds: float = POLL_SECONDS) -> AsyncIterator[None]:
    """Yield whenever a file has changed and is no longer being written, for ever; end at once without files."""
    known_states = _file_states(files)
    while files:
        await asyncio.sleep(poll_seconds)
        if (states := _file_states(files)) == known_states:
            continue
        while states != known_states:
            known_states = states
            await asyncio.sleep(SETTLE_SECONDS)
            states = _file_states(files)
        yield


def _file_states(files: tuple[Path, ...]) -> list[FileState]:
    """Return a state of each file that differs after each change; None for unreadable files. Links are followed."""
    states: list[FileState] = []
    for path in files:
        try:
            file_stat = path.stat()
        except OSError:
            states.append(None)
        else:
            states.append((file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size))
    return states
