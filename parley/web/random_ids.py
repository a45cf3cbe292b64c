"""Random bytes that nobody can guess, fetched from the system many at a time, for asking costs more than their use."""

from __future__ import annotations

import os
from collections.abc import Iterator

SIZE = 16
MANY = 256


def _draws() -> Iterator[bytes]:
    while True:
        store = os.urandom(SIZE * MANY)
        for start in range(0, len(store), SIZE):
            yield store[start : start + SIZE]


draw = _draws().__next__  # SIZE bytes, for the thread of the event loop
