"""A circuit breaker keeps requests away from an instance whose last requests failed.

Status checks do not reveal such an instance: they prove that a server answers, not that it can compute.
"""

from __future__ import annotations

FAILURE_LIMIT = 3  # failed requests in a row that open the breaker
PAUSE_BOUNDS = 1.0, 60.0  # seconds until an open breaker lets a request through: the first pause, and the longest


class CircuitBreaker:
    """Closed at first. FAILURE_LIMIT failures in a row open it for a pause, which doubles with each further failure.

    After the pause one request at a time may probe the instance; a success closes the breaker. Times are those of a
    monotonic clock, in seconds.
    """

    __slots__ = ("_failures", "_is_probed", "_paused_until")

    def __init__(self) -> None:
        self._failures = 0  # consecutive failures
        self._paused_until = 0.0
        self._is_probed = False

    def is_open(self, now: float) -> bool:
        """Whether requests should go to other instances."""
        return self._failures >= FAILURE_LIMIT and (self._is_probed or now < self._paused_until)

    def record_failure(self, now: float) -> float:
        """Record that a request failed. Return the pause that begins now, 0 if none does."""
        if now < self._paused_until:  # the request was sent before the pause
            return 0.0
        self._failures += 1
        if self._failures < FAILURE_LIMIT:
            return 0.0
        first, longest = PAUSE_BOUNDS
        pause = min(longest, first * 2.0 ** min(self._failures - FAILURE_LIMIT, 16))
        self._paused_until = now + pause
        return pause

    def close_breaker(self) -> None:
        """Record a success, or a restart of the instance: let all requests through."""
        self._failures, self._paused_until, self._is_probed = 0, 0.0, False

    def begin_probe(self) -> bool:
        """Return whether a request that is sent now is a probe, because earlier ones failed; the caller ends it."""
        if self._failures < FAILURE_LIMIT or self._is_probed:
            return False
        self._is_probed = True
        return True

    def end_probe(self) -> None:
        """End a request's probe, so that the next request probes the instance, unless this one has closed the breaker
        or begun a pause."""
        self._is_probed = False
