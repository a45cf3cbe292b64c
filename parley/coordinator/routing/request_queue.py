"""The requests that wait for an instance, and the turns that tenants take.

Each tenant has a line of its own, in the configured order. The next request is the first one of the tenant that has
received the least service. Service is counted in tokens: those of a prompt when it is placed, those of the answer at
its end. A tenant gets no credit for time without waiting requests: its count is raised to that of the last tenant whose
turn it was (as in ``core.wait_queue``). With one tenant that is the configured order.

A key becomes a tenant of its own once an instance has answered a request with it. Until then its requests share one
line with those of all other unknown keys: where only instances check keys, any client can make them up.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from parley.coordinator.routing.policies import SchedulingRequest

P = TypeVar("P")

QueuePlace = tuple[int, int]
QUEUE_ORDERS: dict[int, Callable[[SchedulingRequest], int]] = {
    1: lambda request: 0,
    2: lambda request: request.prompt_tokens,
    3: lambda request: -request.prompt_tokens,
}


class QueuedRequest(Generic[P]):
    """A queued request. ``tenant``: the owner of its line; ``place``: its sort key there, ordered by arrival among
    equal requests; ``future``: its placement.
    """

    __slots__ = ("future", "place", "request", "tenant")

    def __init__(self, request: SchedulingRequest, tenant: str, place: QueuePlace, future: asyncio.Future[P]):
        self.request, self.tenant, self.place, self.future = request, tenant, place, future


def _queue_place(queued: QueuedRequest[P]) -> QueuePlace:
    return queued.place


class RequestQueue(Generic[P]):
    """The waiting requests. ``capacity``: how many may wait; more are accepted from tenants below their share.
    ``reordering_type``: the order of a line, as in the configuration."""

    def __init__(self, capacity: int, reordering_type: int):
        self._capacity = capacity
        self._order = QUEUE_ORDERS[reordering_type]
        self._lines: dict[str, list[QueuedRequest[P]]] = {}  # by tenant; none is empty
        self._service: dict[str, int] = {}  # tokens by tenant
        self._virtual_time = 0  # service of the last tenant whose turn it was, at that time
        self._accepted_tenants: set[str] = set()
        self._arrivals = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def accept_tenant(self, tenant: str) -> None:
        """Give a tenant a line of its own from now on: an instance has accepted its key."""
        self._accepted_tenants.add(tenant)

    def line_of(self, tenant: str) -> str:
        """Return the tenant that requests of ``tenant`` queue as, and are charged to."""
        return tenant if tenant in self._accepted_tenants else ""

    @property
    def tenant_count(self) -> int:
        """Number of tenants with waiting requests."""
        return len(self._lines)

    def is_full_for(self, tenant: str) -> bool:
        """Whether no more requests of a tenant may wait: the queue is full, and it holds its share."""
        line = self.line_of(tenant)
        share = self._capacity / len(self._lines.keys() | {line})
        return self._size >= self._capacity and len(self._lines.get(line, ())) >= share

    def add_request(self, request: SchedulingRequest) -> QueuedRequest[P]:
        """Queue a request."""
        self._arrivals += 1
        tenant = self.line_of(request.tenant)
        future: asyncio.Future[P] = asyncio.get_running_loop().create_future()
        queued = QueuedRequest(request, tenant, (self._order(request), self._arrivals), future)
        if tenant not in self._lines:
            self._service[tenant] = max(self._service.get(tenant, 0), self._virtual_time)
        insort(self._lines.setdefault(tenant, []), queued, key=_queue_place)
        self._size += 1
        return queued

    def remove_request(self, queued: QueuedRequest[P]) -> None:
        """Remove a request. One that was removed before is ignored."""
        line = self._lines.get(queued.tenant, [])
        index = bisect_left(line, queued.place, key=_queue_place)
        if index < len(line) and line[index] is queued:
            del line[index]
            self._size -= 1
            if not line:
                del self._lines[queued.tenant]

    def take_turns(self) -> Iterator[QueuedRequest[P]]:
        """Yield every waiting request once, in the order of service, which may change in between."""
        lines = {tenant: iter(tuple(line)) for tenant, line in self._lines.items()}
        first_requests = {tenant: next(line) for tenant, line in lines.items()}
        while first_requests:
            tenant = min(first_requests, key=lambda name: (self._service[name], first_requests[name].place))
            yield first_requests[tenant]
            next_request = next(lines[tenant], None)
            if next_request is None:
                del first_requests[tenant]
            else:
                first_requests[tenant] = next_request

    def start_service(self, tenant: str, tokens: int) -> None:
        """Count the prompt of a request that has been placed: it was its tenant's turn."""
        line = self.line_of(tenant)
        self._virtual_time = max(self._virtual_time, self._service.get(line, 0))
        self.record_service(tenant, tokens)

    def record_service(self, tenant: str, tokens: int) -> None:
        """Count tokens as service of a tenant."""
        line = self.line_of(tenant)
        self._service[line] = self._service.get(line, 0) + tokens
