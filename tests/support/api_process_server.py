"""A server with API processes, which share its ports."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.server_process import ScriptedServer

COSTS = "rows = [[1, 0.02], [256, 0.02]]\nblocks = 4096\nlength = 8192\n"  # a token takes 20 ms
LONG = {"prompt": "abc", "max_tokens": 4000, "stream": True, "ignore_eos": True}


class ProcessServer(ScriptedServer):
    """A server with API processes. ``headers`` go with every request."""

    headers: dict[str, str] = {}  # noqa: RUF012

    @property
    def api_processes(self) -> list[int]:
        return self.children("parley.boot.api_process")

    def open(self, path: str, body: Any = None, *, timeout: float = 30, **headers: str):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json", **self.headers, **headers}
        )
        return urllib.request.urlopen(request, timeout=timeout)

    def call(
        self, path: str, body: Any = None, *, timeout: float = 30, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        try:
            with self.open(path, body, timeout=timeout, **headers) as answer:
                text, status, answer_headers = answer.read(), answer.status, answer.headers
        except urllib.error.HTTPError as error:
            with error:
                text, status, answer_headers = error.read(), error.code, error.headers
        try:
            content = json.loads(text)
        except ValueError:
            content = text.decode()
        return status, content, dict(answer_headers.items())

    def activity(self) -> dict[str, Any]:
        return self.call("/ui/activity")[1]

    def model_state(self) -> dict[str, Any]:
        return self.activity()["models"][0]

    @property
    def is_idle(self) -> bool:
        state = self.model_state()
        return not self.activity()["requests"] and state["slots"][0] == state["running"] == state["kv"][0] == 0


def slow_model(folder: Path, target: Path) -> list[str]:
    """Make a model in the folder ``target`` whose engine process takes its time. Return the flags to serve it."""
    shutil.copytree(folder, target)
    (target / "config.json").write_text('{"model_type":"llama","architectures":["LlamaForCausalLM"]}')
    (target / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (target / "costs.toml").write_text(COSTS)
    return ["--no-scripted-engine", "--cost-model", str(target / "costs.toml")]
