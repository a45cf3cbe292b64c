"""What a server has as an instance of a cluster: role, results, rates, and the address at which others reach it.

One for each server, whatever its role; a mixed one that no coordinator speaks to never uses it. Who answers a request
that others go on with, or takes one over, is told to it by those who can.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from parley.instance import heads
from parley.instance.heads import Order
from parley.instance.prefix import Known, look
from parley.instance.rates import Rates
from parley.instance.results import Results
from parley.instance.role import Address, Name, Role

if TYPE_CHECKING:
    from parley.dialects.dialect import Route
    from parley.server.model import Model
    from parley.server.respond import Exchange
    from parley.server.service import Service

MAPPED = "::ffff:"  # before an IPv4 address, where a socket takes both kinds


class Node:
    """``epoch``: of this process. ``begin``: answers a request of a coordinator. ``reach``: tries a peer, and raises
    OSError if it cannot be handed over to; None: hand-overs are not listened for. ``arrive``: is told of a model that
    is served from now on. ``port``: where hand-overs come in, 0 if they do not. ``known``: hashes of the prompts that
    were computed lately. ``transfers``: what is counted of hand-overs."""

    def __init__(self, service: Service):
        options = service.options
        self.epoch = secrets.token_hex(8)
        self.secret = options.cluster_secret
        self.results = Results()
        self.rates = Rates()
        self.known, self._capacity = Known(0), 0
        self.transfers: dict[str, float] = {}
        self.port = 0
        self.begin: Callable[[Service, Route, Exchange, Order], Awaitable[None]] | None = None
        self.reach: Callable[[Address], Awaitable[None]] | None = None
        self.arrive: Callable[[Model], None] = lambda model: None
        self.role = Role(
            options.role,
            options.p_percentage,
            link=self._link,
            busy=lambda: bool(service.open),
            left=self._left,
            taken=lambda: self._divide(service),
        )

    def follow(self, model: Model) -> None:
        """Measure what a model's engine does, and divide its time as the role says."""
        model.engine.step_observers.append(partial(self.rates.step, model))
        model.engine.divide(self.role.part)
        self.arrive(model)

    def address(self, exchange: Exchange) -> Address:
        """Where other instances reach this one, as who sent the request does."""
        host, port = exchange.scope.get("server") or ("127.0.0.1", 0)
        return Address(host.removeprefix(MAPPED), self.port or port or 0)

    def order(self, exchange: Exchange) -> Order | None:
        """What a coordinator says of a request; None: it is to be answered as any other. Raises heads.Refused."""
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

    async def _link(self, address: Address) -> str:
        """How a link is, in the words of the status."""
        if self.reach is None:
            return "ok"
        try:
            await self.reach(address)
        except OSError as error:
            return f"failed : {error.errno or errno.EIO}"
        return "ok"

    def _divide(self, service: Service) -> None:
        """Another part of the engines' time is for prompts."""
        for model in service.models:
            model.engine.divide(self.role.part)

    def _left(self, before: Name) -> None:
        """The role has ended. A plain coordinator gets results from a decode instance only: what still runs for it has
        to go on elsewhere."""
        if before in ("decode", "flex"):
            plain = self.results.client()
            plain.recall()
            plain.close()
