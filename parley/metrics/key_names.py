"""Limits the API keys that have metric series of their own: operators replace keys for years, but the number of series
must not grow.
"""

from __future__ import annotations

MAX_KEYS, OTHER_KEYS = 200, "other"  # keys with series of their own, and the name of all others together


class KeyNames:
    """Names API keys in metrics: the first ones by their own names, all others by one."""

    def __init__(self) -> None:
        self._keys: set[str] = set()  # those with series of their own

    def series_name(self, key: str) -> str:
        """Return the name of a key in metrics; "" for none."""
        if key in self._keys:
            return key
        if len(self._keys) >= MAX_KEYS:
            return OTHER_KEYS
        self._keys.add(key)
        return key
