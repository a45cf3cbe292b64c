"""The owner of a request."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class KeyOwner(NamedTuple):
    """Who has an API key: a name, which several keys may share, and groups. Permissions are granted to these."""

    name: str = ""
    groups: tuple[str, ...] = ()


class Tenant(msgspec.Struct, frozen=True):
    """The clients with one API key. A server without keys has one tenant, ``NO_TENANT``.

    ``id``: a digest of the key, the same on every server of a cluster; "" without keys. ``has_global_priority``:
    priorities of its requests count among those of all tenants; otherwise only among its own. ``owner``: who has the
    key. ``is_admin``: the key may change the server.
    """

    id: str = ""
    has_global_priority: bool = True
    owner: KeyOwner = KeyOwner()
    is_admin: bool = False

    def may_see(self, owner: Tenant) -> bool:
        """Whether it may know of requests that belong to ``owner``. Without a key, a cluster's coordinator acts for
        every tenant."""
        return not self.id or self.id == owner.id


NO_TENANT = Tenant()
