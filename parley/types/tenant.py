"""The owner of a request, and the rights of its API key."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class KeyOwner(NamedTuple):
    """Who has an API key: a name, which several keys may share, and groups. Permissions are granted to these."""

    name: str = ""
    groups: tuple[str, ...] = ()


class KeyLimits(NamedTuple):
    """How much the requests of an API key may use; None: no limit. Tokens are those of prompts and answers together,
    ``tokens_per_day`` those of a day in UTC. ``concurrent_requests``: that are open at a time."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent_requests: int | None = None


NO_LIMITS = KeyLimits()


class LimitState(NamedTuple):
    """A limit, how much of it is left, and the seconds until all of it is there again."""

    limit: int
    remaining: int
    reset_seconds: float


class KeyLimitStates(NamedTuple):
    """The limits of a key that answers report; None: there is none of this kind."""

    requests: LimitState | None = None
    tokens: LimitState | None = None


class Tenant(msgspec.Struct, frozen=True):
    """The clients with one API key. A server without keys has one tenant, ``NO_TENANT``.

    ``id``: a digest of the key, the same on every server of a cluster; "" without keys. ``has_global_priority``:
    priorities of its requests count among those of all tenants; otherwise only among its own. ``owner``: who has the
    key. ``is_admin``: the key may change the server. ``models``, ``apis``: those that the key may use; none: all.
    ``priority``: of its requests among those of all tenants, unless they have their own; a lower number runs sooner.
    """

    id: str = ""
    has_global_priority: bool = True
    owner: KeyOwner = KeyOwner()
    is_admin: bool = False
    models: tuple[str, ...] = ()
    apis: tuple[str, ...] = ()
    limits: KeyLimits = NO_LIMITS
    priority: int = 0

    def may_see(self, owner: Tenant) -> bool:
        """Whether the tenant may know of requests that belong to ``owner``. Without a key, a cluster's coordinator acts
        for every tenant."""
        return not self.id or self.id == owner.id


NO_TENANT = Tenant()
