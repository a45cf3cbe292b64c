"""Several models in one server, as a user starts them: real engines; the test kills one of them."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def answer_text(server, model):
    status, answer = server.post("/v1/chat/completions", {"model": model, "messages": QUESTION, "temperature": 0})
    return answer["choices"][0]["message"]["content"] if status == 200 else answer["error"]["message"]


def collect_stream(server, model, lines):
    body = {"model": model, "prompt": "one", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    call = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(call, timeout=120) as stream:
        lines += (line for line in stream if line.startswith(b"data: "))


def test_killed_engine_does_not_disturb_the_other_model(serve):
    own = ",kv-memory=64MiB,threads=1"
    server = serve("--model", f"first,alias=parley-demo{own}", "--model", f"second=parley-demo{own}")
    answers = {name: answer_text(server, name) for name in ("first", "alias", "second", "")}
    assert set(answers.values()) == {"The capital of France is Paris."}
    assert "'third' does not exist" in answer_text(server, "third")
    engines = server.children()
    assert len(engines) == 2  # in start order
    streams = {name: [] for name in ("first", "second")}
    threads = [threading.Thread(target=collect_stream, args=(server, *stream)) for stream in streams.items()]
    for thread in threads:
        thread.start()
    assert server.wait_for(lambda: all(map(len, streams.values())))
    os.kill(engines[1], signal.SIGKILL)
    assert server.wait_for(lambda: not server.is_ready())
    status_body = json.loads(server.get("/health/ready")[1])
    assert status_body["models"] == {"first": "ready", "second": "restarting"}
    assert answer_text(server, "first") == answers["first"] and "second" in answer_text(server, "second")
    for thread in threads:
        thread.join()
    assert b"length" in streams["first"][-2] and b"SIGKILL" in streams["second"][-2]
    assert server.wait_for(server.is_ready)
    assert server.children()[0] == engines[0]
    assert answer_text(server, "second") == answers["second"]
    assert server.stop() == 0


def test_unloadable_model_ends_the_server(serve, tmp_path):
    server = serve("--model", "first=parley-demo", "--model", f"second={tmp_path}", wait=False)
    assert server.process.wait(60) == 1
    assert server.output().splitlines()[-1].startswith(f"parley: {tmp_path} cannot be served")
