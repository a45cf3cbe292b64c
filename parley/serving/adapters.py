"""Adapters that clients load and unload while the server runs, from below one folder. Knows no API."""

from __future__ import annotations

import asyncio
from pathlib import Path

from parley.dialects.wishes import Adapt
from parley.errors import Invalid, NotFound, ParleyError, excerpt
from parley.serving.registry import Service
from parley.serving.served_model import Model

CLOSED = "Adapters are not loaded while the server runs; --lora-root names the folder from which they may be."


async def change(service: Service, wish: Adapt) -> None:
    """Load an adapter or unload it, one at a time. Raises ParleyError, and then nothing has changed."""
    root = service.options.lora_root
    if root is None:
        raise NotFound(CLOSED)
    async with service.adapting:
        if wish.folder is None:
            await _unload(service, wish.name)
        else:
            await _load(service, wish, root, wish.folder)


async def _load(service: Service, wish: Adapt, root: str, given: str) -> None:
    model = service.find(wish.model)
    model.require()
    owner = _owner(service, wish.name)
    if owner is None and wish.name in service.names:
        raise _wrong(f"The name {excerpt(wish.name)} is that of a model.", "lora_name")
    if owner is not None and (owner is not model or not wish.replace):
        raise _wrong(
            f"The adapter {excerpt(wish.name)} has already been loaded; unload it, or load it in place.", "lora_name"
        )
    folder = await asyncio.to_thread(_below, root, given)
    if why := await model.adopt(wish.name, str(folder)):
        raise _wrong(why, "lora_path")


async def _unload(service: Service, name: str) -> None:
    model = _owner(service, name)
    if model is None:
        raise NotFound(f"The lora adapter '{name[:256]}' cannot be found.", field="lora_name")
    if why := await model.disown(name):
        raise ParleyError(why)


def _owner(service: Service, name: str) -> Model | None:
    """The model that has an adapter of this name."""
    return next((model for model in service.models if name in model.adapters), None)


def _wrong(message: str, field: str) -> Invalid:
    return Invalid(message, field=field, code="InvalidUserInput")


def _below(root: str, given: str) -> Path:
    """The folder that a client names, absolute or from the root on; links lead nowhere else.

    Raises Invalid, NotFound.
    """
    try:
        top = Path(root).resolve()
        folder = (top / given).resolve()
        if not folder.is_relative_to(top):
            raise _wrong("The adapter's path is not below the folder from which adapters may be loaded.", "lora_path")
        if not folder.is_dir():
            raise NotFound(f"There is no adapter at {excerpt(given)}.", field="lora_path")
    except (OSError, ValueError, RuntimeError):  # too long, no text for a file system, links in a circle
        raise _wrong(f"{excerpt(given)} is no path.", "lora_path") from None
    return folder
