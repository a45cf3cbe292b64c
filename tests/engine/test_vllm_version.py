"""Which vLLM is accepted: what is missing, or was not tested, is refused in one sentence before anything starts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from parley.engine.protocol import EngineFailed
from parley.engine.remote_engine import RemoteEngine
from parley.engine.vllm_engine import START_FILE, VLLMEngine, check_vllm_version, read_version
from parley.types import EngineSettings, VLLMSettings

ORPHAN_SCRIPT = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
os._exit(1)
"""


def fake_python(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # its parent has ended, and nobody may have taken its exit code


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1+cpu", "0.32.0rc1"])
def test_accepts_the_tested_versions(version):
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev"])
def test_refuses_a_version_that_was_not_tested(version):
    with pytest.raises(EngineFailed, match=r"0\.32 to 0\.33.*pip install 'vllm>=0\.32,<0\.34'"):
        check_vllm_version(version)


@pytest.mark.asyncio
async def test_refuses_to_start_without_vllm(tmp_path):
    for script, words in (("exit 1", "is not installed"), ("echo 0.1.0", "vLLM 0.1.0 is installed")):
        engine = VLLMEngine(VLLMSettings(model="m", python=fake_python(tmp_path, script)))
        with pytest.raises(EngineFailed, match=words):
            await engine.start()
        await engine.close()
    with pytest.raises(EngineFailed, match="No such file"):
        read_version(str(tmp_path / "missing"))
    assert START_FILE.is_file()


@pytest.mark.asyncio
async def test_processes_of_the_group_end_with_the_engine(tmp_path):
    note = tmp_path / "pid"
    command = [sys.executable, "-c", ORPHAN_SCRIPT, str(note)]
    engine = RemoteEngine(EngineSettings(model="m"), command=command, owns_group=True, close_seconds=30)
    await engine.start()
    with pytest.raises(EngineFailed):
        await engine.wait_until_ready()
    await engine.close()
    async with asyncio.timeout(30):
        while is_running(int(note.read_text())):
            await asyncio.sleep(0.01)
