"""Unpredictable random ids. The system is asked for many at a time, since a call costs more than an id's use."""

from __future__ import annotations

import os
from collections.abc import Iterator

ID_BYTES = 16  # bytes of an id
IDS_PER_FETCH = 256  # ids fetched from the system at once


def _random_ids() -> Iterator[bytes]:
    while True:
        random_bytes = os.urandom(ID_BYTES * IDS_PER_FETCH)
        for start in range(0, len(random_bytes), ID_BYTES):
            yield random_bytes[start : start + ID_BYTES]


draw_id = _random_ids().__next__  # returns SIZE bytes; only for the event loop's thread
