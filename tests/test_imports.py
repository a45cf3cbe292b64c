"""Imports point downwards, as docs/architecture.md says: a folder imports only what lies below it."""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "parley"
SHARED = {"types", "errors", "wire", "version", "metrics", "web"}
BELOW = {  # of each folder, what its files may import beside itself
    "dialects": SHARED,
    "text": SHARED,
    "kv": SHARED,
    "core": SHARED,
    "native": {"core"},  # the size of a page
    "model": SHARED | {"core", "native", "text", "watermark"},
    "engine": SHARED | {"core", "model"},
    "server": SHARED | {"dialects", "engine", "hub", "instance", "kv", "text", "boot"},
    "instance": SHARED | {"dialects", "engine", "kv", "server"},
    "cluster": SHARED | {"dialects", "instance", "keys", "kinds", "kv", "options", "server"},
}
# What cluster/ takes of instances: data, not the life of a request.
PURE = {"frames", "handover", "heads", "prefix", "layout"}
HEAVY = {"torch", "transformers"}
LIGHT = ("cluster", "dialects", "instance", "kv", "server", "text", "core")


@functools.cache
def imported(file: Path, checked: bool = False) -> set[str]:
    """All modules that a file imports, also late ones; ``checked``: or those that only a type checker reads."""
    tree = ast.parse(file.read_text("utf-8"))
    unread = {
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for each in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if (node in unread) != checked:
            continue
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            deep = node.module == "parley" or (PACKAGE.parent / Path(*node.module.split("."))).is_dir()
            found |= {f"{node.module}.{each.name}" for each in node.names} if deep else {node.module}
    return found


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_imports_what_lies_below_it(folder):
    for file in (PACKAGE / folder).rglob("*.py"):
        parts = [name.split(".")[1] for name in imported(file) if name.startswith("parley.")]
        assert set(parts) - BELOW[folder] - {folder} == set(), file


@pytest.mark.parametrize("folder", LIGHT)
def test_nothing_beside_the_model_imports_torch(folder):
    for file in (PACKAGE / folder).rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(file)} & HEAVY, file


def test_a_coordinator_knows_what_instances_say_and_not_how_they_live():
    for file in (PACKAGE / "cluster").glob("*.py"):
        names = (name.split(".") for name in imported(file))
        assert {name[2] for name in names if name[:2] in (["parley", "instance"], ["parley", "kv"])} <= PURE, file


# Types that two files have of each other, because each of the two things has the other.
MUTUAL = {
    ("parley.instance.node", "parley.server.service"),
    ("parley.server.leg", "parley.server.generation"),
    ("parley.server.model", "parley.server.generation"),
}


def test_types_make_no_circles_but_these():
    files = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    below = {name: imported(file) & files.keys() for name, file in files.items()}

    def reached(name: str) -> set[str]:
        found, new = set(), {name}
        while new:
            found |= new
            new = set().union(*(below[each] for each in new)) - found
        return found

    some = {name: file for name, file in files.items() if "TYPE_CHECKING" in file.read_text("utf-8")}
    typed = {(name, other) for name, file in some.items() for other in imported(file, True) & files.keys()}
    assert {(name, other) for name, other in typed if name in reached(other)} == MUTUAL
