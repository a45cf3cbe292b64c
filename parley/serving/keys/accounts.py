"""The account of one request: its reservation, and its usage when it ends.

It settles with everything that counts the use of tokens: the limits of the client's key, those of the endpoint that the
request is for, and the usage of each key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from parley.serving.endpoints.rate_limits import EndpointLease
from parley.serving.keys.rate_limits import KeyLease, KeyLimiter
from parley.serving.keys.usage_store import UsageStore, tokens_of_day
from parley.types import NO_LIMITS, Tenant, Usage
from parley.web.exchange import Exchange


@dataclass
class RequestAccount:
    """The account of a request of ``tenant``.

    * ``key_name``: the name of its key in logs.
    * ``lease``: its part of the key's limits; None: there are none, or another server counts them.
    * ``endpoint_lease``: its part of the limits of the endpoint that it is for.
    * ``usage_store``: where usage is kept; None: nowhere.
    """

    tenant: Tenant
    key_name: str
    lease: KeyLease | None = None
    endpoint_lease: EndpointLease | None = None
    usage_store: UsageStore | None = None

    async def reserve_tokens(self, prompt_tokens: int, output_tokens: int | None) -> None:
        """Reserve the tokens of the prompts, and those that the answer may have at most; None: the client names no
        limit. Raises RateLimited."""
        if self.lease is not None:
            self.lease.reserve_tokens(prompt_tokens, output_tokens)

    def settle(
        self, model: str, usage: Usage, output_tokens: int, *, was_submitted: bool, handed_over: bool = False
    ) -> None:
        """Charge the key for the request. ``was_submitted``: the engine had it; otherwise it used nothing.
        ``handed_over``: it continues on another instance, which counts its usage; the limits here keep its
        reservation."""
        if self.endpoint_lease is not None:
            self.endpoint_lease.add_tokens(usage.prompt_tokens + output_tokens)
        if handed_over:
            if self.lease is not None:
                self.lease.end_as_reserved()
            return
        if self.lease is not None:
            self.lease.settle_tokens(usage.prompt_tokens + output_tokens if was_submitted else 0)
        if self.usage_store is not None and was_submitted:
            self.usage_store.add_request(
                self.tenant.id, self.key_name, model, usage.prompt_tokens, usage.cached_tokens, output_tokens
            )

    def cancel(self) -> None:
        """End the account of a request that has used nothing."""
        if self.lease is not None:
            self.lease.settle_tokens()


class KeyLedger:
    """Opens the accounts of requests. ``usage_store``: where usage is kept; None: it is not."""

    def __init__(self, usage_store: UsageStore | None):
        self.usage_store = usage_store
        self.limiter = KeyLimiter(used_today=tokens_of_day(usage_store))

    def open_account(self, tenant: Tenant, key_name: str) -> RequestAccount:
        """Return the account of a request, without limits. ``key_name``: the name of its key in logs."""
        return RequestAccount(tenant, tenant.owner.name or key_name or tenant.id[:12], usage_store=self.usage_store)

    def admit_request(self, exchange: Exchange) -> RequestAccount:
        """Count a request for the limits of its client's key, which its answer reports; return its account. Raises
        RateLimited."""
        tenant = exchange.tenant
        account = self.open_account(tenant, exchange.log_entry.key)
        if tenant.limits != NO_LIMITS:
            exchange.limit_states = partial(self.limiter.states_of, tenant)
            account.lease = self.limiter.admit_request(tenant)
        return account
