"""Links to the other members of a cluster: whether they can be reached, and the models whose pages links carry."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from parley.disagg.kv.arena import BadArena
from parley.disagg.kv.peer import KVPeer
from parley.disagg.kv.receiver import KVReceiver
from parley.disagg.kv.transport import LinkError
from parley.disagg.wire.role import InstanceAddress
from parley.engine.page_transfer import find_page_transfer
from parley.serving.served_model import ServedModel
from parley.types import Arena, ModelInfo

log = logging.getLogger("parley.instance")


class PeerLinks:
    """The links that ``peer`` makes. A model's pages are shared as soon as it is loaded."""

    def __init__(self, peer: KVPeer):
        self.peer = peer
        self._models: list[ServedModel] = []
        self._logged_errors: dict[InstanceAddress, str] = {}  # last logged error of each address

    @property
    def handover_port(self) -> int:
        """The port for incoming handovers, or 0 if they are disabled."""
        return self.peer.port

    async def accept_handovers(
        self, host: str, port: int, take_handover: Callable[[KVReceiver], Awaitable[None]]
    ) -> None:
        """Accept handovers from other members; ``take_handover`` is called for each. Raises OSError."""
        await self.peer.listen(host, port, take_handover)

    def add_model(self, model: ServedModel) -> None:
        """Share the pages of a model once it is loaded."""
        self._models.append(model)
        model.engine.load_observers.append(partial(self._share_pages, model))
        if model.engine.info is not None:
            self._share_pages(model, model.engine.info)

    def remove_model(self, model: ServedModel) -> None:
        """Forget a model."""
        self._models.remove(model)

    def _share_pages(self, model: ServedModel, info: ModelInfo) -> None:
        if find_page_transfer(model.engine) is None:
            return
        arena = info.arena
        if arena is None and model.engine.scripted:
            arena = Arena(0, -1, info.kv_pages, [], "scripted")  # pages without content
        try:
            if arena is not None:
                self.peer.add_arena(model.name, arena)
        except BadArena as error:
            log.error("Handovers are not possible: %s", error)

    async def reach_member(self, address: InstanceAddress) -> None:
        """Try to link with another member. A repeated failure is logged once. Raises OSError."""
        for model in self._models:
            try:
                (await self.peer.open_handover(str(address), model.name)).close_handover()
            except LinkError as error:
                if self._logged_errors.get(address) != str(error):
                    self._logged_errors[address] = str(error)
                    log.info("Cannot link to %s: %s", address, error)
                raise OSError(errno.ENOLINK, str(error)) from None
        self._logged_errors.pop(address, None)

    async def link_state(self, address: InstanceAddress) -> str:
        """Return the state of the link to another member as the status shows it; ok if handovers are disabled."""
        if not self.handover_port:
            return "ok"
        try:
            await self.reach_member(address)
        except OSError as error:
            return f"failed : {error.errno or errno.EIO}"
        return "ok"
