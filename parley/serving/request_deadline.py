"""Time limits of a request: on the whole request, by its client or by the server, and on the wait for the next token.

Uses one timer per request, set again only when it fires. Knows nothing of the work that it limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from parley.errors import Limit, TimeLimitPassed

EXPIRED_MESSAGES: dict[Limit, str] = {
    "client": "The answer was not finished within the time that the request allowed.",
    "server": "The answer was not finished within the time that the server allows.",
    "token": "The next token did not come within the time that the server allows.",
}


class RequestDeadline:
    """The time limits of one request; the time starts now, with ``elapsed`` seconds already used.

    All limits are in seconds, None for no limit. ``client_timeout`` and ``server_timeout`` limit the whole request;
    ``token_timeout`` limits the time until the first call of ``note_output`` and between two calls. ``on_expired`` is
    called at most once.
    """

    def __init__(
        self,
        client_timeout: float | None,
        server_timeout: float | None,
        token_timeout: float | None,
        on_expired: Callable[[TimeLimitPassed], None],
        elapsed: float = 0.0,
    ):
        self._loop = asyncio.get_running_loop()
        self._last_output = self._loop.time()
        limits: list[tuple[float, Limit]] = [(client_timeout or inf, "client"), (server_timeout or inf, "server")]
        request_timeout, self._limit_owner = min(limits, key=lambda limit: limit[0])
        self._expires_at = self._last_output + request_timeout - elapsed
        self._token_timeout = token_timeout or inf
        self._on_expired = on_expired
        self._timer_handle: asyncio.TimerHandle | None = None
        self._arm_timer()

    def note_output(self) -> None:
        """Restart the wait for the next token: an output has arrived."""
        self._last_output = self._loop.time()

    def cancel_timer(self) -> None:
        """Cancel the timer for good: no cycle with the limited work is left to the garbage collector."""
        if self._timer_handle is not None:
            self._timer_handle.cancel()
        self._on_expired = _ignore_expiry

    def _arm_timer(self) -> None:
        fires_at = min(self._expires_at, self._last_output + self._token_timeout)
        if fires_at < inf:
            self._timer_handle = self._loop.call_at(fires_at, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.time()
        if now >= self._expires_at:
            self._on_expired(TimeLimitPassed(EXPIRED_MESSAGES[self._limit_owner], limit=self._limit_owner))
        elif now >= self._last_output + self._token_timeout:
            self._on_expired(TimeLimitPassed(EXPIRED_MESSAGES["token"], limit="token"))
        else:
            self._arm_timer()


def _ignore_expiry(error: TimeLimitPassed) -> None:
    """Do nothing: replaces ``on_expired`` once the timer is cancelled."""
