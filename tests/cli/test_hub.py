"""Where models are looked up, and the errors for missing ones. The hub is a small local server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley import foreign_files, hub
from parley.hub.download import _unfinished_mark, name_in_address
from parley.hub.transfer import TransferMeter, format_bytes

COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)) * 4000,
    "pytorch_model.bin": b"not wanted",
    "1_Pooling/config.json": b"{}",
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"weights",
    "additional_chat_templates/tool_use.jinja": b"{{ messages }}",
    "original/model.safetensors": b"not wanted",
    "4bit/model.safetensors": b"not wanted",
    "8_bit/model.safetensors": b"not wanted",
    "onnx/config.json": b"not wanted",
    "adapters/config.json": b"not wanted",
    "assets/config.json": b"not wanted",
    "README.md": b"not wanted",
}
# Files of two models, one of them in parts. They are no models, so each is refused by its name after the download.
GGUF_FILES = {
    "m-Q8_0.gguf": b"no model",
    "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf": b"no model",
    "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf": b"no model either",
    "mmproj-m-F16.gguf": b"no encoder",
    "mmproj-m-Q8_0.gguf": b"no encoder either",
    "Q8_0/mmproj-m-Q4_0.gguf": b"not wanted",
}
# What is said of a download: how much of how much, and before its end the speed and the time that is left.
SIZE = r"[\d.]+ [kMG]?B"
STAGE = re.compile(rf"downloading {SIZE} of (?P<whole>{SIZE})(, {SIZE}/s, (?P<left>(\d+:)?\d+:\d\d) left)?")
REQUIRED_FILES = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
DENSE_FILES = ["2_Dense/config.json", "2_Dense/model.safetensors"]
DOWNLOADED_FILES = [
    "1_Pooling/config.json",
    *DENSE_FILES,
    "additional_chat_templates/tool_use.jinja",
    *REQUIRED_FILES,
]

SCRIPT = """
import json, sys
from parley import hub
from parley.types import ModelOverrides
seen = []
try:
    overrides = ModelOverrides(*sys.argv[2:])
    found = hub.resolve_model(sys.argv[1], lambda stage, fraction: seen.append([stage, fraction]), overrides=overrides)
except hub.ModelMissing as error:
    found = "missing: " + str(error)
print(json.dumps([str(found), seen, sorted({"torch", "transformers"} & set(sys.modules))]))
"""


class FakeHub(BaseHTTPRequestHandler):
    """Answers for the model owner/model as the hub does; refuses ``owner/gated``; knows no others."""

    protocol_version = "HTTP/1.1"
    requested_paths: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        type(self).requested_paths.append(path)
        status, headers, data = 200, {}, b""
        if path.startswith(f"/owner/model/resolve/{COMMIT}/"):
            data = FILES[path.removeprefix(f"/owner/model/resolve/{COMMIT}/")]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        elif path == f"/api/models/owner/model/tree/{COMMIT}":
            sums = {name: hashlib.sha1(data).hexdigest() for name, data in FILES.items()}
            tree = [{"type": "file", "path": n, "size": len(d), "oid": sums[n]} for n, d in FILES.items()]
            data = json.dumps(tree).encode()
        elif path.startswith("/owner/ggufs/resolve/"):
            data = GGUF_FILES[path.split("/", 5)[5]]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        elif path.startswith("/api/models/owner/ggufs/tree/"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": COMMIT} for n, d in GGUF_FILES.items()]
            data = json.dumps(tree).encode()
        elif path == "/api/models/owner/ggufs/revision/main":
            data = json.dumps({"id": "owner/ggufs", "sha": COMMIT, "siblings": []}).encode()
        elif path == "/api/models/owner/model/revision/main":
            data = json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": []}).encode()
        elif path.startswith("/api/models/owner/model/"):
            status, headers = 404, {"X-Error-Code": "RevisionNotFound"}
        elif path.startswith("/api/models/owner/gated"):
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        elif path.startswith("/api/models/owner/broken"):
            status = 500
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        self._send(status, headers, data if body else b"", len(data))

    def _send(self, status: int, headers: dict[str, str], data: bytes, size: int) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(size), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serve_hub(hub: type[FakeHub]) -> Iterator[ThreadingHTTPServer]:
    hub.requested_paths = []
    with ThreadingHTTPServer(("127.0.0.1", 0), hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def running_server() -> Iterator[ThreadingHTTPServer]:
    with serve_hub(FakeHub) as server:
        yield server


def resolve_in_process(
    model: str, home: Path, port: int = 9, *overrides: str, **variables: str
) -> tuple[str, list[list]]:
    """Resolves in a process of its own, because huggingface_hub reads its environment when it is imported."""
    location, seen, heavy = json.loads(run_in_process(SCRIPT, home, port, model, *overrides, **variables))
    assert not heavy
    return location, seen


def hub_environment(home: Path, port: int) -> dict[str, str]:
    """Environment variables of a process that uses the fake hub."""
    return os.environ | {
        "HF_HOME": str(home),
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }


def run_in_process(script: str, home: Path, port: int, *arguments: str, **variables: str) -> str:
    """Returns what a script prints, run with the fake hub."""
    environment = hub_environment(home, port) | variables
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_downloads_a_model_once_and_then_finds_it_offline(tmp_path, running_server):
    location, seen = resolve_in_process("owner/model", tmp_path, running_server.server_port)
    folder = Path(location)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == DOWNLOADED_FILES
    assert all((folder / name).read_bytes() == FILES[name] for name in DOWNLOADED_FILES)
    size = format_bytes(sum(len(FILES[name]) for name in DOWNLOADED_FILES))
    assert seen[0] == ["downloading", 0.0] and seen[-1] == [f"downloading {size} of {size}", 1.0]
    assert all(STAGE.fullmatch(stage)["whole"] == size for stage, _ in seen[1:])
    request_count = len(FakeHub.requested_paths)
    assert resolve_in_process("owner/model", tmp_path, running_server.server_port) == (location, [])
    assert resolve_in_process("owner/model", tmp_path) == (location, [])
    assert resolve_in_process("owner/model", tmp_path, HF_HUB_OFFLINE="1") == (location, [])
    assert len(FakeHub.requested_paths) == request_count


def test_a_server_that_is_stopped_does_not_wait_for_its_download(tmp_path, running_server):
    begun, ended = threading.Event(), threading.Event()

    class StuckHub(FakeHub):
        def _answer(self, body: bool) -> None:
            if body and self.path.endswith("/model.safetensors"):
                begun.set()
                ended.wait(60)
            super()._answer(body)

    running_server.RequestHandlerClass = StuckHub
    StuckHub.requested_paths = []
    command = [sys.executable, "-m", "parley", "serve", "owner/model", "--port", "0"]
    environment = hub_environment(tmp_path, running_server.server_port)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        try:
            assert begun.wait(30)
            server.terminate()
            assert server.wait(30) == 0
        finally:
            ended.set()
            server.kill()
            server.communicate()


FIND_CACHED = """
import sys
from parley.hub.download import find_cached
print(find_cached(sys.argv[1], needs_weights=True))
"""
LAST_FILES = [("owner/ggufs:q8_0", "mmproj-m-Q8_0.gguf"), ("owner/model", "2_Dense/model.safetensors")]
if os.environ.get("PARLEY_NIGHTLY"):
    LAST_FILES += [("owner/ggufs:q8_0", "m-Q8_0.gguf"), ("owner/model", "model.safetensors")]


@pytest.mark.parametrize(("model", "last_file"), LAST_FILES)
def test_a_download_that_was_killed_counts_as_none_and_is_completed(tmp_path, running_server, model, last_file):
    """It is killed in the middle of its last file, when all others are in the cache."""
    repository = model.partition(":")[0]
    snapshot = tmp_path / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / COMMIT
    needed = DOWNLOADED_FILES if repository == "owner/model" else ["m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"]
    others = [snapshot / name for name in needed if name != last_file]
    environment = hub_environment(tmp_path, running_server.server_port)
    pull = [sys.executable, "-m", "parley", "pull", model]

    class DeadlyHub(FakeHub):
        def _send(self, status: int, headers: dict[str, str], data: bytes, size: int) -> None:
            if not data or not self.path.endswith(f"/{COMMIT}/{last_file}"):
                return super()._send(status, headers, data, size)
            end = time.monotonic() + 60
            while not all(path.exists() for path in others) and time.monotonic() < end:
                time.sleep(0.01)
            super()._send(status, headers, data[: size // 2], size)
            process.kill()

    running_server.RequestHandlerClass = DeadlyHub
    DeadlyHub.requested_paths = []
    with subprocess.Popen(pull, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        assert process.wait(120) == -signal.SIGKILL
    assert all(path.exists() for path in others) and not (snapshot / last_file).exists()
    running_server.RequestHandlerClass = FakeHub
    is_encoder_missing = last_file.startswith("mmproj")
    if is_encoder_missing:  # which this does not need, but other users of the model still do
        resolve_in_process(model, tmp_path, running_server.server_port, "", "", "", "", "none")
        assert not (snapshot / last_file).exists()
    names = [model, "owner/ggufs:Q8_0", "owner/ggufs/m-Q8_0.gguf"] if is_encoder_missing else [model]
    for name in names:
        assert run_in_process(FIND_CACHED, tmp_path, 9, name, HF_HUB_OFFLINE="1") == "None\n"
    resolve_in_process(names[-1], tmp_path, running_server.server_port)
    contents = FILES if repository == "owner/model" else GGUF_FILES
    assert {name: (snapshot / name).read_bytes() for name in needed} == {name: contents[name] for name in needed}
    found = run_in_process(FIND_CACHED, tmp_path, 9, model, HF_HUB_OFFLINE="1").strip()
    assert Path(found) == (snapshot if repository == "owner/model" else snapshot / "m-Q8_0.gguf")


def test_a_mark_that_cannot_be_removed_does_not_refuse_a_complete_download(tmp_path, running_server):
    """As in a cache that is read-only by now, or if another process has removed it."""
    repository = tmp_path / "hub" / "models--owner--ggufs"
    (repository / _unfinished_mark("owner/ggufs", "m-Q8_0.gguf").name / "file").mkdir(parents=True)
    for _ in range(2):
        answer, _ = resolve_in_process("owner/ggufs:q8_0", tmp_path, running_server.server_port)
        assert "m-Q8_0.gguf is not a GGUF file" in answer
    assert (repository / "snapshots" / COMMIT / "mmproj-m-Q8_0.gguf").exists()


def test_completes_a_cached_model_that_lost_a_file(tmp_path, running_server):
    folder = Path(resolve_in_process("owner/model", tmp_path, running_server.server_port)[0])
    (folder / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "hub" / "models--owner--model" / "trees")
    assert resolve_in_process("owner/model", tmp_path)[0].startswith("missing: owner/model cannot be served")
    assert resolve_in_process("owner/model", tmp_path, running_server.server_port)[0] == str(folder)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_downloads_the_files_of_one_gguf_model_and_then_finds_them_offline(tmp_path, running_server):
    files = [f"Q4_K_M/m-Q4_K_M-0000{part}-of-00002.gguf" for part in (1, 2)]
    answer, _ = resolve_in_process("owner/ggufs:q4_k_m", tmp_path, running_server.server_port)
    refusal = "m-Q4_K_M-00001-of-00002.gguf is not a GGUF file"
    assert answer.startswith(f"missing: owner/ggufs:q4_k_m cannot be served: {refusal}")
    folder = tmp_path / "hub" / "models--owner--ggufs" / "snapshots" / COMMIT
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gguf")) == [*files, "mmproj-m-Q8_0.gguf"]
    model = f"owner/ggufs/{files[0]}"
    assert refusal in resolve_in_process(model, tmp_path, HF_HUB_OFFLINE="1")[0]


def test_leaves_out_the_encoder_of_images_if_another_is_meant(tmp_path, running_server):
    """The fifth of the overrides is its file, or none."""
    model = "owner/ggufs:q8_0"
    resolve_in_process(model, tmp_path, running_server.server_port, "", "", "", "", "none")
    folder = tmp_path / "hub" / "models--owner--ggufs" / "snapshots" / COMMIT
    assert [path.name for path in folder.rglob("*.gguf")] == ["m-Q8_0.gguf"]


def test_missing_gguf_file_error_lists_the_gguf_files_of_the_repository(tmp_path, running_server):
    answer, _ = resolve_in_process("owner/ggufs:Q2_K", tmp_path, running_server.server_port)
    assert answer.startswith(
        "missing: owner/ggufs:Q2_K cannot be served: owner/ggufs has no such GGUF file; it has m-Q8_0"
    )


def test_a_repository_of_gguf_files_asks_for_the_name_of_one(tmp_path, running_server):
    answer, _ = resolve_in_process("https://hf.co/owner/ggufs", tmp_path, running_server.server_port)
    assert answer.startswith(
        "missing: owner/ggufs cannot be served: its weights are GGUF files; name one of them, such as "
        "owner/ggufs/m-Q8_0.gguf; it has m-Q8_0.gguf, Q4_K_M/m-Q4_K_M-00001-of-00002.gguf, "
    )


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf.co/owner/model:Q4_K_M", "owner/model:Q4_K_M"),
        ("huggingface.co/owner/model@v1", "owner/model@v1"),
        ("https://huggingface.co/owner/model/", "owner/model"),
        ("https://www.huggingface.co/owner/model?library=parley", "owner/model"),
        ("https://huggingface.co/owner/model/tree/main", "owner/model"),
        ("https://huggingface.co/owner/model/tree/v1", "owner/model@v1"),
        ("https://huggingface.co/owner/model/blob/main/a/m-Q8_0.gguf", "owner/model/a/m-Q8_0.gguf"),
        ("https://hf.co/owner/model/resolve/v1/m.gguf?download=true", "owner/model/m.gguf@v1"),
        ("owner/model", "owner/model"),
        ("./hf.co/owner/model", "./hf.co/owner/model"),
        ("https://example.com/owner/model", "https://example.com/owner/model"),
    ],
)
def test_an_address_of_the_hub_means_its_model(address, name):
    assert name_in_address(address) == name


COMMANDS = """
import contextlib, io, json, sys
from parley.cli.main import main
results = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    results.append([code, out.getvalue(), errors.getvalue()])
print(json.dumps(results))
"""


def test_commands_pull_list_show_and_remove_a_model(tmp_path, running_server):
    commands = [
        ["list"],
        ["pull", "owner/model"],
        ["list", "--json"],
        ["show", "owner/model", "--json"],
        ["rm", "owner/modle", "--yes"],
        ["rm", "owner/model"],
        ["rm", "owner/model", "--yes"],
        ["list", "--names"],
        ["show", "owner/model"],
        ["pull", "owner/none"],
    ]
    results = run_in_process(COMMANDS, tmp_path, running_server.server_port, json.dumps(commands), HF_HUB_OFFLINE="0")
    empty, pulled, listed, shown, unknown, unasked, removed, names, absent, refused = json.loads(results)
    assert empty == [0, "NAME  SIZE  LAST USED  REVISION\n", ""]
    assert pulled[0] == 0 and pulled[1].startswith("owner/model is in ") and pulled[2].endswith(", 100%\n")
    row = json.loads(listed[1])
    assert row["name"] == "owner/model" and row["commits"] == [COMMIT]
    assert row["size"] == sum(map(len, {FILES[name] for name in DOWNLOADED_FILES}))  # equal files are one
    assert shown[0] == 0 and json.loads(shown[1])["chat template"] == "yes"
    assert unknown[0] == 1 and "The cache has no model owner/modle. Did you mean owner/model?" in unknown[2]
    assert unasked[0] == 2 and "--yes" in unasked[2]
    assert removed[0] == 0 and removed[1].startswith("Removed owner/model: ")
    assert names == [0, "", ""]
    assert absent[0] == 1 and "is not on this machine; `parley pull owner/model` downloads it" in absent[2]
    assert refused[0] == 1 and "owner/none cannot be pulled: the hub knows no such model" in refused[2]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 300)), max_size=20))
def test_progress_of_a_download_never_falls_whichever_counter_is_ahead(steps):
    now, reports, counters = 0.0, [], [0, 0]
    meter = TransferMeter(1000, lambda stage, fraction: reports.append((stage, fraction)), lambda: now)
    for counter, count in steps:
        now += 1.0
        counters[counter] += count
        meter.set_done(counters[counter])
    fractions = [fraction for _, fraction in reports]
    assert fractions == sorted(fractions)
    assert meter.fraction == min(1.0, max(counters) / 1000)
    for stage, fraction in reports:
        shown = STAGE.fullmatch(stage)
        assert shown and shown["whole"] == "1 kB" and (shown["left"] is None) == (fraction == 1.0), stage
    assert fractions[-1:] != [1.0] or reports[-1][0] == "downloading 1 kB of 1 kB"


def test_progress_of_a_download_says_bytes_speed_and_time():
    now, reports = 0.0, []
    meter = TransferMeter(4_300_000_000, lambda stage, fraction: reports.append(stage), lambda: now)
    for now in (1.0, 2.0):
        meter.set_done(35_000_000 * now)
    assert reports[-1] == "downloading 70 MB of 4.3 GB, 35 MB/s, 2:01 left"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("owner/none", "the hub knows no such model"),
        ("owner/gated", "users who accepted its terms"),
        ("owner/model@other", "the hub has no such revision"),
        ("owner/broken", "the hub has a fault"),
    ],
)
def test_reports_hub_errors_in_one_sentence(tmp_path, running_server, model, why):
    answer, _ = resolve_in_process(model, tmp_path, running_server.server_port)
    assert answer.startswith(f"missing: {model} cannot be served: ") and why in answer
    assert "\n" not in answer and "127.0.0.1" not in answer


OUTSIDE = "../../../../../outside"


@pytest.mark.parametrize(
    ("hostile", "title"),
    [
        ({"tag": f'"{OUTSIDE}"'}, "entity tag of a file"),
        ({"sha": OUTSIDE, "commit": "any text"}, "commit of a model"),
        ({"commit": OUTSIDE}, "commit of a file"),
        ({"commit": OUTSIDE, "status": 404}, "commit of a file"),
        ({"lfs": {"oid": OUTSIDE, "size": 2, "pointerSize": 2}}, "sum of a file"),
    ],
)
def test_a_hub_cannot_write_outside_the_cache(tmp_path, hostile, title):
    class HostileHub(FakeHub):
        def _answer(self, body: bool) -> None:
            status, headers, data = 200, {}, b"{}"
            if "/resolve/" in self.path:
                status = hostile.get("status", 200)
                headers = {"ETag": hostile.get("tag", '"tag"'), "X-Repo-Commit": hostile.get("commit", COMMIT)}
                headers |= {"X-Error-Code": "EntryNotFound"} if status == 404 else {}
            elif "/tree/" in self.path:
                sums = {"oid": COMMIT, "lfs": hostile.get("lfs"), "xetHash": COMMIT[:32] * 2}
                data = json.dumps([{"type": "file", "path": "config.json", "size": 2, **sums}]).encode()
            else:
                data = json.dumps({"id": "owner/sly", "sha": hostile.get("sha", COMMIT), "siblings": []}).encode()
            self._send(status, headers, data if body else b"", len(data))

    with serve_hub(HostileHub) as server:
        answer, _ = resolve_in_process("owner/sly", tmp_path / "home", server.server_port, HF_HUB_DISABLE_XET="0")
    assert answer == f"missing: The hub cannot be used: the {title} is a path."
    assert not list(tmp_path.rglob("outside*"))


def test_downloads_a_revision_and_the_tokenizer_of_another_model(tmp_path, running_server):
    port, cache = running_server.server_port, {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    plain = Path(resolve_in_process("owner/model", tmp_path, port)[0])
    assert resolve_in_process("owner/model", tmp_path, port, COMMIT)[0] == str(plain)
    answer = resolve_in_process("owner/model", tmp_path, port, "other")[0]
    assert answer == "missing: owner/model@other cannot be served: the hub has no such revision of it."
    local = tmp_path / "local"
    local.mkdir()
    (local / "config.json").write_bytes(b"{}")
    (local / "model.safetensors").write_bytes(b"")
    derived = Path(resolve_in_process(str(local), tmp_path / "empty", port, "", "owner/model", **cache)[0])
    assert (derived / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]
    assert (derived / "model.safetensors").resolve() == local / "model.safetensors"
    assert not list((tmp_path / "empty").rglob("*.safetensors"))  # only the tokenizer's files are downloaded
    answer = resolve_in_process(str(local), tmp_path, port, "", "owner/none", **cache)[0]
    assert answer.startswith("missing: The tokenizer owner/none cannot be used: the hub knows no such model")


@pytest.mark.parametrize("offline", ["0", "1"])
def test_reports_an_uncached_model_offline_in_one_sentence(tmp_path, offline):
    answer, _ = resolve_in_process("owner/model", tmp_path, HF_HUB_OFFLINE=offline)
    assert "the hub cannot be reached" in answer and "\n" not in answer
    assert ("since HF_HUB_OFFLINE is set; copy it here or unset that" in answer) == (offline == "1")


def test_resolves_a_complete_folder_to_itself(tmp_path):
    for name in REQUIRED_FILES:
        (tmp_path / name).write_bytes(FILES[name])
    assert hub.resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize(
    ("absent", "why"),
    [
        ("config.json", "its folder has no config.json"),
        ("tokenizer.json", "its folder has no tokenizer.json"),
        ("model.safetensors", "its folder has no *.safetensors weights"),
    ],
)
def test_names_the_missing_file_of_an_incomplete_folder(tmp_path, absent, why):
    for name in REQUIRED_FILES:
        if name != absent:
            (tmp_path / name).write_bytes(FILES[name])
    with pytest.raises(hub.ModelMissing, match="cannot be served") as error:
        hub.resolve_model(str(tmp_path))
    assert why in str(error.value)


def test_a_folder_without_weights_is_enough_if_a_server_has_them(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(FILES[name])
    assert hub.resolve_model(str(tmp_path), needs_weights=False) == tmp_path.resolve()


FILLED = {"config.json": b"{}", "tokenizer.json": b"{}"}
LFS_POINTER = foreign_files.LFS_START + b"spec/v1\noid sha256:0"
FOREIGN_FOLDERS = {
    "lora": (
        {"adapter_config.json": b'{"base_model_name_or_path": "Qwen/Qwen3-4B"}', "adapter_model.safetensors": b""},
        "it is a LoRA adapter of Qwen/Qwen3-4B; serve that model with --lora NAME=",
    ),
    "mistral": (
        {"params.json": b"{}", "consolidated.safetensors": b"", "tekken.json": b"{}"},
        "name the same model in",
    ),
    "meta": ({"params.json": b"{}", "consolidated.00.pth": b""}, "in the format of their maker (consolidated files)"),
    "mistral with a config": (
        FILLED | {"consolidated.safetensors": b""},
        "in the format of their maker (consolidated files)",
    ),
    "pickle": (FILLED | {"pytorch_model.bin": b""}, "pickle files, which can run"),
    "onnx": (FILLED | {"model.onnx": b""}, "ONNX files, which are not read"),
    "diffusers": ({"model_index.json": b"{}"}, "a pipeline of Diffusers"),
    "lfs weights": (
        FILLED | {"model.safetensors": LFS_POINTER},
        "its model.safetensors is a pointer of Git LFS, not the file; run `git lfs pull`",
    ),
    "lfs tokenizer": (
        {"config.json": b"{}", "tokenizer.json": LFS_POINTER, "model.safetensors": b""},
        "its tokenizer.json is a pointer of Git LFS",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN_FOLDERS)
def test_error_names_the_contents_of_a_folder_without_model(kind, tmp_path):
    files, why = FOREIGN_FOLDERS[kind]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    problem = hub.folder_problem(tmp_path)
    assert why in problem and not problem.endswith(".")


def test_names_the_first_missing_weight_shard(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(FILES[name])
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(shards))}))
    (tmp_path / shards[0]).write_bytes(b"")
    assert hub.folder_problem(tmp_path) == f"2 of its 3 weight files are missing, first {shards[1]}"
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert hub.folder_problem(tmp_path) == "its model.safetensors.index.json cannot be read"
    (tmp_path / "model.safetensors.index.json").unlink()
    assert hub.folder_problem(tmp_path) == f"2 of its 3 weight files are missing, first {shards[1]}"
    for shard in shards:
        (tmp_path / shard).write_bytes(b"")
    assert hub.folder_problem(tmp_path) == ""
    (tmp_path / "other-00001-of-00001.safetensors").write_bytes(b"")
    assert hub.folder_problem(tmp_path) == (
        "its folder has the weights model-*-of-00003 and other-*-of-00001, and no model.safetensors.index.json that "
        "says which are the model's"
    )


@pytest.mark.parametrize(
    "model", ["/does/not/exist", "./nothing", "~/nothing-of-that-name", "a b", "a/b/c", "..", "x" * 5000]
)
def test_treats_names_that_the_hub_cannot_have_as_folders(model):
    with pytest.raises(hub.ModelMissing):
        hub.resolve_model(model)


def test_served_name_is_the_hub_name_or_the_folder_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert hub.served_name(None) == hub.served_name("parley-demo") == "parley-demo"
    assert hub.served_name("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert hub.served_name("./tiny/") == hub.served_name("tiny") == hub.served_name(str(tmp_path / "tiny")) == "tiny"
    Path("linked").symlink_to("tiny")
    assert hub.served_name("./linked") == "linked"


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_folder_with_a_pipe_is_refused_before_it_is_read(name, tmp_path):
    os.mkfifo(tmp_path / name)
    assert hub.folder_problem(tmp_path) == f"its {name} is a pipe or a device, and not a file"


def test_a_folder_may_hold_the_socket_of_a_server(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "parley.sock"))
        assert hub.folder_problem(tmp_path) == "its folder has no config.json"
