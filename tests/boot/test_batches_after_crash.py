"""A batch of a server that was killed: the next server with the same file resumes it."""

from __future__ import annotations

import json
import signal
import sqlite3
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
from support.openai_batches import CHAT, CHAT_URL, FORM_HEADERS, request_line
from support.server_process import ScriptedServer
from support.sound_forms import encode_form

LONG = CHAT | {"max_tokens": 4000, "ignore_eos": True, "n": 4}  # they are not all answered when the first one is kept


def call(server: ScriptedServer, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    request = urllib.request.Request(server.url + path, body, headers or {})  # a server of this test
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def kept_answers(file: Path) -> dict[int, Any]:
    """Return the answers that are kept of a batch that runs, by the numbers of their requests."""
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT data FROM records WHERE name LIKE 'batch-answers/%'").fetchall()
    return dict(pair for (data,) in rows for pair in msgspec.msgpack.decode(data))


def test_a_killed_servers_batch_keeps_its_answers_and_goes_on(folder: Path, tmp_path: Path):
    file = tmp_path / "responses.db"
    lines = [request_line("0"), *(request_line(str(number), LONG) for number in range(1, 30))]
    with ScriptedServer(folder, "--response-store-file", str(file)) as server:
        server.wait_until_ready()
        form = encode_form([("purpose", "batch", None), ("file", "\n".join(lines), "in.jsonl")])
        file_id = json.loads(call(server, "/v1/files", form, FORM_HEADERS))["id"]
        wanted = {"input_file_id": file_id, "endpoint": CHAT_URL, "completion_window": "24h"}
        batch_id = json.loads(call(server, "/v1/batches", json.dumps(wanted).encode()))["id"]
        assert server.wait_for(lambda: bool(kept_answers(file)))
        server.process.send_signal(signal.SIGKILL)
        server.wait_for_end()
    kept = kept_answers(file)
    assert 0 in kept and len(kept) < len(lines)
    with sqlite3.connect(file) as database:
        database.execute("UPDATE records SET kept_at = kept_at - 100")  # since then the server was silent
    with ScriptedServer(folder, "--response-store-file", str(file)) as server:
        server.wait_until_ready()
        batch: dict[str, Any] = {}

        def has_ended() -> bool:
            batch.update(json.loads(call(server, f"/v1/batches/{batch_id}")))
            return batch["status"] not in ("validating", "in_progress")

        assert server.wait_for(has_ended), batch
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}
        results = call(server, f"/v1/files/{batch['output_file_id']}/content").splitlines()
    by_id = {line["custom_id"]: line["response"]["request_id"] for line in map(json.loads, results)}
    assert set(by_id) == {str(number) for number in range(len(lines))} and len(results) == len(lines)
    assert {number: answer[1] for number, answer in kept.items()} == {number: by_id[str(number)] for number in kept}
