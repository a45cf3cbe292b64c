"""Imports point downwards, make no circle (types-only imports included), and torch stays in the engine process."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "parley"
FILES = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): file for name, file in FILES.items()}
# The folders ("rooms") of the package from the bottom up. A file imports only from its own room and from lower floors.
FLOORS = (
    (
        "types",
        "errors",
        "foreign_files",
        "weight_shards",
        "control_groups",
        "heartbeat",
        "interrupt",
        "log_lines",
        "tenant_executor",
        "wire",
        "child_process",
        "version",
        "watermark",
        "demo",
        "gguf",
        "ui",
    ),
    ("metrics", "tracing", "text", "core", "settings", "hub"),
    ("dialects", "engine", "native", "cluster"),
    ("web", "disagg", "model"),
    ("serving", "worker"),
    ("instance", "llm"),
    ("boot",),
    ("coordinator",),
    ("cli",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS, 1) for room in rooms}
TORCH_ROOMS = {"model", "native", "demo"}
TORCH_PACKAGES = {"torch", "transformers"}


def room_of(module: str) -> str:
    """Return the folder, or the file at the top, that a module of parley belongs to."""
    return module.split(".")[1] if "." in module else ""


@cache
def imported_modules(file: Path) -> set[str]:
    """Return all modules that a file imports: at its top, inside functions, and for type checkers."""
    package = ["parley", *file.relative_to(PACKAGE).parent.parts]
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*parent, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                modules.add(name if name in MODULES else origin)
    return modules


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that all reach each other."""

    def reachable_from(name: str) -> set[str]:
        reachable, new = set(), set(graph[name])
        while new:
            reachable |= new
            new = set().union(*(graph[other] for other in new)) - reachable
        return reachable

    reachable = {name: reachable_from(name) for name in graph}
    groups = {frozenset(other for other in reachable[name] if name in reachable[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def test_finds_import_circles():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"d"}, "e": {"a"}, "f": set()}
    assert import_circles(graph) == [["a", "b", "c"], ["d"]]


def test_imports_make_no_circle():
    """The package's own file is left out: it loads each public name when it is first used."""
    graph = {
        name: imported_modules(file) & MODULES.keys() - {"parley"} for name, file in MODULES.items() if name != "parley"
    }
    assert len(graph) > 350
    assert import_circles(graph) == []


def test_every_room_has_a_floor():
    rooms = {room_of(name) for name in MODULES} - {"", "__main__"}
    assert rooms == set(FLOOR_OF)


@pytest.mark.parametrize("room", FLOOR_OF)
def test_room_imports_only_from_floors_below(room: str):
    upward = [
        f"{name} imports {other}"
        for name, file in MODULES.items()
        if room_of(name) == room
        for other in imported_modules(file) & MODULES.keys()
        if room_of(other) != room and FLOOR_OF.get(room_of(other), 99) >= FLOOR_OF[room]
    ]
    assert upward == []


def test_architecture_page_lists_these_floors():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (`[^|]*`) \|", page, re.MULTILINE)
    assert tuple(tuple(re.findall(r"`([a-z_]+)(?:/|\.py)?`", rooms)) for _, rooms in rows) == FLOORS
    assert [int(number) for number, _ in rows] == list(range(1, len(FLOORS) + 1))


@pytest.mark.parametrize("room", sorted(set(FLOOR_OF) - TORCH_ROOMS))
def test_room_does_not_import_torch(room: str):
    for name, file in MODULES.items():
        packages = {other.split(".")[0] for other in imported_modules(file)}
        if room_of(name) == room and "vllm" not in packages:  # vLLM has a Python of its own, and imports torch itself
            assert not packages & TORCH_PACKAGES, file


def test_coordinator_imports_neither_instance_nor_worker():
    for name, file in MODULES.items():
        if room_of(name) == "coordinator":
            assert not [other for other in imported_modules(file) if room_of(other) in ("instance", "worker")], file


def test_python_processes_are_started_by_one_module():
    """It keeps the working directory out of their paths."""
    starting = {name for name, file in MODULES.items() if "sys.executable" in file.read_text("utf-8")}
    assert starting == {"parley.child_process"}
