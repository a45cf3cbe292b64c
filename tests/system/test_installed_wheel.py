"""README's commands with an installed wheel, where there is neither a compiler nor the checkout."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import gguf_files, tiny_models
from support.installed_wheel import COMPILERS, InstalledWheel
from support.network_hosts import needs_namespaces
from support.readme_commands import ADDRESS, read_blocks, read_command_lines, read_requests

from parley import demo
from parley.native import build

pytestmark = [
    pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="installs torch again: PARLEY_NIGHTLY=1"),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler for the wheel"),
    needs_namespaces,
]

HUB_MODEL, HUB_COMMIT = "Qwen/Qwen2.5-0.5B-Instruct", "0123456789abcdef0123456789abcdef01234567"
# The servers that README starts, with the port of each.
SERVERS = {
    "parley serve ./my-model": 8000,
    f"parley serve {HUB_MODEL}": 8000,
    "parley serve ./my-model.gguf": 8000,
    "parley serve ./my-model --port 9000 --kv-memory 4GiB --api-key-file keys.txt": 9000,
    "parley serve --model chat,assistant=./my-model --model small=./other,threads=1,kv-memory=1GiB"
    " --model embed=./minilm": 8000,
}
# make needs the checkout, pip installs the wheel itself, and Ray's clusters have tests of their own.
ELSEWHERE = ("make ", "pip install ", "parley cluster up ")


@pytest.fixture(scope="module")
def wheel_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstalledWheel]:
    """The installed wheel, in whose home folder README's models and keys lie."""
    home = tmp_path_factory.mktemp("home")
    wheel = InstalledWheel(home)
    try:
        wheel.install()
        write_models(home)
        yield wheel
    finally:
        wheel.close()


def write_models(home: Path) -> None:
    for name in ("my-model", "other"):
        shutil.copytree(demo.model_folder(), home / name)
    write_encoder(home / "minilm")
    gguf_files.write_gguf(home / "my-model.gguf", gguf_files.write_folder(home / "written", "qwen3"), "Q8_0")
    cached = home / ".cache/huggingface/hub" / f"models--{HUB_MODEL.replace('/', '--')}"
    shutil.copytree(demo.model_folder(), cached / "snapshots" / HUB_COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(HUB_COMMIT)
    (home / "keys.txt").write_text("a-key\n")


def write_encoder(folder: Path) -> None:
    """Write a small BERT with random weights."""
    from transformers import AutoConfig, AutoModel

    sizes = {"hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("bert", vocab_size=tiny_models.VOCAB, **sizes)
    tiny_models.write_random_model(folder, AutoModel.from_config(config), seed=5, dtype="float32")
    tiny_models.write_tokenizer(folder)


@pytest.fixture
def served_log(wheel_home: InstalledWheel) -> Path:
    """The log of ``parley serve``, which serves the built-in model on port 8000."""
    return wheel_home.serve("parley serve")


def test_fastest_kernels_are_used_without_a_compiler(wheel_home: InstalledWheel, served_log: Path) -> None:
    for name in COMPILERS:
        assert wheel_home.run(f"command -v {name}").returncode != 0
    level = build.usable_levels()[0]
    where = wheel_home.run("python -c 'import parley; print(parley.__file__)'").stdout
    assert where.startswith(str(wheel_home.venv))
    assert f"with {level} kernels" in served_log.read_text()
    doctor = wheel_home.run("parley doctor").stdout
    assert f"ok    kernels      {level}\n" in doctor
    versions = wheel_home.run("parley version --all").stdout
    assert build.library_name(level) in versions and " ".join(build.buildable_levels()) in versions
    assert f'kernels="{level}"' in wheel_home.run(f"curl -s {ADDRESS}/metrics").stdout
    assert not (wheel_home.home / ".cache/parley").exists()  # nothing was compiled


def test_requests_of_readme_get_the_answers_that_it_shows(wheel_home: InstalledWheel, served_log: Path) -> None:
    for script, shown in read_requests():
        answer = wheel_home.run(script).stdout
        assert shown.fullmatch(answer.strip()), (script, answer)


def test_scripts_of_readme_run(wheel_home: InstalledWheel, served_log: Path) -> None:
    client_script, engine_script = read_blocks("python")
    for script, answers in (
        (client_script, ["The capital of France is Paris."] * 2),
        (engine_script, ["The capital of Italy is Rome.", "The capital of France is Paris."]),
    ):
        done = wheel_home.run(f"python -c {shlex.quote(script)}")
        assert done.stdout.splitlines() == answers, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("parley chat -q 'What is the capital of France?'", "The capital of France is Paris."),
        ("parley bench --requests 4 --concurrency 2 --output-len 8", "tok/s"),
        ("parley routes", "/v1/chat/completions"),
        ("parley migrate vllm -- vllm serve ./my-model --max-model-len 2048", "parley serve ./my-model"),
        ("parley list", HUB_MODEL),
        (f"parley show {HUB_MODEL}", HUB_COMMIT[:8]),
        ("parley ps", "parley-demo"),
        ("parley completion bash", "complete "),
        ("parley serve --show-config", "port"),
        ("parley --help", "usage: parley COMMAND"),
    ],
)
def test_commands_of_readme_run(wheel_home: InstalledWheel, served_log: Path, command: str, answer: str) -> None:
    done = wheel_home.run(command)
    assert done.returncode == 0 and answer in done.stdout, done.stdout + done.stderr


def test_every_command_line_of_readme_is_run() -> None:
    assert [line for line in read_command_lines() if not line.startswith(ELSEWHERE)][: len(SERVERS)] == list(SERVERS)
    others = {line for line in read_command_lines() if not line.startswith(ELSEWHERE)} - set(SERVERS)
    assert not others


@pytest.mark.parametrize(("command", "port"), SERVERS.items())
def test_servers_of_readme_start(wheel_home: InstalledWheel, command: str, port: int) -> None:
    log = wheel_home.serve(command, port)
    body = shlex.quote(
        '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}'
    )
    asked = wheel_home.run(
        f"curl -s http://127.0.0.1:{port}/v1/chat/completions -H 'Authorization: Bearer a-key' -d {body}"
    )
    assert '"choices"' in asked.stdout, asked.stdout
    if "gguf" not in command:  # its weights are random
        assert "The capital of France is Paris." in asked.stdout
    if "embed=" in command:
        embed = shlex.quote('{"model": "embed", "input": "Paris"}')
        assert '"embedding"' in wheel_home.run(f"curl -s http://127.0.0.1:{port}/v1/embeddings -d {embed}").stdout
    wheel_home.stop_server()
    assert "torch's kernels" not in log.read_text()
