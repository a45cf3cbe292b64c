"""An instance's role, and how the role changes: running requests end first, then the instance links with its peers.

Knows neither the bodies that assign roles nor how links are made. Every engine can do everything; the role decides
which requests an instance accepts and, for a flex instance, how much of the engine's time prefill may take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple

log = logging.getLogger("parley.instance")

InstanceRoleName = Literal["none", "prefill", "decode", "flex", "mixed"]
RoleStatus = Literal["RoleUnknown", "RoleSwitching", "RoleReady"]

ROLE_DRAIN_SECONDS = 300.0  # seconds that running requests have to finish before the role changes anyway
FIRST_LINK_PAUSE, MAX_LINK_PAUSE = 0.1, 10.0  # seconds between two checks of the links: at first, and at most
DEFAULT_PREFILL_SHARE = 50  # default percentage of a flex instance's time for prefill


class InstanceAddress(NamedTuple):
    """The address where an instance listens for other instances: a host without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return the address as a d-target contains it."""
        return f"[{self.host}];{self.port}" if ":" in self.host else f"{self.host};{self.port}"


class RoleAssignment(NamedTuple):
    """A role to take. ``peers``: the instances on the other side of its handovers. ``prefill_share``: None keeps it."""

    name: InstanceRoleName
    peers: Sequence[InstanceAddress] = ()
    prefill_share: int | None = None


class InstanceRole:
    """The current role of an instance, and its changes.

    * ``link_peer``: tries to reach a peer, and returns "ok" or the failure.
    * ``is_busy``: whether requests are running.
    * ``on_role_end``: called with the old role once no request runs any more.
    * ``on_role_set``: called when the role or the share has changed.
    """

    def __init__(
        self,
        name: InstanceRoleName = "mixed",
        prefill_share: int = DEFAULT_PREFILL_SHARE,
        *,
        link_peer: Callable[[InstanceAddress], Awaitable[str]],
        is_busy: Callable[[], bool],
        on_role_end: Callable[[InstanceRoleName], None] = lambda name: None,
        on_role_set: Callable[[], None] = lambda: None,
    ):
        self.name, self.prefill_share = name, prefill_share
        self.status: RoleStatus = "RoleUnknown" if name == "none" else "RoleReady"
        self.is_draining = False
        self.link_states: dict[InstanceAddress, str] = {}
        self._link_peer = link_peer
        self._is_busy = is_busy
        self._on_role_end = on_role_end
        self._on_role_set = on_role_set
        self._change_task: asyncio.Task[None] | None = None

    @property
    def is_unsettled(self) -> bool:
        """Whether requests must be refused because the role is not settled."""
        return self.name == "none" or self.is_draining

    @property
    def runs_prefill(self) -> bool:
        """Whether the instance runs the prefill stage of requests that others continue."""
        return self.name == "prefill" or (self.name == "flex" and self.prefill_share > 0)

    @property
    def runs_decode(self) -> bool:
        """Whether the instance runs the decode stage of requests that others began."""
        return self.name == "decode" or (self.name == "flex" and self.prefill_share < 100)

    @property
    def engine_prefill_share(self) -> int:
        """Percentage of the engine's time that prefill may take while answers are generated."""
        return self.prefill_share if self.name == "flex" else 100

    def assign_role(self, assignment: RoleAssignment) -> None:
        """Change to a role in the background, cancelling a change in progress. An instance that already has the role
        and is linked with all peers continues without interruption, possibly with another share."""
        linked = all(self.link_states.get(peer) == "ok" for peer in assignment.peers)
        settled = self.status == "RoleReady" and assignment.name == self.name and linked
        if self._change_task is not None:
            self._change_task.cancel()
        if not settled:
            self.status = "RoleSwitching"
        self.is_draining = assignment.name != self.name and self.name != "none"
        self.link_states = dict.fromkeys(assignment.peers, "ok" if settled else "linking")
        self._change_task = asyncio.create_task(self._run_change(assignment))

    def cancel_change(self) -> None:
        """Cancel a change in progress."""
        if self._change_task is not None:
            self._change_task.cancel()

    async def _run_change(self, assignment: RoleAssignment) -> None:
        if self.is_draining:
            await self._wait_until_idle()
            old_role, self.is_draining = self.name, False
            self._on_role_end(old_role)
        self._set_role(assignment)
        pause = FIRST_LINK_PAUSE
        while True:
            states = await asyncio.gather(*map(self._link_peer, assignment.peers))
            self.link_states = dict(zip(assignment.peers, states, strict=True))
            if all(state == "ok" for state in states):
                self.status = "RoleReady"
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_LINK_PAUSE)

    def _set_role(self, assignment: RoleAssignment) -> None:
        self.name = assignment.name
        if assignment.prefill_share is not None:
            self.prefill_share = assignment.prefill_share
        log.info(
            "The role is %s%s.", self.name, f" with {self.prefill_share} % for prompts" if self.name == "flex" else ""
        )
        self._on_role_set()

    async def _wait_until_idle(self) -> None:
        """Wait until no request runs, at most ``ROLE_DRAIN_SECONDS`` seconds; requests left over continue in the new
        role.
        """
        deadline = time.monotonic() + ROLE_DRAIN_SECONDS
        while self._is_busy() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
