"""A server as an instance: the requests each role takes, results over a real connection, and role changes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from typing import Any

import pytest
from support import prefill_decode_pair
from support.http_client import HELLO, Connection, Served, request

from parley.dialects.mounts import ALONE, PLANES, alone
from parley.disagg.wire import result_frames, role
from parley.disagg.wire.headers import Order
from parley.disagg.wire.result_frames import Frame, Reader
from parley.instance import handlers, results
from parley.serving import generate

DMI = {"req-id": "12345", "req-type": "prefill", "d-target": "10.0.0.2"}
PEERS: dict[str, Any] = {
    "local": {"server_ip": "10.0.0.1", "id": 1, "host_ip": "10.0.0.1", "p_percentage": 50,
              "device": [{"device_id": "0", "device_logical_id": "0", "device_ip": "10.0.0.1", "rank_id": "0"}]},
    "peers": [{"server_ip": "10.0.0.2", "id": 2, "host_ip": "10.0.0.2", "device": []}],
}  # fmt: skip


class Results:
    """The coordinator's side of ``GET /dresult``."""

    def __init__(self, connection: Connection):
        self.connection, self.reader = connection, Reader()
        self.found: list[Frame] = []

    @classmethod
    async def open(cls, served: Served, query: str = "") -> Results:
        connection = await served.connect()
        await connection.send(request("GET", "/dresult" + query))
        status, headers = await connection.head()
        assert status == 200 and headers["transfer-encoding"] == "chunked"
        assert headers["content-type"] == "text/event-stream"
        return cls(connection)

    async def chunk(self) -> bytes:
        size = int(await self.connection.reader.readline(), 16)
        return (await self.connection.reader.readexactly(size + 2))[:-2]

    async def next(self) -> Frame:
        while not self.found:
            self.found += self.reader.feed(await self.chunk()) + self.reader.flush()
        return self.found.pop(0)


async def test_dresult_is_refused_by_instances_without_results(serve) -> None:
    mixed, prefill = await serve(), await serve(role="prefill")
    told = (await mixed.get("/dresult")).json
    assert told == {"error": "Non DMI does not support dresult request", "error_type": "Bad Request"}
    answer = await prefill.get("/dresult")
    assert answer.status == 400
    assert answer.json["error"] == "Only the Decode node supports dresult but you send to prefill"


async def test_second_dresult_connection_closes_the_first(serve) -> None:
    served = await serve(role="decode")
    first = await Results.open(served)
    channel = served.node.results.channel("", "1")
    channel.write(b'{"text":["a"]}\0')
    assert await first.chunk() == b'reqId:1\0data:{"text":["a"]}\0\0'
    second = await Results.open(served)
    assert await first.chunk() == result_frames.CLOSE
    assert await first.chunk() == b"" and first.connection.reader._buffer == b""  # type: ignore[attr-defined]
    channel.write(b"data: b\n\n", last=True)
    assert await second.chunk() == b"reqId:1\0lastData:data: b\n\n\0"


async def test_dresult_sends_heartbeats_during_silence(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parley.instance.result_connection.CHECK", 0.01)
    monkeypatch.setattr("parley.instance.result_connection.SILENCE", 0.02)
    served = await serve(role="flex")
    line = await Results.open(served)
    assert await line.chunk() == b"ka:heartbeat\0"
    assert await line.chunk() == b"ka:heartbeat\0"


async def test_dresult_replays_frames_lost_in_transit(serve) -> None:
    served = await serve()  # a mixed instance sends results to parley's own coordinators
    line = await Results.open(served, "?client=c-1")
    epoch = (await line.next()).payload.decode()
    channel = served.node.results.channel("c-1", "1")
    for text in (b"a\n", b"b\0", b"c\n"):
        channel.write(text)
    assert [(await line.next()).payload for _ in range(3)] == [b"a\n", b"b\0", b"c\n"]
    line.connection.close()
    await served.until(lambda: not served.node.results.client("c-1").connected)
    channel.write(b"d\n", record=b"r", last=True)
    line = await Results.open(served, f"?client=c-1&epoch={epoch}&from=1")
    found = [await line.next() for _ in range(4)]
    assert [frame.kind for frame in found] == ["epoch", "data", "data", "lastData"]
    assert [frame.payload for frame in found] == [epoch.encode(), b"b\0", b"c\n", b"d\n"]
    assert found[-1].record == base64.b64encode(b"r")
    line.connection.close()


async def test_results_survive_hundreds_of_broken_connections(serve) -> None:
    """Connections are cut at any time while three requests write: every text must arrive whole."""
    served = await serve()
    node, wanted, seen = served.node, dict.fromkeys("abc", b""), dict.fromkeys("abc", b"")

    async def write(id: str) -> None:
        channel = node.results.channel("c", id)
        for number in range(400):
            data = f"{id}:{number} ".encode() + bytes([number % 256])
            wanted[id] += data
            if not channel.write(data, last=number == 399):
                await channel.drain()
            await asyncio.sleep(0.002 if number % 3 else 0)

    writing = [asyncio.create_task(write(id)) for id in "abc"]
    number, epoch, breaks = 0, "", 0
    while not (all(task.done() for task in writing) and seen == wanted):
        line = await Results.open(served, f"?client=c&epoch={epoch}&from={number}" if epoch else "?client=c")
        frame = await line.next()
        assert frame.kind == "epoch" and epoch in ("", frame.payload.decode())
        epoch = frame.payload.decode()
        for _ in range(breaks % 10):
            if seen == wanted:
                break
            frame = await line.next()
            number += 1
            seen[frame.id.decode()] += frame.payload
        line.connection.close()
        breaks += 1
    assert breaks > 200


async def test_results_of_one_request_can_be_paused(serve) -> None:
    served = await serve(cluster_secret="s")
    wish = {"client": "c", "id": "1", "pause": True}
    assert (await served.post("/v1/dresult/flow", wish)).status == 401
    assert (await served.get("/dresult?client=c")).status == 401
    secret = {"parley-secret": "s"}
    assert (await served.post("/v1/dresult/flow", wish, **secret)).json == {"known": False}
    channel = served.node.results.channel("c", "1")
    assert (await served.post("/v1/dresult/flow", wish, **secret)).json == {"known": True}
    assert channel.blocked
    assert (await served.post("/v1/dresult/flow", wish | {"pause": False}, **secret)).json == {"known": True}
    assert not channel.blocked
    assert (await served.post("/v1/dresult/flow", {"client": "c"}, **secret)).status == 400


async def test_prefill_instance_requires_coordinator_headers(serve) -> None:
    served = await serve(role="prefill")
    for path, body in (
        ("/v1/chat/completions", HELLO),
        ("/generate", {"inputs": "a"}),
        ("/v2/models/nobody/generate", b"no json"),
    ):
        answer = await served.post(path, body)
        assert answer.status == 400 and answer.json == {
            "error": "DMI request must have req-type, req-id, d-target headers", "error_type": "Bad Request"
        }  # fmt: skip
    wrong = {"req-id": "x"} | {name: DMI[name] for name in ("req-type", "d-target")}
    answer = await served.call("POST", "/generate", b"x" * 100, wrong | {"content-encoding": "zip"})
    assert answer.json["error"].startswith("Invalid req-id")  # although the body is unreadable as well
    ours = DMI | {"parley-results": "c", "d-target": "self", "parley-given": "9" * 15}
    answer = await served.call("POST", "/generate", None, ours | {"content-length": "99999999999"})
    assert answer.status in (400, 413)
    for path in ("/v1/models", "/health", "/metrics", "/v1/status"):
        assert (await served.get(path)).status == 200
    assert (await served.post("/tokenize", {"prompt": "a"})).status == 200
    answer = await served.post("/v1/embeddings", {"model": "tiny", "input": "a"})
    assert "DMI" not in answer.body.decode()
    decode = await serve(role="decode")
    assert "can be sent only to the prefill node" in (await decode.post("/v1/completions", HELLO, **DMI)).json["error"]
    unknown = await serve(role="none", peer_port=0)
    answer = await unknown.post("/v1/completions", HELLO, **DMI)
    assert answer.status == 503 and answer.json["error_type"] == "Service Unavailable"


async def test_mixed_instance_answers_clients_and_coordinator_commands(serve) -> None:
    served, orders = await serve(), []

    async def begin(service, route, exchange, order: Order) -> None:
        orders.append(order)
        await exchange.answer(b"{}")

    served.parts.intake.begin = begin
    plain = await served.post("/v1/chat/completions", HELLO, **DMI)
    assert plain.status == 200 and "choices" in plain.json and not orders
    ours = DMI | {"parley-results": "c", "d-target": "self"}
    assert (await served.post("/v1/chat/completions", HELLO, **ours)).json == {}
    assert orders[0].here and orders[0].client == "c"


async def test_instance_status_lists_role_resources_and_peers(serve) -> None:
    served = await serve(role="prefill", max_batch=8)
    told = (await served.get("/v1/status")).json
    assert told["service"] == {"roleStatus": "RoleReady", "currentRole": "prefill", "p_percentage": 50}
    assert told["resource"]["availSlotsNum"] == 8
    assert told["resource"]["availBlockNum"] == told["resource"]["totalNpuBlockNums"] > 0
    assert told["linkStatus"] == {"peers": []}
    own = told["parley"]
    assert own["models"] == ["tiny"] and own["peer"] == f"127.0.0.1;{served.port}" and own["slots"] == 8
    again = (await served.get("/v2/status")).json
    assert again["parley"]["epoch"] == own["epoch"] and again["resource"]["totalAvailNpuSlotsNum"] == 8


async def test_role_change_links_peers_in_the_background(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "POLL", 0.01)
    served = await serve(role="none", peer_port=0)
    tries, fail = [], OSError(111, "no")

    async def reach(address: role.Address) -> None:
        tries.append(address)
        if len(tries) < 3:
            raise fail
        await asyncio.sleep(0.01)

    await prefill_decode_pair.join(served)
    served.parts.links.reach = reach
    status = (await served.get("/v1/status")).json["service"]
    assert (status["roleStatus"], status["currentRole"]) == ("RoleUnknown", "none")
    answer = await served.post("/v1/role/decode", PEERS)
    assert (answer.status, answer.json) == (200, {"result": "ok"})
    told = (await served.get("/v1/status")).json
    assert told["service"]["roleStatus"] == "RoleSwitching" and told["service"]["currentRole"] == "decode"
    await served.until(lambda: served.node.role.state == "RoleReady")
    assert set(tries) == {role.Address("10.0.0.2", 1121)}
    told = (await served.get("/v1/status")).json
    assert told["linkStatus"] == {"peers": [{"target": "10.0.0.2", "link": "ok"}]}
    fail.errno, tries[:] = 113, []
    await served.until(lambda: "failed : 113" in served.node.role.links.values())
    assert served.node.role.state == "RoleReady"


async def test_failed_link_is_logged_once(serve, caplog: pytest.LogCaptureFixture) -> None:
    """Linking is retried for as long as the peer is gone, possibly days; the log must not fill up."""
    first = await serve()
    one, other = await prefill_decode_pair.join(first), await prefill_decode_pair.join(await serve())
    strange = await prefill_decode_pair.join(await serve(secret=b"t"))
    caplog.set_level("INFO", logger="parley.instance")
    try:
        places = [role.Address("127.0.0.1", port) for port in (strange.peer.port, other.peer.port)]
        for place in places * 3:
            with contextlib.suppress(OSError):
                await first.parts.links.reach(place)
    finally:
        await asyncio.gather(other.close(), strange.close())
    for _ in range(3):
        with pytest.raises(OSError):
            await first.parts.links.reach(places[1])
    await one.close()
    assert [record.args[0] for record in caplog.records] == places


async def test_role_change_waits_for_running_requests(serve) -> None:
    served = await serve(role="prefill", peer_port=0, tick=0.02)
    node, going = served.node, asyncio.Event()

    async def begin(service, route, exchange, order) -> None:
        going.set()
        await generate.generate(service, route, exchange)

    served.parts.intake.begin = begin
    running = asyncio.create_task(served.post("/v1/chat/completions", HELLO | {"max_tokens": 20}, **DMI))
    await going.wait()
    await served.until(lambda: bool(served.service.open))
    assert (await served.post("/v1/role/decode", PEERS)).status == 200
    told = (await served.get("/v1/status")).json["service"]
    assert (told["roleStatus"], told["currentRole"]) == ("RoleSwitching", "prefill")
    refused = await served.post("/v1/chat/completions", HELLO, **DMI)
    assert refused.status == 503 and "unknown status" in refused.json["error"]
    answer = await running
    assert answer.status == 200 and answer.json["choices"][0]["finish_reason"]
    await served.until(lambda: node.role.name == "decode" and node.role.state == "RoleReady")
    line = await Results.open(served)
    # Back to prefill: the plain coordinator's connection ends, since nothing more would come over it.
    assert (await served.post("/v1/role/prefill", PEERS)).status == 200
    assert await line.chunk() == b""
    await served.until(lambda: node.role.name == "prefill")


async def test_role_sets_the_prefill_share_of_the_engine(serve) -> None:
    served = await serve(role="flex", peer_port=0, p_percentage=30)
    node, engine = served.node, served.engine
    assert engine.share == 30

    async def give(role: str, share: int) -> None:
        body = PEERS | {"local": PEERS["local"] | {"p_percentage": share}}
        assert (await served.post(f"/v1/role/{role}", body)).status == 200

    await give("flex", 60)
    await served.until(lambda: engine.share == 60 and node.role.state == "RoleReady")
    await give("flex", 65)  # a new share alone interrupts nothing
    assert engine.share == 65
    assert (await served.get("/v1/status")).json["service"] == {
        "roleStatus": "RoleReady", "currentRole": "flex", "p_percentage": 65,
    }  # fmt: skip
    await give("decode", 65)
    await served.until(lambda: engine.share == 100)
    await give("flex", 5)
    await served.until(lambda: engine.share == 5)


async def test_share_change_interrupts_no_request(serve) -> None:
    """Nor does the loss of a peer; a new peer has to be linked first."""
    served = await serve(role="flex", peer_port=0)
    node, found = served.node, asyncio.Event()

    async def reach(place: Any) -> None:
        if place.host == "10.0.0.3":
            await found.wait()

    await prefill_decode_pair.join(served)
    served.parts.links.reach = reach
    peers = [PEERS["peers"][0] | {"server_ip": f"10.0.0.{k}"} for k in (2, 3)]

    async def give(share: int, peers: list[Any]) -> None:
        body = {"local": PEERS["local"] | {"p_percentage": share}, "peers": peers}
        assert (await served.post("/v1/role/flex", body)).status == 200

    await give(40, peers[:1])
    await served.until(lambda: node.role.state == "RoleReady" and node.role.share == 40)
    for share, others in ((45, peers[:1]), (50, [])):
        await give(share, others)
        assert node.role.state == "RoleReady"
        await served.until(lambda share=share: served.engine.share == share)
    await give(55, peers)
    assert node.role.state == "RoleSwitching"
    found.set()
    await served.until(lambda: node.role.state == "RoleReady" and served.engine.share == 55)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/role/decode", b"{", 422),
        ("/v1/role/decode", [], 503),
        ("/v1/role/decode", PEERS | {"peers": {}}, 503),
        ("/v1/role/decode", PEERS | {"local": {"server_ip": "0.0.0.0", "device": []}}, 503),
        ("/v1/role/decode", PEERS | {"local": {"server_ip": "10.0.0.1", "id": 1, "device": []}}, 503),
        ("/v1/role/decode", PEERS | {"local": {"server_ip": "10.0.0.1", "device": [{"device_id": "a"}]}}, 503),
        ("/v1/role/decode", PEERS | {"local": PEERS["local"] | {"p_percentage": 101}}, 503),
        ("/v1/role/decode", PEERS | {"peers": []}, 503),
        ("/v1/role/flex", PEERS | {"local": PEERS["local"] | {"p_percentage": 100}, "peers": []}, 503),
        ("/v1/role/flex", PEERS | {"peers": []}, 200),
        ("/v2/role/decode", PEERS, 503),
        ("/v2/role/decode", {"local": [], "peers": [[{"server_ip": "10.0.0.2", "host_ip": "10.0.0.2",
                             "dp_inst_list": [{"dp_inst_id": 10000, "device": []}]}]]}, 200),
        ("/v2/role/decode", {"local": [], "peers": [[{"server_ip": "10.0.0.2",
                             "dp_inst_list": [{"dp_inst_id": "1", "device": []}]}]]}, 503),
    ],
)  # fmt: skip
async def test_role_request_bodies_are_checked(serve, path: str, body: Any, status: int) -> None:
    served = await serve(role="none", peer_port=0)
    answer = await served.post(path, body)
    assert answer.status == status, answer.body
    if status == 422:
        text = "Req body converts to json fail. Reset to previous node status."
        assert answer.json == {"error": text, "error_type": "Input validation error"}
    assert (served.node.role.state == "RoleUnknown") == (status != 200)


async def test_mixed_server_refuses_a_role(serve) -> None:
    served = await serve()
    answer = await served.post("/v1/role/decode", PEERS)
    assert answer.status == 503 and answer.json["error"].startswith("Update pd info failed")
    assert (await served.get("/v1/status")).json["service"]["currentRole"] == "mixed"


async def test_last_of_many_rapid_role_changes_wins(serve) -> None:
    """The last role wins even if requests run and several roles arrive before one is taken."""
    served = await serve(role="prefill", peer_port=0, tick=0.005)
    node, rng = served.node, random.Random(3)

    async def begin(service, route, exchange, order) -> None:
        await generate.generate(service, route, exchange)

    async def ask() -> int:
        await asyncio.sleep(rng.random() / 5)
        return (await served.post("/v1/chat/completions", HELLO, **DMI)).status

    served.parts.intake.begin = begin
    asking = [asyncio.create_task(ask()) for _ in range(40)]
    for _ in range(20):
        name = rng.choice(("prefill", "decode", "flex"))
        assert (await served.post(f"/v1/role/{name}", PEERS)).status == 200
        await asyncio.sleep(rng.random() / 50)
    assert set(await asyncio.gather(*asking)) <= {200, 400, 503}
    await served.until(lambda: node.role.state == "RoleReady" and node.role.name == name)
    await served.idle()


async def test_role_change_needs_an_admin_key_or_the_secret(serve) -> None:
    served = await serve(role="none", peer_port=0, admin_keys=("boss",))
    assert (await served.post("/v1/role/decode", PEERS)).status == 401
    assert (await served.post("/v1/role/decode", PEERS, authorization="Bearer boss")).status == 200
    served = await serve(role="none", peer_port=0, cluster_secret="s")
    assert (await served.post("/v1/role/decode", PEERS)).status == 401
    assert (await served.post("/v1/role/decode", PEERS, **{"parley-secret": "s"})).status == 200


async def test_clients_need_keys_and_coordinators_the_secret(serve) -> None:
    served = await serve(role="decode", api_keys=("k",), admin_keys=("boss",), cluster_secret="s", peer_port=0)
    secret, wrong = {"parley-secret": "s"}, {"parley-secret": "t"}
    for path in ("/v1/status", "/metrics"):
        assert (await served.get(path, **secret)).status == 200
        assert (await served.get(path, **wrong)).status == (await served.get(path)).status == 401
    assert (await served.post("/v2/models/tiny/stopInfer", {"id": "1"}, **secret)).status != 401
    assert (await served.post("/v1/role/flex", PEERS, **secret)).status == 200
    order = DMI | secret | {"parley-results": "c"}
    assert (await served.post("/v1/chat/completions", HELLO, **order)).status == 401  # a client needs a key
    await served.until(lambda: served.node.role.name == "flex")
    assert (await served.post("/v1/chat/completions", HELLO, **order, authorization="Bearer k")).status != 401
    unkeyed = await serve(role="decode", cluster_secret="s")
    assert (await unkeyed.get("/dresult")).status == 401  # a plain coordinator needs the secret, too


async def test_mindie_management_port_serves_the_instance_plane(serve) -> None:
    served = await serve(role="decode", surfaces=alone("mindie-management", apis={**ALONE, **PLANES}))
    assert (await served.get("/v1/status")).json["service"]["currentRole"] == "decode"
    assert (await served.get("/v1/config")).json["modelName"] == "tiny"


async def test_hanging_coordinator_is_disconnected(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its connection but reads nothing: the instance cuts it and ends its requests."""
    monkeypatch.setattr(handlers, "DEAD", 500)
    monkeypatch.setattr(results, "KEEP", 0.2)
    monkeypatch.setattr(results, "WAITING", 1 << 20)
    served = await serve()
    line = await Results.open(served, "?client=c")
    line.connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    channel, gone = served.node.results.channel("c", "1"), asyncio.Event()
    channel.watch(gone.set)
    while channel.write(bytes(1 << 16)):
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await gone.wait()
    assert not served.node.results.clients
