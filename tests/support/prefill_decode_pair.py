"""A prefill and a decode server in one process, linked as in a cluster, driven by a minimal coordinator."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.compare_answers import same_answer
from support.http_client import Answer, RunningServer, build_request

from parley.dialects.mounts import ApiMount, universal_mounts
from parley.disagg.wire import handover, result_frames
from parley.disagg.wire.role import InstanceAddress
from parley.engine.scripted_engine import ScriptedEngine
from parley.instance.cluster_member import ClusterMember
from parley.types import Arena, EngineRequest, ParleySettings

CREATED = 1_700_000_000
COORDINATOR_NAME = "test"
REQUEST_UUID = "0123456789abcdef0123456789abcdef"
HEADERS = {"content-type": "application/json"}


@dataclass
class ClientAnswer:
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


class ResultConnection:
    """A coordinator's result connection, which stores frames by request id."""

    def __init__(self, member: ClusterMember, client: str):
        self.reader = result_frames.FrameReader()
        self.queues: dict[str, asyncio.Queue[result_frames.ResultFrame]] = {}
        line, first = member.instance_state.results.get_client(client).attach_connection(self)
        self.task = asyncio.create_task(line.serve_connection(first))

    def write_part(self, data: bytes) -> bool:
        for frame in self.reader.feed_bytes(data) + self.reader.flush_held():
            if frame.request_id:
                self.queue(frame.request_id.decode()).put_nowait(frame)
        return True

    async def write_stream(self, data: bytes) -> None:
        self.write_part(data)

    def abort_connection(self) -> None:
        pass

    def queue(self, request_id: str) -> asyncio.Queue[result_frames.ResultFrame]:
        return self.queues.setdefault(request_id, asyncio.Queue())


async def join_cluster(server: RunningServer, surfaces: Sequence[ApiMount] = ()) -> ClusterMember:
    """Make a server join the cluster: its peer listens for handovers."""
    member = server.parts.member
    info = server.engine.info
    assert info is not None
    if info.arena is None:
        member.peer.add_arena(server.model.name, Arena(0, -1, info.kv_pages, [], "fake"))
    await server.parts.listen_for_handovers(
        "127.0.0.1", 0, [server.parts.make_port_app(surfaces or universal_mounts(), "127.0.0.1")]
    )
    return member


class ServerPair:
    """A ``prefill`` and a ``decode`` server. With ``here``, the first one computes whole requests by itself."""

    def __init__(
        self,
        prefill: RunningServer,
        decode: RunningServer,
        members: tuple[ClusterMember, ClusterMember],
        here: bool = False,
    ):
        self.prefill, self.decode, self.members = prefill, decode, members
        self.here = here
        self.target = "self" if here else str(InstanceAddress("127.0.0.1", members[1].peer.port))
        self.line = ResultConnection(members[0 if here else 1], COORDINATOR_NAME)
        self.numbers = itertools.count(1)

    @classmethod
    async def of(
        cls,
        serve: Callable[..., Awaitable[RunningServer]],
        *,
        here: bool = False,
        settings: Callable[[], ParleySettings | None] = lambda: None,
        **options: Any,
    ) -> ServerPair:
        prefill = await serve(role="mixed" if here else "prefill", settings=settings(), **options)
        decode = await serve(role="decode", settings=settings(), **options)
        return cls(prefill, decode, (await join_cluster(prefill), await join_cluster(decode)), here)

    async def ask(
        self,
        path: str,
        body: bytes,
        unique: str,
        headers: dict[str, str] | None = None,
        past: list[bytes] | None = None,
        stop: int = 1 << 30,
    ) -> ClientAnswer:
        """Send a request as the coordinator does, and join the answer.

        ``past``: handover records of the tokens that the client already has. ``stop``: cancel after this many parts.
        """
        request_id = f"r{next(self.numbers)}"
        extra = {
            "req-id": request_id, "req-type": "prefill", "d-target": self.target, "parley-results": COORDINATOR_NAME,
            "parley-id": unique, "parley-created": str(CREATED),
        } | (headers or {})  # fmt: skip
        if past is not None:
            prior_records = handover.join_records(past)
            extra["parley-given"], body = str(len(prior_records)), prior_records + body
        connection = await self.prefill.connect()
        try:
            await connection.send(build_request("POST", path, body, extra))
            answer = await connection.answer()
        finally:
            connection.close()
        return await self._merge(request_id, answer, stop)

    async def _merge(self, request_id: str, answer: Answer, stop: int) -> ClientAnswer:
        if answer.status != 200:
            return ClientAnswer(answer.status, answer.headers, [(answer.body, b"")])
        result = answer.json
        assert result["reqId"] == request_id, result
        output = result.get("output", "")
        data = base64.b64decode(output) if result.get("encoding") == "base64" else output.encode()
        merged = ClientAnswer(result.get("status", 200), dict(result.get("headers", [])))
        if result["isStream"] or result["isLastResp"]:
            merged.parts.append((data, base64.b64decode(result["records"])))
        while not result["isLastResp"]:
            if len(merged.parts) >= stop:
                await self.cancel(request_id)
                return merged
            async with asyncio.timeout(20):
                frame = await self.line.queue(request_id).get()
            match frame.kind:
                case "head":
                    head = json.loads(frame.payload)
                    merged.status, merged.headers = head["status"], dict(head["headers"])
                case "data" | "lastData":
                    merged.parts.append((frame.payload, base64.b64decode(frame.record or b"")))
                    if frame.kind == "lastData":
                        break
                case "error":
                    merged.error = frame.payload.decode()
                    break
        self.line.queues.pop(request_id, None)
        return merged

    async def cancel(self, request_id: str) -> None:
        for server in (self.prefill, self.decode):
            await server.post(f"/v2/models/{server.model.name}/stopInfer", {"id": request_id})

    async def wait_until_idle(self) -> None:
        """Wait until both servers are idle, and check that no page, reservation or channel remains."""
        for server, member in zip((self.prefill, self.decode), self.members, strict=True):
            await server.wait_until_idle()
            await server.until(lambda member=member: not member.task_count)
            if isinstance(server.engine, ScriptedEngine):
                await server.pages_returned()
            else:
                await server.engine.submit_request(
                    EngineRequest("a step tells how things are", [5], max_tokens=1)
                ).next_outputs()
                assert server.engine.stats.pinned_pages == server.engine.stats.reserved_pages == 0
            assert not [
                channel for client in member.instance_state.results.clients.values() for channel in client.channels
            ]

    async def close(self) -> None:
        self.line.task.cancel()
        for member in self.members:
            await member.close_member()


async def post_json(server: RunningServer, path: str, body: bytes) -> Answer:
    return await server.call("POST", path, body, HEADERS)


async def assert_same_answer(single_server: RunningServer, pair: ServerPair, path: str, body: bytes) -> None:
    expected, actual = await post_json(single_server, path, body), await pair.ask(path, body, REQUEST_UUID, HEADERS)
    kind = actual.headers.get("content-type")
    assert (actual.status, kind) == (expected.status, expected.headers.get("content-type")), (path, body, actual)
    assert same_answer(actual.body, expected.body), (path, body, actual.body, expected.body)
