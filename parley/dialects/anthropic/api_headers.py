"""Headers of Anthropic's API: its version, and the limits of a key."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from parley.types import KeyLimitStates

VERSION_HEADER = b"anthropic-version"


def anthropic_limit_headers(states: KeyLimitStates, now: float) -> list[tuple[bytes, bytes]]:
    """Return Anthropic's headers about the limits of a key. Times are those of RFC 3339. ``now``: since the epoch."""
    headers = []
    for kind, state in (("requests", states.requests), ("tokens", states.tokens)):
        if state is not None:
            reset = datetime.fromtimestamp(math.ceil(now + state.reset_seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            values = {"limit": state.limit, "remaining": state.remaining, "reset": reset}
            headers += [
                (f"anthropic-ratelimit-{kind}-{name}".encode(), str(value).encode()) for name, value in values.items()
            ]
    return headers
