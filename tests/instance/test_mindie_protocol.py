"""The MindIE protocol: prefill answers, result frames byte by byte, requests that move on."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.compare_answers import same_answer
from support.http_client import Connection, RunningServer, build_request
from support.prefill_decode_pair import join_cluster

from parley.dialects import mindie
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.pd.recompute import ORIGIN_MEMBER
from parley.dialects.mounts import DEDICATED_APIS, SERVER_MOUNT, ApiMount, dedicated_mounts
from parley.disagg.wire import role
from parley.disagg.wire.result_frames import FrameReader, ResultFrame
from parley.disagg.wire.role import InstanceAddress

CHAT = "/v1/chat/completions"
CHAT_BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello there"}],
    "max_tokens": 12,
}
ROUTE_BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, CHAT_BODY),
    ("/v1/completions", {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 9, "echo": True}),
    ("/generate", {"prompt": "Once upon a time", "max_tokens": 9}),
    ("/generate_stream", {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 9, "seed": 7}}),
    ("/infer", {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 9, "seed": 7}}),
    ("/v2/models/tiny/generate_stream", {"text_input": "Once upon a time", "parameters": {"max_new_tokens": 9}}),
]


class PlainCoordinator:
    """A MindIE coordinator that knows one prefill instance and some decode instances."""

    def __init__(self, prefill: RunningServer):
        self.prefill = prefill
        self.frames: list[ResultFrame] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.frame_arrived = asyncio.Event()
        self.raw = b""

    async def follow(self, server: RunningServer) -> None:
        connection = await server.connect()
        await connection.send(build_request("GET", "/dresult"))
        assert (await connection.head())[0] == 200
        self.tasks.append(asyncio.create_task(self._read(connection)))

    async def _read(self, connection: Connection) -> None:
        reader = FrameReader()
        while size := int(await connection.reader.readline(), 16):
            data = (await connection.reader.readexactly(size + 2))[:-2]
            self.raw += data
            self.frames += reader.feed_bytes(data) + reader.flush_held()
            self.frame_arrived.set()

    async def next_frame(self) -> ResultFrame:
        while not self.frames:
            self.frame_arrived.clear()
            async with asyncio.timeout(20):
                await self.frame_arrived.wait()
        return self.frames.pop(0)

    async def send_prefill(
        self, path: str, body: Any, target: InstanceAddress, request_id: str = "77", **extra_headers: str
    ) -> dict[str, Any]:
        headers = {"req-id": request_id, "req-type": "prefill", "d-target": str(target)} | extra_headers
        answer = await self.prefill.call("POST", path, body, headers)
        assert answer.status == 200, answer.body
        assert answer.headers["requestuuid"]
        return answer.json

    async def collect_answer(self, prefill_answer: dict[str, Any]) -> tuple[bytes, ResultFrame | None]:
        """Return the text a client gets, and the last frame if there was one."""
        text, last = prefill_answer.get("output", "").encode(), None
        while not prefill_answer["isLastResp"] and (last is None or last.kind == "data"):
            last = await self.next_frame()
            text += last.payload if last.kind in ("data", "lastData") else b""
        return text, last


class PlainCluster:
    def __init__(
        self,
        prefill: RunningServer,
        decodes: list[RunningServer],
        addresses: list[InstanceAddress],
        single: RunningServer,
    ):
        self.prefill, self.decodes, self.addresses, self.single = prefill, decodes, addresses, single
        self.coordinator = PlainCoordinator(prefill)


@pytest.fixture
async def cluster(serve) -> AsyncIterator[Any]:
    members = []
    clusters: list[PlainCluster] = []

    async def start_cluster(**options: Any) -> PlainCluster:
        options = {"surfaces": dedicated_mounts("mindie", apis=DEDICATED_APIS)} | options
        single = await serve(**options)
        server = [await serve(role=role, **options) for role in ("prefill", "decode", "decode")]
        for running_server in server:
            members.append(await join_cluster(running_server, surfaces=options["surfaces"]))
        addresses = [InstanceAddress("127.0.0.1", member.peer.port) for member in members[-2:]]
        clusters.append(PlainCluster(server[0], server[1:], addresses, single))
        for running_server in server[1:]:
            await clusters[-1].coordinator.follow(running_server)
        return clusters[-1]

    yield start_cluster
    for cluster in clusters:
        for task in cluster.coordinator.tasks:
            task.cancel()
    for member in members:
        await member.close_member()


def blank_differences(text: bytes) -> bytes:
    """Blank out the differences between two servers: ids, times and durations."""
    text = re.sub(rb'"(id|created|request_id)": ?("[^"]*"|\d+)', rb'"\1":0', text)
    text = re.sub(rb'"(prefill_time|decode_time|prefillTime|decodeTime)": ?[^,}\]]+', rb'"\1":0', text)
    return re.sub(rb'"seed": ?\d+', b'"seed":0', text)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "route_body"), ROUTE_BODIES)
async def test_answers_equal_those_of_one_server(cluster, path: str, route_body: dict[str, Any], stream: bool) -> None:
    mindie_cluster = await cluster()
    body = route_body | ({} if path.endswith("_stream") else {"stream": stream}) | {"temperature": 0}
    if "temperature" not in route_body and path.endswith(("_stream", "/infer")):
        del body["temperature"]
    expected = await mindie_cluster.single.call("POST", path, body, {"req-id": "77"})
    prefill_answer = await mindie_cluster.coordinator.send_prefill(path, body, mindie_cluster.addresses[0])
    assert prefill_answer["reqId"] == "77" and prefill_answer["isStream"] == (stream or path.endswith("_stream"))
    assert ("output" in prefill_answer) == (prefill_answer["isStream"] or prefill_answer["isLastResp"])
    text, last = await mindie_cluster.coordinator.collect_answer(prefill_answer)
    assert same_answer(blank_differences(text), blank_differences(expected.body)), (text, expected.body)
    if last is not None:
        assert last.kind == "lastData" and last.request_id == b"77"
        kinds = {piece.split(b":")[0] for piece in mindie_cluster.coordinator.raw.split(b"\0") if piece}
        assert kinds <= {b"reqId", b"data", b"lastData", b"ka"} | ({b'{"text"'} if path == "/generate" else set())
    for server in (mindie_cluster.prefill, *mindie_cluster.decodes):
        await server.wait_until_idle()


# The requests of the document on the scheduler, with the names of this model and of these instances.
DOCUMENTED_CHAT = b"""
{
    "model": "tiny",
    "messages": [{
        "role": "system",
        "content": "You are a helpful assistant."
    }],
    "max_tokens": 20,
    "presence_penalty": 1.03,
    "frequency_penalty": 1.0,
    "seed": null,
    "temperature": 0.5,
    "top_p": 0.95,
    "stream": true
}"""
# The document has prefillTime and decodeTime, but current versions of the original write these names.
DOCUMENTED_TOKEN = ["id", "model_name", "model_version", "text_output", "details", "prefill_time", "decode_time"]
DOCUMENTED_DETAILS = ["generated_tokens", "first_token_cost", "decode_cost", "batch_size", "queue_wait_time"]


async def test_documented_requests_of_a_scheduler_get_the_documented_members(cluster) -> None:
    mindie_cluster = await cluster(reply=lambda work, index: [70] * work.max_tokens)
    coordinator, target = mindie_cluster.coordinator, mindie_cluster.addresses[0]
    media_types = {"Accept": "application/json", "Content-type": "application/json"}
    answer = await coordinator.send_prefill(CHAT, DOCUMENTED_CHAT, target, "12345", **media_types)
    assert sorted(answer) == ["isLastResp", "isStream", "output", "reqId"]
    assert (answer["reqId"], answer["isStream"], answer["isLastResp"]) == ("12345", True, False)
    assert answer["output"].startswith("data:")
    text, last = await coordinator.collect_answer(answer)
    assert last is not None and last.request_id == b"12345" and text.endswith(b"data: [DONE]\n\n")
    body = {"id": "a123", "text_input": "I", "parameters": {"details": True, "max_new_tokens": 4}}
    answer = await coordinator.send_prefill("/v2/models/tiny/generate_stream", body, target, "12346")
    token = json.loads(answer["output"].removeprefix("data:"))
    assert list(token) == DOCUMENTED_TOKEN and list(token["details"]) == DOCUMENTED_DETAILS
    assert token["details"]["generated_tokens"] == 1 and token["decode_time"] is None
    await coordinator.collect_answer(answer)


@pytest.mark.parametrize(("path", "body"), [
    ("/generate", {"prompt": "\u6f22", "max_tokens": 9, "stream": True}),
    ("/infer", {"inputs": "\u6f22", "parameters": {"max_new_tokens": 9}, "stream": True}),
    ("/v2/models/tiny/generate_stream", {"text_input": "\u6f22", "parameters": {"max_new_tokens": 9}}),
])  # fmt: skip
async def test_output_is_empty_if_the_first_token_has_no_text(cluster, path: str, body: dict[str, Any]) -> None:
    """It is the first byte of a character. A coordinator refuses the answer to a stream without the member."""
    mindie_cluster = await cluster()
    expected = await mindie_cluster.single.call("POST", path, body, {"req-id": "77"})
    prefill_answer = await mindie_cluster.coordinator.send_prefill(path, body, mindie_cluster.addresses[0])
    assert prefill_answer == {"reqId": "77", "isStream": True, "isLastResp": False, "output": ""}
    text, _ = await mindie_cluster.coordinator.collect_answer(prefill_answer)
    assert same_answer(blank_differences(text), blank_differences(expected.body)), (text, expected.body)


async def test_answers_a_single_token_by_prefill_alone(cluster) -> None:
    mindie_cluster = await cluster()
    for stream in (True, False):
        prefill_answer = await mindie_cluster.coordinator.send_prefill(
            CHAT, CHAT_BODY | {"max_tokens": 1, "stream": stream}, mindie_cluster.addresses[0]
        )
        assert prefill_answer["isLastResp"] and prefill_answer["output"]
        if stream:
            assert prefill_answer["output"].endswith("data: [DONE]\n\n")
    assert not mindie_cluster.coordinator.raw.replace(b"ka:heartbeat\0", b"")


@pytest.mark.parametrize("native", [True, False], ids=["parley's own", "the original's form"])
@pytest.mark.parametrize(("path", "route_body"), ROUTE_BODIES)
async def test_resumes_after_an_engine_loss(cluster, path: str, route_body: dict[str, Any], native: bool) -> None:
    mindie_cluster = await cluster(tick=0.01)
    body = route_body | ({} if path.endswith("_stream") else {"stream": True})
    expected = await mindie_cluster.single.call("POST", path, body, {"req-id": "77"})
    coordinator = mindie_cluster.coordinator
    prefill_answer = await coordinator.send_prefill(path, body, mindie_cluster.addresses[0])
    text = prefill_answer["output"].encode()
    frame = await coordinator.next_frame()
    text += frame.payload
    mindie_cluster.decodes[0].engine.crash_engine()
    while (frame := await coordinator.next_frame()).kind == "data":
        text += frame.payload
    assert frame.kind == "retry" and frame.request_id == b"77"
    retry_body = json.loads(frame.payload)
    if not native:
        assert len(retry_body.pop(ORIGIN_MEMBER)) > 10
    prefill_answer = await coordinator.send_prefill(
        path, retry_body, mindie_cluster.addresses[1], **{"is-recompute": "true"}
    )
    rest, last = await coordinator.collect_answer(prefill_answer)
    assert same_answer(blank_differences(text + rest), blank_differences(expected.body)), (text, rest, expected.body)
    assert last is not None and last.kind == "lastData"
    for server in (mindie_cluster.prefill, mindie_cluster.decodes[1]):
        await server.wait_until_idle()


@pytest.mark.parametrize("native", [True, False], ids=["parley's own", "the original's form"])
async def test_figures_of_an_answer_agree_after_a_recompute(cluster, native: bool) -> None:
    mindie_cluster = await cluster(tick=0.02)
    coordinator, decode = mindie_cluster.coordinator, mindie_cluster.decodes[0]
    path = "/v2/models/tiny/generate"
    body = {"id": "a", "text_input": "a b", "parameters": {"details": True, "max_new_tokens": 20}}
    await coordinator.send_prefill(path, body, mindie_cluster.addresses[0])
    await decode.until(lambda: decode.engine.stats.generated_tokens > 5)
    decode.engine.crash_engine()
    frame = await coordinator.next_frame()
    assert frame.kind == "retry"
    retry_body = json.loads(frame.payload)
    if not native:
        del retry_body[ORIGIN_MEMBER]
    answer = await coordinator.send_prefill(path, retry_body, mindie_cluster.addresses[1], **{"is-recompute": "true"})
    text, _ = await coordinator.collect_answer(answer)
    details = json.loads(text)["details"]
    count = len(details["batch_size"])
    assert count == len(details["queue_wait_time"]) and details["generated_tokens"] == 20
    assert count == 20 if native else 0 < count < 20  # the original's form has no figures of the first attempt


@pytest.mark.parametrize("stream", [True, False])
async def test_request_resumes_after_a_role_change(cluster, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(role, "ROLE_DRAIN_SECONDS", 0.05)
    mindie_cluster = await cluster(tick=0.02, peer_port=0)
    body, coordinator = CHAT_BODY | {"stream": stream, "max_tokens": 60}, mindie_cluster.coordinator
    expected = await mindie_cluster.single.call("POST", CHAT, body, {"req-id": "77"})
    prefill_answer = await coordinator.send_prefill(CHAT, body, mindie_cluster.addresses[0])
    text = prefill_answer.get("output", "").encode()
    if stream:
        text += (await coordinator.next_frame()).payload
    else:
        await mindie_cluster.decodes[0].until(lambda: mindie_cluster.decodes[0].engine.stats.running > 0)
    local = {"server_ip": "10.0.0.1", "device": []}
    assert (await mindie_cluster.decodes[0].post("/v1/role/prefill", {"local": local, "peers": [local]})).status == 200
    while (frame := await coordinator.next_frame()).kind == "data":
        text += frame.payload
    assert frame.kind == "retry" and frame.request_id == b"77"
    await mindie_cluster.decodes[0].until(lambda: mindie_cluster.decodes[0].instance_state.role.name == "prefill")
    await mindie_cluster.decodes[0].wait_until_idle()
    prefill_answer = await coordinator.send_prefill(
        CHAT, json.loads(frame.payload), mindie_cluster.addresses[1], **{"is-recompute": "true"}
    )
    rest, last = await coordinator.collect_answer(prefill_answer)
    assert same_answer(blank_differences(text + rest), blank_differences(expected.body)), (text, rest, expected.body)
    assert last is not None and last.kind == "lastData"
    for server in (mindie_cluster.prefill, mindie_cluster.decodes[1]):
        await server.wait_until_idle()


async def test_rejects_an_invalid_recompute_body(cluster) -> None:
    mindie_cluster = await cluster()
    headers = {
        "req-id": "7",
        "req-type": "prefill",
        "d-target": str(mindie_cluster.addresses[0]),
        "is-recompute": "true",
    }
    answer = await mindie_cluster.prefill.call("POST", CHAT, CHAT_BODY, headers)
    assert answer.status == 422 and answer.json["error"] == "Messages MUST be a string for recompute"
    answer = await mindie_cluster.prefill.call(
        "POST", CHAT, CHAT_BODY | {"messages": "4096," + "1," * 4095 + "1"}, headers
    )
    assert answer.status == 424 and "maximum input ids length" in answer.json["error"]
    await mindie_cluster.prefill.wait_until_idle()


async def test_strict_prefill_refuses_what_the_original_cannot_hand_over(cluster) -> None:
    plane = (ApiMount("", mindie.service_dialect(MindieRules("strict", is_separated=True))), SERVER_MOUNT)
    mindie_cluster = await cluster(surfaces=plane)
    headers = {"req-id": "7", "req-type": "prefill", "d-target": str(mindie_cluster.addresses[0])}
    answer = await mindie_cluster.prefill.call("POST", CHAT, CHAT_BODY | {"n": 2, "temperature": 1}, headers)
    text = "Parameter [n] can only be set to 1 in pd disaggregation mode, got 2."
    assert (answer.status, answer.json) == (422, {"error": text, "error_type": "Input Validation Error"})
    stopped_body = {"inputs": "Hi", "parameters": {"stop": ["x"]}}
    answer = await mindie_cluster.prefill.call("POST", "/generate_stream", stopped_body, headers)
    assert (answer.status, answer.json["error"]) == (422, "stop is not supported in dmi mode")
    accepted = await mindie_cluster.coordinator.send_prefill(
        CHAT, CHAT_BODY | {"stop": ["never"]}, mindie_cluster.addresses[0]
    )
    _, last = await mindie_cluster.coordinator.collect_answer(accepted)
    assert last is not None and last.kind == "lastData"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("lost", [False, True], ids=["", "its engine is lost"])
async def test_flex_instance_runs_both_stages_itself(serve, stream: bool, lost: bool) -> None:
    options = {"surfaces": dedicated_mounts("mindie", apis=DEDICATED_APIS), "tick": 0.01}
    single, *pair = await serve(**options), await serve(role="flex", **options), await serve(role="flex", **options)
    members = [await join_cluster(running_server, surfaces=options["surfaces"]) for running_server in pair]
    addresses = [InstanceAddress("127.0.0.1", member.peer.port) for member in members]
    coordinator = PlainCoordinator(pair[0])
    for running_server in pair:
        await coordinator.follow(running_server)
    try:
        body = CHAT_BODY | {"stream": stream, "temperature": 0}
        expected = await single.call("POST", CHAT, body, {"req-id": "77"})
        prefill_answer = await coordinator.send_prefill(CHAT, body, addresses[0])
        assert not prefill_answer["isLastResp"] and ("output" in prefill_answer) == stream
        if lost:
            pair[0].engine.crash_engine()
        text, last = await coordinator.collect_answer(prefill_answer)
        if lost:
            assert last is not None and last.kind == "retry"
            coordinator.prefill = pair[1]
            prefill_answer = await coordinator.send_prefill(
                CHAT, last.payload, addresses[1], **{"is-recompute": "true"}
            )
            rest, last = await coordinator.collect_answer(prefill_answer)
            text += rest
        assert (
            same_answer(blank_differences(text), blank_differences(expected.body))
            and last is not None
            and last.kind == "lastData"
        )
        await pair[1 if lost else 0].wait_until_idle()
    finally:
        for task in coordinator.tasks:
            task.cancel()
        for member in members:
            await member.close_member()
