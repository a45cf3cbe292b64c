"""The inference port: refusals, the choice of who answers, and HTTP itself. Instances are scripted."""

from __future__ import annotations

import asyncio
import gzip
import json
from ipaddress import ip_network

import pytest
from support.coordinator_client import read_client_answer
from support.scripted_instance import AnswerScript, ReceivedRequest, ScriptedInstance

from parley.coordinator import refusals
from parley.coordinator.config import CoordinatorOptions, CoordinatorTls
from parley.coordinator.coordinator import Coordinator, run_coordinator
from parley.coordinator.proxy.paths import INTERNAL_KINDS, PathTable
from parley.dialects.mindie.pd import coordinator
from parley.dialects.mounts import mount_table, universal_mounts
from parley.errors import NotAllowed, NotFound
from parley.web.port import open_listener

CHAT_SCRIPT = AnswerScript([b"data: 0\n\n", b"data: 1\n\n"])
CHAT_BODY = b'{"model":"m","messages":[]}'
PLAIN_TEXT = "text/plain; charset=utf-8"


# -- refusals


@pytest.mark.parametrize("strict", [False, True])
async def test_requests_get_503_without_instances(cluster, strict):
    running = await cluster(strict=strict)
    answer = await running.post("/mindie/generate", CHAT_BODY)
    assert (answer.status, answer.headers["content-type"]) == (503, PLAIN_TEXT)
    assert answer.body == b"MindIE-MS Coordinator is not ready\r\n"
    answer = await running.post("/v1/chat/completions", CHAT_BODY)
    if strict:
        assert (answer.status, answer.body) == (503, b"MindIE-MS Coordinator is not ready\r\n")
    else:
        error = json.loads(answer.body)["error"]
        assert answer.status == 503 and error["message"].startswith("The cluster is not ready: ")
        assert "retry-after" in answer.headers
    assert (await running.get("/health/live")).status == 200
    ready = await running.get("/health/ready")
    assert ready.status == 503 and json.loads(ready.body)["status"] == "waiting"
    assert ("MindIE" in json.loads(ready.body)["message"]) == strict
    assert (await running.get("/health")).status == 503
    assert (await running.get("/v1/models")).status == 503


async def test_requests_get_429_above_max_requests(cluster):
    p = ScriptedInstance("prefill")
    running = await cluster(p, ScriptedInstance("decode"), max_requests=1)
    waiting = asyncio.Event()

    async def wait(request: ReceivedRequest) -> None:
        waiting.set()
        await asyncio.sleep(5)

    p.before_prefill = wait
    first = asyncio.create_task(running.post("/v1/completions", CHAT_BODY))
    await waiting.wait()
    answer = await running.post("/mindie/generate", CHAT_BODY)
    assert (answer.status, answer.body) == (429, b"Too many requests\r\n")
    answer = await running.post("/v1/completions", CHAT_BODY)
    assert answer.status == 429 and answer.headers["retry-after"] == "1"
    first.cancel()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions",
         b'{"error":{"message":"Memory limit exceeded","type":"server_error","code":429}}'),
        ("/generate_stream", b'{"error":"Memory limit exceeded","error_type":"overloaded"}'),
        ("/v2/models/m/generate", b'{"error":"Memory limit exceeded","code":429}'),
    ],
)  # fmt: skip
async def test_requests_get_429_above_the_memory_limit(cluster, path, body):
    running = await cluster(ScriptedInstance(), memory_limit=1 << 20, body_limit=4 << 20, strict=True)
    answer = await running.post(path, b" " * (2 << 20))
    assert (answer.status, answer.body) == (429, body)


async def test_coordinator_refuses_unknown_paths_and_methods(cluster):
    running = await cluster(ScriptedInstance())
    answer = await running.get("/mindie/nowhere")
    assert (answer.status, answer.body) == (400, b"Invalid request\r\n")
    assert answer.headers["connection"] == "close"
    answer = await running.get("/v1/nowhere")
    assert answer.status == 404 and "error" in json.loads(answer.body)
    answer = await running.get("/v1/completions")
    assert answer.status == 405 and answer.headers["allow"] == "POST"


async def test_coordinator_refuses_oversized_and_oddly_encoded_bodies(cluster):
    running = await cluster(ScriptedInstance(script=CHAT_SCRIPT), body_limit=1024)
    answer = await running.post("/v1/completions", CHAT_BODY, "content-encoding: br")
    assert answer.status == 400 and "error" in json.loads(answer.body)
    answer = await running.post("/v1/completions", gzip.compress(b" " * 1025), "content-encoding: gzip")
    assert answer.status == 413
    answer = await running.post("/v1/completions", b" " * 1025)
    assert answer.status == 413
    assert (await running.post("/v1/completions", CHAT_BODY, "content-encoding: identity")).status == 200
    assert (await running.post("/v1/completions", gzip.compress(CHAT_BODY), "content-encoding: gzip")).status == 200


async def test_coordinator_checks_the_origin_header(cluster):
    running = await cluster(ScriptedInstance(script=CHAT_SCRIPT))
    assert (await running.post("/v1/completions", CHAT_BODY, "origin: http://evil.example")).status == 403
    running = await cluster(ScriptedInstance(script=CHAT_SCRIPT), cors_origin=("http://good.example",))
    answer = await running.post("/v1/completions", CHAT_BODY, "origin: http://good.example")
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "http://good.example"
    chat = b'{"model":"m","messages":[{"role":"user","content":"a"}]}'
    for origin, status in (("app://obsidian.md", 200), ("http://evil.example", 403)):  # which Ollama allows and refuses
        answer = await running.post("/api/chat", chat, f"origin: {origin}")
        allowed = origin if status == 200 else None
        assert (answer.status, answer.headers.get("access-control-allow-origin")) == (status, allowed)


CHECKED_BODIES = [
    ("/v1/chat/completions", b"{", coordinator.INVALID_FORMAT),
    ("/v1/chat/completions", b"[1]", coordinator.INVALID_FORMAT),
    ("/v1/chat/completions", b"{}", coordinator.NO_PROMPT),
    ("/v1/chat/completions", b'{"messages":[],"stream":1}', coordinator.INVALID_FORMAT),
    ("/v1/completions", b'{"prompt":[1]}', coordinator.INVALID_FORMAT),
    ("/generate", b'{"inputs":1,"prompt":"a"}', coordinator.INVALID_FORMAT),
    ("/infer", b'{"inputs":"a","input_id":[1]}', coordinator.INVALID_FORMAT),
    ("/infer", b"{}", coordinator.INVALID_FORMAT),
    ("/v2/models/m/generate", b'{"inputs":"a"}', coordinator.INVALID_FORMAT),
    ("/v2/models/m/infer", b'{"inputs":[{"datatype":"BYTES"}]}', coordinator.INVALID_FORMAT),
    ("/v1/completions", b'{"prompt":"a"}', ""),
    ("/generate", b'{"prompt":"a"}', ""),
    ("/infer_token", b'{"input_id":[1]}', ""),
    ("/v2/models/m/infer", b'{"inputs":[{"datatype":"UINT32"}]}', ""),
    ("/v2/models/m/generate_stream", b'{"text_input":"a"}', ""),
]


async def test_strict_coordinator_checks_bodies(cluster):
    running = await cluster(ScriptedInstance(script=CHAT_SCRIPT), strict=True)
    for path, body, text in CHECKED_BODIES:
        answer = await running.post(path, body)
        expected = (400, refusals.plain_body(text)) if text else (200, b"".join(CHAT_SCRIPT.parts))
        assert (answer.status, answer.body) == expected, (path, body)
    loose = await cluster(ScriptedInstance(script=CHAT_SCRIPT))
    assert all([(await loose.post(path, body)).status == 200 for path, body, _ in CHECKED_BODIES])


async def test_coordinator_closes_connections_above_the_limit(cluster):
    running = await cluster(ScriptedInstance(script=CHAT_SCRIPT), max_requests=2, strict=True)
    beginning = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 14\r\n\r\n"
    open_connections = [await running.send_raw(beginning) for _ in range(2)]
    await running.wait_until(lambda: running.coordinator.front.load.open_requests == 2)
    reader, writer = await running.send_raw(b"")
    assert await reader.read() == b""
    writer.close()
    for _, open_writer in open_connections:
        open_writer.close()


async def test_strict_coordinator_limits_requests_per_connection(cluster):
    strict, loose = (
        await cluster(ScriptedInstance(script=CHAT_SCRIPT), max_requests=3, strict=True),
        await cluster(ScriptedInstance()),
    )
    raw_request = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 14\r\n\r\n" + b'{"prompt":"a"}'
    reader, writer = await strict.send_raw(raw_request * 4)
    for _ in range(3):
        assert (await read_client_answer(reader)).body == b"".join(CHAT_SCRIPT.parts)
    last = await read_client_answer(reader)
    assert (last.status, last.body) == (429, b"Connection request out of limit, max is 3\r\n")
    assert last.headers["content-type"] == PLAIN_TEXT and last.headers["connection"] == "close"
    assert await reader.read() == b""
    writer.close()
    assert (await strict.post("/generate", b'{"prompt":"a"}')).status == 200
    reader, writer = await loose.send_raw(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10)
    assert {(await read_client_answer(reader)).status for _ in range(10)} == {200}
    writer.close()


async def test_tokenizer_timeout_answers_408(cluster):
    slow = ScriptedInstance()
    running = await cluster(slow, tokenizer_timeout=0.05)

    async def wait(request: ReceivedRequest) -> None:
        await asyncio.sleep(5)

    slow.before_prefill = wait
    answer = await running.post("/mindie/v1/tokenizer", b'{"inputs":"a"}')
    assert (answer.status, answer.body) == (408, b"Request tokenizer timeout\r\n")
    answer = await running.post("/tokenize", b'{"prompt":"a"}')
    assert answer.status == 408 and json.loads(answer.body)["error"]["message"] == "The text was not tokenized in time."


# -- HTTP


async def test_coordinator_keeps_connections_and_takes_pipelined_requests(cluster):
    running = await cluster(ScriptedInstance(script=CHAT_SCRIPT))
    raw_request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    reader, writer = await running.send_raw(raw_request * 5)
    for _ in range(5):
        assert (await read_client_answer(reader)).body == b"".join(CHAT_SCRIPT.parts)
    writer.write(raw_request)
    assert (await read_client_answer(reader)).status == 200
    writer.close()


async def test_coordinator_sends_no_chunks_to_http_1_0_clients(cluster):
    running = await cluster(ScriptedInstance(script=CHAT_SCRIPT))
    reader, writer = await running.send_raw(b"POST /v1/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head and body == b"".join(CHAT_SCRIPT.parts)
    writer.close()


async def test_coordinator_answers_expect_100_continue(cluster):
    running = await cluster(ScriptedInstance(script=CHAT_SCRIPT))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    reader, writer = await running.send_raw(head)
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"{}")
    assert (await read_client_answer(reader)).body == b"".join(CHAT_SCRIPT.parts)
    writer.close()


async def test_coordinator_accepts_a_chunked_body(cluster):
    mixed = ScriptedInstance(script=CHAT_SCRIPT)
    running = await cluster(mixed)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    reader, writer = await running.send_raw(head + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")
    assert (await read_client_answer(reader)).status == 200
    assert mixed.requests[0].body == b"{}" and mixed.requests[0].headers["content-length"] == "2"
    writer.close()


# -- requests that do not generate


async def test_coordinator_answers_health_metrics_and_version_itself(cluster):
    running = await cluster(ScriptedInstance())
    assert (await running.get("/health/ready")).body == b'{"status":"ready"}'
    assert (await running.get("/health")).status == 200
    assert b"parley:cluster_ready 1" in (await running.get("/metrics")).body
    assert "version" in json.loads((await running.get("/version")).body)


async def test_queries_go_to_one_instance_and_changes_to_all(cluster):
    one, two = ScriptedInstance(label="one"), ScriptedInstance(label="two")
    running = await cluster(one, two)
    answer = await running.get("/v1/models")
    assert json.loads(answer.body) == {"instance": "one", "method": "GET", "path": "/v1/models"}
    assert (await running.get("/v1/models", "HEAD")).status == 200
    answer = await running.post("/v1/load_lora_adapter", b'{"lora_name":"a","lora_path":"b"}')
    assert json.loads(answer.body)["path"] == "/v1/load_lora_adapter"
    assert [[request.target for request in instance.requests][-1] for instance in (one, two)] == [
        "/v1/load_lora_adapter"
    ] * 2

    async def refuse(request: ReceivedRequest) -> bytes:
        return b"HTTP/1.1 409 X\r\ncontent-length: 2\r\n\r\nno"

    two.before_prefill = refuse
    answer = await running.post("/v1/load_lora_adapter", b"{}")
    assert (answer.status, answer.body) == (409, b"no")


async def test_queries_are_retried_on_another_instance(cluster):
    one, two = ScriptedInstance(label="one"), ScriptedInstance(label="two")
    running = await cluster(one, two)
    one.hangs_up = True
    for path in ("/v1/models/m", "/v2/models/m/config"):
        assert json.loads((await running.get(path)).body)["instance"] == "two"
    await one.kill_instance()
    assert json.loads((await running.post("/tokenize", b'{"prompt":"a"}')).body)["instance"] == "two"
    two.hangs_up = True
    assert (await running.get("/v1/models/m")).status >= 500


async def test_the_error_says_why_no_instance_answers(cluster):
    async def refuse(request: ReceivedRequest) -> bytes:
        return b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\nno"

    one, two = ScriptedInstance(), ScriptedInstance()
    running = await cluster(one, two)
    await running.coordinator.health.stop_checks()

    async def refusal() -> tuple[int, str]:
        answer = await running.post("/tokenize", b'{"prompt":"a"}')
        return answer.status, json.loads(answer.body)["error"]["message"]

    two.hangs_up = True
    one.hangs_up = True
    assert await refusal() == (500, "The connection to the instance broke before its answer was complete.")
    one.hangs_up, one.before_prefill = False, refuse
    await two.kill_instance()
    assert await refusal() == (503, "The cluster is not ready: too few of its instances can take requests.")
    await one.kill_instance()
    assert await refusal() == (503, "The request could not be sent to any instance.")


async def test_model_statistics_are_summed_over_instances(cluster):
    running = await cluster(*(instances := [ScriptedInstance(), ScriptedInstance(), ScriptedInstance()]))

    def counts(name: str, times: int, last: int) -> bytes:
        stats = {"success": {"count": times, "ns": 5}}
        batches = [{"batch_size": 1, "compute_infer": {"count": times, "ns": 2}}] if times else []
        return json.dumps({"model_stats": [{"name": name, "version": "1", "last_inference": last,
                                            "inference_stats": stats, "batch_stats": batches}]}).encode()  # fmt: skip

    pages = [counts("m", 2, 90), counts("m", 3, 100), counts("other", 0, 0)]
    for one, page in zip(instances, pages, strict=True):

        async def send_page(request: ReceivedRequest, page: bytes = page) -> bytes:
            return b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page)

        one.before_prefill = send_page
    statistics = json.loads((await running.get("/v2/models/stats")).body)
    sums = json.loads(counts("m", 5, 100))["model_stats"][0]
    sums["inference_stats"]["success"]["ns"], sums["batch_stats"][0]["compute_infer"]["ns"] = 10, 4
    assert statistics == {"model_stats": [sums, *json.loads(pages[2])["model_stats"]]}
    instances[1].before_prefill = None
    assert (await running.get("/v2/models/stats", "HEAD")).status == 200


async def test_queries_go_to_an_instance_that_has_the_model(cluster):
    one, two = ScriptedInstance(), ScriptedInstance()
    two.models = ["m", "other"]
    running = await cluster(one, two)

    def listing(path: str, names: list[str]) -> bytes:
        entries = [{"name" if path == "/api/tags" else "id": name, "created": 5} for name in names]
        return json.dumps({"object": "list", "data": entries}).encode()

    for instance in (one, two):

        async def send_page(request: ReceivedRequest, names: list[str] = instance.models) -> bytes:
            page = listing(request.target, names)
            return b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page)

        instance.before_prefill = send_page
    for path in ("/v1/models", "/api/tags"):
        assert json.loads((await running.get(path)).body) == json.loads(listing(path, ["m", "other"]))
    one.before_prefill = two.before_prefill = None
    for query in (running.get("/v1/models/other"), running.get("/v2/models/other/config"),
                  running.post("/tokenize", b'{"model":"other","prompt":"a"}'),
                  running.post("/api/show", b'{"model":"other:latest"}')):  # fmt: skip
        assert (await query).status == 200
    assert len(two.requests) == 6 and len(one.requests) == 2


async def test_large_answer_is_forwarded_completely(cluster):
    mixed = ScriptedInstance()
    running = await cluster(mixed)
    size = 8 << 20

    async def large_answer(request: ReceivedRequest) -> bytes:
        return b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size)

    mixed.before_prefill = large_answer
    answer = await running.get("/v1/models")
    assert (answer.status, len(answer.body), answer.headers["content-length"]) == (200, size, str(size))


async def test_coordinator_hides_the_instance_plane_from_clients(cluster):
    instance = ScriptedInstance()
    running = await cluster(instance, secret="s")
    for path in ("/dresult", "/dresult?client=x", "/v1/status", "/v2/status"):
        assert (await running.get(path)).status == 404
    for path in ("/v1/role/decode", "/v2/role/prefill", "/v1/dresult/flow"):
        assert (await running.post(path, b"{}")).status == 404
    assert (await running.get("/v1/models")).status == 200
    forwarded = instance.requests[-1].headers
    assert (forwarded["parley-secret"], forwarded["parley-forwarded"]) == ("s", "private")


@pytest.mark.parametrize(
    ("port", "host", "keys", "open_to_all"),
    [
        ("metrics", "0.0.0.0", {}, True),
        ("status", "::", {}, True),
        ("status", "0.0.0.0", {"secret": "s" * 32}, False),
        ("status", "0.0.0.0", {"cluster_network": (ip_network("10.0.0.0/24"),)}, False),
        ("status", "0.0.0.0", {"tls": CoordinatorTls(clients="ca.pem")}, False),
        ("metrics", "127.0.0.1", {}, False),
    ],
)
async def test_start_message_says_who_may_see_the_cluster(capsys, port, host, keys, open_to_all):
    sockets = {"predict": ("127.0.0.1", open_listener("127.0.0.1", 0)), port: (host, open_listener(host, 0))}
    coordinator = Coordinator(CoordinatorOptions(**keys), sockets)
    task, output = asyncio.create_task(coordinator.run_until_stopped(signals=False)), ""
    while port not in output:
        await asyncio.sleep(0.01)
        output += capsys.readouterr().out
    coordinator.request_stop()
    await task
    assert (f"anyone who can reach {host} may see the instances and their activity" in output) == open_to_all, output


@pytest.mark.parametrize("keys", [{"host": "0.0.0.0"}, {"management_host": "10.255.0.1"}, {"host": "::"}])
def test_coordinator_refuses_a_management_port_that_is_open_to_strangers(capsys, keys):
    assert run_coordinator(CoordinatorOptions(**keys)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("parley: the management port takes the list of instances at ")
    assert line.endswith(
        "Set secret, or [tls] clients, or cluster_network, or management_host to an address of this machine alone."
    )


def test_a_models_name_in_a_path_may_have_slashes():
    paths = PathTable(universal_mounts())

    def find_names() -> set[str]:
        return {"org/model", "m"}

    match, parts = paths.match_path("POST", "/v2/models/org/model/generate", find_names)
    assert match.route.path == "/v2/models/{model}/generate" and parts == {"model": "org/model"}
    with pytest.raises(NotAllowed, match="PUT is not allowed on '/v2/models/org/model/generate'"):
        paths.match_path("PUT", "/v2/models/org/model/generate", find_names)
    for path in ("/v2/models/org/other/generate", "/v2/models/org/model/nothing"):
        with pytest.raises(NotFound):
            paths.match_path("POST", path, find_names)


def test_coordinator_finds_every_route_of_a_server():
    paths = PathTable(universal_mounts())
    for (method, path), answering in mount_table(universal_mounts()).items():
        if answering[0][0].kind in INTERNAL_KINDS:
            continue
        example_path = "/".join("x" if part.startswith("{") else part for part in path.split("/"))
        if "{" in example_path:
            continue
        match, parts = paths.match_path(method, example_path)
        assert match.route in [route for route, _ in answering] or "{" in path
        assert all(value for value in parts.values())
