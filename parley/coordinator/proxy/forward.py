"""Forwards requests that do not generate: unchanged, to one instance or to all. Knows no API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec

from parley.coordinator import refusals
from parley.coordinator.proxy.client import Caller, returned
from parley.coordinator.proxy.connections import Connections
from parley.coordinator.proxy.http_client import Broken, Connection, Response, Unreachable
from parley.coordinator.routing.instance import Instance


class Pipe:
    """Streams an answer from an instance to the client, at the client's pace."""

    def __init__(self, caller: Caller, connection: Connection):
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._caller, self._connection = caller, connection
        self._waiting: asyncio.Task[None] | None = None
        self._over = False

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Start the client's answer."""
        kept = returned(headers)
        length = dict(headers).get(b"content-length")
        if length is not None:
            kept.append((b"content-length", length))
        self._caller.begin(status, kept)

    def data(self, data: bytes) -> None:
        """Pass a part on; pause the instance's connection while the client does not read."""
        if not self._caller.part(data) and self._waiting is None:
            self._connection.pause(True)
            self._waiting = asyncio.get_running_loop().create_task(self._wait())

    def end(self, error: Broken | None) -> None:
        """Complete the answer, or report the error through ``done``."""
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error)
            self.done.exception()
        elif self._waiting is not None:
            self._over = True
        else:
            self._caller.finish()
            self.done.set_result(None)

    async def _wait(self) -> None:
        await self._caller.write(b"", "")
        self._waiting = None
        self._connection.pause(False)
        if self._over and not self.done.done():
            self._caller.finish()
            self.done.set_result(None)


async def refusal(connections: Connections, caller: Caller, instance: Instance) -> Response | None:
    """Return an instance's refusal (401 or 403) of the client; None if the client is let in.

    API keys are known to instances only. Raises ParleyError.
    """
    try:
        answer = await connections.upstream(instance).ask(b"GET", caller.target, caller.forwarded())
    except (Unreachable, Broken):
        raise refusals.refusal(503, refusals.NOT_READY) from None
    return answer if answer.status in (401, 403) else None


async def one(connections: Connections, caller: Caller, instances: Sequence[Instance], body: bytes) -> None:
    """Send the client the answer of the first of these instances that gives one.

    Raises ParleyError before anything was sent; after that the client's connection is closed.
    """
    for instance in instances:
        if await _answered(connections, caller, instance, body):
            return
    raise refusals.refusal(500, refusals.UNSENT)


async def _answered(connections: Connections, caller: Caller, instance: Instance, body: bytes) -> bool:
    """Send the client an instance's answer; False if none came."""
    upstream = connections.upstream(instance)
    method, headers = caller.scope["method"].encode(), caller.forwarded()
    parts = upstream.request(method, caller.target, headers, (body,) if body else ())
    while True:
        kept = upstream.idle()
        try:
            connection = kept or await upstream.connect()
        except Unreachable:
            return False
        pipe = Pipe(caller, connection)
        connection.send(parts, pipe, bodiless=method == b"HEAD")
        try:
            await pipe.done
            return True
        except Broken:
            if caller.status:
                caller.abort()
                return True
            if kept is None:
                return False
        finally:
            if not pipe.done.done() or pipe.done.cancelled():
                connection.abort()


async def every(connections: Connections, caller: Caller, instances: list[Instance], body: bytes) -> None:
    """Send the request to all instances, and the client the first refusal, or else the first answer.

    Raises ParleyError if an instance does not answer.
    """
    told = await _asked(connections, caller, instances, body)
    if len(told) < len(instances):
        raise refusals.refusal(500, refusals.UNSENT)
    caller.whole(*next((each for each in told if each.status >= 400), told[0]))


async def some(connections: Connections, caller: Caller, instances: list[Instance], body: bytes) -> None:
    """Send the request to all instances, and the client the first success, or else the first answer. Raises
    ParleyError."""
    told = await _asked(connections, caller, instances, body)
    caller.whole(*next((each for each in told if each.status < 400), told[0]))


async def joined(
    connections: Connections,
    caller: Caller,
    instances: list[Instance],
    body: bytes,
    join: Callable[[Iterable[bytes]], bytes],
) -> None:
    """Send the client the merged answers of all instances, or the first error if none succeeds. Raises ParleyError."""
    told = await _asked(connections, caller, instances, body)
    pages = [each for each in told if each.status == 200]
    try:
        caller.whole(*(pages[0]._replace(body=join(each.body for each in pages)) if pages else told[0]))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise refusals.refusal(500, refusals.UNSENT) from None


async def _asked(connections: Connections, caller: Caller, instances: list[Instance], body: bytes) -> list[Response]:
    """Return the answers of the instances that can be reached, at least one. Raises ParleyError."""
    method, headers = caller.scope["method"].encode(), caller.forwarded()
    asked = (
        connections.upstream(each).ask(method, caller.target, headers, (body,) if body else ()) for each in instances
    )
    told = await asyncio.gather(*asked, return_exceptions=True)
    answers = [each for each in told if isinstance(each, Response)]
    if not answers:
        raise refusals.refusal(500, refusals.UNSENT)
    return answers
