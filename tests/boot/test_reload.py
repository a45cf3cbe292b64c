"""SIGHUP makes a running server and a coordinator read their keys, certificates and limits again."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.certificates import make_authority, make_certificate
from support.free_ports import free_port
from support.server_process import ScriptedServer
from support.terminal import Terminal

from parley.settings.key_file import add_key, make_key, remove_key

RELOADED, KEPT = r"were reloaded; changed: (.*)\.$", r"was not reloaded, and the old one stays: (.*)"


@pytest.fixture
def start_server(folder: Path) -> Iterator[Callable[..., ScriptedServer]]:
    running: list[ScriptedServer] = []

    def start(*flags: object) -> ScriptedServer:
        running.append(ScriptedServer(folder, *map(str, flags)))
        return running[-1].wait_until_ready()

    yield start
    for server in running:
        server.close()


def completion_status(server: ScriptedServer, key: str, padding: int = 0) -> int:
    body = json.dumps({"prompt": "a", "max_tokens": 2}) + " " * padding
    request = urllib.request.Request(f"{server.url}/v1/completions", body.encode(), {"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def hang_up(server: ScriptedServer, pattern: str) -> str:
    """Send the signal, and return what the log says about it."""
    earlier_lines = len(server.lines)
    server.process.send_signal(signal.SIGHUP)
    return server.wait_for_line(pattern, after=earlier_lines)[1]


def test_hang_up_reloads_keys_and_limits_of_a_server(start_server, tmp_path: Path) -> None:
    keys, config = tmp_path / "keys", tmp_path / "parley.toml"
    keys.write_text("first-key\n")
    config.write_text("body-limit = 100000\n")
    server = start_server("--api-key-file", keys, "--config", config)
    assert [completion_status(server, key) for key in ("first-key", "second-key")] == [200, 401]
    keys.write_text("second-key\n")
    config.write_text('body-limit = 2000\nmax-queue = 7\nhost = "127.0.0.2"\n')
    changed = hang_up(server, RELOADED)
    assert changed == "body_limit, api_keys, max_queue; these need a restart: host"
    assert [completion_status(server, key) for key in ("first-key", "second-key")] == [401, 200]
    assert [completion_status(server, "second-key", padding) for padding in (1000, 5000)] == [200, 413]


@pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="it waits for three polls; nightly")
def test_changed_key_file_is_read_without_a_signal_and_a_broken_file_is_ignored(start_server, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = {}
    for name in ("first", "second"):
        keys[name], hashed = make_key(name)
        add_key(file, hashed)
    server = start_server("--api-key-file", file)
    remove_key(file, "first")
    server.wait_for_line("Changed API keys were loaded")
    assert [completion_status(server, key) for key in keys.values()] == [401, 200]
    file.write_text(file.read_text() + "[[keys")
    server.wait_for_line("Changed API keys were not loaded, and the old ones stay: .*not valid TOML")
    assert [completion_status(server, key) for key in keys.values()] == [401, 200]


def test_an_instance_that_loses_its_keys_answers_members_only(start_server, tmp_path: Path) -> None:
    config = tmp_path / "parley.toml"
    config.write_text('api-key = ["first-key"]\n')
    server = start_server("--host", "0.0.0.0", "--cluster-secret", "s", "--config", config)
    assert completion_status(server, "first-key") == 200
    config.write_text("")
    assert hang_up(server, RELOADED) == "api_keys"
    assert completion_status(server, "first-key") == 401


BROKEN_FILES = [  # the configuration, the file of keys, and what the log says
    ("body-limit = 'much'\n", "first-key\n", "body-limit"),
    ("body-limit\n", "first-key\n", "parley.toml"),
    ("body-limit = 2000\n", "", "holds no key"),
    ("body-limit = 2000\n", None, "cannot be read"),
]


def link_endless_file(path: Path) -> None:
    path.symlink_to("/dev/zero")


def test_a_broken_file_keeps_the_old_configuration(start_server, tmp_path) -> None:
    keys, config = tmp_path / "keys", tmp_path / "parley.toml"
    keys.write_text("first-key\n")
    config.write_text("body-limit = 100000\n")
    server = start_server("--api-key-file", keys, "--config", config)
    for content, key_content, reason in BROKEN_FILES:
        config.write_text(content)
        keys.unlink() if key_content is None else keys.write_text(key_content)
        assert reason in hang_up(server, KEPT)
        assert completion_status(server, "first-key", 5000) == 200
    config.write_text("body-limit = 100000\n")
    for file in (keys, config):
        for put_file, reason in ((os.mkfifo, "it is a pipe"), (link_endless_file, "it has more than")):
            file.unlink(missing_ok=True)
            put_file(file)
            assert reason in hang_up(server, KEPT)
            assert completion_status(server, "first-key", 5000) == 200
        file.unlink()
        file.write_text("first-key\n")
    config.unlink()
    os.mkfifo(config)
    writer, earlier_lines = os.open(config, os.O_RDWR), len(server.lines)
    server.process.send_signal(signal.SIGHUP)
    open_files = Path(f"/proc/{server.process.pid}/fd")
    wait_until(lambda: any(os.path.realpath(file) == str(config) for file in open_files.iterdir()))
    assert completion_status(server, "first-key", 5000) == 200  # while the server waits for the pipe's end
    os.write(writer, b"body-limit = 2000\n")
    os.close(writer)
    server.wait_for_line(RELOADED, after=earlier_lines)
    assert completion_status(server, "first-key", 5000) == 413


def presented_name(port: int, authority: Path) -> str:
    """Return the name in the certificate that a port presents."""
    context = ssl.create_default_context(cafile=str(authority))
    context.set_alpn_protocols(["h2", "http/1.1"])
    sock = socket.create_connection(("127.0.0.1", port), 10)
    with context.wrap_socket(sock, server_hostname="127.0.0.1") as secure:
        return str(dict(pair for (pair,) in secure.getpeercert()["subject"])["commonName"])


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with the pairs old, new and client of the authority ours, and a stranger's."""
    for authority in ("ours", "theirs"):
        make_authority(tmp_path, authority)
    for name in ("old", "new", "client"):
        make_certificate(tmp_path, name, "ours")
    make_certificate(tmp_path, "stranger", "theirs")
    return tmp_path


def install_certificate(folder: Path, name: str) -> None:
    """Replace the pair ``server`` as certbot does: by other files under the old names."""
    for ending in ("key", "pem"):
        shutil.copy(folder / f"{name}.{ending}", folder / f"next.{ending}")
        (folder / f"next.{ending}").rename(folder / f"server.{ending}")


def test_server_speaks_tls_and_takes_over_changed_certificates(start_server, certificates: Path) -> None:
    grpc = pytest.importorskip("grpc")
    install_certificate(certificates, "old")
    grpc_port, tgi_port, metrics_port, admin_port = (free_port() for _ in range(4))
    server = start_server(
        *("--tls-cert", certificates / "server.pem", "--tls-key", certificates / "server.key"),
        *("--grpc-port", grpc_port, "--listen", f"tgi=127.0.0.1:{tgi_port}"),
        *("--metrics-port", metrics_port, "--admin-port", admin_port),
    )
    ports = [int(server.wait_for_line(r"https://127\.0\.0\.1:(\d+)")[1]), tgi_port, metrics_port, admin_port, grpc_port]
    authority = certificates / "ours.pem"

    def presented_names() -> set[str]:
        return {presented_name(port, authority) for port in ports}

    assert presented_names() == {"old"}
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/health", timeout=10)
    install_certificate(certificates, "new")
    wait_until(lambda: presented_names() == {"new"})
    assert server.wait_for_line("Changed certificates were loaded")
    (certificates / "server.key").write_text("half of a file")
    assert str(certificates / "server.key") in server.wait_for_line("were not loaded, and the old ones stay: (.*)")[1]
    assert presented_names() == {"new"}
    install_certificate(certificates, "old")
    wait_until(lambda: presented_names() == {"old"})
    credentials = grpc.ssl_channel_credentials(authority.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{grpc_port}", credentials) as channel:
        assert channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=20) == b"\x08\x01"


def test_server_asks_clients_for_certificates_on_every_port(start_server, certificates: Path) -> None:
    grpc = pytest.importorskip("grpc")
    install_certificate(certificates, "new")
    grpc_port = free_port()
    server = start_server(
        *("--tls-cert", certificates / "server.pem", "--tls-key", certificates / "server.key"),
        *("--tls-client-ca", certificates / "ours.pem", "--grpc-port", grpc_port, "--host", "0.0.0.0"),
    )
    assert not any("may use this server" in line for line in server.lines)  # strangers cannot
    port = int(server.wait_for_line(r"https://127\.0\.0\.1:(\d+)")[1])

    def status(client: str | None) -> int | None:
        context = ssl.create_default_context(cafile=str(certificates / "ours.pem"))
        if client:
            context.load_cert_chain(certificates / f"{client}.pem", certificates / f"{client}.key")
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", timeout=10, context=context) as answer:
                return int(answer.status)
        except (OSError, http.client.HTTPException):
            return None

    assert [status(client) for client in ("client", "stranger", None)] == [200, None, None]
    pem = {path.name: path.read_bytes() for path in certificates.glob("*")}
    for client, answers in (("client", True), ("stranger", False)):
        credentials = grpc.ssl_channel_credentials(pem["ours.pem"], pem[f"{client}.key"], pem[f"{client}.pem"])
        with grpc.secure_channel(f"127.0.0.1:{grpc_port}", credentials) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            if answers:
                assert call(b"", timeout=20) == b"\x08\x01"
            else:
                with pytest.raises(grpc.RpcError):
                    call(b"", timeout=5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key go together."),
        (["--tls-client-ca", "a.pem"], "--tls-client-ca needs --tls-cert and --tls-key."),
        (["--tls-cert", "none.pem", "--tls-key", "none.key"], "none.pem cannot be read: No such file or directory."),
    ],
)
def test_tls_options_that_cannot_be_used_end_the_start(folder: Path, flags: list[str], message: str) -> None:
    with ScriptedServer(folder, *flags) as server:
        assert server.wait_for_end() in (1, 2)
        assert message in "\n".join(server.lines)


def test_hang_up_reloads_certificates_and_limits_of_a_coordinator(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    make_authority(tmp_path, "ours")
    for name in ("old", "new"):
        make_certificate(tmp_path, name, "ours")
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"

    def install_certificate(name: str) -> None:
        shutil.copy(tmp_path / f"{name}.pem", certificate)
        shutil.copy(tmp_path / f"{name}.key", key)

    install_certificate("old")
    names = ("predict_port", "management_port", "metrics_port", "status_port", "grpc_port")
    ports = [free_port() for _ in names]
    config, log = tmp_path / "coordinator.toml", tmp_path / "log"
    port_lines = "".join(f"{name} = {port}\n" for name, port in zip(names, ports, strict=True))
    tls_table = '[tls]\ncertificate = "server.pem"\nkey = "server.key"\n'
    config.write_text(port_lines + tls_table)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "parley", "coordinator", "--config", config], stdout=output, stderr=output
        )
    try:
        wait_until(lambda: all(map(is_listening, ports)))
        assert {presented_name(port, tmp_path / "ours.pem") for port in ports} == {"old"}
        install_certificate("new")
        config.write_text(port_lines + "max_requests = 3\n" + tls_table)
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "were reloaded; changed: max_requests." in log.read_text())
        assert {presented_name(port, tmp_path / "ours.pem") for port in ports} == {"new"}
        install_certificate("old")
        key.write_text("broken")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "was not reloaded, and the old one stays: " in log.read_text())
        assert {presented_name(port, tmp_path / "ours.pem") for port in ports} == {"new"}
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(30)


def test_a_terminal_that_closes_ends_the_server(folder: Path, tmp_path: Path) -> None:
    """Nobody could stop it any more."""
    with Terminal("serve", str(folder), "--scripted-engine", "--port", "0", home=tmp_path) as terminal:
        terminal.read_until("ready in")
        terminal.hang_up()
        terminal.exit_code()


def has_opened(process: subprocess.Popen[bytes], file: Path) -> bool:
    """Whether a process that runs has opened a file. Raises AssertionError if it has ended."""
    assert process.poll() is None
    with suppress(OSError):  # a descriptor was closed meanwhile
        return any(os.path.realpath(link) == str(file) for link in Path(f"/proc/{process.pid}/fd").iterdir())
    return False


@pytest.mark.parametrize("command", ["serve", "coordinator"])
def test_a_hang_up_during_the_start_is_handled_after_it(folder: Path, tmp_path: Path, command: str) -> None:
    pipe = tmp_path / "config.toml"
    os.mkfifo(pipe)
    words = {
        "serve": ["serve", str(folder), "--scripted-engine", "--port", "0"],
        "coordinator": ["coordinator", "--port", "0"],
    }
    contents = {
        "serve": ("max-queue = 7\n", "max-queue = 8\n"),
        "coordinator": tuple(
            f"max_requests = {count}\nmanagement_port = 0\nmetrics_port = 0\nstatus_port = 0\n" for count in (7, 8)
        ),
    }
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "parley", *words[command], "--config", pipe],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        first, second = contents[command]
        with os.fdopen(os.open(pipe, os.O_RDWR), "w") as writer:  # opening it for writing alone waits for a reader
            wait_until(lambda: has_opened(process, pipe), 120)
            process.send_signal(signal.SIGHUP)
            pipe.unlink()
            pipe.write_text(second)  # a file that the reload finds, in place of the pipe that the start reads
            writer.write(first)
        wait_until(lambda: re.search(r"were reloaded; changed: max_(queue|requests)\.", log.read_text()), 120)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_closed_terminal_leaves_a_server_that_ignores_it(folder: Path, tmp_path: Path) -> None:
    """Started under ``nohup``, which ignores the signal."""
    words = ("serve", str(folder), "--scripted-engine", "--port", "0")
    with Terminal(*words, home=tmp_path, nohup=True) as terminal:
        url = re.findall(r"http://127\.0\.0\.1:\d+", terminal.read_until("ready in"))[0]
        terminal.hang_up()
        terminal.process.send_signal(signal.SIGHUP)
        for _ in range(20):
            with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
                assert answer.status == 200
            time.sleep(0.05)
        assert terminal.process.poll() is None
