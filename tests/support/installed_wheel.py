"""A wheel in an environment of its own, on a machine that has no compiler, no checkout, and no network but its own.

Commands run in a network namespace, so that port 8000 is theirs as README.md says. Their PATH has the environment's
commands, and a few others by name: no compiler is among them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import parley

ROOT = Path(parley.__file__).parents[1]
BUILD_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")
TOOLS = ("bash", "sh", "curl", "cat", "uname")


def copy_sources(folder: Path, *ignored: str) -> Path:
    """Copy the sources into a folder, so that the build leaves no output in the checkout."""
    folder.mkdir(exist_ok=True)
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "parley", folder / "parley", ignore=shutil.ignore_patterns("__pycache__", *ignored))
    return folder


class InstalledWheel:
    """An environment with the wheel of this checkout. Must be closed."""

    def __init__(self, home: Path):
        self.home, self.venv = home, home / "venv"
        self._tools = home / "tools"
        self._namespace = f"parley-wheel{os.getpid()}"
        self._server: subprocess.Popen[bytes] | None = None
        self._served = ""  # the shell line of the running server
        run_checked("ip", "netns", "add", self._namespace)
        run_checked("ip", "-n", self._namespace, "link", "set", "lo", "up")
        self._tools.mkdir()
        for name in TOOLS:
            (self._tools / name).symlink_to(str(shutil.which(name)))

    def install(self) -> None:
        """Build the wheel with every kernel, and install it with the locked versions and OpenAI's client."""
        sources, wheels = copy_sources(self.home / "sources"), self.home / "wheels"
        locks = [ROOT / "requirements.lock", ROOT / "requirements-dev.lock"]
        build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels)
        run_checked(*build, sources, env={**os.environ, "PARLEY_REQUIRE_KERNELS": "1"})
        (wheel,) = wheels.glob("parley_llm-*.whl")
        run_checked(sys.executable, "-m", "venv", self.venv)
        constraints = [word for lock in locks for word in ("--constraint", lock)]
        pip = (self.venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", *constraints)
        run_checked(*pip, f"{wheel}[grpc,http2,websocket]", "openai")
        shutil.rmtree(sources)

    @property
    def environment(self) -> dict[str, str]:
        """The only variables that commands see."""
        return {"PATH": f"{self.venv}/bin:{self._tools}", "HOME": str(self.home), "LANG": "C.UTF-8"}

    def command(self, script: str) -> Sequence[str]:
        """Return the command that runs a shell script on this machine."""
        return (str(shutil.which("ip")), "netns", "exec", self._namespace, str(self._tools / "bash"), "-c", script)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script in the home folder until it ends."""
        return subprocess.run(
            self.command(script), env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=300
        )

    def serve(self, script: str, port: int = 8000) -> Path:
        """Let the server of a shell line run, and no other. Return its log when it is ready."""
        if script == self._served:
            return self._log
        self.stop_server()
        self._served, self._log = script, self.home / "server.log"
        with self._log.open("w") as output:
            self._server = subprocess.Popen(
                self.command(f"exec {script}"),
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 120
        while self.run(f"curl -sf http://127.0.0.1:{port}/health/ready").returncode:
            assert self._server.poll() is None and time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.2)
        return self._log

    def stop_server(self) -> None:
        """End the server as a service manager would. Raises AssertionError if it does not end well."""
        server, self._server, self._served = self._server, None, ""
        if server is not None:
            server.terminate()
            assert server.wait(60) == 0, self._log.read_text()

    def close(self) -> None:
        """Kill the server, and remove the namespace."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        subprocess.run(["ip", "netns", "del", self._namespace], capture_output=True)


def run_checked(*words: object, **options: object) -> None:
    """Run a command. Raises AssertionError with its output if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
