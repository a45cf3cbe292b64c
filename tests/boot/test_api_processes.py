"""Several API processes behind one port: same answers, exact limits, and nothing is lost or left when one is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api_process_server import LONG, ProcessServer, slow_model
from support.metrics_page import metric_value

from parley.cli.serve_config.server_options import server_options
from parley.errors import UnknownModel
from parley.serving.api_processes.plan import decode_server_options, encode_server_options, passed_limit, shared_options
from parley.serving.api_processes.relayed_error import RelayedError, relay_error, restore_error
from parley.serving.server_options import ListenAddress, MediaOptions, ServerOptions
from parley.settings.config import SERVE_OPTIONS
from parley.settings.key_file import add_key, make_key
from parley.settings.media_hosts import MediaHost
from parley.settings.options import ConfigError, resolve_options
from parley.types import KeyOwner
from parley.web.connection_limit import ConnectionLimit
from parley.web.request_body import BodyBudget
from parley.web.tls.files import TlsFiles


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, str]]]:
    file, headers = tmp_path_factory.mktemp("keys") / "keys.toml", {}
    limits: dict[str, dict[str, Any]] = {
        "admin": {"admin": True},
        "requests": {"requests_per_minute": 20},
        "tokens": {"tokens_per_day": 20 * 8},
        "media": {"requests_per_minute": 10},
    }
    for name, members in limits.items():
        key, entry = make_key(name, **members)
        add_key(file, entry)
        headers[name] = {"authorization": f"Bearer {key}"}
    return file, headers


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "calls.jsonl"


@pytest.fixture(scope="module")
def scripted_server(
    folder: Path, keys, audit_log: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessServer]:
    """A server whose engine is scripted."""
    adapter = tmp_path_factory.mktemp("adapters") / "one"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    flags = ["--api-key-file", str(keys[0]), "--lora-root", str(adapter.parent), "--engine-timeout", "3", "--quiet"]
    flags += ["--audit-log", str(audit_log)]
    with ProcessServer(folder, "--api-processes", "2", *flags) as server:
        server.headers = keys[1]["admin"]
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def slow_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessServer]:
    """A server with an engine process that takes its time."""
    model = tmp_path_factory.mktemp("slow") / "tiny"
    with ProcessServer(model, *slow_model(folder, model), "--api-processes", "2") as server:
        yield server.wait_until_ready()


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5},
    "/v1/completions": {"prompt": ["abc", "de"], "n": 2, "max_tokens": 5, "logprobs": 1},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 5},
    "/generate": {"inputs": "abc", "parameters": {"max_new_tokens": 5}},
    "/v2/models/tiny/generate": {"text_input": "abc", "parameters": {"max_tokens": 5}},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "stream": False},
    "/v1/responses": {"input": "abc", "max_output_tokens": 16},
    "/serving-endpoints/tiny/invocations": {"prompt": "abc", "max_tokens": 5},
    "/v1/embeddings": {"input": "abc"},
    "/tokenize": {"prompt": "abc"},
}
CHANGING = {"id", "created", "created_at", "completed_at", "total_duration", "load_duration", "prompt_eval_duration",
            "eval_duration", "databricks_request_id"}  # fmt: skip


def without_ids_and_times(value: Any) -> Any:
    """Return an answer without ids and times."""
    if isinstance(value, dict):
        return {name: without_ids_and_times(member) for name, member in value.items() if name not in CHANGING}
    return [without_ids_and_times(member) for member in value] if isinstance(value, list) else value


def test_websockets_stay_in_their_process(scripted_server: ProcessServer):
    client = openai.OpenAI(
        base_url=f"{scripted_server.url}/v1", api_key="none", default_headers=scripted_server.headers
    )
    with client, client.responses.connect() as connection:
        previous = None
        for text in ("One", "Two", "Three"):
            connection.response.create(input=text, store=False, max_output_tokens=8, previous_response_id=previous)
            events = iter(connection)
            while (event := next(events)).type not in ("response.completed", "response.incomplete", "error"):
                pass
            assert event.type != "error", event
            assert event.response.previous_response_id == previous
            previous = event.response.id


async def test_several_api_processes_answer_like_one(scripted_server: ProcessServer, serve):
    single = await serve()
    for path, body in REQUESTS.items():
        status, content, headers = scripted_server.call(path, body)
        expected = await single.post(path, body)
        assert (status, without_ids_and_times(content)) == (expected.status, without_ids_and_times(expected.json)), path
        assert headers["content-type"] == expected.headers["content-type"]
    for path, body in (("/v1/completions", {"max_tokens": 0.5}), ("/v1/completions", {"model": "no", "prompt": "a"})):
        status, content, _ = scripted_server.call(path, body)
        expected = await single.post(path, body)
        assert (status, content) == (expected.status, expected.json)
    body = {"prompt": "abc", "max_tokens": 5, "stream": True}
    with scripted_server.open("/v1/completions", body) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    expected = await single.post("/v1/completions", body)
    assert [without_ids_and_times(event) for event in events] == [
        without_ids_and_times(event) for event in expected.events
    ]


def test_both_processes_answer_and_metrics_are_their_sum(scripted_server: ProcessServer):
    def count(page: str) -> float:
        return metric_value(page, 'vllm:request_success_total{model_name="tiny",engine="0",finished_reason="length"}')

    before = count(scripted_server.call("/metrics")[1])
    with ThreadPoolExecutor(32) as clients:
        answers = list(
            clients.map(lambda _: scripted_server.call("/v1/completions", {"prompt": "a", "max_tokens": 3}), range(96))
        )
    assert {status for status, *_ in answers} == {200}
    with ThreadPoolExecutor(4) as clients:
        pages = list(clients.map(lambda _: scripted_server.call("/metrics")[1], range(4)))
    assert {count(page) for page in pages} == {before + 96}


def test_limits_of_keys_are_exact_over_all_processes(scripted_server: ProcessServer, keys):
    body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}  # 8 tokens
    for name in ("requests", "tokens"):
        with ThreadPoolExecutor(16) as clients:
            answers = list(
                clients.map(
                    lambda _, name=name: scripted_server.call("/v1/completions", body, **keys[1][name]), range(60)
                )
            )
        assert Counter(status for status, *_ in answers) == {200: 20, 429: 40}
    granted = [headers for status, _, headers in answers if status == 200]
    assert min(int(headers["x-ratelimit-remaining-tokens"]) for headers in granted) == 0


def test_a_request_that_is_passed_on_counts_once(scripted_server: ProcessServer, keys):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [image]}]}
    statuses = Counter(scripted_server.call("/v1/chat/completions", body, **keys[1]["media"])[0] for _ in range(12))
    assert statuses == {400: 10, 429: 2}


def test_adapters_are_known_to_all_processes(scripted_server: ProcessServer):
    def use(_: int) -> int:
        return scripted_server.call("/v1/completions", {"model": "mine", "prompt": "a", "max_tokens": 2})[0]

    for path, expected in (("/v1/load_lora_adapter", 200), ("/v1/unload_lora_adapter", 404)):
        body = {"lora_name": "mine", "lora_path": "one"} if expected == 200 else {"lora_name": "mine"}
        assert scripted_server.call(path, body)[0] == 200
        with ThreadPoolExecutor(8) as clients:
            assert set(clients.map(use, range(24))) == {expected}


def test_calls_are_audited_once_with_the_address_of_their_client(scripted_server: ProcessServer, audit_log: Path):
    forged = {"x-parley-origin": '[["8.8.8.8", 1], "https", ["a.example"]]', "x-request-id": "forged-call"}
    body = {"lora_name": "unknown"}
    assert scripted_server.call("/v1/unload_lora_adapter", body, **forged)[0] == 404
    assert scripted_server.call("/v1/unload_lora_adapter", body, **forged, authorization="Bearer no")[0] == 401

    def calls() -> list[tuple[str, int]]:
        lines = map(json.loads, audit_log.read_text().splitlines())
        return sorted((line["client"], line["status"]) for line in lines if line["id"] == "forged-call")

    scripted_server.wait_for(lambda: len(calls()) >= 2)  # a line is written after the answer
    assert calls() == [("127.0.0.1", 401), ("127.0.0.1", 404)]


def test_reload_of_keys_reaches_all_processes(scripted_server: ProcessServer, keys):
    key, entry = make_key("late")
    add_key(keys[0], entry)
    headers = {"authorization": f"Bearer {key}"}
    body = {"prompt": "a", "max_tokens": 2}
    scripted_server.process.send_signal(signal.SIGHUP)
    assert scripted_server.wait_for(lambda: scripted_server.call("/v1/completions", body, **headers)[0] == 200)
    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(lambda _: scripted_server.call("/v1/completions", body, **headers)[0], range(24))) == {
            200
        }


def test_a_process_that_was_starting_knows_reloaded_keys(scripted_server: ProcessServer, keys):
    def use_key(timeout: float = 30) -> int:
        body = {"prompt": "a", "max_tokens": 2}
        return scripted_server.call("/v1/completions", body, timeout=timeout, authorization=f"Bearer {key}")[0]

    first, second = scripted_server.api_processes
    key, entry = make_key("later")
    os.kill(first, signal.SIGKILL)
    assert scripted_server.wait_for(lambda: len({*scripted_server.api_processes} - {first, second}) == 1)
    add_key(keys[0], entry)
    scripted_server.process.send_signal(signal.SIGHUP)
    assert scripted_server.wait_for(lambda: use_key() == 200)

    def new_one_knows_the_key() -> bool:
        os.kill(second, signal.SIGSTOP)  # so that the new one answers; for less time than a process that hangs has
        try:
            assert use_key(timeout=1) == 200
            return True
        except (TimeoutError, urllib.error.URLError):  # it does not serve yet
            return False
        finally:
            os.kill(second, signal.SIGCONT)

    assert scripted_server.wait_for(new_one_knows_the_key)


def test_a_killed_process_is_started_again_and_others_go_on(slow_server: ProcessServer):
    before = slow_server.api_processes
    assert len(before) == 2
    streams = [slow_server.open("/v1/completions", LONG) for _ in range(8)]
    assert slow_server.model_state()["slots"][0] == 8
    os.kill(before[0], signal.SIGKILL)
    assert slow_server.wait_for(lambda: len({*slow_server.api_processes} - {*before}) == 1)
    assert before[1] in slow_server.api_processes
    alive = []
    for stream in streams:
        try:
            for _ in range(200):
                if not stream.readline():
                    raise OSError("the stream ended")
            alive.append(stream)
        except (OSError, ValueError):
            stream.close()
    assert slow_server.model_state()["slots"][0] == len(alive) == len(slow_server.activity()["requests"])
    for stream in alive:
        stream.close()
    assert slow_server.wait_for(lambda: slow_server.is_idle)
    assert slow_server.call("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def test_requests_are_cancelled_from_any_connection(slow_server: ProcessServer):
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}
    names = [f"request-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as clients:
        answers = [
            clients.submit(slow_server.call, "/inference/v1/generate", body | {"request_id": name}) for name in names
        ]
        assert slow_server.wait_for(lambda: len(slow_server.activity()["requests"]) == 8)
        assert {request["api"] for request in slow_server.activity()["requests"]} == {"vllm"}
        assert slow_server.call("/abort_requests", {"request_ids": names})[0] == 200
        for answer in answers:
            assert answer.result()[1]["choices"][0]["finish_reason"] == "abort"
    assert slow_server.wait_for(lambda: slow_server.is_idle)


def test_a_killed_engine_fails_streams_and_serves_again(slow_server: ProcessServer):
    streams = [slow_server.open("/v1/completions", LONG) for _ in range(8)]
    [engine] = slow_server.children("parley.worker.process")
    os.kill(engine, signal.SIGKILL)
    for stream in streams:
        with stream:
            assert b"killed by SIGKILL" in stream.read()
    assert slow_server.wait_for(lambda: slow_server.get("/health/ready")[0] == 200)
    with ThreadPoolExecutor(8) as clients:
        body = {"prompt": "a", "max_tokens": 2}
        assert set(clients.map(lambda _: slow_server.call("/v1/completions", body)[0], range(8))) == {200}
    assert slow_server.wait_for(lambda: slow_server.is_idle)


def test_drain_refuses_new_requests_and_lets_open_ones_finish(slow_server: ProcessServer):
    body = {"prompt": "a", "max_tokens": 2}
    processes = [*slow_server.api_processes, *slow_server.children("parley.worker.process")]
    answers: list[int] = []
    clients = [
        threading.Thread(
            target=lambda: answers.append(slow_server.call("/v1/completions", body | {"max_tokens": 150})[0])
        )
        for _ in range(8)
    ]
    for client in clients:
        client.start()
    assert slow_server.wait_for(lambda: len(slow_server.activity()["requests"]) == 8)
    slow_server.process.send_signal(signal.SIGTERM)
    assert slow_server.wait_for(lambda: slow_server.get("/health/ready")[0] == 503)
    assert {slow_server.call("/v1/completions", body)[0] for _ in range(4)} == {503}
    for client in clients:
        client.join()
    assert answers == [200] * 8
    assert slow_server.wait_for_end() == 0
    assert not [number for number in processes if Path(f"/proc/{number}").exists()]
    assert not [line for line in slow_server.lines if "Traceback" in line]


def test_a_stopped_process_is_killed_and_started_again(scripted_server: ProcessServer):
    before = scripted_server.api_processes
    os.kill(before[0], signal.SIGSTOP)
    assert scripted_server.wait_for(lambda: len({*scripted_server.api_processes} - {before[0]}) == 2)
    assert scripted_server.wait_for_line(
        r"API process \d hung: it did nothing for \S+ s, and was killed; its requests were cancelled"
    )
    assert scripted_server.call("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def ignores_sigterm(number: int) -> bool:
    """Whether a process ignores SIGTERM, which an API process does once it has been imported."""
    status = Path(f"/proc/{number}/status").read_text()
    [ignored] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")]
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)


def test_processes_end_with_a_killed_main_process(scripted_server: ProcessServer):
    assert scripted_server.wait_for(
        lambda: [ignores_sigterm(number) for number in scripted_server.api_processes] == [True, True]
    )
    processes = scripted_server.api_processes
    os.kill(processes[0], signal.SIGSTOP)  # it cannot see the end, and must not keep the port
    scripted_server.process.kill()
    assert scripted_server.wait_for(lambda: not any(Path(f"/proc/{number}").exists() for number in processes))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-processes", "0"], "a whole number from 1 to 64"),
        (["--api-processes", "65"], "a whole number from 1 to 64"),
        (["--api-processes", "2", "--role", "decode"], "an instance of role decode has one API process"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        server_options(resolve_options(SERVE_OPTIONS, ["--model", "./tiny", *flags], {}))


def test_options_and_errors_arrive_as_they_were_sent(tmp_path: Path):
    _, entry = make_key("ann", models=["a"], expires=datetime(2030, 1, 1, tzinfo=UTC), tokens_per_day=5)
    options = ServerOptions(
        tls=TlsFiles(tmp_path / "cert", tmp_path / "key", client_authorities=(tmp_path / "ca",)),
        trusted_proxies=(ip_network("10.0.0.0/8"), ip_network("fd00::/8")),
        listen=(ListenAddress("tgi", "::", 0),),
        hashed_keys=(entry,),
        key_owners={"k": KeyOwner("ann", ("red",))},
        key_files=(tmp_path,),
        media=MediaOptions(hosts=(MediaHost("a.example", 80),), folder="x"),
        timeout=3.5,
        body_budget=BodyBudget(123),
        connection_limit=ConnectionLimit(7, 9),
    )
    received = decode_server_options(msgspec.msgpack.decode(msgspec.msgpack.encode(encode_server_options(options))))
    assert received == options
    assert received.body_budget.limit == 123 and received.connection_limit.refused_limit == 9
    sent = UnknownModel("The model 'x' does not exist.", name="x", served=["a", "b"], field="model")
    decoder = msgspec.msgpack.Decoder(RelayedError)
    error = restore_error(decoder.decode(msgspec.msgpack.encode(relay_error(sent))))
    assert type(error) is UnknownModel and vars(error) == vars(sent) and str(error) == str(sent)


@settings(max_examples=200)
@given(st.integers(1, 1 << 20), st.integers(2, 64), st.booleans())
def test_passed_connections_fit_the_descriptor_limit(served: int, count: int, is_limited: bool):
    limit = ConnectionLimit(served, served + 40)
    options = ServerOptions(connection_limit=limit, max_connections=served if is_limited else None)
    passed, clients = passed_limit(options, count), shared_options(options, count).connection_limit
    assert passed >= 1 and clients.served_limit >= 1
    if served >= count:
        assert passed * count <= served  # in the main process
        assert passed + clients.served_limit <= served + 1  # in each API process
    assert clients.refused_limit - clients.served_limit == 40
