"""Loads and unloads LoRA adapters at the request of clients while the server runs. Knows no API."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from parley.dialects.admin_requests import AdapterChange
from parley.dialects.reply import Answer
from parley.dialects.route import Route
from parley.errors import InvalidValue, NotFound, ParleyError, excerpt
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_reader import request_context
from parley.serving.served_model import ServedModel
from parley.web.exchange import Exchange

ADAPTERS_DISABLED = "This server loads no adapters at run time. Start it with --lora-root FOLDER to allow it."


async def handle_adapter(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Load or unload a LoRA adapter. A failure is answered in the API's own form if it has one."""
    assert route.reader is not None
    body = await exchange.read_body()
    adapter_change: AdapterChange | Answer = await exchange.to_thread_if_large(
        len(body), partial(route.reader, body, request_context(registry, registry.main_model, exchange))
    )
    if isinstance(adapter_change, Answer):
        await exchange.send_answer(adapter_change)
        return
    try:
        await change_adapter(registry, adapter_change)
    except ParleyError as error:
        if adapter_change.render_failure is None:
            raise
        await exchange.send_answer(adapter_change.render_failure(error))
        return
    await exchange.send_answer(adapter_change.success)


async def change_adapter(registry: ModelRegistry, adapter_change: AdapterChange) -> None:
    """Load or unload an adapter, one at a time. If it raises ParleyError, nothing has changed."""
    root_folder = registry.options.lora_root
    if root_folder is None:
        raise NotFound(ADAPTERS_DISABLED)
    async with registry.adapter_lock:
        if adapter_change.folder is None:
            await _unload_adapter(registry, adapter_change.name)
        else:
            await _load_adapter(registry, adapter_change, root_folder, adapter_change.folder)


async def _load_adapter(
    registry: ModelRegistry, adapter_change: AdapterChange, root_folder: str, folder_path: str
) -> None:
    model = registry.find_model(adapter_change.model)
    model.require_ready()
    adapter_owner = _find_adapter_owner(registry, adapter_change.name)
    if adapter_owner is None and adapter_change.name in registry.served_names:
        raise _adapter_input_error(f"The name {excerpt(adapter_change.name)} belongs to a model.", "lora_name")
    if adapter_owner is not None and (adapter_owner is not model or not adapter_change.replace_existing):
        raise _adapter_input_error(
            f"The adapter {excerpt(adapter_change.name)} has already been loaded; unload it, or load it in place.",
            "lora_name",
        )
    folder = await asyncio.to_thread(_resolve_adapter_folder, root_folder, folder_path)
    if failure := await model.serve_adapter(adapter_change.name, str(folder)):
        raise _adapter_input_error(failure, "lora_path")


async def _unload_adapter(registry: ModelRegistry, name: str) -> None:
    model = _find_adapter_owner(registry, name)
    if model is None:
        raise NotFound(f"The lora adapter '{name[:256]}' cannot be found.", field="lora_name")
    if failure := await model.remove_adapter(name):
        raise ParleyError(failure)


def _find_adapter_owner(registry: ModelRegistry, name: str) -> ServedModel | None:
    """Return the model that serves an adapter of this name, or None."""
    return next((model for model in registry.models if name in model.adapters), None)


def _adapter_input_error(message: str, field: str) -> InvalidValue:
    return InvalidValue(message, field=field, code="InvalidUserInput")


def _resolve_adapter_folder(root_folder: str, folder_path: str) -> Path:
    """Resolve the folder that a client names, absolute or relative to ``root_folder``. Links may not lead out of it.

    Raises InvalidValue if it is outside ``root_folder`` or not a valid path, NotFound if it does not exist.
    """
    try:
        resolved_root = Path(root_folder).resolve()
        folder = (resolved_root / folder_path).resolve()
        if not folder.is_relative_to(resolved_root):
            raise _adapter_input_error(
                "The adapter's path is not inside the folder that adapters may be loaded from.", "lora_path"
            )
        if not folder.is_dir():
            raise NotFound(f"There is no adapter at {excerpt(folder_path)}.", field="lora_path")
    except (OSError, ValueError, RuntimeError):  # too long, not encodable as a file name, or a cycle of links
        raise _adapter_input_error(f"{excerpt(folder_path)} is not a valid path.", "lora_path") from None
    return folder
