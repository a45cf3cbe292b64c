"""Pool of a sender's idle links, by receiver and arena. Knows no handovers."""

from __future__ import annotations

import asyncio

from parley.disagg.kv.link import Link

MOST = 8  # idle links to one receiver and arena
PATIENCE_S = 60.0
NEEDLESS = "The link is not needed any more."


class Pool:
    """Idle links; each ends after IDLE_LINK_TIMEOUT_S. Remove links that have ended by themselves."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], dict[Link, asyncio.TimerHandle]] = {}

    def take(self, address: str, name: str) -> Link | None:
        """Return the link that became idle last, to the receiver at ``address`` for the arena ``name``, or None."""
        waiting = self._links.get((address, name))
        if not waiting:
            return None
        link, timer = waiting.popitem()
        timer.cancel()
        return link

    def put(self, link: Link, address: str, name: str) -> None:
        """Add an idle link, or end it if the pool has enough."""
        waiting = self._links.setdefault((address, name), {})
        if len(waiting) >= MOST:
            link.fail(NEEDLESS)
        else:
            waiting[link] = asyncio.get_running_loop().call_later(PATIENCE_S, link.fail, NEEDLESS)

    def remove(self, link: Link) -> None:
        """Remove a link that has ended. Links outside the pool are ignored."""
        for key, waiting in list(self._links.items()):
            timer = waiting.pop(link, None)
            if timer is not None:
                timer.cancel()
            if not waiting:
                del self._links[key]
