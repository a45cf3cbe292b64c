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

Name = Literal["none", "prefill", "decode", "flex", "mixed"]
State = Literal["RoleUnknown", "RoleSwitching", "RoleReady"]

DRAIN = 300.0  # seconds that running requests have to finish before the role changes anyway
FIRST, POLL = 0.1, 10.0  # seconds between two checks of the links: at first, and at most
SHARE = 50  # default percentage of a flex instance's time for prefill


class Address(NamedTuple):
    """The address where an instance listens for other instances: a host without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return the address as a d-target contains it."""
        return f"[{self.host}];{self.port}" if ":" in self.host else f"{self.host};{self.port}"


class Assignment(NamedTuple):
    """A role to take. ``peers``: the instances on the other side of its handovers. ``share``: None keeps it."""

    name: Name
    peers: Sequence[Address] = ()
    share: int | None = None


class Role:
    """The current role of an instance, and its changes.

    ``link`` tries to reach a peer and returns "ok" or the failure. ``busy``: whether requests are running. ``left`` is
    called with the old role once no request runs any more, ``taken`` when the role or the share has changed.
    """

    def __init__(
        self,
        name: Name = "mixed",
        share: int = SHARE,
        *,
        link: Callable[[Address], Awaitable[str]],
        busy: Callable[[], bool],
        left: Callable[[Name], None] = lambda name: None,
        taken: Callable[[], None] = lambda: None,
    ):
        self.name, self.share = name, share
        self.state: State = "RoleUnknown" if name == "none" else "RoleReady"
        self.draining = False
        self.links: dict[Address, str] = {}
        self._link, self._busy, self._left, self._taken = link, busy, left, taken
        self._changing: asyncio.Task[None] | None = None

    @property
    def unknown(self) -> bool:
        """Whether requests must be refused because the role is not settled."""
        return self.name == "none" or self.draining

    @property
    def prefills(self) -> bool:
        """Whether the instance runs the prefill stage of requests that others continue."""
        return self.name == "prefill" or (self.name == "flex" and self.share > 0)

    @property
    def decodes(self) -> bool:
        """Whether the instance runs the decode stage of requests that others began."""
        return self.name == "decode" or (self.name == "flex" and self.share < 100)

    @property
    def part(self) -> int:
        """Percentage of the engine's time that prefill may take while answers are generated."""
        return self.share if self.name == "flex" else 100

    def assign(self, given: Assignment) -> None:
        """Change to a role in the background, cancelling a change in progress. An instance that already has the role
        and is linked with all peers continues without interruption, possibly with another share."""
        linked = all(self.links.get(peer) == "ok" for peer in given.peers)
        settled = self.state == "RoleReady" and given.name == self.name and linked
        if self._changing is not None:
            self._changing.cancel()
        if not settled:
            self.state = "RoleSwitching"
        self.draining = given.name != self.name and self.name != "none"
        self.links = dict.fromkeys(given.peers, "ok" if settled else "linking")
        self._changing = asyncio.create_task(self._change(given))

    def close(self) -> None:
        """Cancel a change in progress."""
        if self._changing is not None:
            self._changing.cancel()

    async def _change(self, given: Assignment) -> None:
        if self.draining:
            await self._drained()
            before, self.draining = self.name, False
            self._left(before)
        self._take(given)
        pause = FIRST
        while True:
            made = await asyncio.gather(*map(self._link, given.peers))
            self.links = dict(zip(given.peers, made, strict=True))
            if all(each == "ok" for each in made):
                self.state = "RoleReady"
            await asyncio.sleep(pause)
            pause = min(2 * pause, POLL)

    def _take(self, given: Assignment) -> None:
        self.name, self.share = given.name, self.share if given.share is None else given.share
        log.info("The role is %s%s.", self.name, f" with {self.share} % for prompts" if self.name == "flex" else "")
        self._taken()

    async def _drained(self) -> None:
        """Wait until no request runs, at most ``DRAIN`` seconds; requests left over continue in the new role."""
        deadline = time.monotonic() + DRAIN
        while self._busy() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
