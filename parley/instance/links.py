"""Links to the other members of a cluster: whether they are reached, and the models whose pages travel over them."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from parley.disagg.kv.arena import BadArena
from parley.disagg.kv.peer import Peer
from parley.disagg.kv.receiver import Taker
from parley.disagg.kv.transport import LinkError
from parley.disagg.wire.role import Address
from parley.serving.served_model import Model
from parley.types import Arena, ModelInfo

log = logging.getLogger("parley.instance")


class Links:
    """``peer`` makes them. A model's pages are shared as soon as it is loaded."""

    def __init__(self, peer: Peer):
        self.peer = peer
        self._models: list[Model] = []
        self._unlinked: dict[Address, str] = {}  # the reason that was logged last

    @property
    def port(self) -> int:
        """Where hand-overs come in, 0 if they do not."""
        return self.peer.port

    async def listen(self, host: str, port: int, take: Callable[[Taker], Awaitable[None]]) -> None:
        """Let other members hand over; ``take`` is called for each hand-over. Raises OSError."""
        await self.peer.listen(host, port, take)

    def add_model(self, model: Model) -> None:
        self._models.append(model)
        model.engine.load_observers.append(partial(self._share, model))
        if model.engine.info is not None:
            self._share(model, model.engine.info)

    def remove_model(self, model: Model) -> None:
        self._models.remove(model)

    def _share(self, model: Model, info: ModelInfo) -> None:
        arena = info.arena
        if arena is None and model.engine.scripted:
            arena = Arena(0, -1, info.kv_blocks, [], "scripted")  # its pages hold nothing
        try:
            if arena is not None:
                self.peer.add(model.name, arena)
        except BadArena as error:
            log.error("Nothing can be handed over: %s", error)

    async def reach(self, address: Address) -> None:
        """Try to link with another member; log a failure unless it is the last one again. Raises OSError."""
        for model in self._models:
            try:
                (await self.peer.connect(str(address), model.name)).close()
            except LinkError as error:
                if self._unlinked.get(address) != str(error):
                    self._unlinked[address] = str(error)
                    log.info("There is no link to %s: %s", address, error)
                raise OSError(errno.ENOLINK, str(error)) from None
        self._unlinked.pop(address, None)

    async def state(self, address: Address) -> str:
        """How the link to another member is, in the words of the status; ok where hand-overs do not come in."""
        if not self.port:
            return "ok"
        try:
            await self.reach(address)
        except OSError as error:
            return f"failed : {error.errno or errno.EIO}"
        return "ok"
