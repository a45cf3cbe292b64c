"""The owner of a request, and the rights of its API key."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class KeyOwner(NamedTuple):
    """The owner of an API key: a name, which several keys may share, and groups. Names and groups get permissions."""

    name: str = ""
    groups: tuple[str, ...] = ()


class KeyLimits(NamedTuple):
    """The most that the requests of an API key may use; None: no limit. Token limits count prompts and answers
    together; a day is one in UTC. ``concurrent_requests``: the requests that are open at a time.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent_requests: int | None = None


NO_LIMITS = KeyLimits()


class LimitState(NamedTuple):
    """A limit, the part of it that is left, and the seconds until the whole limit is available again."""

    limit: int
    remaining: int
    reset_seconds: float


class KeyLimitStates(NamedTuple):
    """The limits of a key that answers report; None: the key has no limit of this kind."""

    requests: LimitState | None = None
    tokens: LimitState | None = None


class Tenant(msgspec.Struct, frozen=True):
    """The clients with one API key. A server without keys has one tenant, ``NO_TENANT``.

    * ``id``: a digest of the key, the same on every server of a cluster; "" without keys.
    * ``has_global_priority``: priorities of its requests count among those of all tenants; otherwise only among its
      own.
    * ``owner``: the owner of the key.
    * ``is_admin``: the key may change the server.
    * ``models``, ``apis``: the models and APIs that the key may use; empty: all.
    * ``priority``: the default priority of its requests among those of all tenants; lower numbers run sooner.
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
