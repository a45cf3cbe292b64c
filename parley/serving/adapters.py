"""Loads and unloads LoRA adapters at the request of clients while the server runs. Knows no API."""

from __future__ import annotations

import asyncio
from pathlib import Path

from parley.dialects.wishes import Adapt
from parley.errors import Invalid, NotFound, ParleyError, excerpt
from parley.serving.registry import Service
from parley.serving.served_model import Model

CLOSED = "Adapters cannot be loaded while the server runs; start it with --lora-root to name the folder to load from."


async def change(service: Service, wish: Adapt) -> None:
    """Load or unload an adapter, one at a time. If it raises ParleyError, nothing has changed."""
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
        raise _wrong(f"The name {excerpt(wish.name)} belongs to a model.", "lora_name")
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
    """Return the model that serves an adapter of this name, or None."""
    return next((model for model in service.models if name in model.adapters), None)


def _wrong(message: str, field: str) -> Invalid:
    return Invalid(message, field=field, code="InvalidUserInput")


def _below(root: str, given: str) -> Path:
    """Resolve the folder that a client names, absolute or relative to ``root_folder``. Links may not lead out of it.

    Raises Invalid if it is outside ``root_folder`` or not a valid path, NotFound if it does not exist.
    """
    try:
        top = Path(root).resolve()
        folder = (top / given).resolve()
        if not folder.is_relative_to(top):
            raise _wrong("The adapter's path is not inside the folder that adapters may be loaded from.", "lora_path")
        if not folder.is_dir():
            raise NotFound(f"There is no adapter at {excerpt(given)}.", field="lora_path")
    except (OSError, ValueError, RuntimeError):  # too long, not encodable as a file name, or a cycle of links
        raise _wrong(f"{excerpt(given)} is not a valid path.", "lora_path") from None
    return folder
