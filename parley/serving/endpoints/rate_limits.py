"""Limits on the use of endpoints per minute, counted in windows that begin with the first request.

Requests count when they are admitted, tokens when the request has ended. So one request may exceed a limit of tokens;
the next one is refused until the window ends. Knows no API, and nothing of other servers: each counts for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from parley.dialects.facts import Endpoint, EndpointLimit
from parley.errors import Overloaded

WINDOW_SECONDS = 60.0
MAX_WINDOWS = 10_000  # with more, windows that have ended are removed


@dataclass(slots=True)
class UsageWindow:
    """The calls or tokens that an endpoint has used in a window. ``ends_at``: in seconds of the clock."""

    ends_at: float
    used_units: int = 0


WindowKey = tuple[str, EndpointLimit, str]  # the endpoint, the limit, and the client if the limit is for each


class EndpointUsage:
    """Counts the use of endpoints with limits, and refuses requests that exceed them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._windows: dict[WindowKey, UsageWindow] = {}

    def admit_request(self, endpoint: Endpoint, tenant: str) -> EndpointLease:
        """Count a request of a client; the lease counts its tokens. Raises Overloaded, and counts nothing, if a limit
        is reached."""
        for limit in endpoint.limits:
            allowed = limit.tokens if limit.calls is None else limit.calls
            window = self._windows.get(_window_key(endpoint, limit, tenant))
            used_units = window.used_units if window is not None and window.ends_at > self._clock() else 0
            if allowed is not None and used_units >= allowed:
                raise _limit_error(
                    endpoint, limit, WINDOW_SECONDS if window is None else window.ends_at - self._clock()
                )
        self._add_usage(endpoint, tenant, calls=1)
        return EndpointLease(self, endpoint, tenant)

    def add_tokens(self, endpoint: Endpoint, tenant: str, count: int) -> None:
        """Count the tokens of a request that has ended."""
        self._add_usage(endpoint, tenant, tokens=count)

    def _add_usage(self, endpoint: Endpoint, tenant: str, calls: int = 0, tokens: int = 0) -> None:
        now = self._clock()
        if len(self._windows) > MAX_WINDOWS:
            self._windows = {key: window for key, window in self._windows.items() if window.ends_at > now}
        for limit in endpoint.limits:
            key, count = _window_key(endpoint, limit, tenant), calls if limit.tokens is None else tokens
            if key not in self._windows or self._windows[key].ends_at <= now:
                self._windows[key] = UsageWindow(now + WINDOW_SECONDS)
            self._windows[key].used_units += count


@dataclass(frozen=True)
class EndpointLease:
    """One request's part of an endpoint's limits. ``tenant``: the id of its client."""

    usage: EndpointUsage
    endpoint: Endpoint
    tenant: str

    def add_tokens(self, count: int) -> None:
        """Count the tokens of the request, which has ended."""
        self.usage.add_tokens(self.endpoint, self.tenant, count)


def _window_key(endpoint: Endpoint, limit: EndpointLimit, tenant: str) -> WindowKey:
    return endpoint.name, limit, tenant if limit.per_client else ""


def _limit_error(endpoint: Endpoint, limit: EndpointLimit, seconds: float) -> Overloaded:
    allowed = f"{limit.calls} requests" if limit.tokens is None else f"{limit.tokens} tokens"
    whose = "each client" if limit.per_client else "all clients together"
    return Overloaded(
        f"Exceeded the rate limit of endpoint {endpoint.name}: {allowed} per minute for {whose}. "
        f"Try again in {max(1, round(seconds))} s.",
        retry_after=max(1.0, seconds),
    )
