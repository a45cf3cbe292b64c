"""Links of a giver that wait for their next hand-over, by taker and arena. Knows no hand-overs."""

from __future__ import annotations

import asyncio

from parley.kv.link import Link

MOST = 8  # links to one taker that wait
PATIENCE_S = 60.0
NEEDLESS = "The link is not needed any more."


class Pool:
    """``put`` a link that is free, ``take`` one that is, ``remove`` one that has ended."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], dict[Link, asyncio.TimerHandle]] = {}

    def take(self, address: str, name: str) -> Link | None:
        """The latest that waits, to the taker at ``address`` and for the arena ``name``."""
        waiting = self._links.get((address, name))
        if not waiting:
            return None
        link, timer = waiting.popitem()
        timer.cancel()
        return link

    def put(self, link: Link, address: str, name: str) -> None:
        """Let it wait, or end it if enough do."""
        waiting = self._links.setdefault((address, name), {})
        if len(waiting) >= MOST:
            link.fail(NEEDLESS)
        else:
            waiting[link] = asyncio.get_running_loop().call_later(PATIENCE_S, link.fail, NEEDLESS)

    def remove(self, link: Link) -> None:
        """It has ended. One that does not wait is ignored."""
        for key, waiting in list(self._links.items()):
            timer = waiting.pop(link, None)
            if timer is not None:
                timer.cancel()
            if not waiting:
                del self._links[key]
