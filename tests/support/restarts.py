"""Waits for the restart of an engine, and settings of engines that restart quickly."""

import asyncio
from pathlib import Path

from parley.engine.remote_engine import RemoteEngine
from parley.types import ParleySettings


async def becomes_ready_again(engine: RemoteEngine) -> None:
    """Waits until the engine has noticed an end of its process and serves again."""
    async with asyncio.timeout(120):
        while engine.state != "restarting":
            await asyncio.sleep(0.01)
        while engine.state != "ready":
            await asyncio.sleep(0.05)


def quick_settings(folder: Path, step_seconds: float = 0.001) -> ParleySettings:
    """Returns the settings of a simulated engine, which loads no model, with a short engine timeout."""
    costs = folder / "costs.toml"
    rows = f"[[1, {step_seconds}], [1000, {step_seconds + 0.01}]]"
    costs.write_text(f"rows = {rows}\nblocks = 64\nlength = 512\n")
    return ParleySettings(model=str(folder), costs=str(costs), engine_timeout=2.0)
