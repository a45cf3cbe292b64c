"""Forwards requests that do not generate: unchanged, to one instance or to all. Knows no API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence

import msgspec

from parley.coordinator import refusals
from parley.coordinator.proxy.downstream.client import DownstreamClient, returned_headers
from parley.coordinator.proxy.upstream.connections import InstanceConnections
from parley.coordinator.routing.instance import ClusterInstance
from parley.disagg.wire.vouched_client import USED_HEADER, read_used_tokens
from parley.web.http_client import (
    ConnectionBroken,
    HttpClientConnection,
    InstanceAnswer,
    InstanceUnreachable,
)


class AnswerPipe:
    """Streams an answer from an instance to the client, at the client's pace.

    ``may_be_refused``: an answer that the instance takes no requests now is dropped; ``is_refused`` tells so.
    """

    def __init__(self, client: DownstreamClient, connection: HttpClientConnection, *, may_be_refused: bool = False):
        self.is_refused = False
        self._may_be_refused = may_be_refused
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client, self._connection = client, connection
        self._client_task: asyncio.Task[None] | None = None
        self._is_complete = False

    def receive_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Start the client's answer."""
        self.is_refused = self._may_be_refused and status == UNREADY_STATUS
        if self.is_refused:
            return
        client_headers, received = returned_headers(headers), dict(headers)
        if USED_HEADER in received:
            self._client.used_tokens = read_used_tokens(received[USED_HEADER])
        length = received.get(b"content-length")
        if length is not None:
            client_headers.append((b"content-length", length))
        self._client.begin_answer(status, client_headers)

    def receive_data(self, data: bytes) -> None:
        """Pass a part on; pause the instance's connection while the client does not read."""
        if self.is_refused:
            return
        self._client.note_refusal(self._client.status, data)
        if self._client.meter is not None:
            self._client.meter.add_bytes(data)
        if not self._client.write_part(data) and self._client_task is None:
            self._connection.set_reading_paused(self, True)
            self._client_task = asyncio.get_running_loop().create_task(self._wait_for_client())

    def receive_end(self, error: ConnectionBroken | None) -> None:
        """Complete the answer, or report the error through ``done``."""
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error)
            self.done.exception()
        elif self.is_refused:
            self.done.set_result(None)
        elif self._client_task is not None:
            self._is_complete = True
        else:
            self._client.finish_answer()
            self.done.set_result(None)

    async def _wait_for_client(self) -> None:
        await self._client.write_stream(b"", "")
        self._client_task = None
        self._connection.set_reading_paused(self, False)
        if self._is_complete and not self.done.done():
            self._client.finish_answer()
            self.done.set_result(None)


UNREADY_STATUS = 503  # of an instance that is loading or about to stop
KEY_REFUSALS = (401, 403)  # statuses


class ClientRefused(Exception):
    """An instance refuses a client's request. ``answer``: its refusal."""

    def __init__(self, answer: InstanceAnswer):
        super().__init__()
        self.answer = answer


async def check_client(
    connections: InstanceConnections,
    client: DownstreamClient,
    instances: Sequence[ClusterInstance],
    refusing: Container[int] = KEY_REFUSALS,
) -> None:
    """Check that the first of these instances that answers lets the client in: API keys are known to instances only.

    ``refusing``: the statuses of its answers that refuse the client. Raises ClientRefused, ParleyError.
    """
    for instance in instances:
        try:
            answer = await connections.http_client(instance).request_answer(
                b"GET", client.request_target, forwarded_headers(connections, client, instance)
            )
        except (InstanceUnreachable, ConnectionBroken):
            continue
        if answer.status in refusing:
            raise ClientRefused(answer)
        return
    raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)


async def forward_to_one(
    connections: InstanceConnections, client: DownstreamClient, instances: Sequence[ClusterInstance], body: bytes
) -> None:
    """Send the client the answer of the first of these instances that gives one, and takes requests.

    Raises ParleyError before anything was sent; after that the client's connection is closed.
    """
    broke = takes_none = False
    for place, instance in enumerate(instances, 1):
        try:
            if await _forward_once(connections, client, instance, body, may_be_refused=place < len(instances)):
                return
            takes_none = True
        except InstanceUnreachable:
            continue
        except ConnectionBroken:
            broke = True
    if broke:
        raise refusals.coordinator_error(500, refusals.TEXTS.send_failed, sentence=refusals.NO_ANSWER)
    raise refusals.coordinator_error(
        503, refusals.TEXTS.cluster_not_ready if takes_none else refusals.TEXTS.send_failed
    )


async def _forward_once(
    connections: InstanceConnections,
    client: DownstreamClient,
    instance: ClusterInstance,
    body: bytes,
    *,
    may_be_refused: bool,
) -> bool:
    """Send the client an instance's answer; False if the instance takes no requests now. Raises InstanceUnreachable,
    ConnectionBroken if no answer came."""
    http_client = connections.http_client(instance)
    method, headers = client.scope["method"].encode(), forwarded_headers(connections, client, instance)
    parts = http_client.format_request(method, client.request_target, headers, (body,) if body else ())
    while True:
        idle_connection = http_client.take_idle()
        connection = idle_connection or await http_client.open_connection()
        pipe = AnswerPipe(client, connection, may_be_refused=may_be_refused)
        connection.send_request(parts, pipe, bodiless=method == b"HEAD")
        try:
            await pipe.done
            return not pipe.is_refused
        except ConnectionBroken:
            if client.status:
                client.abort_connection()
                return True
            if idle_connection is None:
                raise
        finally:
            connection.abort_silently(pipe)


async def forward_to_all(
    connections: InstanceConnections, client: DownstreamClient, instances: list[ClusterInstance], body: bytes
) -> None:
    """Send the request to all instances, and the client the first refusal, or else the first answer.

    Raises ParleyError if an instance does not answer.
    """
    answers = await collect_answers(connections, client, instances, body)
    if len(answers) < len(instances):
        raise refusals.coordinator_error(500, refusals.TEXTS.send_failed)
    client.send_complete(*next((answer for answer in answers if answer.status >= 400), answers[0]))


async def ask_able(
    connections: InstanceConnections, client: DownstreamClient, instances: list[ClusterInstance], body: bytes
) -> InstanceAnswer:
    """Send the request to all instances, and return the first success, or else the first answer. Raises
    ParleyError."""
    answers = await collect_answers(connections, client, instances, body)
    return next((answer for answer in answers if answer.status < 400), answers[0])


async def forward_and_merge(
    connections: InstanceConnections,
    client: DownstreamClient,
    instances: list[ClusterInstance],
    body: bytes,
    merge: Callable[[Iterable[bytes]], bytes],
    query: bytes | None = None,
) -> None:
    """Send the client the merged answers of all instances, or the first error if none succeeds. ``query``: asks
    instances for more than the client's own. Raises ParleyError, and what ``merge`` raises."""
    answers = await collect_answers(connections, client, instances, body, query)
    pages = [answer for answer in answers if answer.status == 200]
    try:
        client.send_complete(*(pages[0]._replace(body=merge(page.body for page in pages)) if pages else answers[0]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise refusals.coordinator_error(500, refusals.TEXTS.send_failed) from None


async def collect_answers(
    connections: InstanceConnections,
    client: DownstreamClient,
    instances: list[ClusterInstance],
    body: bytes,
    query: bytes | None = None,
) -> list[InstanceAnswer]:
    """Return the answers of the instances that can be reached, at least one. ``query``: in place of the client's.
    Raises ParleyError."""
    method, parts = client.scope["method"].encode(), (body,) if body else ()
    target = client.request_target if query is None else client.request_target.partition(b"?")[0] + b"?" + query
    requests = (
        connections.http_client(instance).request_answer(
            method, target, forwarded_headers(connections, client, instance), parts
        )
        for instance in instances
    )
    results = await asyncio.gather(*requests, return_exceptions=True)
    answers = [result for result in results if isinstance(result, InstanceAnswer)]
    if not answers:
        raise refusals.coordinator_error(500, refusals.TEXTS.send_failed)
    return answers


def forwarded_headers(
    connections: InstanceConnections, client: DownstreamClient, instance: ClusterInstance
) -> list[tuple[bytes, bytes]]:
    """Return the headers that an instance gets with a client's request. Only parley instances know this coordinator
    and trust its statements about the client."""
    headers = client.forwarded_headers()
    if not instance.native:
        return headers
    return [*headers, *connections.forwarding_headers, *client.vouched_headers]
