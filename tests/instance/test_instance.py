"""A server as an instance: the requests each role takes, results over a real connection, and role changes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from typing import Any

import pytest
from support import prefill_decode_pair
from support.http_client import HELLO_CHAT, Connection, RunningServer, build_request

from parley.dialects.mounts import ADMIN_PLANES, DEDICATED_APIS, dedicated_mounts
from parley.disagg.wire import result_frames, role
from parley.disagg.wire.headers import PrefillCommand
from parley.disagg.wire.result_frames import FrameReader, ResultFrame
from parley.instance import instance_handlers, result_streams
from parley.serving import generate_handler

COORDINATOR_HEADERS = {"req-id": "12345", "req-type": "prefill", "d-target": "10.0.0.2"}
ROLE_BODY: dict[str, Any] = {
    "local": {"server_ip": "10.0.0.1", "id": 1, "host_ip": "10.0.0.1", "p_percentage": 50,
              "device": [{"device_id": "0", "device_logical_id": "0", "device_ip": "10.0.0.1", "rank_id": "0"}]},
    "peers": [{"server_ip": "10.0.0.2", "id": 2, "host_ip": "10.0.0.2", "device": []}],
}  # fmt: skip


class ResultConnection:
    """The coordinator's side of ``GET /dresult``."""

    def __init__(self, connection: Connection):
        self.connection, self.reader = connection, FrameReader()
        self.frames: list[ResultFrame] = []

    @classmethod
    async def connect(cls, server: RunningServer, query: str = "") -> ResultConnection:
        connection = await server.connect()
        await connection.send(build_request("GET", "/dresult" + query))
        status, headers = await connection.head()
        assert status == 200 and headers["transfer-encoding"] == "chunked"
        assert headers["content-type"] == "text/event-stream"
        return cls(connection)

    async def next_chunk(self) -> bytes:
        size = int(await self.connection.reader.readline(), 16)
        return (await self.connection.reader.readexactly(size + 2))[:-2]

    async def next_frame(self) -> ResultFrame:
        while not self.frames:
            self.frames += self.reader.feed_bytes(await self.next_chunk()) + self.reader.flush_held()
        return self.frames.pop(0)


async def test_dresult_is_refused_by_instances_without_results(serve) -> None:
    mixed, prefill = await serve(), await serve(role="prefill")
    refusal = (await mixed.get("/dresult")).json
    assert refusal == {"error": "Non DMI does not support dresult request", "error_type": "Bad Request"}
    answer = await prefill.get("/dresult")
    assert answer.status == 400
    assert answer.json["error"] == "Only the Decode node supports dresult but you send to prefill"


async def test_second_dresult_connection_closes_the_first(serve) -> None:
    server = await serve(role="decode")
    first = await ResultConnection.connect(server)
    channel = server.instance_state.results.open_request_channel("", "1")
    channel.write_result(b'{"text":["a"]}\0')
    assert await first.next_chunk() == b'reqId:1\0data:{"text":["a"]}\0\0'
    second = await ResultConnection.connect(server)
    assert await first.next_chunk() == result_frames.CLOSE_FRAME
    assert await first.next_chunk() == b""
    await first.connection.send(build_request("GET", "/health/live"))
    assert (await first.connection.answer()).status == 200  # nothing else is on the connection
    channel.write_result(b"data: b\n\n", last=True)
    assert await second.next_chunk() == b"reqId:1\0lastData:data: b\n\n\0"


async def test_dresult_sends_heartbeats_during_silence(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parley.instance.result_connection.SILENCE_CHECK_PERIOD", 0.01)
    monkeypatch.setattr("parley.instance.result_connection.HEARTBEAT_SILENCE", 0.02)
    server = await serve(role="flex")
    connection = await ResultConnection.connect(server)
    assert await connection.next_chunk() == b"ka:heartbeat\0"
    assert await connection.next_chunk() == b"ka:heartbeat\0"


async def test_dresult_replays_frames_lost_in_transit(serve) -> None:
    server = await serve()  # a mixed instance sends results to parley's own coordinators
    connection = await ResultConnection.connect(server, "?client=c-1")
    epoch = (await connection.next_frame()).payload.decode()
    channel = server.instance_state.results.open_request_channel("c-1", "1")
    for text in (b"a\n", b"b\0", b"c\n"):
        channel.write_result(text)
    assert [(await connection.next_frame()).payload for _ in range(3)] == [b"a\n", b"b\0", b"c\n"]
    connection.connection.close()
    await server.until(lambda: not server.instance_state.results.get_client("c-1").is_connected)
    channel.write_result(b"d\n", record=b"r", last=True)
    connection = await ResultConnection.connect(server, f"?client=c-1&epoch={epoch}&from=1")
    frames = [await connection.next_frame() for _ in range(4)]
    assert [frame.kind for frame in frames] == ["epoch", "data", "data", "lastData"]
    assert [frame.payload for frame in frames] == [epoch.encode(), b"b\0", b"c\n", b"d\n"]
    assert frames[-1].record == base64.b64encode(b"r")
    connection.connection.close()


async def test_results_survive_hundreds_of_broken_connections(serve) -> None:
    """Connections are cut at any time while three requests write: every text must arrive whole."""
    server = await serve()
    node, expected, received = server.instance_state, dict.fromkeys("abc", b""), dict.fromkeys("abc", b"")

    async def write(request_id: str) -> None:
        channel = node.results.open_request_channel("c", request_id)
        for number in range(400):
            data = f"{request_id}:{number} ".encode() + bytes([number % 256])
            expected[request_id] += data
            if not channel.write_result(data, last=number == 399):
                await channel.wait_until_writable()
            await asyncio.sleep(0.002 if number % 3 else 0)

    writing = [asyncio.create_task(write(label)) for label in "abc"]
    number, epoch, breaks = 0, "", 0
    while not (all(task.done() for task in writing) and received == expected):
        connection = await ResultConnection.connect(
            server, f"?client=c&epoch={epoch}&from={number}" if epoch else "?client=c"
        )
        frame = await connection.next_frame()
        assert frame.kind == "epoch" and epoch in ("", frame.payload.decode())
        epoch = frame.payload.decode()
        for _ in range(breaks % 10):
            if received == expected:
                break
            frame = await connection.next_frame()
            number += 1
            received[frame.request_id.decode()] += frame.payload
        connection.connection.close()
        breaks += 1
    assert breaks > 200


async def test_results_of_one_request_can_be_paused(serve) -> None:
    server = await serve(cluster_secret="s")
    pause_body = {"client": "c", "id": "1", "pause": True}
    assert (await server.post("/v1/dresult/flow", pause_body)).status == 401
    assert (await server.get("/dresult?client=c")).status == 401
    secret = {"parley-secret": "s"}
    assert (await server.post("/v1/dresult/flow", pause_body, **secret)).json == {"known": False}
    channel = server.instance_state.results.open_request_channel("c", "1")
    assert (await server.post("/v1/dresult/flow", pause_body, **secret)).json == {"known": True}
    assert channel.must_wait
    assert (await server.post("/v1/dresult/flow", pause_body | {"pause": False}, **secret)).json == {"known": True}
    assert not channel.must_wait
    assert (await server.post("/v1/dresult/flow", {"client": "c"}, **secret)).status == 400


async def test_prefill_instance_requires_coordinator_headers(serve) -> None:
    server = await serve(role="prefill")
    for path, body in (
        ("/v1/chat/completions", HELLO_CHAT),
        ("/generate", {"inputs": "a"}),
        ("/v2/models/nobody/generate", b"no json"),
    ):
        answer = await server.post(path, body)
        assert answer.status == 400 and answer.json == {
            "error": "DMI request must have req-type, req-id, d-target headers", "error_type": "Bad Request"
        }  # fmt: skip
    wrong = {"req-id": "x"} | {name: COORDINATOR_HEADERS[name] for name in ("req-type", "d-target")}
    answer = await server.call("POST", "/generate", b"x" * 100, wrong | {"content-encoding": "zip"})
    assert answer.json["error"].startswith("Invalid req-id")  # although the body is unreadable as well
    native_headers = COORDINATOR_HEADERS | {"parley-results": "c", "d-target": "self", "parley-given": "9" * 15}
    answer = await server.call("POST", "/generate", None, native_headers | {"content-length": "99999999999"})
    assert answer.status in (400, 413)
    for path in ("/v1/models", "/health", "/metrics", "/v1/status"):
        assert (await server.get(path)).status == 200
    assert (await server.post("/tokenize", {"prompt": "a"})).status == 200
    answer = await server.post("/v1/embeddings", {"model": "tiny", "input": "a"})
    assert "DMI" not in answer.body.decode()
    decode = await serve(role="decode")
    assert (
        "can be sent only to the prefill node"
        in (await decode.post("/v1/completions", HELLO_CHAT, **COORDINATOR_HEADERS)).json["error"]
    )
    unknown = await serve(role="none", peer_port=0)
    answer = await unknown.post("/v1/completions", HELLO_CHAT, **COORDINATOR_HEADERS)
    assert answer.status == 503 and answer.json["error_type"] == "Service Unavailable"


async def test_mixed_instance_answers_clients_and_coordinator_commands(serve) -> None:
    server, orders = await serve(), []

    async def record_order(service, route, exchange, order: PrefillCommand) -> None:
        orders.append(order)
        await exchange.send_response(b"{}")

    server.parts.intake.begin_prefill = record_order
    plain = await server.post("/v1/chat/completions", HELLO_CHAT, **COORDINATOR_HEADERS)
    assert plain.status == 200 and "choices" in plain.json and not orders
    native_headers = COORDINATOR_HEADERS | {"parley-results": "c", "d-target": "self"}
    assert (await server.post("/v1/chat/completions", HELLO_CHAT, **native_headers)).json == {}
    assert orders[0].continues_here and orders[0].coordinator_name == "c"


async def test_instance_status_lists_role_resources_and_peers(serve) -> None:
    server = await serve(role="prefill", max_batch=8)
    status = (await server.get("/v1/status")).json
    assert status["service"] == {"roleStatus": "RoleReady", "currentRole": "prefill", "p_percentage": 50}
    assert status["resource"]["availSlotsNum"] == 8
    assert status["resource"]["availBlockNum"] == status["resource"]["totalNpuBlockNums"] > 0
    assert status["linkStatus"] == {"peers": []}
    native_status = status["parley"]
    assert (
        native_status["models"] == ["tiny"]
        and native_status["peer"] == f"127.0.0.1;{server.port}"
        and native_status["slots"] == 8
    )
    second_status = (await server.get("/v2/status")).json
    assert (
        second_status["parley"]["epoch"] == native_status["epoch"]
        and second_status["resource"]["totalAvailNpuSlotsNum"] == 8
    )


async def test_role_change_links_peers_in_the_background(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "MAX_LINK_PAUSE", 0.01)
    server = await serve(role="none", peer_port=0)
    attempts, fail = [], OSError(111, "no")

    async def reach(address: role.InstanceAddress) -> None:
        attempts.append(address)
        if len(attempts) < 3:
            raise fail
        await asyncio.sleep(0.01)

    await prefill_decode_pair.join_cluster(server)
    server.parts.links.reach_member = reach
    status = (await server.get("/v1/status")).json["service"]
    assert (status["roleStatus"], status["currentRole"]) == ("RoleUnknown", "none")
    answer = await server.post("/v1/role/decode", ROLE_BODY)
    assert (answer.status, answer.json) == (200, {"result": "ok"})
    whole_status = (await server.get("/v1/status")).json
    assert (
        whole_status["service"]["roleStatus"] == "RoleSwitching" and whole_status["service"]["currentRole"] == "decode"
    )
    await server.until(lambda: server.instance_state.role.status == "RoleReady")
    assert set(attempts) == {role.InstanceAddress("10.0.0.2", 1121)}
    whole_status = (await server.get("/v1/status")).json
    assert whole_status["linkStatus"] == {"peers": [{"target": "10.0.0.2", "link": "ok"}]}
    fail.errno, attempts[:] = 113, []
    await server.until(lambda: "failed : 113" in server.instance_state.role.link_states.values())
    assert server.instance_state.role.status == "RoleReady"


async def test_failed_link_is_logged_once(serve, caplog: pytest.LogCaptureFixture) -> None:
    """Linking is retried for as long as the peer is gone, possibly days; the log must not fill up."""
    first = await serve()
    one, other = await prefill_decode_pair.join_cluster(first), await prefill_decode_pair.join_cluster(await serve())
    wrong_secret = await prefill_decode_pair.join_cluster(await serve(secret=b"t"))
    caplog.set_level("INFO", logger="parley.instance")
    try:
        places = [role.InstanceAddress("127.0.0.1", port) for port in (wrong_secret.peer.port, other.peer.port)]
        for place in places * 3:
            with contextlib.suppress(OSError):
                await first.parts.links.reach_member(place)
    finally:
        await asyncio.gather(other.close_member(), wrong_secret.close_member())
    for _ in range(3):
        with pytest.raises(OSError):
            await first.parts.links.reach_member(places[1])
    await one.close_member()
    assert [record.args[0] for record in caplog.records if record.msg.startswith("Cannot link")] == places


async def test_role_change_waits_for_running_requests(serve) -> None:
    server = await serve(role="prefill", peer_port=0, tick=0.02)
    node, started = server.instance_state, asyncio.Event()

    async def generate_here(service, route, exchange, order) -> None:
        started.set()
        await generate_handler.handle_generate(service, route, exchange)

    server.parts.intake.begin_prefill = generate_here
    running = asyncio.create_task(
        server.post("/v1/chat/completions", HELLO_CHAT | {"max_tokens": 20}, **COORDINATOR_HEADERS)
    )
    await started.wait()
    await server.until(lambda: bool(server.service.open_requests))
    assert (await server.post("/v1/role/decode", ROLE_BODY)).status == 200
    status = (await server.get("/v1/status")).json["service"]
    assert (status["roleStatus"], status["currentRole"]) == ("RoleSwitching", "prefill")
    refused = await server.post("/v1/chat/completions", HELLO_CHAT, **COORDINATOR_HEADERS)
    assert refused.status == 503 and "unknown status" in refused.json["error"]
    answer = await running
    assert answer.status == 200 and answer.json["choices"][0]["finish_reason"]
    await server.until(lambda: node.role.name == "decode" and node.role.status == "RoleReady")
    connection = await ResultConnection.connect(server)
    # Back to prefill: the plain coordinator's connection ends, since nothing more would come over it.
    assert (await server.post("/v1/role/prefill", ROLE_BODY)).status == 200
    assert await connection.next_chunk() == b""
    await server.until(lambda: node.role.name == "prefill")


async def test_role_sets_the_prefill_share_of_the_engine(serve) -> None:
    server = await serve(role="flex", peer_port=0, p_percentage=30)
    node, engine = server.instance_state, server.engine
    assert engine.prefill_share == 30

    async def give_role(role: str, share: int) -> None:
        body = ROLE_BODY | {"local": ROLE_BODY["local"] | {"p_percentage": share}}
        assert (await server.post(f"/v1/role/{role}", body)).status == 200

    await give_role("flex", 60)
    await server.until(lambda: engine.prefill_share == 60 and node.role.status == "RoleReady")
    await give_role("flex", 65)  # a new share alone interrupts nothing
    assert engine.prefill_share == 65
    assert (await server.get("/v1/status")).json["service"] == {
        "roleStatus": "RoleReady", "currentRole": "flex", "p_percentage": 65,
    }  # fmt: skip
    await give_role("decode", 65)
    await server.until(lambda: engine.prefill_share == 100)
    await give_role("flex", 5)
    await server.until(lambda: engine.prefill_share == 5)


async def test_share_change_interrupts_no_request(serve) -> None:
    """Nor does the loss of a peer; a new peer has to be linked first."""
    server = await serve(role="flex", peer_port=0)
    node, third_found = server.instance_state, asyncio.Event()

    async def reach(place: Any) -> None:
        if place.host == "10.0.0.3":
            await third_found.wait()

    await prefill_decode_pair.join_cluster(server)
    server.parts.links.reach_member = reach
    peers = [ROLE_BODY["peers"][0] | {"server_ip": f"10.0.0.{k}"} for k in (2, 3)]

    async def give_share(share: int, peers: list[Any]) -> None:
        body = {"local": ROLE_BODY["local"] | {"p_percentage": share}, "peers": peers}
        assert (await server.post("/v1/role/flex", body)).status == 200

    await give_share(40, peers[:1])
    await server.until(lambda: node.role.status == "RoleReady" and node.role.prefill_share == 40)
    for share, others in ((45, peers[:1]), (50, [])):
        await give_share(share, others)
        assert node.role.status == "RoleReady"
        await server.until(lambda share=share: server.engine.prefill_share == share)
    await give_share(55, peers)
    assert node.role.status == "RoleSwitching"
    third_found.set()
    await server.until(lambda: node.role.status == "RoleReady" and server.engine.prefill_share == 55)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/role/decode", b"{", 422),
        ("/v1/role/decode", [], 503),
        ("/v1/role/decode", ROLE_BODY | {"peers": {}}, 503),
        ("/v1/role/decode", ROLE_BODY | {"local": {"server_ip": "0.0.0.0", "device": []}}, 503),
        ("/v1/role/decode", ROLE_BODY | {"local": {"server_ip": "10.0.0.1", "id": 1, "device": []}}, 503),
        ("/v1/role/decode", ROLE_BODY | {"local": {"server_ip": "10.0.0.1", "device": [{"device_id": "a"}]}}, 503),
        ("/v1/role/decode", ROLE_BODY | {"local": ROLE_BODY["local"] | {"p_percentage": 101}}, 503),
        ("/v1/role/decode", ROLE_BODY | {"peers": []}, 503),
        ("/v1/role/flex", ROLE_BODY | {"local": ROLE_BODY["local"] | {"p_percentage": 100}, "peers": []}, 503),
        ("/v1/role/flex", ROLE_BODY | {"peers": []}, 200),
        ("/v2/role/decode", ROLE_BODY, 503),
        ("/v2/role/decode", {"local": [], "peers": [[{"server_ip": "10.0.0.2", "host_ip": "10.0.0.2",
                             "dp_inst_list": [{"dp_inst_id": 10000, "device": []}]}]]}, 200),
        ("/v2/role/decode", {"local": [], "peers": [[{"server_ip": "10.0.0.2",
                             "dp_inst_list": [{"dp_inst_id": "1", "device": []}]}]]}, 503),
    ],
)  # fmt: skip
async def test_role_request_bodies_are_checked(serve, path: str, body: Any, status: int) -> None:
    server = await serve(role="none", peer_port=0)
    answer = await server.post(path, body)
    assert answer.status == status, answer.body
    if status == 422:
        text = "Req body converts to json fail. Reset to previous node status."
        assert answer.json == {"error": text, "error_type": "Input validation error"}
    assert (server.instance_state.role.status == "RoleUnknown") == (status != 200)


async def test_mixed_server_refuses_a_role(serve) -> None:
    server = await serve()
    answer = await server.post("/v1/role/decode", ROLE_BODY)
    assert answer.status == 503 and answer.json["error"].startswith("Update pd info failed")
    assert (await server.get("/v1/status")).json["service"]["currentRole"] == "mixed"


async def test_last_of_many_rapid_role_changes_wins(serve) -> None:
    """The last role wins even if requests run and several roles arrive before one is taken."""
    server = await serve(role="prefill", peer_port=0, tick=0.005)
    node, rng = server.instance_state, random.Random(3)

    async def generate_here(service, route, exchange, order) -> None:
        await generate_handler.handle_generate(service, route, exchange)

    async def send_request() -> int:
        await asyncio.sleep(rng.random() / 5)
        return (await server.post("/v1/chat/completions", HELLO_CHAT, **COORDINATOR_HEADERS)).status

    server.parts.intake.begin_prefill = generate_here
    requests = [asyncio.create_task(send_request()) for _ in range(40)]
    for _ in range(20):
        name = rng.choice(("prefill", "decode", "flex"))
        assert (await server.post(f"/v1/role/{name}", ROLE_BODY)).status == 200
        await asyncio.sleep(rng.random() / 50)
    assert set(await asyncio.gather(*requests)) <= {200, 400, 503}
    await server.until(lambda: node.role.status == "RoleReady" and node.role.name == name)
    await server.wait_until_idle()


async def test_role_change_needs_an_admin_key_or_the_secret(serve) -> None:
    server = await serve(role="none", peer_port=0, admin_keys=("boss",))
    assert (await server.post("/v1/role/decode", ROLE_BODY)).status == 401
    assert (await server.post("/v1/role/decode", ROLE_BODY, authorization="Bearer boss")).status == 200
    server = await serve(role="none", peer_port=0, cluster_secret="s")
    assert (await server.post("/v1/role/decode", ROLE_BODY)).status == 401
    assert (await server.post("/v1/role/decode", ROLE_BODY, **{"parley-secret": "s"})).status == 200


async def test_clients_need_keys_and_coordinators_the_secret(serve) -> None:
    server = await serve(role="decode", api_keys=("k",), admin_keys=("boss",), cluster_secret="s", peer_port=0)
    secret, wrong = {"parley-secret": "s"}, {"parley-secret": "t"}
    for path in ("/v1/status", "/metrics"):
        assert (await server.get(path, **secret)).status == 200
        assert (await server.get(path, **wrong)).status == (await server.get(path)).status == 401
    assert (await server.post("/v2/models/tiny/stopInfer", {"id": "1"}, **secret)).status != 401
    assert (await server.post("/v1/role/flex", ROLE_BODY, **secret)).status == 200
    order = COORDINATOR_HEADERS | secret | {"parley-results": "c"}
    assert (await server.post("/v1/chat/completions", HELLO_CHAT, **order)).status == 401  # a client needs a key
    await server.until(lambda: server.instance_state.role.name == "flex")
    assert (await server.post("/v1/chat/completions", HELLO_CHAT, **order, authorization="Bearer k")).status != 401
    unkeyed = await serve(role="decode", cluster_secret="s")
    assert (await unkeyed.get("/dresult")).status == 401  # a plain coordinator needs the secret, too


async def test_mindie_management_port_serves_the_instance_plane(serve) -> None:
    server = await serve(
        role="decode", surfaces=dedicated_mounts("mindie-management", apis={**DEDICATED_APIS, **ADMIN_PLANES})
    )
    assert (await server.get("/v1/status")).json["service"]["currentRole"] == "decode"
    assert (await server.get("/v1/config")).json["modelName"] == "tiny"


async def test_hanging_coordinator_is_disconnected(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its connection but reads nothing: the instance cuts it and ends its requests."""
    monkeypatch.setattr(instance_handlers, "UNACKNOWLEDGED_MILLISECONDS", 500)
    monkeypatch.setattr(result_streams, "REPLAY_SECONDS", 0.2)
    monkeypatch.setattr(result_streams, "MAX_QUEUED_BYTES", 1 << 20)
    server = await serve()
    connection = await ResultConnection.connect(server, "?client=c")
    connection.connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    channel, channel_gone = server.instance_state.results.open_request_channel("c", "1"), asyncio.Event()
    channel.watch_coordinator(channel_gone.set)
    while channel.write_result(bytes(1 << 16)):
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await channel_gone.wait()
    assert not server.instance_state.results.clients
