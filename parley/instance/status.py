"""The status that an instance reports at ``/v1/status`` and ``/v2/status``: MindIE's members, and ``parley`` with more.

Times and sizes are current values. Knows nothing of HTTP.
"""

from __future__ import annotations

from typing import Any

from parley.disagg.wire.role import Address
from parley.instance.node import Node
from parley.serving.registry import Service


def status(service: Service, node: Node, address: Address, version: int) -> dict[str, Any]:
    """Return the status. ``address``: where others reach the instance. ``version``: of the status interface, 1 or 2."""
    role = node.role
    resource = resources(service)
    told: dict[str, Any] = {
        "service": {
            # A coordinator must not choose an instance while a model is being loaded or reloaded.
            "roleStatus": "RoleSwitching" if role.state == "RoleReady" and service.refusal() else role.state,
            "currentRole": role.name,
            "p_percentage": role.share,
        },
        "resource": resource,
        "linkStatus": {"peers": [{"target": peer.host, "link": link} for peer, link in role.links.items()]},
    }
    if version == 2:
        slots, blocks = resource["availSlotsNum"], resource["availBlockNum"]
        resource |= {
            "totalAvailNpuSlotsNum": slots,
            "totalAvailNpuBlockNum": blocks,
            "maxAvailNpuBlockNum": blocks,
            "dpInstMap": {"0": {"availSlotsNum": slots, "availBlockNum": blocks}},
        }
    told["parley"] = own(service, node, address)
    return told


def resources(service: Service) -> dict[str, Any]:
    """Return the resources of all models together. Blocks are KV cache pages; there is no second memory to swap to."""
    stats = [model.engine.stats for model in service.models]
    infos = [model.engine.info for model in service.models]  # stats.blocks_total may still be 0
    total = sum(each.kv_blocks for each in infos if each is not None)
    used = sum(each.blocks_used for each in stats)
    places = sum(model.settings.max_batch for model in service.models)
    running, waiting = sum(each.running for each in stats), sum(each.waiting for each in stats)
    return {
        "availSlotsNum": max(0, places - running - waiting),
        "availBlockNum": total - used,
        "waitingRequestNum": waiting,
        "runningRequestNum": running,
        "swappedRequestNum": 0,
        "freeNpuBlockNums": total - used,
        "freeCpuBlockNums": 0,
        "totalNpuBlockNums": total,
        "totalCpuBlockNums": 0,
    }


def own(service: Service, node: Node, address: Address) -> dict[str, Any]:
    """Return the values for parley's own coordinator. Rates are tokens per second, 0 before any measurement."""
    info, stats = service.main.engine.info, [model.engine.stats for model in service.models]
    infos = [model.engine.info for model in service.models]
    layouts = [each.arena.layout for each in infos if each is not None and each.arena is not None]
    return {
        "epoch": node.epoch,
        "role": node.role.name,
        "peer": str(address),
        "models": service.names,
        "ready": service.refusal() is None,
        "layout": ",".join(layouts),
        "slots": sum(model.settings.max_batch for model in service.models),
        "block_size": info.block_size if info is not None else 0,
        "max_seq_len": info.max_model_len if info is not None else 0,
        "pinned": sum(each.pinned for each in stats),
        "reserved": sum(each.reserved for each in stats),
        "unstaged": sum(each.unstaged for each in stats),
        "running": sum(each.running for each in stats),
        "waiting": sum(each.waiting for each in stats),
        "prefill_rate": round(node.rates.prefill.value, 1),
        "decode_rate": round(node.rates.decode.value, 1),
        "transfers": node.transfers,
        "prefix_hash": node.known.hashes(),
    }
