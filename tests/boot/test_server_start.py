"""The server as a process: its first lines, signals, exit codes and imports."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import tiny_models
from support.free_ports import free_port
from support.http_client import MODEL_INFO, Answer, Connection, build_request
from support.server_process import ScriptedServer
from support.terminal import Terminal

from parley.boot import engine_factories
from parley.boot import server as start_module
from parley.boot.listening_places import listening_places
from parley.boot.start_banner import opening_lines
from parley.dialects.mounts import is_api, universal_mounts
from parley.disagg.kv.peer import KVPeer
from parley.disagg.kv.transport import LinkError
from parley.engine.scripted_engine import ScriptedEngine
from parley.serving.server_options import ListenAddress, OfferedModel, ServerOptions
from parley.types import Arena, ModelInfo, ParleySettings
from parley.web.banner import loaded_line, local_url
from parley.web.port import open_listener


@pytest.fixture
def start_server(folder: Path) -> Iterator[Callable[..., ScriptedServer]]:
    running: list[ScriptedServer] = []

    def start_process(*flags: str, model: Path | None = None) -> ScriptedServer:
        running.append(ScriptedServer(model or folder, *flags))
        return running[-1]

    yield start_process
    for process in running:
        process.close()


def test_server_prints_its_url_exits_on_sigterm_and_tells_systemd(start_server, tmp_path, monkeypatch):
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")  # few enough signs to fit into the queue
    server = start_server().wait_until_ready()
    text = "\n".join(server.lines)
    assert server.lines[0].startswith("parley ")
    assert "tiny" in text
    assert f"{server.url}/v1" in text
    assert server.get("/health/ready")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_for_end() == 0
    systemd.setblocking(False)
    messages = []
    with systemd, contextlib.suppress(BlockingIOError):
        while True:
            messages.append(systemd.recv(100))
    states = [message for message in messages if message != b"WATCHDOG=1"]
    assert states == [b"READY=1", b"STOPPING=1"]
    assert messages[0] == b"WATCHDOG=1"


def screen_lines(output: str) -> list[str]:
    """Return what a terminal shows after this output, which returns to the start of a line or clears its rest."""
    lines, column = [""], 0
    for part in re.split(r"(\r|\n|\x1b\[K)", output):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines, column = [*lines, ""], 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
            column += len(part)
    return lines


def test_progress_bar_leaves_nothing_on_the_terminal(folder, tmp_path):
    with Terminal("serve", str(folder), "--scripted-engine", "--port", "0", home=tmp_path) as terminal:
        output = terminal.read_until("ready in ")
    assert "····" in output
    assert not [line for line in screen_lines(output) if "··" in line or "██" in line]


def test_first_signal_drains_running_streams(start_server):
    server = start_server().wait_until_ready()
    with server.stream(3000) as stream:
        first = stream.readline()
        server.process.send_signal(signal.SIGINT)
        rest = stream.read()
    assert first.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in rest
    assert server.wait_for_end() == 0


class InProcessServer:
    """The server inside this process, with an engine that takes time for each step."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, load: float = 0.0, **options: Any):
        self.engine = ScriptedEngine(info=MODEL_INFO, step_seconds=0.005, load_seconds=load)
        monkeypatch.setitem(engine_factories.ENGINE_FACTORIES, "scripted", lambda settings, name: self.engine)
        server_options = ServerOptions(port=0, **options)
        sockets = [open_listener(place.host, place.port) for place in listening_places(server_options)]
        offer = OfferedModel(("tiny",), ParleySettings(model=str(folder)), "scripted")
        self.instance = start_module.ServerProcess([offer], server_options, sockets)
        self.port, *self.others = (sock.getsockname()[1] for sock in sockets)

    async def stream(self) -> Connection:
        """Open a connection and start a long answer on it."""
        connection = Connection(*await asyncio.open_connection("127.0.0.1", self.port))
        body = {"prompt": "a", "max_tokens": 3000, "stream": True}
        await connection.send(build_request("POST", "/v1/completions", body))
        assert (await connection.head())[0] == 200
        return connection


async def test_streams_past_the_drain_time_get_an_error_and_exit_is_clean(folder, monkeypatch):
    server = InProcessServer(folder, monkeypatch, drain=0.1)
    running = asyncio.create_task(server.instance.serve_until_exit())
    while server.instance.registry.unready_error():
        await asyncio.sleep(0.01)
    connection = await server.stream()
    os.kill(os.getpid(), signal.SIGTERM)
    rest = await connection.ended()
    assert b"shutting down" in rest and b"data: [DONE]\n\n" in rest
    assert await running == 0
    assert server.engine.state == "closed"


async def test_extra_api_port_is_strict_and_drains_with_the_main_port(folder, monkeypatch, capsys):
    listen = (ListenAddress("tgi", "127.0.0.1", 0), ListenAddress("triton", "127.0.0.1", 0))
    server = InProcessServer(folder, monkeypatch, listen=listen, drain=0.1, api_keys=("k" * 16,))
    running = asyncio.create_task(server.instance.serve_until_exit())
    while server.instance.registry.unready_error():
        await asyncio.sleep(0.01)

    async def send_request(port: int, method: str, path: str, body: Any = None, key: str = "k" * 16) -> Answer:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        await connection.send(build_request(method, path, body, {"authorization": f"Bearer {key}"}))
        answer = await connection.answer()
        connection.close()
        return answer

    tgi, triton = server.others
    zero = {"inputs": "a", "parameters": {"temperature": 0, "max_new_tokens": 4}}
    assert (await send_request(server.port, "POST", "/generate", zero)).status == 200
    assert "strictly positive" in (await send_request(tgi, "POST", "/generate", zero)).json["error"]
    assert (await send_request(tgi, "POST", "/generate", zero, key="wrong")).status == 401
    assert (await send_request(tgi, "GET", "/info")).json["max_best_of"] == 2
    assert (await send_request(tgi, "GET", "/health/live")).status == 200
    nowhere = await send_request(tgi, "GET", "/v2")
    assert (nowhere.status, nowhere.body) == (404, b"")
    assert (await send_request(triton, "GET", "/v2")).json["name"]
    assert (await send_request(triton, "POST", "/generate", zero)).status == 404
    assert re.search(rf"^  TGI .*  http://127\.0\.0\.1:{tgi}$", capsys.readouterr().out, re.MULTILINE)

    connection = Connection(*await asyncio.open_connection("127.0.0.1", tgi))
    long = {"inputs": "a", "parameters": {"max_new_tokens": 3000}}
    await connection.send(build_request("POST", "/generate_stream", long, {"authorization": "Bearer " + "k" * 16}))
    assert (await connection.head())[0] == 200
    os.kill(os.getpid(), signal.SIGTERM)
    assert b'"error_type":"healthcheck"' in await connection.ended()
    assert await running == 0
    for port in (server.port, *server.others):
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_second_signal_exits_at_once(folder, monkeypatch):
    server = InProcessServer(folder, monkeypatch, drain=1000.0)
    running = asyncio.create_task(server.instance.serve_until_exit())
    while server.instance.registry.unready_error():
        await asyncio.sleep(0.01)
    connection = await server.stream()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
    assert await running == 128 + signal.SIGTERM
    assert b'"error"' in await connection.ended()
    assert server.engine.state == "closed"


async def test_second_signal_tells_clients_when_to_try_again(folder, monkeypatch):
    server = InProcessServer(folder, monkeypatch, drain=1000.0)
    running = asyncio.create_task(server.instance.serve_until_exit())
    while server.instance.registry.unready_error():
        await asyncio.sleep(0.01)
    connection = Connection(*await asyncio.open_connection("127.0.0.1", server.port))
    await connection.send(build_request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3000}))
    while not server.instance.registry.open_requests:
        await asyncio.sleep(0.01)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
    answer = await connection.answer()
    connection.close()
    assert await running == 128 + signal.SIGTERM
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")


async def test_signal_during_loading_exits_the_server(folder, monkeypatch):
    server = InProcessServer(folder, monkeypatch, load=1000.0)
    running = asyncio.create_task(server.instance.serve_until_exit())
    while server.engine.state != "loading":
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert server.engine.state == "closed"


async def test_server_exits_when_its_engine_is_lost(folder, monkeypatch, capsys):
    server = InProcessServer(folder, monkeypatch)
    running = asyncio.create_task(server.instance.serve_until_exit())
    while server.instance.registry.unready_error():
        await asyncio.sleep(0.01)
    connection = await server.stream()
    server.engine.crash_engine("The engine process was killed by SIGKILL.")
    assert b"SIGKILL" in await connection.ended()
    assert await running == 1
    assert "SIGKILL" in capsys.readouterr().err.splitlines()[-1]


TAKEN_PORT = (
    "cannot listen on 127.0.0.1 port {}: Address already in use. Choose another, or end the program that listens there."
)


def test_taken_port_is_reported_in_one_line(start_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server("--port", str(port))
        assert server.wait_for_end() == 1
    assert server.lines == [f"parley: {TAKEN_PORT.format(port)}"]


def test_taken_api_port_is_reported_in_one_line(start_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server("--listen", f"tgi=127.0.0.1:{port}")
        assert server.wait_for_end() == 1
    assert server.lines == [f"parley: {TAKEN_PORT.format(port)}"]


def test_taken_peer_port_is_reported_in_one_line(start_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server("--role", "decode", "--peer-port", str(port))
        assert server.wait_for_end() == 1
    message = f"cannot listen on 127.0.0.1 port {port} for handovers: Address already in use"
    assert server.lines == [f"parley: {message}. Choose another with --peer-port."]


def test_instances_on_one_host_take_different_peer_ports(start_server):
    servers = [start_server("--role", "decode").wait_until_ready() for _ in range(2)]
    ports = set()
    for server in servers:
        with urllib.request.urlopen(f"{server.url}/v1/status") as answer:
            host, _, port = json.load(answer)["parley"]["peer"].partition(";")
        socket.create_connection((host, int(port))).close()
        ports.add(port)
    assert len(ports) == 2


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (["--role", "decode", "--api-key", "k"], "127.0.0.1 port 8000, which anyone on this machine can reach"),
        (["--role", "prefill", "--host", "0.0.0.0"], "0.0.0.0 port 8000, which anyone can reach"),
    ],
)
def test_does_not_start_an_instance_that_strangers_could_command(start_server, flags, place):
    server = start_server(*flags, "--port", "8000")
    assert server.wait_for_end() == 1
    (line,) = server.lines
    assert place in line and "--cluster-secret" in line and "--cluster-network" in line


async def test_keyed_instance_takes_no_handover_from_a_stranger(start_server):
    """Forged pages would enter the prefix cache, and change other clients' answers."""
    server = start_server("--role", "decode", "--api-key", "k", "--cluster-secret", "s", "--peer-port", "0")
    server.wait_until_ready()
    request = urllib.request.Request(f"{server.url}/v1/status", headers={"parley-secret": "s"})
    with urllib.request.urlopen(request) as answer:
        place = json.load(answer)["parley"]["peer"]
    stranger = KVPeer()
    try:
        stranger.add_arena("tiny", Arena(0, -1, 8, [], "scripted"))
        with pytest.raises(LinkError, match="has another cluster secret"):
            await stranger.open_handover(place, "tiny")
    finally:
        await stranger.close_peer()


def test_missing_tokenizer_is_reported_in_the_last_line(start_server, tmp_path):
    server = start_server(model=tmp_path)
    assert server.wait_for_end() == 1
    assert "tokenizer" in server.lines[-1] and server.lines[-1].startswith("parley: ")
    assert not any("Traceback" in line for line in server.lines)


def test_serve_imports_neither_torch_nor_transformers():
    code = (
        "import sys, parley.boot.server, parley.cli.serve\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_printed_urls_are_reachable_from_this_machine():
    assert local_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert local_url("::", 80) == "http://[::1]:80"
    assert local_url("llm.local", 80) == "http://llm.local:80"


def test_opening_names_the_web_page_and_warns_about_a_server_open_to_the_network():
    def opening_text(**options):
        return opening_lines(
            ServerOptions(**options), [OfferedModel(("m",), ParleySettings(model="m"))], "http://x", ()
        )

    assert "web page http://x/\n" in opening_text() and "web page" not in opening_text(ui=False)
    assert "--api-key" in opening_text(host="0.0.0.0")
    assert "--api-key" not in opening_text(host="0.0.0.0", api_keys=("k",))
    assert "--api-key" not in opening_text(host="127.0.0.1")
    assert "--api-key" not in opening_text(host="::1")
    assert "--api-key" in opening_text(listen=(ListenAddress("tgi", "0.0.0.0", 80),))
    assert "warning" not in opening_text(host="0.0.0.0", cluster_secret="s" * 16)  # it answers members only
    warning = opening_text(
        host="10.0.0.1", listen=(ListenAddress("tgi", "10.0.0.2", 80), ListenAddress("mindie", "10.0.0.1", 81))
    )
    assert "10.0.0.1 or 10.0.0.2 may use" in warning


def test_opening_has_one_line_for_each_api():
    mounts = [mount for mount in universal_mounts() if is_api(mount)]
    urls = [(mount.dialect, root + mount.prefix) for root in ("http://x:1", "http://x:12") for mount in mounts]
    model = OfferedModel(("m",), ParleySettings(model="m"))
    lines = opening_lines(ServerOptions(), [model], "http://x:1", urls).splitlines()
    lines_of = {
        title: [line for line in lines if line.startswith(f"  {title} ")] for title in {d.title for d, _ in urls}
    }
    assert all(len(found) >= 1 for found in lines_of.values())
    assert len(lines) == len(lines_of) + 4  # version, model, web page, health
    (line,) = lines_of["OpenAI"]
    assert line.split(maxsplit=1)[1].startswith("http://x:1/v1  /openai/v1  ") and "  http://x:12/v1" in line


def test_loaded_line_shows_the_memory_plan():
    info = ModelInfo(
        architecture="Qwen3ForCausalLM", dtype="bfloat16", device="cpu", parameters=494_032_768, vocab_size=9,
        max_model_len=32768, weights_bytes=988 << 20, kv_bytes=3 << 30, kv_pages=1000, page_tokens=16, fused=True,
    )  # fmt: skip
    text = loaded_line("chat", info)
    for part in (
        "chat: ",
        "494M parameters",
        "988 MiB",
        "3.00 GiB",
        "16,000 tokens",
        "32,768 tokens",
        "bfloat16 on cpu",
    ):
        assert part in text
    assert "reads" not in text
    info = msgspec.structs.replace(info, kernels="avx2")
    assert "bfloat16 on cpu with avx2 kernels" in loaded_line("chat", info)
    info = msgspec.structs.replace(info, media_kinds=frozenset({"image", "video"}))
    assert loaded_line("chat", info).endswith("; reads text, images and videos")


def start_ready_process(
    folder: Path, port: int, shell: str = 'exec "$@"', options: Sequence[str] = ("--scripted-engine",), **streams: Any
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "parley", "serve", str(folder), *options, "--port", str(port)]
    process = subprocess.Popen(["sh", "-c", shell, "sh", *command], **streams)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=10).close()
            return process
        except OSError:
            time.sleep(0.02)
    process.kill()
    raise AssertionError("it is never ready")


def test_unread_log_pipe_does_not_block_the_server(folder):
    reader, writer = os.pipe()
    port = free_port()
    process = start_ready_process(folder, port, stdout=subprocess.DEVNULL, stderr=writer)
    try:
        head = f"GET /{'a' * 190} HTTP/1.1\r\nhost: localhost\r\n".encode()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall((head + b"\r\n") * 600 + head + b"connection: close\r\n\r\n")  # more log than a 64 KiB pipe
            answers = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answers.count(b" 404 ") == 601
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("options", [["--scripted-engine"], ["--kv-memory", "64MiB"]])
def test_closed_standard_streams_are_replaced_by_dev_null(folder, options):
    """Also where the engine's process is started first: its socket could get their numbers."""
    model = folder if "--scripted-engine" in options else tiny_models.model_folder("llama")
    process = start_ready_process(model, free_port(), 'exec "$@" <&- >&- 2>&-', options)
    try:
        if sys.platform == "linux":
            assert {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)} == {os.devnull}
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_listening_on_all_addresses_accepts_ipv4_and_ipv6():
    with open_listener("::", 0) as sock:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, sock.getsockname()[1]), timeout=5).close()
