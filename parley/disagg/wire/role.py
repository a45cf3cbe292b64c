"""An instance's role, and how it takes another: what runs ends first, then it links with those it is to work with.

Knows neither the bodies in which roles are given nor how a link is made. An engine can do everything in every role;
a role says which requests an instance takes and, of a flex one, which part of the engine's time prompts may have.
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

DRAIN = 300.0  # seconds that running requests have before the role changes around them
FIRST, POLL = 0.1, 10.0  # seconds between two looks at the links, at first and after a while
SHARE = 50  # percent of a flex instance's time for prefill, unless it is told


class Address(NamedTuple):
    """Where an instance listens for others: an address without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        """As it stands in a d-target."""
        return f"[{self.host}];{self.port}" if ":" in self.host else f"{self.host};{self.port}"


class Assignment(NamedTuple):
    """A role that is given. ``peers``: those that hand over to it, or that it hands over to. ``share``: None: as is."""

    name: Name
    peers: Sequence[Address] = ()
    share: int | None = None


class Role:
    """``link`` tries a peer and says how that went, "ok" or why not; ``busy``: do requests run? ``left`` is called
    with the role that ends, when no request runs any more, ``taken`` when there is another role or share."""

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
        """Can no request be answered, for it is not known in which role?"""
        return self.name == "none" or self.draining

    @property
    def prefills(self) -> bool:
        """Does it begin requests that others go on with?"""
        return self.name == "prefill" or (self.name == "flex" and self.share > 0)

    @property
    def decodes(self) -> bool:
        """Does it go on with requests that others began?"""
        return self.name == "decode" or (self.name == "flex" and self.share < 100)

    @property
    def part(self) -> int:
        """Percent of the engine's time that prompts may have while answers go on."""
        return self.share if self.name == "flex" else 100

    def assign(self, given: Assignment) -> None:
        """Take a role, in the background; one that was being taken is not any more. Who has it and is linked with all
        its peers goes on as before, with another share."""
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
        """Wait until no request runs, but not for ever: the rest goes on in the new role."""
        deadline = time.monotonic() + DRAIN
        while self._busy() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
