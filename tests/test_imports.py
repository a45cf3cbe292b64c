"""Imports point downwards, form no cycle (types-only imports included), and torch stays in the engine process."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "parley"
FILES = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): file for name, file in FILES.items()}
# The folders and top-level files of the package, lowest layer first. A file imports only from its own folder and from
# lower layers.
LAYERS = (
    (
        "cache_folders",
        "control_groups",
        "early_hang_up",
        "heartbeat",
        "interrupt",
        "log_lines",
        "tenant_executor",
        "wire",
        "child_process",
        "version",
    ),
    ("types", "errors", "foreign_files", "weight_shards", "watermark", "demo", "gguf", "ui"),
    ("metrics", "tracing", "text", "core", "settings", "hub"),
    ("dialects", "engine", "native", "cluster"),
    ("web", "disagg", "model"),
    ("serving", "worker"),
    ("instance", "llm"),
    ("boot",),
    ("coordinator",),
    ("cli",),
)
LAYER_OF = {folder: layer for layer, folders in enumerate(LAYERS, 1) for folder in folders}
TORCH_FOLDERS = {"model", "native", "demo"}
TORCH_PACKAGES = {"torch", "transformers"}


def folder_of(module: str) -> str:
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


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
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


def test_finds_import_cycles():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"d"}, "e": {"a"}, "f": set()}
    assert import_cycles(graph) == [["a", "b", "c"], ["d"]]


def test_imports_form_no_cycle():
    """The package's own file is left out: it loads each public name when it is first used."""
    graph = {
        name: imported_modules(file) & MODULES.keys() - {"parley"} for name, file in MODULES.items() if name != "parley"
    }
    assert len(graph) > 350
    assert import_cycles(graph) == []


def test_every_folder_has_a_layer():
    folders = {folder_of(name) for name in MODULES} - {"", "__main__"}
    assert folders == set(LAYER_OF)


@pytest.mark.parametrize("folder", LAYER_OF)
def test_folder_imports_only_from_layers_below(folder: str):
    upward = [
        f"{name} imports {other}"
        for name, file in MODULES.items()
        if folder_of(name) == folder
        for other in imported_modules(file) & MODULES.keys()
        if folder_of(other) != folder and LAYER_OF.get(folder_of(other), 99) >= LAYER_OF[folder]
    ]
    assert upward == []


def test_architecture_page_lists_these_layers():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (`[^|]*`) \|", page, re.MULTILINE)
    assert tuple(tuple(re.findall(r"`([a-z_]+)(?:/|\.py)?`", folders)) for _, folders in rows) == LAYERS
    assert [int(number) for number, _ in rows] == list(range(1, len(LAYERS) + 1))


@pytest.mark.parametrize("folder", sorted(set(LAYER_OF) - TORCH_FOLDERS))
def test_folder_does_not_import_torch(folder: str):
    for name, file in MODULES.items():
        packages = {other.split(".")[0] for other in imported_modules(file)}
        # The host of vLLM runs in vLLM's own Python, which imports torch itself.
        if folder_of(name) == folder and "vllm" not in packages:
            assert not packages & TORCH_PACKAGES, file


def test_coordinator_imports_neither_instance_nor_worker():
    for name, file in MODULES.items():
        if folder_of(name) == "coordinator":
            assert not [other for other in imported_modules(file) if folder_of(other) in ("instance", "worker")], file


def test_python_processes_are_started_by_one_module():
    """It keeps the working directory out of their paths."""
    starting = {name for name, file in MODULES.items() if "sys.executable" in file.read_text("utf-8")}
    assert starting == {"parley.child_process"}
