"""Role requests of controllers: the bodies of ``POST /v1/role/…`` and ``/v2/role/…``, parsed and checked.

Knows nothing of the current role.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from parley.dialects.json_body import decode_json
from parley.dialects.reply import Answer
from parley.disagg.wire.headers import DEFAULT_PEER_PORT
from parley.disagg.wire.role import InstanceAddress, InstanceRoleName, RoleAssignment
from parley.errors import CommandRefused

ROLE_ACCEPTED = Answer(200, b'{"result":"ok"}')
INVALID_JSON = "Req body converts to json fail. Reset to previous node status."
INVALID_MEMBERS = "Parse req json failed. Reset to previous node status."
NO_PEERS = "Update pd info failed. Reset to previous node status."
ASSIGNABLE_ROLES: dict[str, InstanceRoleName] = {"prefill": "prefill", "decode": "decode", "flex": "flex"}


def parse_role_request(role: str, version: str, body: bytes, without_role: bool) -> RoleAssignment:
    """Parse a role request. ``role`` and ``version`` ("v1" or "v2") come from the path. ``without_role``: the instance
    has no role yet, so the request must contain peers. Raises CommandRefused.

    As extensions of MindIE's format, a peer may have an ``inter_comm_port`` and an IPv6 address.

    """
    try:
        document = decode_json(body)
    except (ValueError, RecursionError):
        raise CommandRefused(422, INVALID_JSON, "Input validation error") from None
    try:
        local = _expect_object(document)["local"]
        peers = _expect_list(document["peers"])
        if version == "v2":
            for instance in _expect_list(local):
                _parse_instance(instance, _check_groups)
            peer_groups = [_expect_list(peer) for peer in peers]
            share = None
            addresses = [_parse_instance(instance, _check_groups) for peer in peer_groups for instance in peer[:1]]
            for peer in peer_groups:
                for instance in peer[1:]:
                    _parse_instance(instance, _check_groups)
        else:
            _parse_instance(local, _check_devices)
            share = _parse_prefill_share(local)
            addresses = [_parse_instance(instance, _check_devices) for instance in peers]
    except (KeyError, TypeError, ValueError):
        raise CommandRefused(503, INVALID_MEMBERS) from None
    name = ASSIGNABLE_ROLES[role]
    needs_no_peer = name == "flex" and share is not None and 0 < share < 100
    if without_role and not addresses and not needs_no_peer:
        raise CommandRefused(503, NO_PEERS)
    return RoleAssignment(name, tuple(dict.fromkeys(addresses)), share if name == "flex" else None)


def _parse_instance(value: Any, check_parts: Callable[[dict[str, Any]], None]) -> InstanceAddress:
    """Return the address of an instance, local or a peer. Raises KeyError, TypeError, ValueError."""
    instance = _expect_object(value)
    host = _parse_ip_address(instance["server_ip"])
    if ("id" in instance) != ("host_ip" in instance) and check_parts is _check_devices:
        raise ValueError("id and host_ip")
    if "id" in instance:
        _expect_unsigned(instance["id"])
    if "host_ip" in instance:
        _parse_ip_address(instance["host_ip"])
    _parse_prefill_share(instance)
    check_parts(instance)
    port = int(instance.get("inter_comm_port", DEFAULT_PEER_PORT))
    if not 0 < port < 65536:
        raise ValueError("inter_comm_port")
    return InstanceAddress(host, port)


def _check_devices(instance: dict[str, Any]) -> None:
    for device in map(_expect_object, _expect_list(instance["device"])):
        for name in ("device_id", "device_logical_id"):
            if not (isinstance(device[name], str) and device[name].isascii() and device[name].isdigit()):
                raise ValueError(name)
        ipaddress.ip_address(_expect_text(device["device_ip"]))


def _check_groups(instance: dict[str, Any]) -> None:
    for group in map(_expect_object, _expect_list(instance["dp_inst_list"])):
        _expect_unsigned(group["dp_inst_id"])
        _check_devices(group)


def _parse_prefill_share(instance: dict[str, Any]) -> int | None:
    return _expect_unsigned(instance["p_percentage"], 100) if "p_percentage" in instance else None


def _expect_unsigned(value: Any, max_value: int = 2**64 - 1) -> int:
    if type(value) is not int or not 0 <= value <= max_value:
        raise ValueError(value)
    return value


def _parse_ip_address(value: Any) -> str:
    address = ipaddress.ip_address(_expect_text(value))
    if address.is_unspecified:
        raise ValueError(value)
    return str(address)


def _expect_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _expect_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(value)
    return value


def _expect_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(value)
    return value
