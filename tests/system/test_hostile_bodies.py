"""A server process under bodies made to exhaust it: others are served meanwhile, and it keeps no memory.

``PARLEY_NIGHTLY=1`` sends every kind of bomb to every route.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.json_bombs import BOMB_KINDS, compress_bomb, every_bomb, write_bomb
from support.server_process import ScriptedServer

from parley.dialects.mounts import mount_table, universal_mounts

NIGHTLY = bool(os.environ.get("PARLEY_NIGHTLY"))
PROBE_PATIENCE = 4.0  # seconds that a probe waits; the bombs took longer
GROWTH_LIMIT = 400 << 20  # bytes that one bomb may take; arrays took over 800 MB
KEPT_LIMIT = 200 << 20  # bytes that may be kept after many large bodies
POST_PATHS = sorted(
    path.replace("{model}", "tiny")
    for method, path in mount_table(universal_mounts())
    if method == "POST" and not path.startswith("/inference.")  # those are gRPC's
)
STOPPING_PATHS = ("/stopService",)


def memory_of(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def forget_peak_memory(pid: int) -> None:
    """Let ``peak_memory_of`` count from now on: tests run in any order, and some bodies may take more than others."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory_of(pid: int) -> int:
    """Return the most resident memory that a process has had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def send_body(url: str, path: str, body: bytes, headers: dict[str, str] | None = None, seconds: float = 60) -> int:
    """Send a request and return the status of its answer; 0 if the connection was cut."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=seconds)
    try:
        connection.request("POST", path, body, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (ConnectionError, http.client.RemoteDisconnected):
        return 0
    finally:
        connection.close()


@contextmanager
def continuous_probes(url: str) -> Iterator[None]:
    """Probe the server all the time; each probe has to be answered within PROBE_PATIENCE."""
    stop, failures, answered = threading.Event(), list[str](), list[int]()

    def probe() -> None:
        while not stop.wait(0.05):
            connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=PROBE_PATIENCE)
            try:
                connection.request("GET", "/health/live")
                answered.append(connection.getresponse().status)
            except OSError as error:
                failures.append(repr(error))
            finally:
                connection.close()

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures and set(answered) <= {200}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ScriptedServer]:
    from support.tiny_models import write_tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_tokenizer(folder)
    with ScriptedServer(folder).wait_until_ready() as process:
        yield process
        process.process.terminate()
        assert process.wait_for_end() == 0


@pytest.mark.parametrize("kind", BOMB_KINDS if NIGHTLY else ["arrays", "members"])
def test_body_of_too_many_values_delays_no_request_and_takes_little_memory(server, kind):
    body = write_bomb(kind)
    forget_peak_memory(server.process.pid)
    before = memory_of(server.process.pid)
    with continuous_probes(server.url):
        statuses = {
            send_body(server.url, "/v1/completions", body),
            send_body(server.url, "/v1/completions", compress_bomb(body), {"content-encoding": "gzip"}),
        }
    assert statuses <= ({400, 413} if kind != "one string" else {200, 413})
    assert peak_memory_of(server.process.pid) - before < GROWTH_LIMIT


def test_memory_of_many_large_bodies_is_given_back(server):
    body = write_bomb("one string", member="prompt")
    before = memory_of(server.process.pid)
    with continuous_probes(server.url):
        senders = [
            threading.Thread(target=send_body, args=(server.url, "/v1/completions", body), daemon=True)
            for _ in range(20)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(60)
    assert server.wait_for(lambda: memory_of(server.process.pid) - before < KEPT_LIMIT), memory_of(server.process.pid)


def is_documented(path: str, status: int) -> bool:
    """Whether the original answers requests that it refuses with this status of a server error."""
    if status == 500:
        return path.startswith(("/triton", "/vllm", "/tgi/vertex"))
    return status == 501 or (status == 503 and path.endswith(("/load", "/unload", "/prefill", "/decode", "/flex")))


@pytest.mark.skipif(not NIGHTLY, reason="takes minutes: PARLEY_NIGHTLY=1")
@pytest.mark.parametrize("path", [path for path in POST_PATHS if not path.endswith(STOPPING_PATHS)])
def test_every_route_survives_every_bomb(server, path):
    forget_peak_memory(server.process.pid)
    with continuous_probes(server.url):
        for name, body, headers in every_bomb():
            status = send_body(server.url, path, body, headers)
            assert status < 500 or is_documented(path, status), (name, status)
    assert peak_memory_of(server.process.pid) < 1 << 30


TEXT_ROUTES = {
    "/tokenize": {"prompt": ...},
    "/tgi/tokenize": {"inputs": ...},
    "/tgi/chat_tokenize": {"messages": [{"role": "user", "content": ...}]},
    "/vllm/tokenize": {"prompt": ...},
    "/mindie/v1/tokenizer": {"inputs": ...},
    "/v1/completions": {"prompt": ...},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": ...}]},
    "/vllm/v1/completions": {"prompt": ...},
    "/generate": {"inputs": ...},
    "/tgi/generate": {"inputs": ...},
    "/mindie/generate": {"inputs": ...},
    "/triton/v2/models/tiny/generate": {"text_input": ...},
    "/databricks/serving-endpoints/tiny/invocations": {"messages": [{"role": "user", "content": ...}]},
}


def write_text_request(template: object, text: str) -> object:
    """Return a body with the text in place of the ellipsis."""
    if isinstance(template, dict):
        return {name: write_text_request(value, text) for name, value in template.items()}
    if isinstance(template, list):
        return [write_text_request(value, text) for value in template]
    return text if template is ... else template


LONG_TEXT = "The sun goes down, and the moon comes up. " * (30_000_000 // 42)


@pytest.mark.parametrize("path", TEXT_ROUTES if NIGHTLY else ["/tokenize", "/v1/completions", "/tgi/generate"])
def test_long_text_is_refused_without_reading_it_all(server, path):
    body = json.dumps(write_text_request(TEXT_ROUTES[path], LONG_TEXT)).encode()
    forget_peak_memory(server.process.pid)
    with continuous_probes(server.url):
        assert 400 <= send_body(server.url, path, body) < 500
    assert peak_memory_of(server.process.pid) < 1 << 30


def test_long_text_of_a_client_that_left_is_abandoned(server):
    """Blanks have few tokens, so no limit ends the work."""
    body = json.dumps({"prompt": "a" + " " * 30_000_000}).encode()
    began = processor_seconds(server.process.pid)
    with pytest.raises(TimeoutError):
        send_body(server.url, "/tokenize", body, seconds=0.3)

    def is_idle() -> bool:
        before = processor_seconds(server.process.pid)
        time.sleep(0.5)
        return processor_seconds(server.process.pid) - before < 0.1

    assert server.wait_for(is_idle)
    assert processor_seconds(server.process.pid) - began < 8  # it took over twenty


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
