"""The load of the inference port: its open requests, the bytes of their bodies, and whether it accepts more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from parley.coordinator import refusals
from parley.coordinator.routing.instance_scheduler import InstanceScheduler


class FrontLoad:
    """The load of the inference port.

    * ``memory_limit``: the most bytes of bodies that are held at a time.
    * ``open_requests``: the number of requests at the port that have not ended.
    * ``body_bytes``: the bytes of their bodies.
    * ``stopping``: new requests are refused.
    """

    def __init__(self, scheduler: InstanceScheduler, memory_limit: int):
        self._scheduler = scheduler
        self.memory_limit = memory_limit
        self.open_requests = 0
        self.body_bytes = 0
        self.stopping = False

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within this context, do not count a request: it waits for other requests, which are counted themselves."""
        self.open_requests -= 1
        try:
            yield
        finally:
            self.open_requests += 1

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served now, as far as known."""
        return not self.stopping and self._scheduler.can_serve()

    def add_body_bytes(self, count: int) -> None:
        """Count bytes of a body that have arrived. Raises ParleyError if they are too many."""
        self.body_bytes += count
        if self.body_bytes > self.memory_limit:
            raise refusals.coordinator_error(429, refusals.TEXTS.memory_exceeded, 1.0)

    async def becomes_ready(self) -> bool:
        """Whether requests can be served now; if it seems not so, the instances are asked again."""
        return not self.stopping and await self._scheduler.can_serve_now()

    async def check_room(self, announced: int, body_limit: int, *, always_ask_ready: bool) -> None:
        """Raise ParleyError if no further generating request is accepted.

        ``announced``: the announced bytes of its body; ``body_limit``: the most that a body may have.
        ``always_ask_ready``: also refuse the request if the only reason is that no request can be served.
        """
        # A body above its own limit gets 413 instead.
        memory_full = self.body_bytes + announced > self.memory_limit and announced <= body_limit
        too_many = self.open_requests > self._scheduler.options.max_requests
        # "Not ready" takes precedence over other errors. If it is the only one, the scheduler reports it.
        if (memory_full or too_many or self.stopping or always_ask_ready) and not await self.becomes_ready():
            raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
        if memory_full or too_many:
            raise refusals.coordinator_error(
                429, refusals.TEXTS.too_many_requests if too_many else refusals.TEXTS.memory_exceeded, 1.0
            )

    def check_memory(self, added: int) -> None:
        """Raise ParleyError if ``added`` more bytes exceed the limit."""
        if self.body_bytes + added > self.memory_limit:
            raise refusals.coordinator_error(429, refusals.TEXTS.memory_exceeded, 1.0)
