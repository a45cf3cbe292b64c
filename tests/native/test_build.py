"""Compiling the kernels: what a compiler says is kept, and no compiler outlives the process that started it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
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
        "CXX", write_compiler(tmp_path, f"sleep 1000 & echo $$ $! > {pids}.$$; mv {pids}.$$ {pids}; wait")
    )
    with subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path / "built")]) as process:
        try:
            wait_for(pids.exists)
            running = [Path(f"/proc/{number}") for number in pids.read_text().split()]
            time.sleep(0.1)  # it runs for a while
            assert len(running) == 2 and all(path.exists() for path in running)
        finally:
            process.kill()
        wait_for(lambda: not any(path.exists() for path in running))


def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", write_compiler(tmp_path, "echo no such machine >&2; exit 7"))
    with pytest.raises(build.BuildError, match="the compiler failed: no such machine"):
        build.compile_level("generic", tmp_path / "built")
    assert not [*(tmp_path / "built").iterdir()]


# As g++ with -o at the end: it makes that file, but waits in second.cpp until it may go on.
WAITING_COMPILER = """
echo "$*" >> {folder}/runs
case "$*" in *second.cpp*) test -e {folder}/unblocked || sleep 1000;; esac
for output; do :; done
echo made > "$output"
"""


def test_a_build_that_was_killed_continues_with_its_objects(tmp_path: Path):
    (tmp_path / "source").mkdir()
    for name in ("first", "second"):
        (tmp_path / "source" / f"{name}.cpp").write_text("// compiled by a script")
    shutil.copy(build.__file__, tmp_path)
    environment = os.environ | {"CXX": write_compiler(tmp_path, WAITING_COMPILER.format(folder=tmp_path))}
    command = [sys.executable, "-c", "import build; print(build.compile_level('generic', build.HERE / 'made'))"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        try:
            wait_for(lambda: (tmp_path / "runs").exists() and "second.cpp" in (tmp_path / "runs").read_text())
            wait_for(lambda: [*tmp_path.glob("made/.build-*/first.cpp.o")])
        finally:
            process.kill()
    (tmp_path / "unblocked").touch()
    library_path = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    runs = (tmp_path / "runs").read_text()
    assert [runs.count(f"{name}.cpp -o") for name in ("first", "second")] == [1, 2]
    assert [*(tmp_path / "made").glob("*.so")] == [Path(library_path.stdout.strip())]
    assert not [*(tmp_path / "made").glob(".build-*")]


def test_progress_says_that_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stages: list[str] = []
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(library, "user_cache_folder", lambda: tmp_path)
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


def test_a_build_that_only_seems_old_is_left_to_its_process(tmp_path: Path):
    """Its folder has an old time, if the machine's time was set meanwhile."""
    folder = tmp_path / "made"
    for name in ("kernels-1-generic", "kernels-2-generic"):
        (folder / f".build-{name}").mkdir(parents=True)
        os.utime(folder / f".build-{name}", (0, 0))
    with (folder / "kernels-1-generic.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        build.remove_unfinished_builds(folder)
        assert sorted(path.name for path in folder.iterdir()) == [".build-kernels-1-generic", "kernels-1-generic.lock"]
    build.remove_unfinished_builds(folder)
    assert not [*folder.iterdir()]


def test_a_build_that_begins_while_old_ones_are_removed_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The owner of the old folder ends, and another process compiles there, just before the lock is asked for."""
    build_folder, lock = tmp_path / ".build-kernels-1-generic", tmp_path / "kernels-1-generic.lock"
    build_folder.mkdir()
    os.utime(build_folder, (0, 0))
    with contextlib.ExitStack() as new_build:

        def lock_late(file, flags: int, flock=fcntl.flock) -> None:
            lock.unlink()
            flock(new_build.enter_context(lock.open("w")), fcntl.LOCK_EX)
            flock(file, flags)

        monkeypatch.setattr(build.fcntl, "flock", lock_late)
        build.remove_unfinished_builds(tmp_path)
        assert build_folder.exists() and lock.exists()


def test_one_of_several_processes_compiles_a_damaged_library_again(tmp_path: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "first.cpp").write_text("// compiled by a script")
    shutil.copy(build.__file__, tmp_path)
    script = f'echo "$*" >> {tmp_path}/runs; sleep 0.5; for output; do :; done; cp {sys.executable} "$output"'
    environment = os.environ | {"CXX": write_compiler(tmp_path, script)}
    name = [sys.executable, "-c", "import build; print(build.library_name('generic'))"]
    name_line = subprocess.run(name, cwd=tmp_path, capture_output=True, text=True, check=True)
    path = tmp_path / "made" / name_line.stdout.strip()
    path.parent.mkdir()
    path.write_bytes(Path(sys.executable).read_bytes()[:1000])
    command = [sys.executable, "-c", "import build; build.compile_level('generic', build.HERE / 'made')"]
    processes = [subprocess.Popen(command, cwd=tmp_path, env=environment) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "runs").read_text().count("first.cpp -o") == 1
    assert [*path.parent.iterdir()] == [path] and build.is_whole(path)


def test_only_one_process_compiles_after_another_one_failed(tmp_path: Path):
    """A build that waited, and one that started later, do not write the same objects at the same time."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "first.cpp").write_text("// compiled by a script")
    shutil.copy(build.__file__, tmp_path)
    overlap = f"mkdir {tmp_path}/running || echo overlap >> {tmp_path}/overlaps; sleep 0.3; rmdir {tmp_path}/running"
    environment = os.environ | {"CXX": write_compiler(tmp_path, f"{overlap}; exit 1")}
    command = [sys.executable, "-c", "import build; build.compile_level('generic', build.HERE / 'made')"]

    def start_build() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)

    first = start_build()
    wait_for((tmp_path / "running").exists)
    second = start_build()
    assert b"the compiler failed" in first.communicate()[1]
    third = start_build()
    for process in (second, third):
        assert b"the compiler failed" in process.communicate()[1]
    assert not (tmp_path / "overlaps").exists()
