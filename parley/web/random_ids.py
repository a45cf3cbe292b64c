"""Unpredictable random ids. The system is asked for many at a time, since a call costs more than an id's use."""

from __future__ import annotations

import os
from collections.abc import Iterator

SIZE = 16  # bytes of an id
MANY = 256  # ids fetched from the system at once


def _draws() -> Iterator[bytes]:
    while True:
        store = os.urandom(SIZE * MANY)
        for start in range(0, len(store), SIZE):
            yield store[start : start + SIZE]


draw = _draws().__next__  # returns SIZE bytes; only for the event loop's thread
