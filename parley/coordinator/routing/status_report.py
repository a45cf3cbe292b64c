"""Parses an instance's /v1/status. Members of an unexpected type leave the old value in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parley.coordinator.lenient import amount, count
from parley.coordinator.routing.instance import Instance
from parley.disagg.wire.prompt_hash import REPORTED

RESOURCES = (
    ("avail_slots", "availSlotsNum"),
    ("avail_blocks", "availBlockNum"),
    ("waiting", "waitingRequestNum"),
    ("running", "runningRequestNum"),
)
COUNTS = ("pinned", "reserved", "waiting", "running", "slots", "block_size")


def take(instance: Instance, said: Mapping[str, Any]) -> str:
    """Update an instance from its status; return its epoch, empty if it has none."""
    service, resource, own = _table(said, "service"), _table(said, "resource"), _table(said, "parley")
    instance.extended = bool(own)
    role = own.get("role") or service.get("currentRole")
    if isinstance(role, str):
        instance.role = role
    instance.switching = service.get("roleStatus", "RoleReady") != "RoleReady"
    instance.loaded = own.get("ready", True) is not False
    share = service.get("p_percentage")
    if count(share) and share <= 100:
        instance.p_percentage = share
    for name, key in RESOURCES:
        _set(instance, name, resource.get(key))
    _set(instance, "blocks", resource.get("totalNpuBlockNums") or None)
    for name in COUNTS:
        _set(instance, name, own.get(name))
    _set(instance, "longest", own.get("max_seq_len"))
    for name in ("prefill_rate", "decode_rate"):
        value = own.get(name)
        if amount(value):
            setattr(instance, name, float(value))
    if isinstance(layout := own.get("layout"), str):
        instance.layout = layout
    if isinstance(peer := own.get("peer"), str) and not instance.peer_given:
        instance.peer = peer
    if isinstance(models := own.get("models"), list):
        instance.models = frozenset(name for name in models if isinstance(name, str))
    if isinstance(hashes := own.get("prefix_hash"), list):
        instance.hashes = frozenset(hash for hash in hashes[:REPORTED] if isinstance(hash, int))
    transfers = _table(own, "transfers")
    instance.transfers = {name: value for name, value in transfers.items() if amount(value)}
    epoch = own.get("epoch")
    return epoch if isinstance(epoch, str) else ""


def _table(said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = said.get(name)
    return value if isinstance(value, dict) else {}


def _set(instance: Instance, name: str, value: Any) -> None:
    if count(value):
        setattr(instance, name, value)
