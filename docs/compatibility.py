"""Writes docs/compatibility.md and TGI's OpenAPI document from what the readers ask for: ``make docs``."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from survey import Member, Members, survey

from parley.dialects import tgi
from parley.dialects.dialect import Dialect
from parley.dialects.mounts import SURFACES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
OPENAPI = ROOT / "parley" / "dialects" / "tgi" / "openapi.json"
INTRODUCTION = """\
# What each API takes

<!-- Made by docs/compatibility.py from the readers of parley/dialects; change it there. -->

Every route, and every member of a body that the route reads; members that are not here are ignored, as in the
originals. `/` is the surface that all APIs share, where originals' refusals that only stand in a client's way are
lifted; the other columns are the prefixes below which an API is as strict as its original, or as one of its versions.

* **yes**: taken. **in part**: some values are refused by name, for what they need is not there yet.
* **refused**: read and checked in full, and refused by name until the feature is there.
* **not alone**: no value makes a good body by itself: it needs other members, or the original refuses it.
* **-**: not read.

*Tested by* names one of the tests that send the member, or say what becomes of it.
"""


def apis() -> dict[str, list[tuple[str, Dialect]]]:
    """Each API with its surfaces, the shared one first; versions belong to their API."""
    found: dict[str, list[tuple[str, Dialect]]] = {}
    for surface in sorted(SURFACES, key=lambda each: bool(each.prefix)):
        name = re.sub(r"-[\d.]+$", "", surface.dialect.name)
        columns = found.setdefault(name, [])
        if not any(surface.dialect is dialect for _, dialect in columns):
            columns.append((surface.prefix or "/", surface.dialect))
    return found


Surveyed = dict[tuple[str, str], Members]


def groups(surveys: dict[str, Surveyed]) -> Iterator[tuple[list[tuple[str, str]], list[str]]]:
    """Routes that have the same members in the same state everywhere, and the paths of these members."""
    made: dict[str, tuple[list[tuple[str, str]], list[str]]] = {}
    for key in dict.fromkeys(key for surveyed in surveys.values() for key in surveyed):
        told = {column: surveyed.get(key) for column, surveyed in surveys.items()}
        paths = list(dict.fromkeys(path for members in told.values() for path in members or ()))
        signature = repr([(path, [state(members, path) for members in told.values()]) for path in paths])
        made.setdefault(signature if paths else repr(key), ([], paths))[0].append(key)
    yield from made.values()


def state(members: Members | None, path: str) -> str:
    return members[path].state if members and path in members else "-"


@cache
def tests(api: str) -> list[tuple[str, str]]:
    """Names of the tests of an API and their sources, those of the dialect first."""
    found = []
    for file in sorted(ROOT.glob(f"tests/dialects/test_{api}*.py")) + sorted(ROOT.glob(f"tests/apis/test_{api}*.py")):
        text = file.read_text("utf-8")
        lines, nodes = text.splitlines(), ast.parse(text).body
        tables = dict(_tables(text, nodes))
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                source = "\n".join(lines[first - 1 : node.end_lineno])
                used = [table for name, table in tables.items() if re.search(rf"\b{name}\b", source)]
                found.append((f"{file.stem}.{node.name}", "\n".join([source, *used])))
    return found


def _tables(text: str, nodes: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """A module's tables, whose names are in capitals, with their sources."""
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.isupper():
            yield target.id, ast.get_source_segment(text, node) or ""


def tested(api: str, path: str) -> str:
    """The shortest test that speaks of a member; none: empty."""
    leaf = path.rpartition(".")[2].removesuffix("[]")
    speaks = re.compile(rf"[\"\']{leaf}[\"\']|\b{leaf}=")
    for name in (api, "openai"):  # whose reader of messages others use
        speaking = [test for test, source in tests(name) if speaks.search(source)]
        if speaking:
            return speaking[0]
    return ""


def section(api: str, columns: list[tuple[str, Dialect]]) -> str:
    """One API: its routes, and the members of those that have any."""
    surveys = {prefix: survey(dialect) for prefix, dialect in columns}
    lines = [f"## {columns[0][1].title}", ""]
    bare = []
    for keys, paths in groups(surveys):
        if not paths:
            bare += keys
            continue
        named = ", ".join(f"`{method} {path}`" for method, path in keys)
        lines += [f"### {named}", ""]
        lines += [f"| Member | Type | {' | '.join(f'`{prefix}`' for prefix in surveys)} | Tested by |"]
        lines += ["|---|---|" + "---|" * len(surveys) + "---|"]
        for path in paths:
            told = [surveyed.get(keys[0]) for surveyed in surveys.values()]
            member = next(members[path] for members in told if members and path in members)
            states = " | ".join(state(members, path) for members in told)
            lines.append(f"| `{path}` | {kind(member)} | {states} | {tested(api, path)} |")
        lines.append("")
    if bare:
        where = [", ".join(prefix for prefix, surveyed in surveys.items() if key in surveyed) for key in bare]
        lines += ["### Routes without members", "", "| Route | On |", "|---|---|"]
        lines += [f"| `{method} {path}` | {on} |" for (method, path), on in zip(bare, where, strict=True)]
        lines.append("")
    return "\n".join(lines)


def kind(member: Member) -> str:
    listed = ", ".join(f"`{name}`" for name in member.allowed)
    return f"{member.type} {member.range}".strip() + (f": {listed}" if listed else "")


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "\n" + "\n".join(section(api, columns) for api, columns in apis().items())


SCHEMAS: dict[str, Any] = {
    "strings": {"type": "array", "items": {"type": "string"}},
    "integers": {"type": "array", "items": {"type": "integer"}},
    "array": {"type": "array", "items": {}},
    "objects": {"type": "array", "items": {"type": "object"}},
    "free": {"type": "object"},
    "weights": {"type": "object"},
    "raw": {},
}


def schema(members: Members) -> dict[str, Any]:
    """A body as a JSON schema."""
    whole: dict[str, Any] = {"type": "object", "properties": {}}
    for path, member in members.items():
        place = whole
        *parents, name = path.split(".")
        for parent in parents:
            place = place.setdefault("properties", {}).setdefault(parent.removesuffix("[]"), {"type": "object"})
            place = place.setdefault("items", {"type": "object"}) if parent.endswith("[]") else place
        own: dict[str, Any] = deepcopy(SCHEMAS.get(member.how, {"type": member.how}))
        own |= {key: int(v) for key, v in (("minimum", member.low), ("maximum", member.high))
                if v is not None and member.how == "integer"}  # fmt: skip
        if member.allowed:
            own["enum"] = list(member.allowed)
        place.setdefault("properties", {}).setdefault(name, {}).update(own)
    return whole


def openapi() -> str:
    """The OpenAPI document of TGI's routes."""
    paths: dict[str, Any] = {}
    for (method, path), members in survey(tgi.STRICT).items():
        operation: dict[str, Any] = {"responses": {"200": {"description": "What was asked for."}}}
        if members:
            content = {"application/json": {"schema": schema(members)}}
            operation["requestBody"] = {"content": content, "required": True}
            operation["responses"] |= {
                str(status): {"description": text}
                for status, text in ((422, "The request is wrong."), (424, "The engine failed."), (429, "It is full."))
            }
        paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "Text Generation Inference", "version": tgi.shared.TGI_VERSION}
    return json.dumps({"openapi": "3.0.3", "info": info, "paths": paths}, indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    OPENAPI.write_text(openapi(), "utf-8")
