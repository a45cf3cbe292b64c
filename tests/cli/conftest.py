"""Servers for the commands to talk to: parley itself with the scripted engine, and one that misbehaves on demand."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.cli_process import clean_environment, send_answer
from support.free_ports import free_port

sys.path.insert(0, str(Path(__file__).parents[1]))  # shared support modules


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A model folder that looks complete: real tokenizer and template, weights of a single number."""
    import numpy
    from safetensors.numpy import save_file
    from support.tiny_models import write_tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    save_file({"weight": numpy.zeros(1, numpy.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def serve(tiny) -> Iterator[Callable[..., str]]:
    """Start ``parley serve`` with the scripted engine, return its URL once it is ready, and stop all at session end."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> str:
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "parley", "serve", str(tiny), "--scripted-engine", "--port", str(port), *flags]
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean_environment())
        )
        for _ in range(600):
            assert running[-1].poll() is None, running[-1].stdout.read().decode()
            try:
                with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                    return url
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise AssertionError("the server was not ready in time")

    yield start
    for process in running:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(scope="session")
def url(serve) -> str:
    """One server for all tests that only send it requests."""
    return serve()


@pytest.fixture
def parley() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command as a user does."""

    def run(*words: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "parley", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            env=clean_environment() | variables,
        )

    return run


Script = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def faulty() -> Iterator[Callable[[Script], str]]:
    """A server that lists the model "m", tokenizes, and answers every other POST as the script says."""
    servers: list[ThreadingHTTPServer] = []

    def start(script: Script) -> str:
        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                send_answer(self, 200, b'{"object":"list","data":[{"id":"m","object":"model"}]}')

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/tokenize":
                    send_answer(self, 200, b'{"count":4,"tokens":[5,6,7,8]}')
                else:
                    script(self)

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Answer))
        servers[-1].daemon_threads = True
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
