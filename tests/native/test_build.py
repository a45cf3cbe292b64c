"""Compiling the kernels: what a compiler says is kept, and no compiler outlives the process that started it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from parley.model.load import loader
from parley.native import build, library
from parley.types import ParleySettings

BUILD = (
    "from parley.native import build; import sys, pathlib; build.compile_level('generic', pathlib.Path(sys.argv[1]))"
)


def write_compiler(folder: Path, script: str) -> str:
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return str(compiler)


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_compiler_and_its_processes_end_with_a_killed_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pids = tmp_path / "pids"
    # As g++ does, it starts another program and waits for it.
    monkeypatch.setenv(
        "CXX", write_compiler(tmp_path, f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait")
    )
    with subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path / "built")]) as process:
        wait_for(pids.exists)
        running = [Path(f"/proc/{number}") for number in pids.read_text().split()]
        time.sleep(0.1)  # it runs for a while
        assert len(running) == 2 and all(path.exists() for path in running)
        process.kill()
        wait_for(lambda: not any(path.exists() for path in running))


def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", write_compiler(tmp_path, "echo no such machine >&2; exit 7"))
    with pytest.raises(build.BuildError, match="the compiler failed: no such machine"):
        build.compile_level("generic", tmp_path / "built")
    assert not [*(tmp_path / "built").iterdir()]


def test_progress_says_that_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stages: list[str] = []
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(library, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(library, "load_kernels", lambda: stages.append("loaded"))
    monkeypatch.setattr(library, "wanted_levels", lambda: ["generic"])
    monkeypatch.delenv("PARLEY_NATIVE", raising=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(loader.LoadError):
        loader.load_runner(ParleySettings(model=str(tmp_path)), lambda stage, done: stages.append(stage))
    assert stages[:3] == ["compiling the kernels", "loaded", "reading the config"]
    stages.clear()
    monkeypatch.setenv("PARLEY_NATIVE", "off")
    with pytest.raises(loader.LoadError):
        loader.load_runner(ParleySettings(model=str(tmp_path)), lambda stage, done: stages.append(stage))
    assert stages[0] == "reading the config"
