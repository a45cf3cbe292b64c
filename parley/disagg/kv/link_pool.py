"""Pool of a sender's idle links, by receiver and arena. Knows no handovers."""

from __future__ import annotations

import asyncio

from parley.disagg.kv.link import KVLink

MAX_IDLE_LINKS = 8  # idle links to one receiver and arena
IDLE_LINK_TIMEOUT_S = 60.0
LINK_NOT_NEEDED = "The link is not needed any more."


class LinkPool:
    """Idle links; each ends after IDLE_LINK_TIMEOUT_S. Remove links that have ended by themselves."""

    def __init__(self) -> None:
        self._idle_links: dict[tuple[str, str], dict[KVLink, asyncio.TimerHandle]] = {}

    def take_idle_link(self, address: str, name: str) -> KVLink | None:
        """Return the link that became idle last, to the receiver at ``address`` for the arena ``name``, or None."""
        idle_links = self._idle_links.get((address, name))
        if not idle_links:
            return None
        link, timer = idle_links.popitem()
        timer.cancel()
        return link

    def put_idle_link(self, link: KVLink, address: str, name: str) -> None:
        """Add an idle link, or end it if the pool has enough."""
        idle_links = self._idle_links.setdefault((address, name), {})
        if len(idle_links) >= MAX_IDLE_LINKS:
            link.fail_link(LINK_NOT_NEEDED)
        else:
            idle_links[link] = asyncio.get_running_loop().call_later(
                IDLE_LINK_TIMEOUT_S, link.fail_link, LINK_NOT_NEEDED
            )

    def remove_link(self, link: KVLink) -> None:
        """Remove a link that has ended. Links outside the pool are ignored."""
        for key, idle_links in list(self._idle_links.items()):
            timer = idle_links.pop(link, None)
            if timer is not None:
                timer.cancel()
            if not idle_links:
                del self._idle_links[key]
