"""How a server becomes an instance that others reach: its peer listens, has the pages of its engines, and knows links.

What comes in over it is ``member``'s affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parley.instance.member import Member
from parley.instance.role import Place
from parley.kv.peer import Peer
from parley.server.tls import calling, context
from parley.types import Arena, ModelInfo

if TYPE_CHECKING:
    from parley.server.app import App


class Joined:
    """A server's membership. ``open`` begins it, ``close`` ends it. Raises BadTls. ``app`` answers what is handed over.

    An engine in this process alone, or none at all, has no pages that could be read: these are computed again.
    """

    def __init__(self, app: App):
        self.service = service = app.service
        self.node = node = service.node
        tls = service.options.peer_tls
        self.peer = Peer(
            secret=service.options.cluster_secret.encode(),
            lets=context(tls) if tls is not None else None,
            shows=calling(tls) if tls is not None else None,
        )
        self.member = Member(app, node.results, self.peer, node.role)
        node.begin = self.member.begin

    async def open(self, host: str) -> None:
        """Let other instances in, if they are expected. Raises OSError."""
        port = self.service.options.peer_port
        if port is None:
            return
        await self.peer.listen(host, port, self.member.accept)
        self.node.port, self.node.reach, self.node.turned = self.peer.port, self._reach, self._turned
        for model in self.service.models:
            if model.engine.info is not None and model.engine.state == "ready":
                self._turned(model.name, model.engine.info)

    async def close(self) -> None:
        await self.member.close()
        await self.peer.close()

    def _turned(self, name: str, info: ModelInfo | None) -> None:
        """An engine serves, or does no longer."""
        if info is None:
            self.peer.remove(name)
        else:
            self.peer.add(name, info.arena or Arena(0, -1, info.kv_blocks, [], "none"))

    async def _reach(self, place: Place) -> None:
        giver = await self.peer.connect(str(place), self.service.main.name)
        giver.close()
