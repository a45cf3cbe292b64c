"""A prefill and a decode server in one process, linked as in a cluster, driven by a minimal coordinator."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.compare_answers import same
from support.http_client import Answer, Served, request

from parley.dialects.mounts import Surface, universal
from parley.disagg.wire import handover, result_frames
from parley.disagg.wire.role import Address
from parley.engine.fake import FakeEngine
from parley.instance.member import Member
from parley.types import Arena, Settings, Work

CREATED = 1_700_000_000
CLIENT = "test"
UNIQUE = "0123456789abcdef0123456789abcdef"
HEADERS = {"content-type": "application/json"}


@dataclass
class Given:
    """An answer as the client sees it.

    ``parts``: each piece of the body with the handover record that came with it (empty for an error of the prefill
    server).
    """

    status: int
    headers: dict[str, str]
    parts: list[tuple[bytes, bytes]] = field(default_factory=list)
    error: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(data for data, _ in self.parts)


class Line:
    """A coordinator's result connection, which stores frames by request id."""

    def __init__(self, member: Member, client: str):
        self.reader = result_frames.Reader()
        self.queues: dict[str, asyncio.Queue[result_frames.Frame]] = {}
        line, first = member.node.results.client(client).attach(self)
        self.task = asyncio.create_task(line.run(first))

    def part(self, data: bytes) -> bool:
        for frame in self.reader.feed(data) + self.reader.flush():
            if frame.id:
                self.queue(frame.id.decode()).put_nowait(frame)
        return True

    async def write(self, data: bytes) -> None:
        self.part(data)

    def abort(self) -> None:
        pass

    def queue(self, id: str) -> asyncio.Queue[result_frames.Frame]:
        return self.queues.setdefault(id, asyncio.Queue())


async def join(served: Served, surfaces: Sequence[Surface] = ()) -> Member:
    """Make a server join the cluster: its peer listens for handovers."""
    member = served.parts.member
    info = served.engine.info
    assert info is not None
    if info.arena is None:
        member.peer.add(served.model.name, Arena(0, -1, info.kv_blocks, [], "fake"))
    await served.parts.listen("127.0.0.1", 0, [served.parts.app(surfaces or universal(), "127.0.0.1")])
    return member


class Pair:
    """A ``prefill`` and a ``decode`` server. With ``here``, the first one computes whole requests by itself."""

    def __init__(self, prefill: Served, decode: Served, members: tuple[Member, Member], here: bool = False):
        self.prefill, self.decode, self.members = prefill, decode, members
        self.here = here
        self.target = "self" if here else str(Address("127.0.0.1", members[1].peer.port))
        self.line = Line(members[0 if here else 1], CLIENT)
        self.numbers = itertools.count(1)

    @classmethod
    async def of(
        cls,
        serve: Callable[..., Awaitable[Served]],
        *,
        here: bool = False,
        settings: Callable[[], Settings | None] = lambda: None,
        **options: Any,
    ) -> Pair:
        prefill = await serve(role="mixed" if here else "prefill", settings=settings(), **options)
        decode = await serve(role="decode", settings=settings(), **options)
        return cls(prefill, decode, (await join(prefill), await join(decode)), here)

    async def ask(
        self,
        path: str,
        body: bytes,
        unique: str,
        headers: dict[str, str] | None = None,
        past: list[bytes] | None = None,
        stop: int = 1 << 30,
    ) -> Given:
        """Send a request as the coordinator does, and join the answer.

        ``past``: handover records of the tokens that the client already has. ``stop``: cancel after this many parts.
        """
        id = f"r{next(self.numbers)}"
        extra = {
            "req-id": id, "req-type": "prefill", "d-target": self.target, "parley-results": CLIENT,
            "parley-id": unique, "parley-created": str(CREATED),
        } | (headers or {})  # fmt: skip
        if past is not None:
            before = handover.join(past)
            extra["parley-given"], body = str(len(before)), before + body
        connection = await self.prefill.connect()
        try:
            await connection.send(request("POST", path, body, extra))
            answer = await connection.answer()
        finally:
            connection.close()
        return await self._merge(id, answer, stop)

    async def _merge(self, id: str, answer: Answer, stop: int) -> Given:
        if answer.status != 200:
            return Given(answer.status, answer.headers, [(answer.body, b"")])
        told = answer.json
        assert told["reqId"] == id, told
        output = told.get("output", "")
        data = base64.b64decode(output) if told.get("encoding") == "base64" else output.encode()
        given = Given(told.get("status", 200), dict(told.get("headers", [])))
        if told["isStream"] or told["isLastResp"]:
            given.parts.append((data, base64.b64decode(told["records"])))
        while not told["isLastResp"]:
            if len(given.parts) >= stop:
                await self.cancel(id)
                return given
            async with asyncio.timeout(20):
                frame = await self.line.queue(id).get()
            match frame.kind:
                case "head":
                    head = json.loads(frame.payload)
                    given.status, given.headers = head["status"], dict(head["headers"])
                case "data" | "lastData":
                    given.parts.append((frame.payload, base64.b64decode(frame.record or b"")))
                    if frame.kind == "lastData":
                        break
                case "error":
                    given.error = frame.payload.decode()
                    break
        self.line.queues.pop(id, None)
        return given

    async def cancel(self, id: str) -> None:
        for served in (self.prefill, self.decode):
            await served.post(f"/v2/models/{served.model.name}/stopInfer", {"id": id})

    async def idle(self) -> None:
        """Wait until both servers are idle, and check that no page, reservation or channel remains."""
        for served, member in zip((self.prefill, self.decode), self.members, strict=True):
            await served.idle()
            await served.until(lambda member=member: not member._tasks)
            if isinstance(served.engine, FakeEngine):
                await served.until(lambda served=served: not served.engine._leases and not served.engine._reservations)
            else:
                await served.engine.submit(Work("a step tells how things are", [5], max_tokens=1)).next()
                assert served.engine.stats.pinned == served.engine.stats.reserved == 0
            assert not [channel for client in member.node.results.clients.values() for channel in client.channels]

    async def close(self) -> None:
        self.line.task.cancel()
        for member in self.members:
            await member.close()


async def single(served: Served, path: str, body: bytes) -> Answer:
    return await served.call("POST", path, body, HEADERS)


async def compare(one: Served, pair: Pair, path: str, asked: bytes) -> None:
    expected, given = await single(one, path, asked), await pair.ask(path, asked, UNIQUE, HEADERS)
    kind = given.headers.get("content-type")
    assert (given.status, kind) == (expected.status, expected.headers.get("content-type")), (path, asked, given)
    assert same(given.body, expected.body), (path, asked, given.body, expected.body)
