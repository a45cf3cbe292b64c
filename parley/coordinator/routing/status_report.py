"""Parses an instance's /v1/status. Members of an unexpected type leave the old value in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parley.coordinator.routing.implied_model import read_offered_models
from parley.coordinator.routing.instance import ClusterInstance, InstanceModel
from parley.coordinator.tolerant_json import is_amount, is_count
from parley.disagg.wire.prompt_hash import MAX_REPORTED_HASHES

RESOURCE_KEYS = (
    ("avail_slots", "availSlotsNum"),
    ("avail_blocks", "availBlockNum"),
    ("waiting", "waitingRequestNum"),
    ("running", "runningRequestNum"),
)
COUNT_KEYS = ("pinned", "reserved", "waiting", "running", "slots", "block_size")


def apply_status(instance: ClusterInstance, status: Mapping[str, Any]) -> str:
    """Update an instance from its status; return its epoch, empty if it has none."""
    service = _read_subtable(status, "service")
    resource = _read_subtable(status, "resource")
    own_members = _read_subtable(status, "parley")
    instance.native = bool(own_members)
    role = own_members.get("role") or service.get("currentRole")
    if isinstance(role, str):
        instance.role = role
    instance.switching = service.get("roleStatus", "RoleReady") != "RoleReady"
    instance.accepts_requests = own_members.get("ready", True) is not False
    share = service.get("p_percentage")
    if is_count(share) and share <= 100:
        instance.p_percentage = share
    for name, key in RESOURCE_KEYS:
        _set_count(instance, name, resource.get(key))
    _set_count(instance, "blocks", resource.get("totalNpuBlockNums") or None)
    for name in COUNT_KEYS:
        _set_count(instance, name, own_members.get(name))
    _set_count(instance, "context_length", own_members.get("max_seq_len"))
    for name in ("prefill_rate", "decode_rate"):
        value = own_members.get(name)
        if is_amount(value):
            setattr(instance, name, float(value))
    if isinstance(layout := own_members.get("layout"), str):
        instance.layout = layout
    if isinstance(peer := own_members.get("peer"), str) and not instance.peer_configured:
        instance.peer = peer
    if isinstance(models := own_members.get("models"), list):
        instance.models = frozenset(name for name in models if isinstance(name, str))
    if (offered := read_offered_models(own_members)) is not None:
        instance.offered_models = _keep_known_tasks(instance.offered_models, offered)
    instance.checks_keys = own_members.get("api_keys") is True
    instance.has_private_prefixes = own_members.get("private_prefixes") is True
    if isinstance(hashes := own_members.get("prefix_hash"), list):
        instance.cached_hashes = frozenset(
            prompt_hash for prompt_hash in hashes[:MAX_REPORTED_HASHES] if isinstance(prompt_hash, int)
        )
    transfers = _read_subtable(own_members, "transfers")
    instance.transfers = {name: value for name, value in transfers.items() if is_amount(value)}
    epoch = own_members.get("epoch")
    return epoch if isinstance(epoch, str) else ""


def _keep_known_tasks(
    known: tuple[InstanceModel, ...], offered: tuple[InstanceModel, ...]
) -> tuple[InstanceModel, ...]:
    """Return the models that an instance offers now. While it loads one, the tasks that it had before are kept."""
    known_tasks = {name: model.tasks for model in known for name in model.names}
    return tuple(
        model if model.tasks is not None else model._replace(tasks=known_tasks.get(model.names[0])) for model in offered
    )


def _read_subtable(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = status.get(name)
    return value if isinstance(value, dict) else {}


def _set_count(instance: ClusterInstance, name: str, value: Any) -> None:
    if is_count(value):
        setattr(instance, name, value)
