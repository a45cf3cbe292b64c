"""API keys with limits, and a clock for those limits that stands still."""

from __future__ import annotations

from typing import Any

from parley.serving.keys.rate_limits import KeyLimiter
from parley.settings.key_file import HashedKey, make_key

SECOND = 10**9  # nanoseconds


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def monotonic(self) -> int:
        return self.nanoseconds

    def wall(self) -> float:
        return self.nanoseconds / SECOND

    def limiter(self) -> KeyLimiter:
        return KeyLimiter(self.monotonic, self.wall)


def make_keys(**members_by_name: dict[str, Any]) -> tuple[dict[str, dict[str, str]], tuple[HashedKey, ...]]:
    """Return the headers with each key, and what a server knows of them."""
    pairs = {name: make_key(name, **members) for name, members in members_by_name.items()}
    headers = {name: {"authorization": f"Bearer {key}"} for name, (key, _) in pairs.items()}
    return headers, tuple(hashed for _, hashed in pairs.values())
