"""Imports make no circle, not even those for type checkers, and only the engine's process imports torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "parley"
FILES = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): file for name, file in FILES.items()}
# What cluster/ takes of instances: data, not the life of a request.
PURE = {"frames", "handover", "heads", "prefix", "layout"}
HEAVY = {"torch", "transformers"}
LIGHT = ("boot", "cluster", "core", "dialects", "instance", "kv", "metrics", "server", "settings", "text", "web")


def imported(file: Path) -> set[str]:
    """All modules that a file imports: at its top, inside functions, and for type checkers."""
    package = ["parley", *file.relative_to(PACKAGE).parent.parts]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*parent, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                found.add(name if name in MODULES else origin)
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules of which each one reaches all others."""

    def reached(name: str) -> set[str]:
        found, new = set(), set(graph[name])
        while new:
            found |= new
            new = set().union(*(graph[other] for other in new)) - found
        return found

    above = {name: reached(name) for name in graph}
    groups = {frozenset(other for other in above[name] if name in above[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"d"}, "e": {"a"}, "f": set()}
    assert circles(graph) == [["a", "b", "c"], ["d"]]


def test_imports_make_no_circle():
    """The package's own file is left out: it loads each public name when it is first used."""
    graph = {name: imported(file) & MODULES.keys() - {"parley"} for name, file in MODULES.items() if name != "parley"}
    assert len(graph) > 350
    assert circles(graph) == []


@pytest.mark.parametrize("folder", LIGHT)
def test_nothing_beside_the_model_imports_torch(folder):
    for file in (PACKAGE / folder).rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(file)} & HEAVY, file


def test_a_coordinator_knows_what_instances_say_and_not_how_they_live():
    for file in (PACKAGE / "cluster").glob("*.py"):
        names = (name.split(".") for name in imported(file))
        assert {name[2] for name in names if name[:2] in (["parley", "instance"], ["parley", "kv"])} <= PURE, file
