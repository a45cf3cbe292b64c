"""When a request has taken too long: as a whole, by its client's wish or the server's, or for its next token.

One timer for each request that has a limit, set anew only when it rings. Knows nothing of what is being done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from parley.errors import Expired, Limit

TOLD: dict[Limit, str] = {
    "client": "The answer was not finished within the time that the request allowed.",
    "server": "The answer was not finished within the time that the server allows.",
    "token": "The next token did not come within the time that the server allows.",
}


class Clock:
    """Runs from now on, when ``spent`` seconds of the whole are over.

    Limits in seconds, None for none: for the whole, of the ``client`` and of the ``server``; for the time between two
    calls of ``seen``, or before the first. ``expire`` is called at most once."""

    def __init__(
        self,
        client: float | None,
        server: float | None,
        token: float | None,
        expire: Callable[[Expired], None],
        spent: float = 0.0,
    ):
        self._loop = asyncio.get_running_loop()
        self._seen = self._loop.time()
        limits: list[tuple[float, Limit]] = [(client or inf, "client"), (server or inf, "server")]
        whole, self._whose = min(limits, key=lambda limit: limit[0])
        self._end = self._seen + whole - spent
        self._gap = token or inf
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None
        self._set()

    def seen(self) -> None:
        """Something came."""
        self._seen = self._loop.time()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set(self) -> None:
        due = min(self._end, self._seen + self._gap)
        if due < inf:
            self._timer = self._loop.call_at(due, self._ring)

    def _ring(self) -> None:
        now = self._loop.time()
        if now >= self._end:
            self._expire(Expired(TOLD[self._whose], limit=self._whose))
        elif now >= self._seen + self._gap:
            self._expire(Expired(TOLD["token"], limit="token"))
        else:
            self._set()
