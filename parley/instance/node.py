"""Instance state: a server's role, results and rates, and the address at which other instances reach it.

Every server has one, whatever its role; a mixed server without a coordinator never uses it.
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

MAPPED = "::ffff:"  # prefix of an IPv4 address on a socket for both IPv4 and IPv6


class Node:
    """``epoch``: random name of this process. ``models``: the served models. ``known``: hashes of recently computed
    prompts. ``transfers``: statistics of handovers."""

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
        """Measure the rates of a model's engine, and set the prefill share of its time as the role says."""
        self.models.append(model)
        model.engine.step_observers.append(partial(self.rates.step, model))
        model.engine.divide(self.role.part)

    def remove_model(self, model: Model) -> None:
        """Forget a model."""
        self.models.remove(model)

    def address(self, exchange: Exchange) -> Address:
        """Return the address at which other instances reach this one, as the sender of the request does."""
        host, port = exchange.scope.get("server") or ("127.0.0.1", 0)
        return Address(host.removeprefix(MAPPED), self._links.port or port or 0)

    def order(self, exchange: Exchange) -> Order | None:
        """Return the coordinator's command in a request's headers, or None for an ordinary request. Raises
        OrderRefused."""
        if self.role.name == "mixed" and not heads.extended(exchange.headers):
            return None
        return heads.read(exchange.headers, self.role, self.address(exchange), self.secret)

    def member(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a coordinator of the cluster sends this on its own behalf. Such requests need no API key."""
        return heads.member(headers, self.secret)

    def note(self, body: bytes, capacity: int) -> None:
        """Record the prompt hashes of a request that is computed here. ``capacity``: tokens that the cache holds."""
        if capacity != self._capacity:
            self.known, self._capacity = Known(capacity), capacity
        self.known.add(look(body).marks)

    async def close(self) -> None:
        """Stop a role change in progress, and end all results."""
        self.role.close()
        self.results.close()

    def _divide(self) -> None:
        """Apply the role's prefill share to all engines."""
        for model in self.models:
            model.engine.divide(self.role.part)

    def _left(self, before: Name) -> None:
        """End the old role. MindIE's coordinator gets results from a decode instance only, so its running requests must
        continue elsewhere."""
        if before in ("decode", "flex"):
            plain = self.results.client()
            plain.recall()
            plain.close()
