"""The status that an instance reports at ``/v1/status`` and ``/v2/status``: MindIE's members, and ``parley`` with more.

Times and sizes are current values. Knows nothing of HTTP.
"""

from __future__ import annotations

from typing import Any

from parley.disagg.wire.role import InstanceAddress
from parley.instance.instance_state import InstanceState
from parley.serving.model_registry import ModelRegistry
from parley.serving.served_model import ServedModel


def instance_status(
    registry: ModelRegistry, instance_state: InstanceState, address: InstanceAddress, version: int
) -> dict[str, Any]:
    """Return the status. ``address``: where others reach the instance. ``version``: of the status interface, 1 or 2."""
    role = instance_state.role
    resource = instance_resources(registry)
    report: dict[str, Any] = {
        "service": {
            # A coordinator must not choose an instance while a model is being loaded or reloaded.
            "roleStatus": "RoleSwitching" if role.status == "RoleReady" and registry.unready_error() else role.status,
            "currentRole": role.name,
            "p_percentage": role.prefill_share,
        },
        "resource": resource,
        "linkStatus": {"peers": [{"target": peer.host, "link": link} for peer, link in role.link_states.items()]},
    }
    if version == 2:
        slots, blocks = resource["availSlotsNum"], resource["availBlockNum"]
        resource |= {
            "totalAvailNpuSlotsNum": slots,
            "totalAvailNpuBlockNum": blocks,
            "maxAvailNpuBlockNum": blocks,
            "dpInstMap": {"0": {"availSlotsNum": slots, "availBlockNum": blocks}},
        }
    report["parley"] = parley_members(registry, instance_state, address)
    return report


def instance_resources(registry: ModelRegistry) -> dict[str, Any]:
    """Return the resources of all models together. Blocks are KV cache pages; there is no second memory to swap to."""
    stats = [model.engine.stats for model in registry.models]
    infos = [model.engine.info for model in registry.models]  # stats.total_pages may still be 0
    total = sum(info.kv_pages for info in infos if info is not None)
    used_blocks = sum(engine_stats.used_pages for engine_stats in stats)
    places = sum(model.settings.max_batch for model in registry.models)
    running = sum(engine_stats.running for engine_stats in stats)
    waiting = sum(engine_stats.waiting for engine_stats in stats)
    return {
        "availSlotsNum": max(0, places - running - waiting),
        "availBlockNum": total - used_blocks,
        "waitingRequestNum": waiting,
        "runningRequestNum": running,
        "swappedRequestNum": 0,
        "freeNpuBlockNums": total - used_blocks,
        "freeCpuBlockNums": 0,
        "totalNpuBlockNums": total,
        "totalCpuBlockNums": 0,
    }


def parley_members(registry: ModelRegistry, instance_state: InstanceState, address: InstanceAddress) -> dict[str, Any]:
    """Return the values for parley's own coordinator. Rates are tokens per second, 0 before any measurement."""
    info, stats = registry.main_model.engine.info, [model.engine.stats for model in registry.models]
    infos = [model.engine.info for model in registry.models]
    layouts = [info.arena.layout for info in infos if info is not None and info.arena is not None]
    return {
        "epoch": instance_state.epoch,
        "role": instance_state.role.name,
        "peer": str(address),
        "models": registry.served_names,
        "model_tasks": [model_tasks(model) for model in registry.models],
        "ready": registry.unready_error() is None,
        "layout": ",".join(layouts),
        "slots": sum(model.settings.max_batch for model in registry.models),
        "block_size": info.page_tokens if info is not None else 0,
        "max_seq_len": info.max_model_len if info is not None else 0,
        "pinned": sum(engine_stats.pinned_pages for engine_stats in stats),
        "reserved": sum(engine_stats.reserved_pages for engine_stats in stats),
        "unstaged": sum(engine_stats.unstaged_pages for engine_stats in stats),
        "running": sum(engine_stats.running for engine_stats in stats),
        "waiting": sum(engine_stats.waiting for engine_stats in stats),
        "prefill_rate": round(instance_state.rates.prefill.tokens_per_second, 1),
        "decode_rate": round(instance_state.rates.decode.tokens_per_second, 1),
        "transfers": instance_state.transfers,
        "api_keys": registry.options.has_keys,
        "private_prefixes": registry.options.has_private_prefixes,
        "prefix_hash": instance_state.recent_prefixes.newest_hashes(),
    }


def model_tasks(model: ServedModel) -> dict[str, Any]:
    """Return the names of a model and of its adapters, and its tasks and media; None until it is loaded."""
    info = model.engine.info
    return {
        "names": [*model.names, *model.adapters],
        "tasks": None if info is None else sorted(info.tasks),
        "media": None if info is None else sorted(info.media_kinds),
    }
