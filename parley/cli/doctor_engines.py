"""Checks of ``parley doctor`` for engines other than parley's own: the vLLM that it would start, or a server."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Generator
from typing import TYPE_CHECKING, Literal, NamedTuple

from parley.child_process import python_command

if TYPE_CHECKING:
    from parley.types import AttachedSettings, VLLMSettings
    from parley.worker.attached.server_facts import AttachedServerFacts

Level = Literal["ok", "warn", "fail"]
SAME_WORDS = "serve would refuse it with the same words."
MODULE_SECONDS = 60.0  # seconds until a Python answers, which may lie on a slow disk


class Finding(NamedTuple):
    """One line of output: the level, the subject, the observation, and a hint how to fix it."""

    level: Level
    subject: str
    observation: str
    hint: str = ""


def check_vllm(settings: VLLMSettings) -> Generator[Finding, None, bool]:
    """Check which version of vLLM its Python has. Return whether serve would refuse it."""
    from parley.engine.protocol import EngineFailed
    from parley.engine.vllm_engine import check_vllm_version, read_version

    try:
        check_vllm_version(version := read_version(settings.python))
    except EngineFailed as error:
        yield Finding("fail", "vLLM", str(error))
        return True
    yield Finding("ok", "vLLM", version)
    return False


def lacks_video_decoder(settings: VLLMSettings) -> bool:
    """Whether vLLM's Python cannot import PyAV, which parley needs there to decode video and audio."""
    command = python_command("-c", "import av", python=settings.python)
    try:
        return subprocess.run(command, capture_output=True, timeout=MODULE_SECONDS, check=False).returncode != 0
    except (OSError, subprocess.TimeoutExpired):
        return True


def check_server(settings: AttachedSettings, name: str) -> Generator[Finding, None, bool]:
    """Ask a server the same questions as serve. ``name``: the model's. Return whether serve would refuse it."""
    from parley.worker.attached.server_calls import ServerAway
    from parley.worker.attached.server_facts import AttachRefused

    try:
        facts = asyncio.run(_read_facts(settings, name))
    except AttachRefused as error:
        yield Finding("fail", "engine", str(error), SAME_WORDS)
        return True
    except ServerAway as error:
        yield Finding("warn", "engine", f"{settings.url} is away: {error}", "serve waits until the server answers.")
        return False
    observation = f"vLLM {facts.version} at {settings.url}: {facts.card.id}, context {facts.max_model_len:,} tokens"
    if facts.missing_features:
        missing_features = ", ".join(sorted(facts.missing_features)).replace("_", " ")
        yield Finding(
            "warn", "engine", f"{observation}, without {missing_features}", "Its own flags exclude these features."
        )
    else:
        yield Finding("ok", "engine", observation)
    return False


async def _read_facts(settings: AttachedSettings, name: str) -> AttachedServerFacts:
    """Return the server's facts: version, model, limits. Raises AttachRefused, ServerAway."""
    from parley.worker.attached.server_calls import ServerCalls
    from parley.worker.attached.server_facts import read_facts

    calls = ServerCalls(settings)
    try:
        return await read_facts(calls, settings, name)
    finally:
        calls.close()
