"""Databricks endpoints through a running server: the traffic split, changes under load, and the stored file."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from support.http_client import build_request

from parley.dialects.admin_requests import EndpointChange
from parley.dialects.facts import Endpoint, EndpointShare
from parley.dialects.reply import Answer
from parley.errors import NotFound, NotReady, ParleyError
from parley.serving.endpoints import traffic_split
from parley.serving.endpoints.traffic_split import BadEndpointFile, EndpointFile, EndpointStore

ROOT = "/api/2.0/serving-endpoints"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def split_config(**percent: int) -> dict:
    """Build a configuration that splits requests between names of the one model."""
    return {
        "served_entities": [{"entity_name": "tiny", "name": name} for name in percent],
        "traffic_config": {
            "routes": [{"served_model_name": name, "traffic_percentage": part} for name, part in percent.items()]
        },
    }


def put_endpoint(name: str, **percent: int) -> EndpointChange:
    return EndpointChange(
        Answer(), put_endpoint=Endpoint(name, [EndpointShare(target, "tiny", part) for target, part in percent.items()])
    )


def deviations(count: int, total: int, part: float) -> float:
    """Return the distance of a count from its expected value, in standard deviations."""
    return abs(count - total * part) / (total * part * (1 - part)) ** 0.5


async def test_choose_splits_ten_thousand_requests_by_percentage():
    endpoints = EndpointStore()
    await endpoints.change_endpoints(lambda current: put_endpoint("e", a=70, b=30, c=0))
    draw = random.Random(5).random
    counts = Counter(endpoints.choose_share("e", draw=draw).name for _ in range(10_000))
    assert deviations(counts["a"], 10_000, 0.7) < 3
    assert counts["a"] + counts["b"] == 10_000
    assert endpoints.choose_share("e", "c").name == "c", "by name also what gets no share"
    with pytest.raises(NotFound):
        endpoints.choose_share("e", "d")
    assert endpoints.choose_share("tiny") == EndpointShare("tiny", "tiny", 100)
    for edge, name in ((0.0, "a"), (0.6999, "a"), (0.7, "b"), (0.999999, "b")):
        assert endpoints.choose_share("e", draw=lambda edge=edge: edge).name == name


async def test_http_requests_are_split_by_percentage(serve):
    running_server = await serve(reply=lambda work, index: [70, 71][: work.max_tokens])
    assert (await running_server.post(ROOT, {"name": "e", "config": split_config(a=70, b=30)})).status == 200
    connection = await running_server.connect()
    counts: Counter[str] = Counter()
    for _ in range(600):
        await connection.send(build_request("POST", "/serving-endpoints/e/invocations", BODY))
        answer = await connection.answer("POST")
        assert answer.status == 200
        counts[answer.headers["served-model-name"]] += 1
    connection.close()
    assert set(counts) == {"a", "b"}
    assert deviations(counts["a"], 600, 0.7) < 5  # exceeded by chance once in a million runs
    for path in ("", "/databricks"):
        one = await running_server.post(f"{path}/serving-endpoints/e/served-models/b/invocations", BODY)
        assert one.headers["served-model-name"] == "b"
        by_body = await running_server.post(
            f"{path}/serving-endpoints/chat/completions", BODY | {"model": "e", "stream": True}
        )
        assert by_body.headers["served-model-name"] in "ab"
        assert all(event["model"] == "tiny" for event in by_body.events)


async def test_changing_the_split_under_load_loses_no_request(serve):
    running_server = await serve(reply=lambda work, index: [70] * work.max_tokens, tick=0.001)
    await running_server.post(ROOT, {"name": "e", "config": split_config(a=50, b=50)})
    stopped = False
    statuses: Counter[int] = Counter()

    async def client(streams: bool) -> None:
        while not stopped:
            body = BODY | {"max_tokens": 8, "stream": streams}
            answer = await running_server.post("/serving-endpoints/e/invocations", body)
            statuses[answer.status] += 1
            if streams:
                assert answer.events[-1]["choices"][0]["finish_reason"] == "length"
            else:
                assert answer.json["usage"]["completion_tokens"] == 8

    clients = [asyncio.create_task(client(bool(number % 2))) for number in range(16)]
    for number in range(40):
        names = {f"n{number}": 30, f"m{number}": 70}
        answer = await running_server.call("PUT", f"{ROOT}/e/config", split_config(**names))
        assert answer.status == 200 and answer.json["config"]["config_version"] == number + 2
        latest = await running_server.post("/serving-endpoints/e/invocations", BODY)
        assert latest.headers["served-model-name"] in names, "from the answer on it is so"
    stopped = True
    await asyncio.gather(*clients)
    assert set(statuses) == {200} and statuses[200] >= 40
    await running_server.wait_until_idle()


async def test_concurrent_creations_of_one_endpoint_succeed_once(serve):
    running_server = await serve()
    creations = [
        running_server.post(ROOT, {"name": f"e{number % 10}", "config": split_config(a=100)}) for number in range(30)
    ]
    statuses = Counter(answer.status for answer in await asyncio.gather(*creations))
    assert statuses == {200: 10, 409: 20}
    listed = (await running_server.get(ROOT + "/")).json["endpoints"]
    assert sorted(entry["name"] for entry in listed) == [*(f"e{number}" for number in range(10)), "tiny"]


async def test_endpoint_of_a_missing_model_is_not_ready(serve, tmp_path):
    file = tmp_path / "endpoints.json"
    endpoint_file = EndpointFile([Endpoint("e", [EndpointShare("a", "other", 100)])])
    file.write_bytes(msgspec.json.encode(endpoint_file))
    running_server = await serve(endpoints=str(file))
    answer = await running_server.post("/serving-endpoints/e/invocations", BODY)
    assert (answer.status, answer.json["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")
    endpoint = (await running_server.get(f"{ROOT}/e")).json
    assert endpoint["state"]["ready"] == "NOT_READY"


# -- the file


async def test_endpoints_survive_a_restart_and_lock_their_file(tmp_path):
    file = str(tmp_path / "endpoints.json")
    first = EndpointStore(file)
    await first.change_endpoints(lambda current: put_endpoint("e", a=70, b=30))
    await first.change_endpoints(lambda current: put_endpoint("f", a=100))
    await first.change_endpoints(lambda current: EndpointChange(Answer(), remove_endpoint="f"))
    with pytest.raises(BadEndpointFile, match="in use"):
        EndpointStore(file)
    first.release_file()
    with pytest.raises(NotReady):
        await first.change_endpoints(lambda current: EndpointChange(Answer(), remove_endpoint="e"))
    second = EndpointStore(file)
    assert second.by_name == first.by_name and list(second.by_name) == ["e"]
    second.release_file()


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"\xff", b'{"endpoints": [{"name": "e"}]}', b'{"endpoints": [{"name": "e", "shares": []}]}',
     b'{"endpoints": [{"name": "e", "shares": [{"name": "a", "model": "m", "percent": 99}]}]}'],
)  # fmt: skip
def test_invalid_endpoints_file_is_rejected_and_kept(tmp_path, content):
    file = tmp_path / "endpoints.json"
    file.write_bytes(content)
    with pytest.raises(BadEndpointFile, match="endpoints"):
        EndpointStore(str(file))
    assert file.read_bytes() == content


def test_unwritable_endpoints_path_fails_at_start(tmp_path):
    with pytest.raises(BadEndpointFile):
        EndpointStore(str(tmp_path / "none" / "endpoints.json"))


async def test_failed_write_leaves_endpoints_unchanged(tmp_path, monkeypatch):
    endpoints = EndpointStore(str(tmp_path / "endpoints.json"))
    await endpoints.change_endpoints(lambda current: put_endpoint("e", a=100))
    (tmp_path / "endpoints.json.new").mkdir()  # blocks the temporary file
    with pytest.raises(ParleyError, match="could not be written"):
        await endpoints.change_endpoints(lambda current: put_endpoint("f", a=100))
    assert list(endpoints.by_name) == ["e"]
    (tmp_path / "endpoints.json.new").rmdir()
    await endpoints.change_endpoints(lambda current: put_endpoint("f", a=100))
    assert list(endpoints.by_name) == ["e", "f"]
    endpoints.release_file()


async def test_cancelled_change_of_endpoints_still_completes(tmp_path, monkeypatch):
    endpoints = EndpointStore(str(tmp_path / "endpoints.json"))
    entered = asyncio.Event()
    loop, write = asyncio.get_running_loop(), traffic_split.replace_file

    def slow(file: Path, content: bytes) -> None:
        loop.call_soon_threadsafe(entered.set)
        time.sleep(0.05)
        write(file, content)

    monkeypatch.setattr(traffic_split, "replace_file", slow)
    leaving = asyncio.create_task(endpoints.change_endpoints(lambda current: put_endpoint("e", a=100)))
    await entered.wait()
    leaving.cancel()
    await endpoints.change_endpoints(lambda current: put_endpoint("f", a=100))
    assert list(endpoints.by_name) == ["e", "f"]
    endpoints.release_file()
    again = EndpointStore(str(tmp_path / "endpoints.json"))
    assert again.by_name == endpoints.by_name
    again.release_file()


WRITER_SCRIPT = """
import asyncio, sys
from parley.dialects.reply import Answer
from parley.dialects.facts import Endpoint, EndpointShare
from parley.dialects.admin_requests import EndpointChange
from parley.serving.endpoints.traffic_split import EndpointStore

async def main():
    known = EndpointStore(sys.argv[1])
    last = known.by_name.get("e")
    version = int(last.about["version"]) if last else 0
    while True:
        version += 1
        about = {"version": version, "filling": ["x" * 100] * (version % 977)}
        shares = [EndpointShare("a", "m", version % 101), EndpointShare("b", "m", 100 - version % 101)]
        made = Endpoint("e", shares, about)
        await known.change_endpoints(lambda _: EndpointChange(Answer(), put_endpoint=made))
        sys.stdout.write(f"{version}\\n")
        sys.stdout.flush()

asyncio.run(main())
"""


def test_endpoints_file_is_complete_whenever_its_writer_is_killed(tmp_path):
    file = tmp_path / "endpoints.json"
    rng = random.Random(3)
    acknowledged = 0
    for _ in range(20):
        writer = subprocess.Popen([sys.executable, "-c", WRITER_SCRIPT, str(file)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert int(writer.stdout.readline()) > 0, "it found a whole file, and no lock that outlived its holder"
        time.sleep(rng.uniform(0, 0.03))
        writer.send_signal(signal.SIGKILL)
        printed_versions = writer.stdout.read().split(b"\n")[:-1]
        writer.stdout.close()
        writer.wait()
        (endpoint,) = msgspec.json.decode(file.read_bytes(), type=EndpointFile).endpoints
        version = endpoint.about["version"]
        assert [share.percent for share in endpoint.shares] == [version % 101, 100 - version % 101]
        assert len(endpoint.about["filling"]) == version % 977
        if printed_versions:
            assert version in (int(printed_versions[-1]), int(printed_versions[-1]) + 1), (
                "every acknowledged change is stored, and at most one more"
            )
        assert version >= acknowledged
        acknowledged = version
    assert acknowledged > 20


def test_killed_server_restores_its_endpoints(tmp_path):
    file = tmp_path / "endpoints.json"
    command = [sys.executable, "-m", "parley", "serve", "--scripted-engine", "--port", "0", "--endpoints", str(file)]
    for number in range(2):
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            assert server.stdout is not None
            port = next(int(line.rpartition(b":")[2].split(b"/")[0]) for line in server.stdout if b"Databricks" in line)
            status = asyncio.run(create_endpoint(port, f"e{number}", expected=number))
            assert status == 200
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
            server.stdout.close()
    endpoints_on_disk = msgspec.json.decode(file.read_bytes(), type=EndpointFile).endpoints
    assert [endpoint.name for endpoint in endpoints_on_disk] == ["e0", "e1"]


async def create_endpoint(port: int, name: str, expected: int) -> int:
    """Create an endpoint at a server that lists ``expected`` endpoints and its model; return the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(build_request("GET", ROOT))
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")).split()[1])
    listed = json.loads(await reader.readexactly(size))["endpoints"]
    assert len(listed) == expected + 1
    config = {"served_entities": [{"entity_name": listed[-1]["name"]}]}
    writer.write(build_request("POST", ROOT, {"name": name, "config": config}))
    status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    writer.close()
    return status
