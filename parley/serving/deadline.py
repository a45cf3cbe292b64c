"""Time limits of a request: on the whole request, by its client or by the server, and on the wait for the next token.

Uses one timer per request, set again only when it fires. Knows nothing of the work that it limits.
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
    """The time limits of one request; the time starts now, with ``elapsed`` seconds already used.

    All limits are in seconds, None for no limit. ``client_timeout`` and ``server_timeout`` limit the whole request;
    ``token_timeout`` limits the time until the first call of ``note_output`` and between two calls. ``on_expired`` is
    called at most once.
    """

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
        """Restart the wait for the next token: an output has arrived."""
        self._seen = self._loop.time()

    def stop(self) -> None:
        """Cancel the timer."""
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
