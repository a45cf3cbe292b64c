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
from itertools import pairwise
from pathlib import Path
from typing import Any

from parley.settings.option_kinds import size_kind
from parley.settings.options import ConfigError, did_you_mean, read_toml

GROUP_ROLES = ("mixed", "prefill", "decode", "flex")
PLAN_KEYS = ("name", "address", "coordinator", "instances")
PLACEMENT_OPTIONS = ("host", "port", "config", "peer-port", "cluster-secret", "cluster-secret-file")  # set at placement
REFUSED_KEYS = {  # keys of the coordinator's own file that a plan cannot set, and why
    "secret": "because a secret is generated for the cluster",
    "secret_file": "because a secret is generated for the cluster",
    "tls": "because traffic within the cluster is not encrypted; put a proxy with TLS in front of it",
}
RAY_BACKEND_FLAGS = ("--distributed-executor-backend", "--data-parallel-backend")  # vLLM's
MAX_COUNT = 1000  # instances of a group
NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,63}")


@dataclass(frozen=True)
class ResourceNeeds:
    """The resources that one process reserves: cores, accelerators, bytes, and custom resources that nodes declare."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = {"cpus": self.cpus, "gpus": self.gpus, "memory": self.memory, **self.resources}
        return ", ".join(f"{name} {amount:g}" for name, amount in parts.items() if amount) or "nothing"


@dataclass(frozen=True)
class InstanceGroup:
    """Identical instances: initially ``count`` of them, started with the same ``options`` of ``parley serve``."""

    name: str
    role: str
    count: int
    needs: ResourceNeeds
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ClusterPlan:
    """A whole cluster. ``address``: of the Ray cluster; empty: one running on this machine, or else a new one."""

    name: str
    address: str
    coordinator: Mapping[str, Any]
    needs: ResourceNeeds  # resources of the coordinator
    groups: tuple[InstanceGroup, ...]


def read_plan(path: str) -> ClusterPlan:
    """Read a plan file. Raises ConfigError."""
    content = read_toml(path)
    base = Path(path).parent
    for key in content:
        if key not in PLAN_KEYS:
            raise ConfigError(f"{path}: unknown key {key}.{did_you_mean(key, PLAN_KEYS)}")
    name = _parse_name(content, path, Path(path).stem)
    coordinator: dict[str, Any] = {}
    for raw_key, value in _check_table(content.get("coordinator", {}), f"{path}: coordinator").items():
        key = raw_key.replace("-", "_")
        if key in coordinator:
            raise ConfigError(f"{path}: coordinator: {key} is given twice.")
        if key in REFUSED_KEYS:
            raise ConfigError(f"{path}: coordinator: {key} cannot be set, {REFUSED_KEYS[key]}.")
        coordinator[key] = value
    needs = _parse_needs(coordinator, f"{path}: coordinator", cpus=0.0)
    group_tables = content.get("instances")
    if not isinstance(group_tables, list) or not group_tables:
        raise ConfigError(f"{path}: instances must be tables, one [[instances]] for each kind of instance.")
    groups: list[InstanceGroup] = []
    for number, group_table in enumerate(group_tables):
        group = _parse_group(
            dict(_check_table(group_table, f"{path}: instances[{number}]")), f"{path}: instances[{number}]", base
        )
        if group.name in (other.name for other in groups):
            raise ConfigError(f"{path}: two kinds of instances have the name {group.name}; give each a `name`.")
        groups.append(group)
    address = content.get("address", "")
    if not isinstance(address, str):
        raise ConfigError(f"{path}: address is {address!r}, not the address of a Ray cluster.")
    return ClusterPlan(name, address, coordinator, needs, tuple(groups))


def starts_ray_workers(options: Mapping[str, Any]) -> bool:
    """Whether an instance with these options of ``parley serve`` has vLLM workers that Ray places."""
    flags = options.get("engine-args", options.get("engine_args", []))
    words = (
        " ".join(map(str, flags if isinstance(flags, list) else [flags])).replace("_", "-").replace("=", " ").split()
    )
    backends = [value for flag, value in pairwise(words) if flag in RAY_BACKEND_FLAGS]
    return options.get("engine") == "vllm" and "ray" in backends


def format_toml(table: Mapping[str, Any]) -> str:
    """Format a table as TOML."""
    return "".join(f"{_format_key(key)} = {_format_value(value)}\n" for key, value in table.items())


def _parse_group(table: dict[str, Any], where: str, base: Path) -> InstanceGroup:
    role = table.pop("role", "mixed")
    if role not in GROUP_ROLES:
        raise ConfigError(f"{where}: role is {role!r}, not one of {', '.join(GROUP_ROLES)}.")
    name = _parse_name(table, where, role)
    table.pop("name", None)
    count = table.pop("count", 1)
    if type(count) is not int or not 0 <= count <= MAX_COUNT:
        raise ConfigError(f"{where}: count is {count!r}, not a whole number from 0 to {MAX_COUNT}.")
    needs = _parse_needs(table, where, cpus=1.0)
    if needs.gpus and starts_ray_workers(table):
        raise ConfigError(f"{where}: gpus cannot be set: vLLM's workers, which Ray places, take GPUs of their own.")
    for key in PLACEMENT_OPTIONS:
        if key in table or key.replace("-", "_") in table:
            raise ConfigError(f"{where}: {key} is chosen where the instance is placed and cannot be set.")
    model = table.get("model")
    if isinstance(model, str) and model.startswith("."):  # relative to the plan file
        table["model"] = str((base / model).resolve())
    return InstanceGroup(name, role, count, needs, table)


def _parse_needs(table: dict[str, Any], where: str, cpus: float) -> ResourceNeeds:
    """Remove the resource keys from a table and parse them. Raises ConfigError."""

    def pop_amount(key: str, usual: float) -> float:
        value = table.pop(key, usual)
        if type(value) not in (int, float) or not 0 <= value < 1e6:
            raise ConfigError(f"{where}: {key} is {value!r}, not a number of at least 0.")
        return float(value)

    memory = table.pop("memory", 0)
    try:
        memory = size_kind(0).parse_raw(memory) if memory else 0
    except ValueError as expectation:
        raise ConfigError(f"{where}: memory is {memory!r}, not {expectation}.") from None
    resources = _check_table(table.pop("resources", {}), f"{where}: resources")
    for key, value in resources.items():
        if type(value) not in (int, float) or not 0 < value < 1e6:
            raise ConfigError(f"{where}: resources.{key} is {value!r}, not a number above 0.")
    return ResourceNeeds(
        pop_amount("cpus", cpus), pop_amount("gpus", 0.0), memory, {k: float(v) for k, v in resources.items()}
    )


def _parse_name(table: Mapping[str, Any], where: str, usual: str) -> str:
    value = table.get("name", usual)
    if not isinstance(value, str) or not NAME_PATTERN.fullmatch(value):
        raise ConfigError(f"{where}: name is {value!r}, not 1 to 63 letters, digits, - and _.")
    return value


def _check_table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}, not a table.")
    return value


def _format_key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else _quote_text(key)


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_format_key(key)} = {_format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    return _quote_text(value) if isinstance(value, str) else json.dumps(value)


def _quote_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
