"""What a server has as an instance of a cluster: role, results, rates, and the address at which others reach it.

One for each server, whatever its role; a mixed one that no coordinator speaks to never uses it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial

from parley.disagg.wire import headers as heads
from parley.disagg.wire.headers import Order
from parley.disagg.wire.prompt_hash import Known, look
from parley.disagg.wire.role import Address, Name, Role
from parley.instance.links import Links
from parley.instance.rates import Rates
from parley.instance.results import Results
from parley.serving.options import ServerOptions
from parley.serving.served_model import Model
from parley.web.exchange import Exchange

MAPPED = "::ffff:"  # before an IPv4 address, where a socket takes both kinds


class Node:
    """``epoch``: of this process. ``models``: those that are served. ``known``: hashes of the prompts that were
    computed lately. ``transfers``: what is counted of hand-overs."""

    def __init__(self, options: ServerOptions, links: Links):
        self.epoch = secrets.token_hex(8)
        self.secret = options.cluster_secret
        self.models: list[Model] = []
        self.results = Results()
        self.rates = Rates()
        self.known, self._capacity = Known(0), 0
        self.transfers: dict[str, float] = {}
        self._links = links
        self.role = Role(
            options.role,
            options.p_percentage,
            link=links.state,
            busy=lambda: any(model.open for model in self.models),
            left=self._left,
            taken=self._divide,
        )

    def add_model(self, model: Model) -> None:
        """Measure the work of its engine, and divide the engine's time as the role says."""
        self.models.append(model)
        model.engine.step_observers.append(partial(self.rates.step, model))
        model.engine.divide(self.role.part)

    def remove_model(self, model: Model) -> None:
        self.models.remove(model)

    def address(self, exchange: Exchange) -> Address:
        """Where other instances reach this one, as who sent the request does."""
        host, port = exchange.scope.get("server") or ("127.0.0.1", 0)
        return Address(host.removeprefix(MAPPED), self._links.port or port or 0)

    def order(self, exchange: Exchange) -> Order | None:
        """What a coordinator says of a request; None: it is to be answered as any other. Raises OrderRefused."""
        if self.role.name == "mixed" and not heads.extended(exchange.headers):
            return None
        return heads.read(exchange.headers, self.role, self.address(exchange), self.secret)

    def member(self, headers: Mapping[bytes, bytes]) -> bool:
        """Does a coordinator of the cluster speak for itself? Then it needs no key."""
        return heads.member(headers, self.secret)

    def note(self, body: bytes, capacity: int) -> None:
        """A prompt is computed here, beside as many tokens as the cache holds."""
        if capacity != self._capacity:
            self.known, self._capacity = Known(capacity), capacity
        self.known.add(look(body).marks)

    async def close(self) -> None:
        self.role.close()
        self.results.close()

    def _divide(self) -> None:
        """Another part of the engines' time is for prompts."""
        for model in self.models:
            model.engine.divide(self.role.part)

    def _left(self, before: Name) -> None:
        """The role has ended. A plain coordinator gets results from a decode instance only: what still runs for it has
        to go on elsewhere."""
        if before in ("decode", "flex"):
            plain = self.results.client()
            plain.recall()
            plain.close()
