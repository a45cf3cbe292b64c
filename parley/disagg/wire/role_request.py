"""Role requests of controllers: the bodies of ``POST /v1/role/…`` and ``/v2/role/…``, parsed and checked.

Knows nothing of the current role.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

import msgspec

from parley.dialects.dialect import Answer
from parley.disagg.wire.headers import PORT
from parley.disagg.wire.role import Address, Assignment, Name
from parley.errors import OrderRefused

DONE = Answer(200, b'{"result":"ok"}')
UNREAD = "Req body converts to json fail. Reset to previous node status."
WRONG = "Parse req json failed. Reset to previous node status."
UNFIT = "Update pd info failed. Reset to previous node status."
ROLES: dict[str, Name] = {"prefill": "prefill", "decode": "decode", "flex": "flex"}


def read(role: str, version: str, body: bytes, first: bool) -> Assignment:
    """Parse a role request. ``role`` and ``version`` ("v1" or "v2") come from the path. ``first``: the instance has no
    role yet, so the request must contain peers. Raises OrderRefused.

    As extensions of MindIE's format, a peer may have an ``inter_comm_port`` and an IPv6 address.
    """
    try:
        given = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        raise OrderRefused(422, UNREAD, "Input validation error") from None
    try:
        own = _object(given)["local"]
        peers = _list(given["peers"])
        if version == "v2":
            for each in _list(own):
                _checked(each, _groups)
            several = [_list(peer) for peer in peers]
            share, found = None, [_checked(each, _groups) for peer in several for each in peer[:1]]
            for peer in several:
                for each in peer[1:]:
                    _checked(each, _groups)
        else:
            _checked(own, _devices)
            share, found = _share(own), [_checked(each, _devices) for each in peers]
    except (KeyError, TypeError, ValueError):
        raise OrderRefused(503, WRONG) from None
    name = ROLES[role]
    alone = name == "flex" and share is not None and 0 < share < 100
    if first and not found and not alone:
        raise OrderRefused(503, UNFIT)
    return Assignment(name, tuple(dict.fromkeys(found)), share if name == "flex" else None)


def _checked(value: Any, parts: Callable[[dict[str, Any]], None]) -> Address:
    """Return the address of an instance, local or a peer. Raises KeyError, TypeError, ValueError."""
    one = _object(value)
    host = _address(one["server_ip"])
    if ("id" in one) != ("host_ip" in one) and parts is _devices:
        raise ValueError("id and host_ip")
    if "id" in one:
        _unsigned(one["id"])
    if "host_ip" in one:
        _address(one["host_ip"])
    _share(one)
    parts(one)
    port = int(one.get("inter_comm_port", PORT))
    if not 0 < port < 65536:
        raise ValueError("inter_comm_port")
    return Address(host, port)


def _devices(one: dict[str, Any]) -> None:
    for device in map(_object, _list(one["device"])):
        for name in ("device_id", "device_logical_id"):
            if not (isinstance(device[name], str) and device[name].isascii() and device[name].isdigit()):
                raise ValueError(name)
        ipaddress.ip_address(_text(device["device_ip"]))


def _groups(one: dict[str, Any]) -> None:
    for group in map(_object, _list(one["dp_inst_list"])):
        _unsigned(group["dp_inst_id"])
        _devices(group)


def _share(one: dict[str, Any]) -> int | None:
    return _unsigned(one["p_percentage"], 100) if "p_percentage" in one else None


def _unsigned(value: Any, most: int = 2**64 - 1) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(value)
    return value


def _address(value: Any) -> str:
    address = ipaddress.ip_address(_text(value))
    if address.is_unspecified:
        raise ValueError(value)
    return str(address)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(value)
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(value)
    return value
