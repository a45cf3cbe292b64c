"""Links to the other members of a cluster: whether they can be reached, and the models whose pages links carry."""

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
    """The links that ``peer`` makes. A model's pages are shared as soon as it is loaded."""

    def __init__(self, peer: Peer):
        self.peer = peer
        self._models: list[Model] = []
        self._unlinked: dict[Address, str] = {}  # last logged error of each address

    @property
    def port(self) -> int:
        """The port for incoming handovers, or 0 if they are disabled."""
        return self.peer.port

    async def listen(self, host: str, port: int, take: Callable[[Taker], Awaitable[None]]) -> None:
        """Accept handovers from other members; ``take`` is called for each. Raises OSError."""
        await self.peer.listen(host, port, take)

    def add_model(self, model: Model) -> None:
        """Share the pages of a model once it is loaded."""
        self._models.append(model)
        model.engine.load_observers.append(partial(self._share, model))
        if model.engine.info is not None:
            self._share(model, model.engine.info)

    def remove_model(self, model: Model) -> None:
        """Forget a model."""
        self._models.remove(model)

    def _share(self, model: Model, info: ModelInfo) -> None:
        arena = info.arena
        if arena is None and model.engine.scripted:
            arena = Arena(0, -1, info.kv_blocks, [], "scripted")  # pages without content
        try:
            if arena is not None:
                self.peer.add(model.name, arena)
        except BadArena as error:
            log.error("Handovers are not possible: %s", error)

    async def reach(self, address: Address) -> None:
        """Try to link with another member. A repeated failure is logged once. Raises OSError."""
        for model in self._models:
            try:
                (await self.peer.connect(str(address), model.name)).close()
            except LinkError as error:
                if self._unlinked.get(address) != str(error):
                    self._unlinked[address] = str(error)
                    log.info("Cannot link to %s: %s", address, error)
                raise OSError(errno.ENOLINK, str(error)) from None
        self._unlinked.pop(address, None)

    async def state(self, address: Address) -> str:
        """Return the state of the link to another member as the status shows it; ok if handovers are disabled."""
        if not self.port:
            return "ok"
        try:
            await self.reach(address)
        except OSError as error:
            return f"failed : {error.errno or errno.EIO}"
        return "ok"
