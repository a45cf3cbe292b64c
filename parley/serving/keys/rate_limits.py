"""Limits of API keys: requests and tokens per minute, tokens per day, and requests that are open at a time.

A budget per minute is full at first and refills evenly, as those of OpenAI and Anthropic do. Tokens are reserved before
a request is queued, and settled when it has ended. All counts are integers, so that no rounding admits one request too
many or refuses one too many. Knows neither HTTP nor models, and nothing of other servers: each counts for itself,
except that a coordinator counts for all its instances.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from parley.errors import RateLimited
from parley.types import KeyLimits, KeyLimitStates, LimitState, Tenant

MINUTE = 60 * 10**9  # nanoseconds
DAY_SECONDS = 86_400
MAX_METERS = 10_000  # with more, meters that equal new ones are removed
OPEN_RETRY_SECONDS = 1.0  # seconds until the retry of a request that was refused because too many are open


class RefillingBudget:
    """A budget of ``limit`` units that refills evenly within ``period`` nanoseconds. ``clock`` returns nanoseconds.

    More than all of it may be spent; the rest is a debt that refilling pays first.
    """

    def __init__(self, limit: int, period: int, clock: Callable[[], int]):
        self.limit = limit
        self._period, self._clock = period, clock
        self._spent = 0  # units times the period: this much refills ``limit`` of it in each nanosecond
        self._counted_at = clock()

    @property
    def remaining(self) -> int:
        """The whole units that are left; negative after more than all were spent."""
        return self.limit + -self._refill_budget() // self._period

    def spend(self, units: int) -> None:
        """Spend units, even more than are left. Negative units are given back, because they were not used."""
        spent = self._refill_budget() + units * self._period
        self._spent = spent if spent > 0 else 0

    def try_spend(self, units: int) -> bool:
        """Spend units if that many are left, and return whether they were."""
        spent = self._refill_budget() + units * self._period
        if spent > self.limit * self._period:
            return False
        self._spent = spent
        return True

    def seconds_until(self, units: int) -> float:
        """Return the seconds until this many units are left; 0 if they are."""
        missing_units = self._refill_budget() + (units - self.limit) * self._period
        return max(0, -(-missing_units // self.limit)) / 1e9

    def limit_state(self) -> LimitState:
        """Return the budget as answers report it."""
        spent = self._refill_budget()
        remaining = self.limit + -spent // self._period
        return LimitState(self.limit, remaining if remaining > 0 else 0, -(-spent // self.limit) / 1e9)

    def _refill_budget(self) -> int:
        now = self._clock()
        spent = self._spent - (now - self._counted_at) * self.limit
        self._spent, self._counted_at = spent if spent > 0 else 0, now
        return self._spent


class DailyBudget:
    """A budget of ``limit`` units for each day in UTC. ``wall_clock`` returns seconds since the epoch."""

    def __init__(self, limit: int, wall_clock: Callable[[], float]):
        self.limit = limit
        self._wall_clock = wall_clock
        self._spent, self._counted_day = 0, int(wall_clock() // DAY_SECONDS)

    @property
    def remaining(self) -> int:
        """The units that are left today; negative after more than all were spent."""
        return self.limit - self._spent_today()

    def spend(self, units: int, day: int) -> None:
        """Spend units of a day, even more than are left; negative units are given back. Only those of today count."""
        spent = self._spent_today() + units
        if day == self._counted_day:
            self._spent = spent if spent > 0 else 0

    def seconds_until(self, units: int) -> float:
        """Return the seconds until this many units are left: until the next day, unless they are."""
        return 0.0 if units <= self.remaining else DAY_SECONDS - self._wall_clock() % DAY_SECONDS

    def limit_state(self) -> LimitState:
        """Return the budget as answers report it."""
        spent = self._spent_today()
        remaining = self.limit - spent
        reset_seconds = DAY_SECONDS - self._wall_clock() % DAY_SECONDS if spent > 0 else 0.0
        return LimitState(self.limit, remaining if remaining > 0 else 0, reset_seconds)

    def _spent_today(self) -> int:
        if (day := self._wall_clock() // DAY_SECONDS) != self._counted_day:
            self._spent, self._counted_day = 0, int(day)
        return self._spent


class KeyMeter:
    """The usage of one key, and its current limits. ``token_budgets``: the limits that count tokens."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], int], wall_clock: Callable[[], float]):
        self._clock, self._wall_clock = clock, wall_clock
        self.open_requests = 0
        self.requests: RefillingBudget | None = None
        self.tokens: RefillingBudget | None = None
        self.daily_tokens: DailyBudget | None = None
        self.use_limits(limits)

    def use_limits(self, limits: KeyLimits) -> None:
        """Replace the limits. Earlier usage still counts."""
        self.limits = limits
        self.requests = self._changed_budget(self.requests, limits.requests_per_minute)
        self.tokens = self._changed_budget(self.tokens, limits.tokens_per_minute)
        if limits.tokens_per_day is None:
            self.daily_tokens = None
        elif self.daily_tokens is None:
            self.daily_tokens = DailyBudget(limits.tokens_per_day, self._wall_clock)
        else:
            self.daily_tokens.limit = limits.tokens_per_day
        self.token_budgets: list[RefillingBudget | DailyBudget] = [
            budget for budget in (self.tokens, self.daily_tokens) if budget is not None
        ]

    def _changed_budget(self, budget: RefillingBudget | None, limit: int | None) -> RefillingBudget | None:
        if limit is None:
            return None
        if budget is None:
            return RefillingBudget(limit, MINUTE, self._clock)
        budget.spend(0)  # refill at the old rate up to now
        budget.limit = limit
        return budget

    @property
    def utc_day(self) -> int:
        """The day in UTC, counted from the epoch."""
        return int(self._wall_clock() // DAY_SECONDS)

    @property
    def is_idle(self) -> bool:
        """Whether the meter equals a new one, so that it can be dropped."""
        budgets = [*self.token_budgets, *((self.requests,) if self.requests is not None else ())]
        return not self.open_requests and not any(budget.seconds_until(budget.limit) for budget in budgets)

    def limit_states(self) -> KeyLimitStates:
        """Return the limits as answers report them. Of several token limits, that is the one that will be used up
        first."""
        tokens: LimitState | None = None
        for budget in self.token_budgets:
            state = budget.limit_state()
            if tokens is None or state.remaining < tokens.remaining:
                tokens = state
        return KeyLimitStates(None if self.requests is None else self.requests.limit_state(), tokens)


class KeyLease:
    """One request of a key with limits, from its admission to its end. ``end`` must follow; it may be called twice."""

    def __init__(self, meter: KeyMeter, name: str):
        self._meter, self._name = meter, name
        self._reserved = 0
        self._day = meter.utc_day  # the day of the reservation
        self._ended = False

    def reserve_tokens(self, prompt_tokens: int, output_tokens: int | None) -> None:
        """Reserve the tokens that the request may use. ``output_tokens``: None if the client names no limit; then the
        answer counts when it has ended, and may use more than is left. Raises RateLimited, and reserves nothing."""
        tokens = prompt_tokens + (output_tokens or 0)
        for budget in self._meter.token_budgets:
            if tokens > budget.remaining:
                raise _token_error(self._name, budget, tokens, f", requested {tokens}")
        self._reserved = tokens
        self._day = self._meter.utc_day
        self._count(tokens)

    def settle_tokens(self, used_tokens: int = 0) -> None:
        """End the request: tokens that it did not use are given back, and those beyond the reservation are counted."""
        if self._ended:
            return
        self._ended = True
        self._meter.open_requests -= 1
        self._count(used_tokens - self._reserved)

    def end_as_reserved(self) -> None:
        """End the request and count its whole reservation as used, because its usage is unknown."""
        self.settle_tokens(self._reserved)

    def _count(self, tokens: int) -> None:
        meter = self._meter
        if meter.tokens is not None:
            meter.tokens.spend(tokens)
        if meter.daily_tokens is not None:
            meter.daily_tokens.spend(tokens, self._day)


class KeyLimiter:
    """Counts the usage of keys, and refuses requests that exceed their limits.

    ``clock``: nanoseconds that never go back; ``wall_clock``: seconds since the epoch. ``used_today`` returns the
    tokens that a tenant has used today before this process began.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        wall_clock: Callable[[], float] = time.time,
        used_today: Callable[[str], int] = lambda tenant_id: 0,
    ):
        self._clock, self._wall_clock, self._used_today = clock, wall_clock, used_today
        self._meters: dict[str, KeyMeter] = {}

    def admit_request(self, tenant: Tenant) -> KeyLease:
        """Count a request. Raises RateLimited; a request that is refused does not count."""
        meter, limits, name = self._meter_of(tenant), tenant.limits, tenant.owner.name
        requests = meter.requests
        if limits.concurrent_requests is not None and meter.open_requests >= limits.concurrent_requests:
            raise _limit_error(
                name,
                "concurrent requests",
                limits.concurrent_requests,
                meter.open_requests,
                OPEN_RETRY_SECONDS,
                "requests",
            )
        for budget in meter.token_budgets:
            if budget.remaining < 1:  # every prompt has a token
                raise _token_error(name, budget, 1)
        if requests is not None and not requests.try_spend(1):
            used_requests = requests.limit - requests.remaining
            raise _limit_error(
                name, "requests per minute", requests.limit, used_requests, requests.seconds_until(1), "requests"
            )
        meter.open_requests += 1
        return KeyLease(meter, name)

    def return_request(self, tenant: Tenant) -> None:
        """Stop counting a request, because it is counted elsewhere."""
        if (requests := self._meter_of(tenant).requests) is not None:
            requests.spend(-1)

    def states_of(self, tenant: Tenant) -> KeyLimitStates:
        """Return the limits of a key now."""
        return self._meter_of(tenant).limit_states()

    def _meter_of(self, tenant: Tenant) -> KeyMeter:
        meter = self._meters.get(tenant.id)
        if meter is None:
            if len(self._meters) >= MAX_METERS:
                self._meters = {key: meter for key, meter in self._meters.items() if not meter.is_idle}
            meter = self._meters[tenant.id] = KeyMeter(tenant.limits, self._clock, self._wall_clock)
            if meter.daily_tokens is not None:
                meter.daily_tokens.spend(self._used_today(tenant.id), meter.utc_day)
        elif meter.limits != tenant.limits:
            meter.use_limits(tenant.limits)
        return meter


def _token_error(name: str, budget: RefillingBudget | DailyBudget, tokens: int, requested: str = "") -> RateLimited:
    unit = "tokens per minute" if isinstance(budget, RefillingBudget) else "tokens per day"
    seconds = None if tokens > budget.limit else budget.seconds_until(tokens)
    return _limit_error(name, unit, budget.limit, budget.limit - budget.remaining, seconds, "tokens", requested)


def _limit_error(
    name: str, unit: str, limit: int, used: int, seconds: float | None, kind: str, requested: str = ""
) -> RateLimited:
    """Return the error of a limit. ``seconds``: when to retry; None if the request alone exceeds the limit."""
    advice = "Ask for fewer tokens." if seconds is None else f"Try again in {max(1, math.ceil(seconds))} s."
    return RateLimited(
        f"Rate limit reached for key {name} on {unit}: limit {limit}, used {used}{requested}. {advice}",
        kind=kind,
        retry_after=seconds,
    )
