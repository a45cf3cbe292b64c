"""Started in a folder with a file for each module that Python could look for there, parley imports none of them."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.free_ports import free_port

ROOT = Path(__file__).parents[2]
BUILT_IN_MODEL = ROOT / "parley/demo/model"
MODULE, SAFE_MODULE = [sys.executable, "-m", "parley"], [sys.executable, "-P", "-m", "parley"]
BARE_MODULE = [sys.executable, "-S", "-m", "parley"]  # fewer modules are imported before parley is
SCRIPT = [str(Path(sys.executable).with_name("parley"))]
nightly = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes a minute: PARLEY_NIGHTLY=1")


@functools.cache
def installed_modules() -> frozenset[str]:
    """The names of the modules of all installed packages: their lists of files are read, which takes seconds."""
    return frozenset(importlib.metadata.packages_distributions())


class TrapFolder:
    """A folder with a model and traps: modules that write their name into a file when they are imported."""

    def __init__(self, folder: Path, *further: str):
        self.folder = folder / "model"
        self._record = folder / "imported"
        shutil.copytree(BUILT_IN_MODEL, self.folder)
        known = {*sys.stdlib_module_names, *sys.builtin_module_names, *installed_modules(), *sys.modules, *further}
        for name in known:
            module = name.partition(".")[0]
            if module.isidentifier() and module != "parley":
                self.set_trap(self.folder / f"{module}.py")

    def set_trap(self, file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"with open({str(self._record)!r}, 'a') as record:\n    record.write(__file__ + '\\n')\n")

    def set_package_trap(self) -> None:
        """Set a trap in the place of parley itself."""
        self.set_trap(self.folder / "parley/__init__.py")
        self.set_trap(self.folder / "parley/__main__.py")

    def remove_unavoidable(self, interpreter: Sequence[str]) -> None:
        """Remove the traps in whose place Python itself imports modules for -m, before it runs any of ours."""
        script = [*interpreter, "-P", "-c", "import runpy, sys; print(*sys.modules)"]
        for module in subprocess.run(script, capture_output=True, text=True, check=True).stdout.split():
            (self.folder / f"{module}.py").unlink(missing_ok=True)

    @property
    def imported(self) -> list[str]:
        return self._record.read_text().splitlines() if self._record.exists() else []


@pytest.fixture
def traps(tmp_path: Path) -> TrapFolder:
    return TrapFolder(tmp_path, "torch", "uuid", "transformers", "ray", "grpc", "sitecustomize", "usercustomize")


def clean_environment(**variables: str) -> dict[str, str]:
    """Return an environment in which only this checkout and the installed packages are importable."""
    packages = {path for path in sys.path if path.endswith("-packages")}  # -S leaves them out
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PARLEY_")},
        "PYTHONPATH": os.pathsep.join([str(ROOT), *packages]),
        "HF_HUB_OFFLINE": "1",
        **variables,
    }


def complete(port: int, deadline: float) -> str:
    """Return a completion, as soon as the server answers at all."""
    body = json.dumps({"prompt": "One two", "max_tokens": 4}).encode()
    while True:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return str(json.loads(answer.read())["choices"][0]["text"])
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


class RunningCommands:
    """Commands that run in a folder until the end of the block. Their output goes to the file ``log``."""

    def __init__(self, folder: Path, log: Path, **variables: str):
        self._folder, self._log, self._environment = folder, log, clean_environment(**variables)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: object) -> None:
        command = list(map(str, words))
        with self._log.open("a") as output:
            self._processes.append(
                subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=output, stderr=output)
            )

    def __enter__(self) -> RunningCommands:
        return self

    def __exit__(self, *details: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)


def run_in_folder(traps: TrapFolder, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=traps.folder,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_module_run_imports_nothing_from_the_working_directory(traps: TrapFolder) -> None:
    traps.remove_unavoidable(MODULE[:1])
    assert run_in_folder(traps, [*MODULE, "version"]).stdout.startswith("parley ")
    traps.remove_unavoidable(BARE_MODULE[:2])
    assert run_in_folder(traps, [*BARE_MODULE, "version"]).stdout.startswith("parley ")
    assert traps.imported == []


@pytest.mark.skipif(not Path(SCRIPT[0]).exists(), reason="the command is not installed")
def test_the_command_imports_nothing_from_the_working_directory(traps: TrapFolder) -> None:
    traps.set_package_trap()  # with -m Python itself would start this package
    assert "torch" in run_in_folder(traps, [*SCRIPT, "doctor", "."]).stdout
    assert traps.imported == []


def test_a_server_and_its_engine_import_nothing_from_the_working_directory(traps: TrapFolder, tmp_path: Path) -> None:
    traps.set_package_trap()
    port, log = free_port(), tmp_path / "log"
    with RunningCommands(traps.folder, log) as running:
        running.start(*SAFE_MODULE, "serve", ".", "--port", port, "--grpc-port", free_port(), "--kv-memory", "24MiB")
        assert complete(port, time.monotonic() + 60), log.read_text()
    assert traps.imported == []


@nightly
def test_a_pair_and_its_coordinator_import_nothing_from_the_working_directory(
    traps: TrapFolder, tmp_path: Path
) -> None:
    traps.set_package_trap()
    ports, log = [free_port() for _ in range(5)], tmp_path / "log"
    config = tmp_path / "coordinator.toml"
    config.write_text(
        f'host = "127.0.0.1"\npredict_port = {ports[0]}\nsecret = "s"\n'
        + "".join(
            f'[[instances]]\nurl = "http://127.0.0.1:{port}"\nrole = "{role}"\n'
            for port, role in zip(ports[1:3], ("prefill", "decode"), strict=True)
        )
    )
    with RunningCommands(traps.folder, log, PARLEY_CLUSTER_SECRET="s") as running:
        for role, port, peer in (("prefill", ports[1], ports[3]), ("decode", ports[2], ports[4])):
            addresses = ("--host", "127.0.0.1", "--port", port, "--peer-port", peer)
            running.start(*SAFE_MODULE, "serve", ".", "--role", role, *addresses, "--kv-memory", "24MiB")
        running.start(*SAFE_MODULE, "coordinator", "--config", config)
        assert complete(ports[0], time.monotonic() + 90), log.read_text()
    assert traps.imported == []


@nightly
def test_a_chat_and_its_server_import_nothing_from_the_working_directory(traps: TrapFolder) -> None:
    traps.set_package_trap()
    assert run_in_folder(traps, [*SAFE_MODULE, "chat", ".", "--question", "Hello", "--max-tokens", "4"]).stdout
    assert traps.imported == []


@nightly
def test_the_processes_of_a_ray_cluster_import_nothing_from_the_working_directory(
    traps: TrapFolder, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    traps.set_package_trap()
    port, log = free_port(), tmp_path / "log"
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'name = "{secrets.token_hex(4)}"\n[coordinator]\npredict_port = {port}\n'
        '[[instances]]\nrole = "mixed"\ncpus = 0.1\nkv-memory = "24MiB"\n'
    )
    with RunningCommands(traps.folder, log) as running:
        running.start(*SAFE_MODULE, "cluster", "up", plan)
        assert complete(port, time.monotonic() + 120), log.read_text()
    assert traps.imported == []


def test_a_script_beside_the_checkout_finds_the_package(tmp_path: Path) -> None:
    """The checkout is named as the package, and Python must not take it for a package without __init__.py."""
    (tmp_path / "parley").symlink_to(ROOT)
    (tmp_path / "answer.py").write_text("import parley\nfrom parley.version import __version__\nprint(__version__)")
    script = subprocess.run([sys.executable, "answer.py"], cwd=tmp_path, capture_output=True, text=True)
    assert script.stdout.strip() == importlib.metadata.version("parley-llm"), script.stderr


@nightly
def test_runs_from_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """There the package is in the working directory, and its child processes find it as well."""
    (tmp_path / "parley").symlink_to(ROOT / "parley")
    packages = clean_environment()["PYTHONPATH"].removeprefix(f"{ROOT}{os.pathsep}")
    port, log = free_port(), tmp_path / "log"
    with RunningCommands(tmp_path, log, PYTHONPATH=packages) as running:
        running.start(*BARE_MODULE, "serve", "--port", port, "--kv-memory", "24MiB")
        assert complete(port, time.monotonic() + 60), log.read_text()
