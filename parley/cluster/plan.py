"""The cluster plan: a TOML file that lists groups of instances, their number, and the resources of each.

    name = "local"

    [coordinator]            # keys of `parley coordinator --config`
    port = 8000

    [[instances]]
    role = "prefill"
    count = 2
    cpus = 1                 # reserved for each instance; also gpus, memory, resources
    model = "./my-model"     # this and all further keys: options of `parley serve`

The parser knows nothing of Ray, and leaves the validation of program options to the programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parley.settings.kinds import size
from parley.settings.options import ConfigError, nearest, read_toml

ROLES = ("mixed", "prefill", "decode", "flex")
KEYS = ("name", "address", "coordinator", "instances")
OURS = ("host", "port", "config", "peer-port", "cluster-secret", "cluster-secret-file")  # set at placement
REFUSED = {  # keys of the coordinator's own file that a plan cannot set, and why
    "secret": "because a secret is generated for the cluster",
    "secret_file": "because a secret is generated for the cluster",
    "tls": "because traffic within the cluster is not encrypted; put a proxy with TLS in front of it",
}
MOST = 1000  # instances of a group
NAME = re.compile(r"[A-Za-z0-9_-]{1,63}")


@dataclass(frozen=True)
class Needs:
    """The resources that one process reserves: cores, accelerators, bytes, and custom resources that nodes declare."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = {"cpus": self.cpus, "gpus": self.gpus, "memory": self.memory, **self.resources}
        return ", ".join(f"{name} {amount:g}" for name, amount in parts.items() if amount) or "nothing"


@dataclass(frozen=True)
class Group:
    """Identical instances: initially ``count`` of them, started with the same ``options`` of ``parley serve``."""

    name: str
    role: str
    count: int
    needs: Needs
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """A whole cluster. ``address``: of the Ray cluster; empty: one running on this machine, or else a new one."""

    name: str
    address: str
    coordinator: Mapping[str, Any]
    needs: Needs  # resources of the coordinator
    groups: tuple[Group, ...]


def read(path: str) -> Plan:
    """Read a plan file. Raises ConfigError."""
    content = read_toml(path)
    base = Path(path).parent
    for key in content:
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key}.{nearest(key, KEYS)}")
    name = _name(content, path, Path(path).stem)
    coordinator: dict[str, Any] = {}
    for spelled, value in _table(content.get("coordinator", {}), f"{path}: coordinator").items():
        key = spelled.replace("-", "_")
        if key in coordinator:
            raise ConfigError(f"{path}: coordinator: {key} is given twice.")
        if key in REFUSED:
            raise ConfigError(f"{path}: coordinator: {key} cannot be set, {REFUSED[key]}.")
        coordinator[key] = value
    needs = _needs(coordinator, f"{path}: coordinator", cpus=0.0)
    listed = content.get("instances")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}: instances must be tables, one [[instances]] for each kind of instance.")
    groups: list[Group] = []
    for number, each in enumerate(listed):
        group = _group(dict(_table(each, f"{path}: instances[{number}]")), f"{path}: instances[{number}]", base)
        if group.name in (other.name for other in groups):
            raise ConfigError(f"{path}: two kinds of instances have the name {group.name}; give each a `name`.")
        groups.append(group)
    address = content.get("address", "")
    if not isinstance(address, str):
        raise ConfigError(f"{path}: address is {address!r}, not the address of a Ray cluster.")
    return Plan(name, address, coordinator, needs, tuple(groups))


def written(table: Mapping[str, Any]) -> str:
    """Format a table as TOML."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items())


def _group(table: dict[str, Any], where: str, base: Path) -> Group:
    role = table.pop("role", "mixed")
    if role not in ROLES:
        raise ConfigError(f"{where}: role is {role!r}, not one of {', '.join(ROLES)}.")
    name = _name(table, where, role)
    table.pop("name", None)
    count = table.pop("count", 1)
    if type(count) is not int or not 0 <= count <= MOST:
        raise ConfigError(f"{where}: count is {count!r}, not a whole number from 0 to {MOST}.")
    needs = _needs(table, where, cpus=1.0)
    for key in OURS:
        if key in table or key.replace("-", "_") in table:
            raise ConfigError(f"{where}: {key} is chosen where the instance is placed and cannot be set.")
    model = table.get("model")
    if isinstance(model, str) and model.startswith("."):  # relative to the plan file
        table["model"] = str((base / model).resolve())
    return Group(name, role, count, needs, table)


def _needs(table: dict[str, Any], where: str, cpus: float) -> Needs:
    """Remove the resource keys from a table and parse them. Raises ConfigError."""

    def amount(key: str, usual: float) -> float:
        value = table.pop(key, usual)
        if type(value) not in (int, float) or not 0 <= value < 1e6:
            raise ConfigError(f"{where}: {key} is {value!r}, not a number of at least 0.")
        return float(value)

    memory = table.pop("memory", 0)
    try:
        memory = size(0).read(memory) if memory else 0
    except ValueError as wanted:
        raise ConfigError(f"{where}: memory is {memory!r}, not {wanted}.") from None
    resources = _table(table.pop("resources", {}), f"{where}: resources")
    for key, value in resources.items():
        if type(value) not in (int, float) or not 0 < value < 1e6:
            raise ConfigError(f"{where}: resources.{key} is {value!r}, not a number above 0.")
    return Needs(amount("cpus", cpus), amount("gpus", 0.0), memory, {k: float(v) for k, v in resources.items()})


def _name(table: Mapping[str, Any], where: str, usual: str) -> str:
    value = table.get("name", usual)
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ConfigError(f"{where}: name is {value!r}, not 1 to 63 letters, digits, - and _.")
    return value


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}, not a table.")
    return value


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else _quoted(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
