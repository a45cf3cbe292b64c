"""What an instance tells of itself at ``/v1/status`` and ``/v2/status``: MindIE's members, and ``parley`` beside them.

Times and sizes are those of the moment. Knows nothing of how it is asked.
"""

from __future__ import annotations

from typing import Any

from parley.disagg.wire.role import Address
from parley.instance.node import Node
from parley.serving.registry import Service


def status(service: Service, node: Node, address: Address, version: int) -> dict[str, Any]:
    """``address``: where others reach it. ``version``: of the interface, 1 or 2."""
    role = node.role
    resource = resources(service)
    told: dict[str, Any] = {
        "service": {
            # Who chooses by this must not choose one whose models are being loaded, or again.
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
    """Of all models together. Blocks are pages of the KV cache; there is no second kind of memory to swap to."""
    stats = [model.engine.stats for model in service.models]
    infos = [model.engine.info for model in service.models]  # numbers of steps come with the first of these
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
    """What parley's own coordinator asks for. Rates are tokens per second, 0 before anything was measured."""
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
