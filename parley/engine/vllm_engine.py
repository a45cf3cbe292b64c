"""vLLM as an engine: a host process, run by the Python that vLLM is installed for, which starts vLLM's own processes.

The host (``worker/vllm/host.py``) speaks the messages of any engine process. Media processes run vLLM's processor of
the model. Of parley's environment, both see only parley's own modules (``worker/vllm/start.py``), because parley's
libraries, torch among them, have other versions.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from parley.child_process import python_command
from parley.engine.protocol import EngineFailed
from parley.engine.remote_engine import RemoteEngine
from parley.text.media_family import read_media_family
from parley.text.tokens.json_files import read_json_object
from parley.types import MediaKind, VLLMSettings

START_FILE = Path(__file__).parents[1] / "worker" / "vllm" / "start.py"
HOST_MODULE = "parley.worker.vllm.host"
MEDIA_MODULE = "parley.worker.vllm.media.media_process"
TESTED_VERSIONS = (0, 32), (0, 33)  # the first and the last minor version that the host was tested with
CLOSE_SECONDS = 15.0  # seconds until all processes have ended
VERSION_SECONDS = 60.0  # seconds until a Python answers, which may lie on a slow disk
VERSION_SCRIPT = "from importlib.metadata import version; print(version('vllm'))"


class VLLMEngine(RemoteEngine):
    """Runs vLLM's processes as one process group."""

    def __init__(self, settings: VLLMSettings, *, name: str = "model"):
        command = vllm_command(settings, HOST_MODULE)
        super().__init__(settings, command=command, name=name, close_seconds=CLOSE_SECONDS, owns_group=True)
        self._vllm_settings = settings

    async def start(self) -> None:
        """Start the processes. Raises EngineFailed if this Python has no vLLM, or another version than was tested."""
        settings = self._vllm_settings
        check_vllm_version(await asyncio.to_thread(read_version, settings.python))
        settings.media_marks = media_marks(read_json_object(Path(settings.model) / "config.json"))
        self.media_command = vllm_command(settings, MEDIA_MODULE, msgspec.json.encode(settings).decode())
        await super().start()


def vllm_command(settings: VLLMSettings, *arguments: str) -> list[str]:
    """Return the command that runs a module of parley with vLLM's Python."""
    return python_command(str(START_FILE), *arguments, python=settings.python)


def media_marks(config: Mapping[str, Any]) -> dict[MediaKind, int | str]:
    """Return the marks of media in prompts of a model with this config.json (``VLLMSettings.media_marks``)."""
    family = read_media_family(config)
    return {} if family is None else {**family.placeholder_ids, **family.prompt_marks}


def read_version(python: str) -> str:
    """Return the version of vLLM that a Python interpreter ("": this one) has. Raises EngineFailed."""
    command = python_command("-c", VERSION_SCRIPT, python=python)
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=False)
    except OSError as error:
        raise EngineFailed(f"--engine-python: {python} cannot be run: {error.strerror}.") from error
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"--engine-python: {python} did not answer for {VERSION_SECONDS:g} s.") from error
    if probe.returncode:
        raise EngineFailed(
            f"vLLM is not installed for {command[0]}. Install it (Python 3.11 or later) with `python3 -m venv vllm && "
            "vllm/bin/pip install vllm`, and add `--engine-python vllm/bin/python`."
        )
    return probe.stdout.strip()


def check_vllm_version(version: str) -> None:
    """Check that the host was tested with this version of vLLM. Raises EngineFailed."""
    first, last = TESTED_VERSIONS
    if not is_tested_version(version):
        raise EngineFailed(
            f"vLLM {version} is installed, but parley works with {first[0]}.{first[1]} to {last[0]}.{last[1]}: "
            f"`pip install 'vllm>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}'`."
        )


def is_tested_version(version: str) -> bool:
    """Whether parley was tested with this version of vLLM."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    first, last = TESTED_VERSIONS
    return numbers is not None and first <= (int(numbers[1]), int(numbers[2])) <= last
