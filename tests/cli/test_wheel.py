"""The contents of the wheel of `pip install .`: the command, the built-in model, and only parley's files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.installed_wheel import ROOT, copy_sources

import parley
from parley import demo
from parley.native import build


def run_wheel(source: Path, folder: Path, environment: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def make_wheel(source: Path, folder: Path, environment: dict[str, str] | None = None) -> zipfile.ZipFile:
    done = run_wheel(source, folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(folder.glob("parley_llm-*.whl")))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[zipfile.ZipFile]:
    """A wheel that takes libraries from the checkout, and compiles those for other CPUs without optimisation."""
    source = copy_sources(tmp_path_factory.mktemp("source"))
    compiler = source / "quick-g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n')
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler)} if shutil.which("g++") else None
    with make_wheel(source, source / "wheel", environment) as wheel:
        yield wheel


def read_member(wheel: zipfile.ZipFile, ending: str) -> str:
    return wheel.read(next(name for name in wheel.namelist() if name.endswith(ending))).decode()


def test_wheel_contains_every_file_of_the_package_and_the_built_in_model(wheel):
    names = set(wheel.namelist())
    listed = subprocess.run(["git", "ls-files", "parley"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert len(files) > 1000 and files <= names, files - names
    page_files = {str(path.relative_to(ROOT)) for path in (ROOT / "parley/ui/static").rglob("*") if path.is_file()}
    assert len(page_files) > 30 and page_files <= names
    assert "parley/py.typed" in names
    model = {str(path.relative_to(ROOT)) for path in demo.model_folder().rglob("*") if path.is_file()}
    assert {name for name in model if not name.endswith(".md")} <= names
    assert {Path(name).name for name in model} >= {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_wheel_contains_compiled_kernels_for_every_cpu_level(wheel):
    kernel_files = {Path(name).name for name in wheel.namelist() if name.endswith(".so")}
    assert kernel_files == {build.library_name(level) for level in build.buildable_levels()}
    assert {path.name for path in build.source_files()} <= {Path(name).name for name in wheel.namelist()}
    tag = re.search(r"^Tag: (\S+)$", read_member(wheel, ".dist-info/WHEEL"), re.M)[1]
    assert tag.startswith("py3-none-") and not tag.endswith("-any")


def test_builds_a_wheel_without_a_compiler(tmp_path):
    source = copy_sources(tmp_path, "*.so")
    environment = os.environ | {"CXX": "/nowhere/g++", "PATH": str(source)}
    with make_wheel(source, source / "plain", environment) as plain_wheel:
        assert not [name for name in plain_wheel.namelist() if name.endswith(".so")]
        assert "Tag: py3-none-any" in read_member(plain_wheel, ".dist-info/WHEEL")


def test_builds_a_wheel_for_another_architecture(tmp_path):
    source = copy_sources(tmp_path)  # with the libraries for this machine, which must not get into the wheel
    compiler = tmp_path / "cross-g++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf "for another machine" > "$2"\n')
    compiler.chmod(0o755)
    environment = os.environ | {"PARLEY_MACHINE": "riscv64", "CXX": str(compiler)}
    with make_wheel(source, tmp_path / "wheel", environment) as cross_wheel:
        (library,) = [name for name in cross_wheel.namelist() if name.endswith(".so")]
        assert library.endswith("-generic.so") and cross_wheel.read(library) == b"for another machine"
        assert "Tag: py3-none-linux_riscv64" in read_member(cross_wheel, ".dist-info/WHEEL")


def test_wheel_lacks_no_level_unnoticed(tmp_path):
    """One level fails with an old compiler; without any, a wheel for others is not built."""
    source = copy_sources(tmp_path, build.library_name("generic"))
    environment = os.environ | {"PATH": str(source), "PARLEY_REQUIRE_KERNELS": "1"}
    for compiler, reason in ((shutil.which("false"), "the compiler failed: "), ("/nowhere/g++", "no C++ compiler")):
        done = run_wheel(source, tmp_path / "wheels", environment | {"CXX": compiler})
        assert done.returncode and not list(tmp_path.glob("wheels/*"))
        assert f"error: {reason}" in done.stdout + done.stderr


def test_no_text_names_the_package_of_others():
    """``parley`` on the public index is another project."""
    named = subprocess.run(
        ["git", "grep", "-nE", r"pip install '?parley($|\b[^-])|parley\\?\[[a-z]"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert [
        line for line in named.stdout.splitlines() if not line.startswith(("tests/cli/test_wheel.py", "CHANGELOG"))
    ] == []


def test_wheel_contains_only_parley(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {re.sub(r"-.*\.", ".", top) for top in tops} == {"parley", "parley_llm.dist-info"}


def test_wheel_installs_the_command_and_names_the_licence(wheel):
    assert "parley = parley.cli.entry:main" in read_member(wheel, "entry_points.txt")
    assert "Apache License" in read_member(wheel, "licenses/LICENSE")
    metadata = read_member(wheel, ".dist-info/METADATA")
    assert f"Name: parley-llm\nVersion: {parley.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0" in metadata


def test_wheel_dependencies_are_few_and_locked(wheel):
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra)", read_member(wheel, ".dist-info/METADATA"), re.M)
    assert len(required) <= 16
    locked = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements.lock").read_text(), re.M))
    assert {name.lower().replace("_", "-") for name in required} <= set(locked)
    assert locked["torch"] == "2.13.0"


def test_lock_files_pin_everything_and_name_no_index():
    for name in ("requirements.lock", "requirements-dev.lock"):
        for line in (ROOT / name).read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[\w-]+==[\w.]+", line), line
