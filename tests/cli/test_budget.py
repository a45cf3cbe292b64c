"""Imports of the API process: after answering every kind of request it has loaded neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.cli_process import clean_environment
from support.free_ports import free_port

# The server runs in the main thread, as always; a second thread sends requests, reports the modules and stops it.
SCRIPT = """
import json, os, signal, sys, threading, time, urllib.error, urllib.request
from parley.cli.main import main

root, words = sys.argv[1], sys.argv[2:]

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(root + path, data), timeout=60) as answer:
        return answer.read()

def look():
    try:
        for _ in range(1200):
            try:
                ask("/health/ready")
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        name = json.loads(ask("/v1/models"))["data"][0]["id"]
        turns = [{"role": "user", "content": "the lazy dog"}]
        body = {"model": name, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
        ask("/v1/chat/completions", body | {"messages": turns})
        ask("/v1/chat/completions", body | {"messages": turns, "stream": True})
        ask("/v1/completions", {"model": name, "prompt": "the", "max_tokens": 3, "echo": True, "logprobs": 1})
        count = json.loads(ask("/tokenize", {"model": name, "prompt": "the lazy dog"}))["count"]
        ask("/detokenize", {"model": name, "tokens": list(range(count))})
        ask("/metrics")
        print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
    except BaseException as error:
        print(json.dumps([repr(error)]), file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=look, daemon=True).start()
sys.exit(main(words))
"""


@pytest.mark.parametrize("engine", ["scripted", "process"])
def test_api_process_imports_neither_torch_nor_transformers(tiny, tmp_path, engine):
    model, port = tiny, free_port()
    if engine == "process":
        from support.tiny_models import write_model

        model = write_model(tmp_path / "model", "llama")
    flags = ["--scripted-engine"] if engine == "scripted" else ["--kv-memory", "8MiB", "--threads", "1"]
    words = ["serve", str(model), "--port", str(port), "--quiet", *flags]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"http://127.0.0.1:{port}", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert {"parley", "starlette", "uvicorn", "tokenizers", "msgspec"} <= loaded, loaded
    assert not loaded & {"torch", "transformers"}
    assert not loaded & {"grpc", "google"}  # only --grpc-port needs them
