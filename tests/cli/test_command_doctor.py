"""The findings of doctor: a healthy machine has no failure, and each defect is one line with a hint."""

from __future__ import annotations

import json
import shutil
import socket

import pytest
from support import tiny_models
from support.free_ports import free_port
from support.multimodal_models import multimodal_folder
from support.server_process import ScriptedServer

from parley.cli import doctor, doctor_engines
from parley.native import build
from parley.serving.media import workers
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import resolve_options
from parley.worker.check import ModelCheck


def findings(check, *flags: str) -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in check(resolve_options(SERVE_OPTIONS, flags, {}))}


@pytest.fixture
def copy(tmp_path):
    """A model that can be changed."""
    return shutil.copytree(tiny_models.model_folder("llama"), tmp_path / "copy")


def test_doctor_finds_no_failure_on_a_healthy_machine(parley):
    done = parley("doctor", "--port", str(free_port()))
    assert done.returncode == 0, done.stdout
    assert not done.stderr and "fail" not in done.stdout
    subjects = {line.split()[1] for line in done.stdout.splitlines() if not line.lstrip().startswith("->")}
    assert subjects >= {"python", "torch", "packages", "processor", "model", "tokenizer", "memory", "port", "keys"}


def test_doctor_exits_with_1_and_a_hint_on_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_python, doctor.check_network))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = doctor.run_command(resolve_options(SERVE_OPTIONS, ["--port", str(taken.getsockname()[1])], {}))
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert [line.split()[:2] for line in lines] == [
        ["ok", "python"],
        ["fail", "port"],
        ["->", "Choose"],
        ["ok", "keys"],
    ]


def test_doctor_says_which_kernels_are_used(monkeypatch):
    finding = findings(doctor.check_torch)["kernels"]
    assert finding.level == "ok" and finding.observation.split(",")[0] in (*build.LEVELS, "torch's")
    for installed, used in (("none", "torch's are used"), ("avx2", "avx2 is used")):
        finding = doctor.kernels_finding(installed, "none", "avx512", "avx2", "generic")
        assert (finding.level, finding.observation) == ("warn", f"avx512 is missing, and {used}")
        assert "g++" in finding.hint
    finding = doctor.kernels_finding("none", "compiler", "avx512", "generic")
    assert (finding.level, finding.observation) == ("ok", "avx512, which the first start compiles")
    assert doctor.kernels_finding("avx512", "none", "avx512", "generic").observation == "avx512"
    monkeypatch.setenv("PARLEY_NATIVE", "sse9")
    assert "sse9" in findings(doctor.check_torch)["kernels"].observation
    monkeypatch.setenv("PARLEY_NATIVE", "off")
    assert findings(doctor.check_torch)["kernels"].level == "ok"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_doctor_names_a_missing_model_file(copy, name):
    (copy / name).unlink()
    finding = findings(doctor.check_models, str(copy))["model"]
    assert finding.level == "fail" and (name in finding.observation or "*.safetensors" in finding.observation)


def truncate_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])


def test_doctor_reports_a_refusal_of_the_engine(copy):
    truncate_weights(copy)
    finding = findings(doctor.check_models, str(copy))["model"]
    assert finding.level == "fail" and "model.safetensors is cut off" in finding.observation


def test_doctor_is_not_sure_of_a_model_that_runs_through_transformers(copy, monkeypatch):
    monkeypatch.setattr(doctor, "check_in_process", lambda settings: ModelCheck(load_caveat="only loading shows it"))
    finding = findings(doctor.check_models, str(copy))["model"]
    assert finding.level == "warn" and finding.observation.endswith("; only loading shows it")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--role", "decode", "--host", "0.0.0.0"), "takes commands at 0.0.0.0"),
        (("--body-memory", "1MiB"), "body-memory must be at least body-limit"),
        (("--cluster-cert", "a"), "go together"),
        (("--endpoints", "{missing}/below"), ""),
        (("--api-key-file", "/does/not/exist"), "/does/not/exist"),
        (("--mindie-config", "/does/not/exist"), "/does/not/exist"),
    ],
)
def test_doctor_refuses_options_that_serve_refuses(flags, words, tmp_path):
    (tmp_path / "missing").write_text("not JSON")
    flags = [flag.replace("{missing}/below", str(tmp_path / "missing")) for flag in flags]
    found = findings(doctor.check_network, "--port", str(free_port()), *flags)
    assert found["options"].level == "fail" and words in found["options"].observation


def test_doctor_finds_a_broken_tokenizer_and_a_missing_template(copy):
    (copy / "tokenizer_config.json").unlink()
    assert findings(doctor.check_models, str(copy), "--scripted-engine")["template"].level == "warn"
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert "template" not in findings(doctor.check_models, str(copy), "--scripted-engine")
    (copy / "tokenizer.json").write_text("{}")
    assert findings(doctor.check_models, str(copy), "--scripted-engine")["tokenizer"].level == "fail"


def test_doctor_says_that_a_family_of_multimodal_models_reads_text_only(tmp_path):
    folder = shutil.copytree(multimodal_folder("llava"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "molmo2"}
    (folder / "config.json").write_text(json.dumps(config))
    finding = findings(doctor.check_models, str(folder), "--scripted-engine")["media"]
    assert (finding.level, finding.hint) == ("warn", "It reads text only.")
    assert finding.observation == "encoders of molmo2 models are not supported"


def test_doctor_names_the_packages_that_media_need(monkeypatch):
    folder = str(multimodal_folder("qwen2_vl"))
    assert findings(doctor.check_models, folder, "--scripted-engine")["media"].observation == "image, video"
    monkeypatch.setitem(workers.PACKAGES, "parley_no_such_package", "PyNone")
    finding = findings(doctor.check_models, folder, "--scripted-engine")["media"]
    assert finding.level == "warn"
    assert finding.observation == "the model reads image, video, but PyNone is not installed"
    assert "parley-llm[media]" in finding.hint


def test_doctor_asks_the_server_that_computes():
    folder = tiny_models.model_folder("llama")
    away = findings(doctor.check_models, str(folder), "--engine", f"http://127.0.0.1:{free_port()}")["engine"]
    assert away.level == "warn" and "is away" in away.observation
    with ScriptedServer(folder) as server:
        server.wait_until_ready()
        found = findings(doctor.check_models, str(folder), "--engine", f"{server.url}/vllm")
        assert {name: finding.level for name, finding in found.items()} == dict.fromkeys(found, "ok")
        assert "vLLM 0.33" in found["engine"].observation and "tokens" in found["engine"].observation
        other = findings(doctor.check_models, "--engine", f"{server.url}/vllm")["engine"]
        assert other.level == "fail" and "its tokenizer is not that of" in other.observation


def test_doctor_names_the_decoder_that_vllms_python_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_engines, "python_command", lambda *arguments, python: [python, *arguments])
    folder = multimodal_folder("qwen2_vl")
    for script, level in (("exit 1", "warn"), ("echo 0.32.0", "ok")):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n[ \"$2\" = 'import av' ] || {{ echo 0.32.0; exit; }}\n{script}\n")
        python.chmod(0o755)
        found = findings(doctor.check_models, str(folder), "--engine", "vllm", "--engine-python", str(python))
        assert (found["vLLM"].observation, found["media"].level) == ("0.32.0", level)


def test_doctor_includes_the_kv_cache_in_the_memory_check(copy):
    scripted = (str(copy), "--scripted-engine")
    assert findings(doctor.check_models, *scripted)["memory"].level == "ok"
    assert findings(doctor.check_models, *scripted, "--kv-memory", "900TiB")["memory"].level == "fail"


def test_doctor_only_warns_about_a_model_on_the_hub(monkeypatch, tmp_path):
    assert findings(doctor.check_models, "nobody/nothing-of-that-name")["model"].level == "warn"


def test_doctor_warns_about_a_public_address_without_a_key(tmp_path):
    port = ("--port", str(free_port()))
    assert findings(doctor.check_network, *port)["keys"].level == "ok"
    assert findings(doctor.check_network, *port, "--host", "0.0.0.0")["keys"].level == "warn"
    (tmp_path / "keys").write_text("# mine\n\nsesame\n")
    keyed = findings(doctor.check_network, *port, "--host", "0.0.0.0", "--api-key-file", str(tmp_path / "keys"))
    assert keyed["keys"] == ("ok", "keys", "1 set", "")
    assert findings(doctor.check_network, *port, "--host", "no.such.host.invalid")["port"].level == "fail"


def test_doctor_names_a_package_of_another_version(monkeypatch):
    assert findings(doctor.check_packages)["packages"].level == "ok"
    versions = doctor.importlib.metadata.version
    monkeypatch.setattr(
        doctor.importlib.metadata, "version", lambda name: "0.0.1" if name == "numpy" else versions(name)
    )
    finding = findings(doctor.check_packages)["packages"]
    assert finding.level == "warn" and finding.observation.startswith("numpy 0.0.1 (wanted ==")


def test_doctor_counts_api_processes_against_the_cores(monkeypatch):
    flags = ("--port", str(free_port()), "--api-processes", "3")
    for cores, level in ((8, "ok"), (3, "warn")):
        monkeypatch.setattr(doctor.control_groups, "core_count", lambda cores=cores: cores)
        found = findings(doctor.check_network, *flags)["processes"]
        assert (found.level, found.observation) == (level, f"3 API processes and a main process on {cores} cores")
    assert "processes" not in findings(doctor.check_network, *flags[:2])
